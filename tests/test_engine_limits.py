"""Wrong input: a `ValueError` that names what is wrong and the limit, after which the engine goes on."""

import math
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jradix import Engine, EngineConfig, SamplingParams
from jradix.schedule_queue import QueueFullError, WaitingQueue
from tests.tiny_engine import greedy, output_ids, paused, start, write_dummy_model

GOOD = [3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of prompt and input_ids"),
        ({"prompt": "ab", "input_ids": GOOD}, "exactly one of prompt and input_ids"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": ["ab", ""]}, "the prompt is empty"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": 5}, "prompt must be"),
        ({"prompt": ["ab", 5]}, "prompt must be"),
        ({"prompt": "a\ud800"}, "surrogate"),
        ({"input_ids": GOOD, "rid": "a\ud800"}, "rid must not hold lone surrogates"),
        ({"input_ids": GOOD, "cache_salt": "\udfff"}, "cache_salt must not hold lone surrogates"),
        ({"input_ids": []}, "input_ids must be"),
        ({"input_ids": [[]]}, "the prompt is empty"),
        ({"input_ids": [GOOD, []]}, "the prompt is empty"),
        ({"input_ids": 5}, "input_ids must be"),
        ({"input_ids": "abc"}, "input_ids must be"),
        ({"input_ids": {"a": 1}}, "input_ids must be"),
        ({"input_ids": [GOOD, 5]}, "input_ids must be"),
        ({"input_ids": [3, [4]]}, "input_ids must be integers"),
        ({"input_ids": [3, 1.5]}, "input_ids must be integers, got a float"),
        ({"input_ids": [3, 4.0]}, "input_ids must be integers, got a float"),
        ({"input_ids": [3, True]}, "input_ids must be integers, got a bool"),
        ({"input_ids": [3, "a"]}, "input_ids must be integers, got a str"),
        ({"input_ids": [3, None]}, "input_ids must be integers"),
        ({"input_ids": np.array([1.0, 2.0])}, "input_ids must be integers"),
        ({"input_ids": [3, 320]}, r"\[0, 320\).* got 320"),
        ({"input_ids": [3, -1]}, r"\[0, 320\).* got -1"),
        ({"input_ids": [3, 2**31]}, r"\[0, 320\)"),
        ({"input_ids": [3, 2**63]}, r"\[0, 320\)"),
        ({"input_ids": [3, 2**70]}, r"\[0, 320\)"),
        ({"input_ids": [3] * 96}, "the prompt has 96 tokens, and at most 95"),
        ({"input_ids": [3] * 5000}, "the prompt has 5000 tokens, and at most 95"),
        ({"input_ids": GOOD, "sampling_params": {"max_new_tokens": 94}}, "max_new_tokens 94 does not fit.* leaves 93"),
        ({"input_ids": GOOD, "sampling_params": {"temperature": math.nan}}, "temperature"),
        ({"input_ids": GOOD, "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": GOOD, "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": GOOD, "sampling_params": {"temprature": 1}}, "unknown sampling parameter 'temprature'"),
        ({"input_ids": GOOD, "sampling_params": {"stop_token_ids": [320]}}, "stop_token_ids"),
        ({"input_ids": GOOD, "sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids"),
        ({"input_ids": GOOD, "sampling_params": "hot"}, "sampling_params"),
        ({"input_ids": GOOD, "sampling_params": [{}, {}]}, "sampling_params .*each of the 1 prompts, got 2"),
        ({"input_ids": [GOOD, GOOD], "sampling_params": [{}]}, "sampling_params .*each of the 2 prompts, got 1"),
        (
            {"input_ids": [GOOD, GOOD], "sampling_params": [{}, 5]},
            "sampling_params must be SamplingParams or a dict of its fields, got 5",
        ),
        ({"input_ids": GOOD, "sampling_params": {"logit_bias": {320: 1.0}}}, r"logit_bias must lie in \[0, 320\)"),
        ({"input_ids": GOOD, "sampling_params": {"regex": "(a"}}, "regex is refused"),
        ({"input_ids": GOOD, "return_logprob": True, "logprob_start_len": 4}, "at most the prompt's 3 tokens, got 4"),
        ({"input_ids": GOOD, "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len .*at least -1"),
        ({"input_ids": GOOD, "return_logprob": True, "top_logprobs_num": 10**6}, r"top_logprobs_num .*\[0, 128\]"),
        ({"input_ids": GOOD, "return_logprob": True, "token_ids_logprob": [3, 320]}, r"\[0, 320\).* got 320"),
        ({"input_ids": GOOD, "return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob"),
        ({"input_ids": GOOD, "return_logprob": True, "token_ids_logprob": 5}, "token_ids_logprob must be a list"),
        (
            {"input_ids": GOOD, "return_logprob": True, "token_ids_logprob": list(range(129))},
            "at most 128 ids, got 129",
        ),
        ({"input_ids": GOOD, "top_logprobs_num": 2}, "top_logprobs_num needs return_logprob=True"),
        ({"input_ids": [GOOD, GOOD], "rid": 7}, "rid must be a string, got 7"),
        ({"input_ids": [GOOD, GOOD], "rid": ["a"]}, "rid .*each of the 2 prompts, got 1"),
        ({"input_ids": [GOOD, GOOD], "rid": ["a", "a"]}, "rid must name each request differently"),
        ({"input_ids": [GOOD, GOOD], "rid": ["a", 7]}, "rid must be a string, got 7"),
        (
            {
                "input_ids": GOOD,
                "sampling_params": {"min_new_tokens": 1, "stop_token_ids": list(range(3, 19)), "max_new_tokens": 5},
            },
            "min_new_tokens can hold back at most 16",
        ),
    ],
    ids=str,
)
def test_wrong_requests_are_refused_whole(tiny_engine: Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_engine.generate(**arguments)
    tiny_engine.check_idle()


def test_the_engine_goes_on_beside_refused_requests(tiny_engine: Engine) -> None:
    """A list with one wrong prompt runs none of them, and a stream that is under way does not notice."""
    expected = output_ids(tiny_engine, [GOOD])[0]
    stream = tiny_engine.generate(input_ids=GOOD, sampling_params=greedy(), stream=True)
    next(stream)
    with pytest.raises(ValueError, match="got 320"):
        tiny_engine.generate(input_ids=[GOOD, [320]])
    with pytest.raises(ValueError, match="exactly one"):
        tiny_engine.generate(stream=True)
    assert list(stream)[-1]["output_ids"] == expected


def test_of_many_submissions_beyond_the_limit_each_gets_a_result_or_hears_that_the_queue_is_full(
    tiny_engine: Engine,
) -> None:
    """Twenty callers at once, with room for two; none hangs, and the engine goes on."""
    expected, usual = output_ids(tiny_engine, [GOOD])[0], tiny_engine.scheduler.waiting
    tiny_engine.scheduler.waiting = WaitingQueue(max_queued=2)
    answers: list[Any] = []

    def ask(stream: bool) -> None:
        try:
            result = tiny_engine.generate(input_ids=GOOD, sampling_params=greedy(), stream=stream)
            answers.append(list(result)[-1]["output_ids"] if stream else result["output_ids"])
        except QueueFullError as error:
            answers.append(error)

    threads = [threading.Thread(target=ask, args=(bool(i % 2),)) for i in range(20)]
    with paused(tiny_engine):
        for thread in threads:
            thread.start()
        while len(answers) + len(tiny_engine.scheduler.waiting) < 20:
            time.sleep(0.001)
        assert len(answers) == 18
        assert all(isinstance(answer, QueueFullError) for answer in answers)
    for thread in threads:
        thread.join()
    assert [answer for answer in answers if not isinstance(answer, QueueFullError)] == [expected] * 2
    with pytest.raises(QueueFullError, match="0 requests are waiting and 3 more exceed max_queued_requests 2"):
        output_ids(tiny_engine, [GOOD] * 3)
    assert output_ids(tiny_engine, [GOOD] * 2) == [expected] * 2
    tiny_engine.scheduler.waiting = usual


def test_a_prompt_exactly_at_the_limit_runs(tiny_engine: Engine) -> None:
    for max_new_tokens in (None, 0, 1):
        result = tiny_engine.generate(input_ids=[3] * 95, sampling_params=greedy(max_new_tokens))
        assert len(result["output_ids"]) == (1 if max_new_tokens is None else max_new_tokens)
    with pytest.raises(ValueError, match=r"max_new_tokens 2 does not fit.* leaves 1"):
        tiny_engine.generate(input_ids=[3] * 95, sampling_params=greedy(2))


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers(tiny_path: Callable[[str], Path]) -> None:
    engine = start(tiny_path("llama"), max_total_tokens=32)
    with pytest.raises(ValueError, match=r"prompt of 20 tokens with max_new_tokens 14 needs 9 KV pages.* pool has 8"):
        engine.generate(input_ids=[3] * 20, sampling_params=greedy(14))
    with pytest.raises(ValueError, match="needs 9 KV pages"):
        engine.generate(input_ids=[GOOD, [3] * 33], sampling_params=greedy(1))
    engine.check_idle()
    assert len(output_ids(engine, [[3] * 20], greedy(13))[0]) == 13, "a request that fills the pool to the last place"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_sise": 16}, "unknown engine option 'page_sise'"),
        ({"page_size": 0}, "page_size must be an integer of at least 1, got 0"),
        ({"max_total_tokens": 3, "page_size": 4}, "max_total_tokens must be .*at least 4, got 3"),
        ({"context_length": 513}, "context_length must be at most 512"),
        ({"radix_eviction_policy": "newest"}, "radix_eviction_policy must be one of"),
        ({"max_total_tokens": None, "mem_fraction_static": 1e-12}, "mem_fraction_static"),
        ({"skip_tokenizer_init": False}, "skip_tokenizer_init"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str, tiny_path: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=message):
        start(tiny_path("llama"), **options)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "model"),
        (lambda path: (path / "config.json").unlink(), "config.json"),
        (lambda path: (path / "model.safetensors").unlink(), "safetensors"),
        (lambda path: (path / "config.json").write_text("{"), "config.json"),
        (lambda path: truncate(path / "model.safetensors"), "model.safetensors"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "model.safetensors"),
    ],
    ids=["no directory", "no config", "no weights", "half a config", "half the weights", "empty weights"],
)
def test_missing_and_corrupt_files_are_named(
    damage: Callable[[Path], object], message: str, tmp_path: Path, tiny_path: Callable[[str], Path]
) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_path("llama"), path)
    damage(path)
    with pytest.raises(ValueError, match=message):
        start(path)


