"""The engine's greedy tokens against those of transformers, whichever way a prompt reaches the model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jradix import Engine
from tests.every_way import SMOLLM2, SMOLLM2_OPTIONS, TINY_NAMES, Case
from tests.tiny_engine import Golden, greedy, logits_after, output_ids, start, use_one_bucket

# Those that differ in what the engine sees of them, heads, windows, experts, are enough each time.
EXAMPLES = {"gemma3_text", "gpt_oss", "llama", "llama_mqa", "qwen3_wide", "qwen3_moe_mixed"}
NAMES = [name if name in EXAMPLES else pytest.param(name, marks=pytest.mark.thorough) for name in TINY_NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_model_gives_the_tokens_of_transformers_every_way(name: str, tiny_path: Callable[[str], Path]) -> None:
    """One engine for all ways: its two programs are what this test spends its time on."""
    case, golden, engine = Case.of(tiny_path(name)), Golden(tiny_path(name)), start(tiny_path(name))
    case.check(case.answers(engine))
    for prompt, logits in zip(golden.prompts, golden.logits, strict=True):
        np.testing.assert_allclose(logits_after(engine, prompt), logits[-1], atol=2e-4, rtol=0)
    engine.check_idle()
    assert engine.runner.num_compiled == 5, (
        "forward passes of decode and mixed steps, a sampler for each, the copy of pages"
    )


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Engine:
    options: dict[str, Any] = SMOLLM2_OPTIONS | {"skip_tokenizer_init": False}
    engine = Engine(model_path=str(smollm2_path), **options)
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
        assert output_ids(real_engine, [prompt], greedy(8)) == [expected[:8]], "cold, or behind a shared system prompt"
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
