"""The measurement of loading: a checkpoint in files that loads, and a number for each number of devices."""

from collections.abc import Callable
from typing import Any

import pytest


def test_what_is_resident_beside_the_parameters_is_little(
    load_script: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    bench = load_script("bench_load")
    assert bench.main(["--layers", "1", "--files", "2", "--tp-size", "2"]) == 0
    [_, line] = capsys.readouterr().out.splitlines()
    devices, parameters, beside, mark = map(int, line.split())
    weights = 2 * bench.HEADS * bench.HEAD_DIM + 2 * bench.KV_HEADS * bench.HEAD_DIM + 3 * bench.MLP
    expected = 2 * bench.HIDDEN * (weights + bench.VOCAB)
    assert devices == 2
    assert parameters == pytest.approx(expected / 1e6, abs=1)
    assert 0 <= beside <= mark < 2 * parameters
