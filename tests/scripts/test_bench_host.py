"""The host benchmark: its parts make up the whole, and it leaves no timers behind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jradix.core
from jradix import batch


@pytest.fixture(scope="module")
def bench(load_script: Callable[[str], Any]) -> Any:
    return load_script("bench_host")


def test_the_command_line_prints_each_part_and_their_sum(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = tmp_path / "host.json"
    bench.main(["--batch", "4", "--steps", "6", "--layers", "1", "--context-length", "64", "--json", str(numbers)])
    printed = capsys.readouterr().out
    table = json.loads(numbers.read_text())
    assert list(table) == ["greedy", "sampled"]
    for parts in table.values():
        assert list(parts) == ["plan", "arrays", "dispatch", "read", "bookkeeping", "host"]
        assert all(part in printed for part in parts)
        assert all(0 < part["lowest"] <= part["median"] for part in parts.values())
        host = parts.pop("host")
        assert host["mean"] == pytest.approx(sum(part["mean"] for part in parts.values()))
    assert jradix.core.build_arrays is batch.build_arrays
