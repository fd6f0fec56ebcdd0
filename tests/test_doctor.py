"""What `jradix doctor` says."""

from pathlib import Path

import pytest

from jradix import EngineConfig
from jradix.cli import main
from jradix.doctor import report


def test_the_report_names_kernels_reasons_pool_and_programs(tiny_text_path: Path) -> None:
    config = EngineConfig(model_path=str(tiny_text_path), page_size=4, max_total_tokens=64, max_running_requests=2)
    facts = dict(line.split("  ", 1) for line in report(config).splitlines())
    facts = {name: fact.strip() for name, fact in facts.items()}
    assert facts["attention"] == "XLA"
    assert "this is a cpu" in facts["because"]
    assert facts["KV pool"].startswith("16 pages of 4 tokens = 64 tokens, ")
    assert facts["decode rows"] == "1, 2"
    assert facts["layer loop"] == "scan"


def test_the_command_refuses_what_an_engine_would(tiny_text_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model-path", str(tiny_text_path), "--context-length", "100000"]) == 2
    assert "context_length must be at most" in capsys.readouterr().err
