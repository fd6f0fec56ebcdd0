"""The ahead-of-time check: what it compiles, what it calls a fault, and its estimates."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

GIB = 1 << 30


@pytest.fixture(scope="module")
def check(load_script: Callable[[str], Any]) -> Any:
    return load_script("aot_check")


def test_a_program_fails_for_a_pool_not_aliased_large_temporaries_and_pool_sized_copies(check: Any) -> None:
    assert check.find_faults(GIB, GIB // 50, GIB, 1000, {(10,)}) == []
    [not_aliased] = check.find_faults(0, 0, GIB, 1000, set())
    [temporaries] = check.find_faults(GIB, GIB // 10, GIB, 1000, set())
    [copy] = check.find_faults(GIB, 0, GIB, 1000, {(10, 100)})
    assert "in place" in not_aliased
    assert "10.0%" in temporaries
    assert "[10, 100]" in copy


def test_a_model_too_large_for_a_chip_is_compiled_with_fewer_layers(check: Any) -> None:
    engine = check.EngineConfig(model_path="", page_size=64, context_length=8192)
    small, large = (check.Plan.of(check.TARGETS[target], "llama-3.1-8b", engine) for target in ("v5e", "h200"))
    assert small.config.layers < large.config.layers == 32
    assert check.weight_bytes(small.config) <= 0.85 * 16e9 / 2
    assert 15e9 < check.weight_bytes(large.config) < 17e9


def test_fewer_compiled_layers_leave_weights_and_pool_as_they_are(check: Any) -> None:
    engine = check.EngineConfig(model_path="", page_size=64, context_length=8192)
    whole, part = (check.Plan.of(check.TARGETS["tpu7x"], "llama-3.1-70b", engine, 8, layers) for layers in (None, 2))
    assert (whole.compiled_layers, part.compiled_layers) == (80, 2)
    assert part == replace(whole, compiled_layers=2)
    assert check.Plan.of(check.TARGETS["v5e"], "smollm2-135m", engine, 1, 99).compiled_layers == 30


def test_a_pool_and_weights_of_8_bits_leave_room_for_more_tokens_and_read_fewer_bytes(check: Any) -> None:
    options: dict[str, Any] = {"model_path": "", "page_size": 64, "context_length": 131_072}
    wide = check.EngineConfig(**options)
    narrow = check.EngineConfig(quantization="int8", kv_cache_dtype="int8", **options)
    pages, more = (
        check.Plan.of(check.TARGETS["v6e"], "qwen3-0.6b", engine).layout.num_pages for engine in (wide, narrow)
    )
    assert 2 * pages < more < 2.2 * pages
    found, other = (check.estimate("v6e", "llama-3.1-8b", engine).decode_ms for engine in (wide, narrow))
    assert other == pytest.approx(found / 2, rel=0.01)


def test_estimates_are_bytes_over_bandwidth_and_operations_over_peak(check: Any) -> None:
    found = check.estimate("v6e", "llama-3.1-8b")
    weights, kv = 15.0e9, 64 * 1024 * 2 * 32 * 8 * 128 * 2  # without the embedding, which is not read whole
    assert found.decode_ms == pytest.approx(1e3 * (weights + kv) / 1640e9, rel=0.01)
    assert found.prefill_ms == pytest.approx(1e3 * 2 * 6.98e9 * 2048 / 918e12, rel=0.05)  # and a little attention
    assert check.seen_pairs(5, 2) == 1 + 2 * 4
    assert check.seen_pairs(5, 9) == 15
    active = check.estimate("v6e", "gpt-oss-20b").prefill_ms
    assert active == pytest.approx(1e3 * 2 * 3.0e9 * 2048 / 918e12, rel=0.1), "of 3.6B, without embedding and head"
    assert found.fits
    assert not check.estimate("v5e", "llama-3.1-8b").fits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--page-size", "8"], "page_size must be a multiple of 16 on a TPU"),
        (["--page-size", "0"], "page_size must be an integer of at least 1"),
        (["--context-length", "9000000"], "--context-length must be from 2 to 8192"),
        (["--targets", "h200"], "needs jax's CUDA plug-in"),
        (["--compiled-layers", "0"], "--compiled-layers must be at least 1, got 0"),
    ],
)
def test_what_no_engine_could_run_is_refused_in_one_line(
    check: Any, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        check.main(["--models", "smollm2-135m", "--targets", "v6e", *options])
    assert message in capsys.readouterr().err


def test_a_program_that_does_not_compile_is_a_line_with_its_reason(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **static: Any) -> Any:
        raise check.jax.errors.JaxRuntimeError("out of memory\nat length")

    monkeypatch.setattr(check.Target, "compile", fails)
    plan = check.Plan.of(check.TARGETS["v6e"], "smollm2-135m", check.EngineConfig(model_path="", page_size=64))
    [line] = check.compile_programs(plan, "smollm2-135m", "v6e", [])
    assert line.faults == ["does not compile: out of memory"]
    assert "FAILED: does not compile" in check.format_lines([line])


def test_a_model_s_steps_compile_for_a_tpu(check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("libtpu")
    path = tmp_path / "aot.json"
    sizes = ["--context-length", "8192", "--max-running-requests", "8", "--chunked-prefill-size", "32"]
    status = check.main(["--targets", "v5e", "--models", "smollm2-135m", *sizes, "--json", str(path)])
    programs = json.loads(path.read_text())["programs"]
    assert [program["program"] for program in programs] == [
        "copy of pages",
        "8 decode rows, 128 pages a row",
        "0 decode rows + 16 tokens of 1 rows, 128 pages a row",
        "8 decode rows + 32 tokens of 8 rows, 128 pages a row",
    ]
    assert {program["kernels"] for program in programs} == {"tpu"}
    assert not any(program["faults"] for program in programs)
    assert status == 0
    assert "estimate" in capsys.readouterr().out
