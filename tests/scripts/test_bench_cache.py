"""The cache benchmark: every number it promises, and a tree within its memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def bench(load_script: Callable[[str], Any]) -> Any:
    return load_script("bench_cache")


def test_the_command_line_prints_every_number(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, numbers = tmp_path / "trace.jsonl", tmp_path / "cache.json"
    trace.write_text("".join(json.dumps({"hash_ids": [0, index % 3, index]}) + "\n" for index in range(300)))
    bench.main(["--quick", "--repeats", "1", "--trace", str(trace), "--json", str(numbers)])
    printed = capsys.readouterr().out
    found = json.loads(numbers.read_text())
    for what in ("load chat, lru", "load documents, adaptive", "load trace, lru", "eviction, adaptive", "hit of 2000"):
        assert any(name.startswith(what) and number > 0 for name, number in found.items()), what
        assert what in printed


@pytest.mark.parametrize("prompt_len", [16, 32, 33, 640])
@pytest.mark.parametrize("split", [False, True])
def test_a_tree_takes_at_most_12_bytes_a_token_and_400_a_node(bench: Any, prompt_len: int, split: bool) -> None:
    share, _ = bench.memory_share(2_000, prompt_len, split=split)
    assert share <= 1
