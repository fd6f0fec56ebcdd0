"""What a caller of `generate` can count on: results, streams, ends, aborts, threads, and life after a failure."""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import pytest

from jradix import Engine, SamplingParams
from jradix.delivery import StepFailedError
from tests.tiny_engine import Golden, greedy, output_ids, paused

PROMPTS = [[5, 6, 7, 8, 9, seed] for seed in range(10, 22)]


def encode(engine: Engine, text: str) -> list[int]:
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(text)


def decode(engine: Engine, token_ids: list[int]) -> str:
    assert engine.tokenizer is not None
    return engine.tokenizer.decode(token_ids)


def test_results_come_in_the_order_of_the_prompts_with_their_numbers(tiny_engine: Engine) -> None:
    lengths = [9, 1, 5, 2, 0, 7]
    rids = [f"r{length}" for length in lengths]
    results = tiny_engine.generate(
        input_ids=PROMPTS[:6], sampling_params=[greedy(length) for length in lengths], rid=rids
    )
    assert [result["meta_info"]["id"] for result in results] == rids
    for prompt, length, result in zip(PROMPTS, lengths, results, strict=False):
        meta = result["meta_info"]
        assert len(result["output_ids"]) == meta["completion_tokens"] == length
        assert meta["prompt_tokens"] == 6
        assert meta["finish_reason"] == {"type": "length", "length": length}
        assert meta["e2e_latency"] >= meta.get("time_to_first_token", 0) >= 0
        assert result["output_ids"] == output_ids(tiny_engine, [prompt], greedy(9))[0][:length]


def test_one_prompt_gives_a_dict_and_a_list_of_one_a_list(tiny_engine: Engine) -> None:
    single = tiny_engine.generate("abcabc", greedy(4))
    listed = tiny_engine.generate(["abcabc"], [greedy(4)])
    fields = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    as_ids = tiny_engine.generate(input_ids=encode(tiny_engine, "abcabc"), sampling_params=fields)
    assert single["output_ids"] == listed[0]["output_ids"] == as_ids["output_ids"]
    assert single["text"] == decode(tiny_engine, single["output_ids"])


def test_max_new_tokens_none_fills_the_context_exactly(tiny_engine: Engine) -> None:
    for prompt_len in (1, 50, 95):
        results = tiny_engine.generate(input_ids=[7] * prompt_len, sampling_params=greedy(None))
        assert len(results["output_ids"]) == 96 - prompt_len
        given = tiny_engine.generate(input_ids=[7] * prompt_len, sampling_params=greedy(96 - prompt_len))
        assert given["output_ids"] == results["output_ids"]


def test_a_stop_token_ends_the_request_and_is_no_text(tiny_engine: Engine) -> None:
    whole = tiny_engine.generate(input_ids=PROMPTS[0], sampling_params=greedy(12))
    stop_id = whole["output_ids"][5]
    first = whole["output_ids"].index(stop_id)
    result = tiny_engine.generate(input_ids=PROMPTS[0], sampling_params=greedy(12, stop_token_ids=[stop_id]))
    assert result["output_ids"] == whole["output_ids"][: first + 1]
    assert result["text"] == decode(tiny_engine, whole["output_ids"][:first])
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}


def test_eos_ends_a_request_unless_ignored_or_too_early(tiny_engine: Engine, tiny_path: Callable[[str], Path]) -> None:
    golden = Golden(tiny_path("llama"))
    prompt, ignoring = next(pair for pair in zip(golden.prompts, golden.greedy_ids, strict=True) if 2 in pair[1])
    at = ignoring.index(2)
    ended = tiny_engine.generate(input_ids=prompt, sampling_params=greedy(16, ignore_eos=False))
    assert ended["output_ids"] == ignoring[: at + 1]
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    longer = tiny_engine.generate(input_ids=prompt, sampling_params=greedy(16, ignore_eos=False, min_new_tokens=at + 1))
    assert longer["output_ids"][:at] == ignoring[:at]
    assert 2 not in longer["output_ids"][: at + 1]


def test_a_stop_string_over_several_tokens_ends_the_request(tiny_engine: Engine) -> None:
    """Every piece of two to five letters of the output, so that stops begin and end inside tokens too."""
    whole = tiny_engine.generate(input_ids=PROMPTS[1], sampling_params=greedy(14))
    text = whole["text"]
    pieces = {text[i : i + n] for n in (2, 3, 5) for i in range(len(text) - n)}
    stops = sorted(piece for piece in pieces if "\ufffd" not in piece)  # which may be the half of a character
    assert len(stops) > 10
    results = tiny_engine.generate(
        input_ids=[PROMPTS[1]] * len(stops), sampling_params=[greedy(14, stop=[stop, "never this"]) for stop in stops]
    )
    for stop, result in zip(stops, results, strict=True):
        ids = result["output_ids"]
        assert result["text"] == text[: text.index(stop)]
        assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert ids == whole["output_ids"][: len(ids)]
        assert stop in decode(tiny_engine, ids)
        assert stop not in decode(tiny_engine, ids[:-1])


