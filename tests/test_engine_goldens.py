"""The engine's greedy tokens against those of transformers, whichever way a prompt reaches the model."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from jradix import Engine
from tests.tiny_engine import Golden, greedy, logits_after, output_ids, start, use_one_bucket

# Those that differ in what the engine sees of them: heads, windows, experts. tests/model has the rest.
TINY_NAMES = ["gemma3_text", "gpt_oss", "llama", "llama_mqa", "mistral_window", "phi3", "qwen3_wide", "qwen3_moe_mixed"]
SMOLLM2 = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())["prompts"]


@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_tiny_model_gives_the_tokens_of_transformers(name: str, tiny_path: Callable[[str], Path]) -> None:
    """One engine for all ways to arrive: its two programs are what this test spends its time on."""
    golden, engine = Golden(tiny_path(name)), start(tiny_path(name))
    prompts, expected = golden.prompts, golden.greedy_ids

    for prompt, ids in zip(prompts, expected, strict=True):
        assert output_ids(engine, [prompt]) == [ids], "whole and alone"
    results = engine.generate(input_ids=prompts, sampling_params=greedy())
    assert [result["output_ids"] for result in results] == expected, "on top of a cached prompt"
    assert [result["meta_info"]["cached_tokens"] for result in results] == [56, 56, 56]

    engine.flush_cache()
    output_ids(engine, [prompt[:cut] for prompt, cut in zip(prompts, (4, 31, 54), strict=True)], greedy(1))
    assert output_ids(engine, prompts) == expected, "on top of a part of the prompt, beside each other"

    for chunk, count in ((16, 3), (7, 3), (1, 1)):
        engine.flush_cache()
        engine.scheduler.chunked_prefill_size = chunk  # a smaller chunk fits the same bucket: nothing to compile
        assert output_ids(engine, prompts[:count]) == expected[:count], f"in chunks of {chunk}, beside each other"

    engine.scheduler.chunked_prefill_size = 64
    in_the_way = engine.cache.allocate(engine.cache.num_total - 50)  # three requests need 19 pages each
    assert in_the_way is not None
    for _ in range(2):
        assert output_ids(engine, prompts) == expected, "retracted, and on top of what evictions left"
    assert engine.scheduler.num_retractions > 0
    for prompt, logits in zip(prompts, golden.logits, strict=True):
        np.testing.assert_allclose(logits_after(engine, prompt), logits[-1], atol=2e-4, rtol=0)
    engine.cache.free(in_the_way)
    engine.check_idle()
    assert engine.runner.num_compiled == 5, (
        "forward passes of decode and mixed steps, a sampler for each, the copy of pages"
    )


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Engine:
    engine = Engine(
        model_path=str(smollm2_path),
        dtype="float32",
        context_length=128,
        max_total_tokens=2048,
        max_running_requests=8,
        chunked_prefill_size=64,
    )
    use_one_bucket(engine)
    return engine


@pytest.fixture
def real_engine(smollm2: Engine) -> Iterator[Engine]:
    smollm2.flush_cache()
    yield smollm2
    smollm2.check_idle()


PROMPTS = [case["prompt_ids"] for case in SMOLLM2]
EXPECTED = [case["greedy_ids"] for case in SMOLLM2]


def test_smollm2_gives_the_tokens_of_transformers_cold_cached_and_batched(real_engine: Engine) -> None:
    for prompt, expected in zip(PROMPTS, EXPECTED, strict=True):
        assert output_ids(real_engine, [prompt], greedy(32)) == [expected], "cold, or behind a shared system prompt"
    results = real_engine.generate(input_ids=PROMPTS, sampling_params=greedy(32))
    assert [result["output_ids"] for result in results] == EXPECTED, "cached, beside each other"
    assert [result["meta_info"]["cached_tokens"] for result in results] == [len(prompt) - 1 for prompt in PROMPTS]
    real_engine.flush_cache()
    assert output_ids(real_engine, PROMPTS, greedy(32)) == EXPECTED, "cold, beside each other"


def test_smollm2_reads_and_writes_the_text_of_transformers(real_engine: Engine) -> None:
    raw = [case for case in SMOLLM2 if case["kind"] == "raw"]
    results = real_engine.generate(
        [case["text"] for case in raw], {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    )
    assert [result["text"] for result in results] == [case["decoded"] for case in raw]


def test_smollm2_gives_the_first_log_probabilities_of_transformers_cold_and_cached(real_engine: Engine) -> None:
    for case in SMOLLM2:
        for cached in (False, True):
            logits = logits_after(real_engine, case["prompt_ids"]).astype(np.float64)
            log_probs = logits - np.logaddexp.reduce(logits)
            for token_id, log_prob in case["first_top5"]:
                assert log_probs[token_id] == pytest.approx(log_prob, abs=1e-3), f"{cached=}"
