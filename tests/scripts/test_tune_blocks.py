"""The tuning of block sizes, without a chip: what it tries, and how it ranks."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from jradix.pallas.geometry import Geometry
from jradix.pallas.ops import Kernels

LLAMA = Geometry(q_heads=32, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
CHIPS = [Kernels("tpu", "v6e", joined_pages=True), Kernels("tpu", "7x", joined_pages=True), Kernels("gpu", "9.0")]


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], Any]) -> Any:
    return load_script("tune_blocks")


@pytest.mark.parametrize("kind", ["decode", "extend"])
@pytest.mark.parametrize("kernels", CHIPS, ids=lambda kernels: f"{kernels.name} {kernels.chip}")
def test_candidates_start_with_the_table_s_choice_and_are_all_different(
    script: Any, kernels: Kernels, kind: str
) -> None:
    blocks = list(script.candidates(kernels, kind, LLAMA))
    assert blocks[0] == script.chosen_blocks(kernels, kind, LLAMA)
    assert len(blocks) > 3
    assert len(set(blocks)) == len(blocks)


def test_the_fastest_comes_first_and_what_the_compiler_refuses_last(script: Any) -> None:
    blocks = list(script.candidates(CHIPS[2], "decode", LLAMA))

    def seconds(candidate: Any) -> float:
        if candidate.stages == 3:
            raise NotImplementedError("too many registers")
        return 1e-6 * candidate.block_len * candidate.stages

    trials = script.tune(iter(blocks), seconds)
    times = [trial.us for trial in trials if trial.us is not None]
    assert times == sorted(times)
    refused = [trial for trial in trials if trial.us is None]
    assert refused == trials[len(times) :]
    assert all("too many registers" in trial.error for trial in refused)
    printed = script.format_trials("title", trials, asdict(blocks[0]))
    assert printed.count("<- the table's") == 1
    assert "1.00" in next(line for line in printed.splitlines() if "<-" in line)


def test_without_kernels_it_says_why(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--models", "qwen3-0.6b", "--page-sizes", "16", "--kinds", "decode"]) == 1
    assert "this is a cpu" in capsys.readouterr().err
