"""The raw benchmark on a tiny model: the work it reckons with, counted from the checkpoint, and its report."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from jradix import Engine


@pytest.fixture(scope="module")
def bench(load_script: Callable[[str], Any]) -> Any:
    return load_script("bench_raw")


def test_the_work_of_a_model_is_what_its_checkpoint_holds(bench: Any, tiny_path: Callable[[str], Path]) -> None:
    path = tiny_path("llama")
    engine = Engine(model_path=str(path), dtype="bfloat16", skip_tokenizer_init=True, max_total_tokens=256)
    work = bench.Work.of(engine, prompt_len=10)

    with safe_open(path / "model.safetensors", "numpy") as checkpoint:
        sizes = {name: checkpoint.get_tensor(name).size for name in checkpoint.keys()}  # noqa: SIM118 - no mapping
    config = json.loads((path / "config.json").read_text())
    embedding, head = sizes.pop("model.embed_tokens.weight"), sizes["lm_head.weight"]
    assert embedding == head == config["vocab_size"] * config["hidden_size"]
    assert work.weight_bytes == 2 * sum(sizes.values())  # an embedding that is no LM head is not read whole
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    assert work.kv_bytes == 2 * 2 * layers * config["num_key_value_heads"] * head_dim
    scores = layers * config["num_attention_heads"] * (10 * 11 / 2) * head_dim  # multiplications of q by k, or p by v
    in_layers = sum(sizes.values()) - head
    assert work.prefill_flops == 2 * (10 * in_layers + head) + 2 * 2 * scores


def test_the_command_line_prints_speeds_beside_limits(
    bench: Any, tmp_path: Path, tiny_path: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = tmp_path / "raw.json"
    bench.main(["--quick", "--repeats", "2", "--model-path", str(tiny_path("llama")), "--json", str(numbers)])
    printed = capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads(numbers.read_text())}
    assert list(rows) == ["read", "copy", "matmul", "decode 1", "decode 16", "prefill"]
    for name, row in rows.items():
        assert name in printed
        assert len(row["samples"]) == 2
        assert min(row["samples"]) <= row["value"] <= max(row["samples"])
        assert row["value"] > 0
    assert rows["decode 16"]["ms"] == pytest.approx(16e3 / rows["decode 16"]["value"])
    for name in ("decode 1", "decode 16", "prefill"):
        assert 0 < rows[name]["utilisation"] < 1, f"{name} is faster than the machine"


def test_without_a_model_the_message_says_how_to_get_one(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench_engine = importlib.import_module("bench_engine")

    def not_installed(name: str) -> None:
        raise bench_engine.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(bench_engine.importlib.metadata, "files", not_installed)
    with pytest.raises(SystemExit, match=r"scripts/setup_venv.sh demo.*--model-path"):
        bench_engine.default_model_path()
