"""The batch simulator: its loads, and a table in which reordering is between the order given and the bound."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FEW_SHOT = Path(__file__).parents[1] / "data" / "gsm8k_cot_nested_shots.jsonl"


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], Any]) -> Any:
    return load_script("simulate_batch")


def test_the_command_line_prints_and_writes_every_load_in_every_pool(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "out.json"
    pools = ["--pool-tokens", "12000", "400000"]
    script.main([str(FEW_SHOT), "few-shot", "chat", *pools, "--limit", "300", "--json", str(table)])
    printed = capsys.readouterr().out
    outcomes = json.loads(table.read_text())
    assert [(outcome["load"], outcome["pool_tokens"]) for outcome in outcomes] == [
        (load, pool) for load in ("gsm8k_cot_nested_shots", "few-shot", "chat") for pool in (12_000, 400_000)
    ]
    assert printed.count("chat") == 2
    for outcome in outcomes:
        assert 0 < outcome["given"] <= outcome["bound"]
        assert outcome["bound"] - 0.02 < outcome["reordered"] <= outcome["bound"]
        assert outcome["predicted"] == outcome["reordered"]  # so few requests are all simulated
    for small in outcomes[2::2]:
        assert small["given"] < 0.8 * small["reordered"]


def test_the_loads_share_what_they_say(script: Any) -> None:
    few_shot = script.few_shot(num_requests=50, num_templates=1, num_tasks=1)
    stem_len = len(few_shot[0]) - 40
    assert all((prompt[:stem_len] == few_shot[0][:stem_len]).all() for prompt in few_shot)
    chat = script.chat()
    assert len(chat) == 300 * 6
    assert all((prompt[:200] == chat[0][:200]).all() for prompt in chat)
