"""The benchmark of structured output: a line for each grammar, with its times."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_the_command_line_prints_the_times_of_each_grammar(
    load_script: Callable[[str], Any], smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = load_script("bench_grammar")
    bench.main(["--model-path", str(smollm2_path), "--tokens", "20"])
    lines = capsys.readouterr().out.splitlines()[3:]
    assert [line[:18].strip() for line in lines] == list(bench.GRAMMARS)
    for line in lines:
        numbers = [float(cell) for cell in line[18:].split()]
        assert len(numbers) == 7
        assert min(numbers) > 0
