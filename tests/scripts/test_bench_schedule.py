"""The scheduling benchmark on a tiny model: its table, and that a reordered batch computes least."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jradix import Engine
from tests.tiny_engine import compile_quickly, use_one_bucket


@pytest.fixture(scope="module")
def bench(load_script: Callable[[str], Any]) -> Any:
    return load_script("bench_schedule")


def quickly_compiled(make: Callable[..., Engine], options: Any, **fields: Any) -> Engine:
    engine = make(options, **fields)
    use_one_bucket(engine)
    compile_quickly(engine)
    return engine


def test_the_command_line_compares_the_order_given_with_the_reordered_batch(
    bench: Any,
    tmp_path: Path,
    tiny_path: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "make_engine", partial(quickly_compiled, bench.make_engine))
    numbers = tmp_path / "schedule.json"
    model = ["--model-path", str(tiny_path("llama")), "--dtype", "float32", "--page-size", "4"]
    bench.main(["--quick", "--repeats", "1", *model, "--json", str(numbers)])

    printed = capsys.readouterr().out
    content = json.loads(numbers.read_text())
    given, longest_match, reordered = content["ways"]
    assert [way["name"] for way in content["ways"]] == ["fcfs", "lpm", "reordered"]
    assert content["prompt_tokens"] == 6 * 4 * (37 + 6)
    assert given["hit_rate"] < 0.7 * reordered["hit_rate"]
    assert longest_match["hit_rate"] > 1.2 * given["hit_rate"]
    for way in (given, reordered):
        assert way["hit_rate"] == pytest.approx(way["predicted_hit_rate"], abs=0.03)
        assert way["computed_tokens"] == pytest.approx((1 - way["hit_rate"]) * content["prompt_tokens"])
        assert way["ratio"] == pytest.approx(given["seconds"] / way["seconds"])
        assert str(way["computed_tokens"]) in printed
    assert reordered["computed_tokens"] >= content["prompt_tokens"] - content["bound"]
