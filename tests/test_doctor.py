"""What `jradix doctor` says."""

import re
from pathlib import Path
from typing import Any

import pytest

from jradix import EngineConfig
from jradix.cli import main
from jradix.doctor import report


def test_the_report_names_kernels_reasons_pool_and_programs(tiny_text_path: Path) -> None:
    sizes: dict[str, Any] = {"page_size": 4, "max_total_tokens": 64, "max_running_requests": 2}
    config = EngineConfig(model_path=str(tiny_text_path), kv_cache_dtype="int8", **sizes)
    facts = dict(line.split("  ", 1) for line in report(config).splitlines())
    facts = {name: fact.strip() for name, fact in facts.items()}
    assert facts["attention"] == "XLA"
    assert "this is a cpu" in facts["because"]
    assert facts["KV pool"].startswith("16 pages of 4 tokens = 64 tokens, ")
    assert facts["KV pool"].endswith(" in int8")
    assert facts["weights"].endswith(" in bfloat16")
    assert facts["decode rows"] == "1, 2"
    assert facts["layer loop"] == "scan"


def test_the_report_tells_what_each_of_several_devices_holds(tiny_text_path: Path) -> None:
    sizes: dict[str, Any] = {"page_size": 4, "max_total_tokens": 2**16, "max_running_requests": 2}
    reports = [report(EngineConfig(model_path=str(tiny_text_path), tp_size=devices, **sizes)) for devices in (1, 8)]
    one, eight = (dict(line.split("  ", 1) for line in text.splitlines()) for text in reports)
    assert one["devices"].strip() == "1 of 8 share each layer (tp_size)"
    assert eight["devices"].strip() == "8 of 8 share each layer (tp_size)"
    assert "heads" not in one
    assert eight["heads"].strip() == (
        "1 KV and 1 query heads on each device; each KV head 2 times, 4 of 8 places empty"
    )
    sizes_of = [re.search(r"tokens, (\d+) MiB( on each device)? in", facts["KV pool"]) for facts in (one, eight)]
    [pool, share] = (int(found[1]) for found in sizes_of if found)
    assert share == pool // 2, "eight places for two KV heads, and one of them on each device"


def test_the_command_refuses_what_an_engine_would(tiny_text_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model-path", str(tiny_text_path), "--context-length", "100000"]) == 2
    assert "context_length must be at most" in capsys.readouterr().err
