"""The server's benchmark on a tiny model: both ways give the same outputs, and the report holds what was measured."""

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
    return load_script("bench_server")


def quickly_compiled(make: Callable[..., Engine], options: Any, **fields: Any) -> Engine:
    engine = make(options, **fields)
    use_one_bucket(engine)
    compile_quickly(engine)
    return engine


def test_the_command_line_compares_a_server_with_an_engine(
    bench: Any,
    tmp_path: Path,
    tiny_text_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "make_engine", partial(quickly_compiled, bench.make_engine))
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # of the server
    numbers = tmp_path / "server.json"
    model = ["--model-path", str(tiny_text_path), "--dtype", "float32", "--page-size", "4"]
    few_shapes = ["--streams", "1", "--chunked-prefill-size", "32"]
    bench.main(["--quick", *few_shapes, "--repeats", "2", "--cached-repeats", "3", *model, "--json", str(numbers)])

    printed = capsys.readouterr().out
    found = json.loads(numbers.read_text())
    assert found["same"] == 1
    assert len(found["ratios"]) == 2
    assert len(found["first_samples"]) == 3
    assert found["first_mark_ms"] == pytest.approx(1.3 * found["step_ms"] + 5)
    assert 0 < found["tokens_a_write"] <= bench.QUICK_LOAD.output_len
    assert found["bytes_a_token"] > 0
    for name in ("server", "engine", "ratio", "first_ms", "step_ms"):
        assert found[name] > 0
        assert f"{found[name]:.1f}" in printed or f"{found[name]:.3f}" in printed


def test_an_answer_that_was_cut_off_is_not_taken(bench: Any) -> None:
    stream = bench.Stream.__new__(bench.Stream)
    stream.pieces = [(0.0, b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[{"text":"a"}]}\n\n')]
    with pytest.raises(AssertionError, match="not complete"):
        stream.text()
    stream.pieces.append((1.0, b'data: {"choices":[{"text":"b"}]}\n\ndata: [DONE]\n\n'))
    assert stream.text() == "ab"