def test_models_jradix_does_not_run_are_refused_by_name(tmp_path: Path, tiny_path: Callable[[str], Path]) -> None:
    for fields, message in (
        ({"architectures": ["NoSuchForCausalLM"]}, "NoSuchForCausalLM"),
        ({"attention_kind": "new"}, "attention_kind"),
    ):
        write_dummy_model(tiny_path("llama"), tmp_path, **fields)
        with pytest.raises(ValueError, match=message):
            start(tmp_path, load_format="dummy")


def test_without_a_tokenizer_there_is_no_text(tiny_path: Callable[[str], Path]) -> None:
    engine = start(tiny_path("llama"))
    with pytest.raises(ValueError, match="prompt needs a tokenizer, and skip_tokenizer_init is set"):
        engine.generate("abc")
    with pytest.raises(ValueError, match="stop and stop_regex need a tokenizer"):
        engine.generate(input_ids=GOOD, sampling_params=greedy(4, stop="a"))


def test_options_reach_what_they_are_about(tiny_path: Callable[[str], Path]) -> None:
    engine = start(tiny_path("llama"), disable_radix_cache=True, max_total_tokens=1023)
    assert not engine.cache.enabled
    assert engine.cache.num_total == 255
    assert engine.runner.pool.dtype == np.float32
    assert isinstance(engine.config, EngineConfig)
    assert start(tiny_path("llama"), dtype="auto").runner.pool.dtype == "bfloat16"
    assert start(tiny_path("llama"), context_length=None).context_length == 512
    assert SamplingParams().temperature == 1.0