def test_text_held_back_for_a_stop_string_that_never_comes_is_given_out(tiny_engine: Engine) -> None:
    whole = tiny_engine.generate(input_ids=PROMPTS[1], sampling_params=greedy(14))
    almost = whole["text"][-3:] + "!"
    result = tiny_engine.generate(input_ids=PROMPTS[1], sampling_params=greedy(14, stop=almost))
    assert result["text"] == whole["text"]
    assert result["meta_info"]["finish_reason"]["type"] == "length"


def collect(stream: Iterator[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    items: dict[int, list[dict[str, Any]]] = {}
    for item in stream:
        items.setdefault(item.get("index", 0), []).append(item)
    return items


@pytest.mark.parametrize("stop", [None, "zz"])
def test_streams_only_grow_and_end_in_the_result(tiny_engine: Engine, stop: str | None) -> None:
    params = [greedy(length, stop=stop) for length in (12, 0, 1, 7, 12, 12)]
    expected = tiny_engine.generate(input_ids=PROMPTS[:6], sampling_params=params)
    streams = collect(tiny_engine.generate(input_ids=PROMPTS[:6], sampling_params=params, stream=True))
    assert sorted(streams) == list(range(6))
    for index, items in streams.items():
        assert (items[-1]["text"], items[-1]["output_ids"]) == (expected[index]["text"], expected[index]["output_ids"])
        for before, after in pairwise(items):
            assert after["text"].startswith(before["text"])
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        ends = [item["meta_info"]["finish_reason"] for item in items]
        assert ends[-1] is not None
        assert not any(ends[:-1]), "it went on after its end"


def test_a_stream_gives_each_token_as_it_comes(tiny_engine: Engine) -> None:
    with paused(tiny_engine):
        stream = tiny_engine.generate(input_ids=PROMPTS[0], sampling_params=greedy(8), stream=True)
        with tiny_engine.hold() as core:
            core.step()
            for count in range(1, 6):
                core.step()
                assert len(next(stream)["output_ids"]) == count
    assert len(list(stream)[-1]["output_ids"]) == 8


def test_the_stream_of_one_prompt_is_its_text(tiny_engine: Engine) -> None:
    expected = tiny_engine.generate("abab", greedy(10))
    items = list(tiny_engine.generate("abab", greedy(10), stream=True))
    assert items[-1]["text"] == expected["text"]
    assert all("index" not in item for item in items)


@pytest.mark.parametrize("items", [0, 1, 4])
def test_a_stream_that_is_closed_leaks_nothing(tiny_engine: Engine, items: int) -> None:
    stream = tiny_engine.generate(input_ids=PROMPTS, sampling_params=greedy(40), stream=True)
    for _ in range(items):
        next(stream)
    stream.close()
    tiny_engine.check_idle()


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("regex", [None, "([a-c][d-f])+"])
@pytest.mark.parametrize("end", ["abort", "timeout"])
def test_abort_and_timeout_work_at_every_stage_and_leave_right_caches(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, steps: int, regex: str | None, end: str
) -> None:
    """Queued, between chunks of the prompt, with a step in flight, while decoding, and when over."""
    prompt, params = list(range(20, 80)), greedy(8, regex=regex)
    expected = output_ids(tiny_engine, [prompt], params)[0]
    tiny_engine.flush_cache()
    with paused(tiny_engine):
        tiny_engine.scheduler.chunked_prefill_size = 16
        timeout = 1000 if end == "timeout" else None
        stream = tiny_engine.generate(
            input_ids=[prompt], sampling_params=params, rid=["x"], timeout=timeout, stream=True
        )
        with tiny_engine.hold() as core:
            for _ in range(steps):
                core.step()
            if end == "timeout":
                later = time.perf_counter() + 2000
                with monkeypatch.context() as patch:
                    patch.setattr(time, "perf_counter", lambda: later)
                    core.turn()
        assert tiny_engine.abort_request("x") == (end == "abort")
        assert not tiny_engine.abort_request("x"), "it has ended"
        *before, last = stream
        assert not any(item["meta_info"]["finish_reason"] for item in before), "it ended twice"
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert last["output_ids"] == expected[: len(last["output_ids"])]
        # Four chunks; and one step in flight, but for a grammar, whose mask needs the tokens before it.
        assert len(last["output_ids"]) == max(0, steps - 4)
        tiny_engine.check_idle()
    assert output_ids(tiny_engine, [prompt], params)[0] == expected
    tiny_engine.scheduler.chunked_prefill_size = 64


def test_who_is_not_alive_cannot_be_aborted(tiny_engine: Engine) -> None:
    tiny_engine.generate(input_ids=PROMPTS[0], sampling_params=greedy(1), rid="over")
    assert not tiny_engine.abort_request("over")
    assert not tiny_engine.abort_request("nobody")
    with pytest.raises(ValueError, match="rid must be the id of one request"):
        tiny_engine.abort_request(["nobody"])  # pyright: ignore[reportArgumentType]


def test_aborts_do_not_disturb_requests_on_the_same_prefix(tiny_engine: Engine) -> None:
    prompts = [[*range(30, 62), seed] for seed in range(6)]
    expected = output_ids(tiny_engine, prompts, greedy(12))
    for cut in range(1, 10, 2):
        tiny_engine.flush_cache()
        rids = [f"r{index}" for index in range(6)]
        with paused(tiny_engine):
            stream = tiny_engine.generate(input_ids=prompts, sampling_params=greedy(12), rid=rids, stream=True)
            with tiny_engine.hold() as core:
                for _ in range(cut):
                    core.step()
            assert tiny_engine.abort_request("r1")
            assert tiny_engine.abort_request("r4")
            stream_again = tiny_engine.generate(input_ids=prompts[1], sampling_params=greedy(12), stream=True)
        last = {item["index"]: item["output_ids"] for item in stream}
        assert list(stream_again)[-1]["output_ids"] == expected[1]
        assert [last[index] for index in (0, 2, 3, 5)] == [expected[index] for index in (0, 2, 3, 5)]


def test_a_rid_is_unique_among_the_living_only(tiny_engine: Engine) -> None:
    with paused(tiny_engine):
        stream = tiny_engine.generate(input_ids=PROMPTS[0], sampling_params=greedy(12), rid="mine", stream=True)
        with pytest.raises(ValueError, match="'mine' belongs to a request that is still running"):
            tiny_engine.generate(input_ids=PROMPTS[1], sampling_params=greedy(3), rid="mine")
    assert len(list(stream)[-1]["output_ids"]) == 12, "the first one was disturbed"
    again = tiny_engine.generate(input_ids=PROMPTS[0], sampling_params=greedy(3), rid="mine")
    assert again["meta_info"]["id"] == "mine"


def test_samples_of_one_rid_have_ids_that_nobody_else_has(tiny_engine: Engine) -> None:
    both = greedy(12, n=2)
    with pytest.raises(ValueError, match=r"rid must name each request differently, .*'x-0', 'x-1', 'x-0'"):
        tiny_engine.generate(input_ids=PROMPTS[:2], sampling_params=[both, greedy(3)], rid=["x", "x-0"])
    with paused(tiny_engine):
        stream = tiny_engine.generate(input_ids=PROMPTS[0], sampling_params=both, rid="x", stream=True)
        for rid, params in (("x", both), ("x", greedy(3)), ("x-1", greedy(3)), ("x-1", both)):
            with pytest.raises(ValueError, match="belongs to a request that is still running"):
                tiny_engine.generate(input_ids=PROMPTS[1], sampling_params=params, rid=rid, stream=True)
        assert tiny_engine.abort_request("x-1")
    ends = {index: items[-1]["meta_info"] for index, items in collect(stream).items()}
    assert [ends[index]["finish_reason"]["type"] for index in range(2)] == ["length", "abort"]
    assert [ends[index]["id"] for index in range(2)] == ["x-0", "x-1"]


@pytest.mark.parametrize("logprobs", [False, True])
def test_without_new_tokens_there_are_results_and_no_tokens(tiny_engine: Engine, logprobs: bool) -> None:
    """Alone and as four samples, cold and on a cached prompt; log-probabilities are all that needs the model."""
    for n in (1, 4, 4):
        options: dict[str, Any] = {"return_logprob": logprobs, "logprob_start_len": 2 if logprobs else None}
        params = greedy(0, n=n)
        items = collect(tiny_engine.generate(input_ids=PROMPTS[0], sampling_params=params, stream=True, **options))
        assert sorted(items) == list(range(n))
        for [item] in items.values():
            assert (item["text"], item["output_ids"]) == ("", [])
            meta = item["meta_info"]
            assert (meta["completion_tokens"], meta["finish_reason"]) == (0, {"type": "length", "length": 0})
            assert "time_to_first_token" not in meta
            if logprobs:
                assert meta["output_token_logprobs"] == []
                assert [token for _, token, _ in meta["input_token_logprobs"]] == PROMPTS[0][2:]
                assert all(value < 0 for value, _, _ in meta["input_token_logprobs"])
        tiny_engine.check_idle()
    assert bool(tiny_engine.cache.num_evictable) == logprobs


def test_a_closed_stream_does_not_abort_a_later_request_of_the_same_rid(tiny_engine: Engine) -> None:
    """Request "x" of the first stream has ended, but nobody has read that yet."""
    with paused(tiny_engine):
        first = tiny_engine.generate(
            input_ids=PROMPTS[:2], sampling_params=[greedy(40), greedy(1)], rid=["y", "x"], stream=True
        )
        with tiny_engine.hold() as core:
            while "x" in core.outputs:
                core.step()
        later = tiny_engine.generate(input_ids=PROMPTS[2], sampling_params=greedy(3), rid="x", stream=True)
        first.close()
    assert list(later)[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


def test_cache_salts_share_nothing(tiny_engine: Engine) -> None:
    prompt = list(range(40))
    for salt in (None, "a", "b", 1, "1", ""):
        first, second = (
            tiny_engine.generate(input_ids=prompt, sampling_params=greedy(2), cache_salt=salt) for _ in range(2)
        )
        assert first["meta_info"]["cached_tokens"] == 0
        assert second["meta_info"]["cached_tokens"] == 39
        assert first["output_ids"] == second["output_ids"]


def test_threads_share_the_engine(tiny_engine: Engine) -> None:
    """Each gets its own results, with all of their text, while all requests run in the same batches."""
    stops = greedy(9, stop="qqq")  # so that text is decoded while the other thread reads it
    expected = tiny_engine.generate(input_ids=PROMPTS, sampling_params=stops)
    errors: list[BaseException] = []

    def work(offset: int) -> None:
        try:
            for round_ in range(6):
                index = (offset + round_) % len(PROMPTS)
                if round_ % 2:
                    result = tiny_engine.generate(input_ids=PROMPTS[index], sampling_params=stops)
                else:
                    *_, result = tiny_engine.generate(input_ids=PROMPTS[index], sampling_params=stops, stream=True)
                assert (result["text"], result["output_ids"]) == (
                    expected[index]["text"],
                    expected[index]["output_ids"],
                )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in (0, 4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_after_a_failed_step_everybody_hears_of_it_and_the_engine_goes_on(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The program has taken the donated pool and returns none; or its results cannot be read."""
    expected = output_ids(tiny_engine, PROMPTS)
    tiny_engine.pause_generation("in_place")
    stream = tiny_engine.generate(input_ids=PROMPTS[0], sampling_params=greedy(40), stream=True)
    runner, error = tiny_engine.runner, RuntimeError("the device is gone")

    def fail(parameters: Any, pool: jax.Array | None = None, *rest: Any) -> Any:
        if pool is not None:
            pool.delete()
        raise error

    with monkeypatch.context() as patch:
        if where == "launch":
            compiled = runner.programs.compiled
            failing = {name: fail if name[0] == "forward" else program for name, program in compiled.items()}
            patch.setattr(runner.programs, "compiled", failing)
        else:
            patch.setattr(runner, "collect", fail)
        tiny_engine.continue_generation()
        for waiting in (lambda: output_ids(tiny_engine, PROMPTS), lambda: list(stream)):
            with pytest.raises(StepFailedError, match="the device is gone") as caught:
                waiting()
            assert caught.value.__cause__ is error
    tiny_engine.check_idle()
    assert tiny_engine.cache.num_free == tiny_engine.cache.num_total, "KV of the lost pool is still in the cache"
    assert output_ids(tiny_engine, PROMPTS) == expected


def test_a_stream_that_dies_inside_a_step_ends_after_it(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may close a stream at any moment, in the thread that is planning a step."""
    tiny_engine.pause_generation("in_place")
    stream = tiny_engine.generate(input_ids=[5, 6, 7], sampling_params=greedy(50), stream=True)
    plan = tiny_engine.scheduler.plan

    def close_and_plan(**arguments: Any) -> Any:
        planned = plan(**arguments)
        stream.close()
        return planned

    with monkeypatch.context() as patch:
        patch.setattr(tiny_engine.scheduler, "plan", close_and_plan)
        tiny_engine.continue_generation()
        tiny_engine.check_idle()


def test_engine_takes_a_config_or_keywords(tiny_engine: Engine) -> None:
    with pytest.raises(ValueError, match="either an EngineConfig or keyword options"):
        Engine(tiny_engine.config, page_size=16)
    assert SamplingParams().max_new_tokens == 128
