"""The simulator of scheduling: what it counts, that no bound is broken, and what it prints."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import get_args

import numpy as np
import pytest

from jradix.config import SchedulePolicy


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("simulate_schedule")


@pytest.mark.parametrize("load", ["few-shot", "chat"])
def test_every_policy_ends_within_the_bound(script: ModuleType, load: str) -> None:
    outcomes = script.simulate(script.parse_arguments(["--load", load, "--requests", "60", "--pages", "160"]))
    assert [outcome.policy for outcome in outcomes] == list(get_args(SchedulePolicy))
    for outcome in outcomes:
        assert outcome.waited <= outcome.bound
        assert 0 < outcome.nearest <= 1
        assert outcome.rows <= 16


def test_what_is_computed_is_what_is_not_cached(script: ModuleType) -> None:
    options = script.parse_arguments(["--requests", "40", "--pages", "4000", "--policies", "lpm"])
    [outcome] = script.simulate(options)
    turns = [turn for client in script.few_shot(0, 40) for turn in client.turns]
    asked = sum(len(turn.question) - 1 for turn in turns)
    outputs = sum(len(turn.answer) for turn in turns)  # the last token of a prompt counts for the last of the answer
    assert outcome.retractions == 0
    assert outcome.computed_tokens == asked - round(outcome.hit_rate * asked) + outputs
    assert outcome.rows * outcome.steps >= outputs


def test_a_conversation_hits_its_history(script: ModuleType) -> None:
    turns = [script.Turn(np.arange(32, dtype=np.int32) + 100 * i, np.full(8, i, np.int32)) for i in range(3)]
    options = script.parse_arguments(["--pages", "100"])
    outcome = script.Simulation([script.Client(turns, pause=3)], "fcfs", options).run()
    # Of prompts of 32, 72 and 112 tokens, all but the new question and the last token of the answer before.
    assert outcome.hit_rate == (0 + 39 + 79) / (31 + 71 + 111)


def test_a_trace_is_read_and_outcomes_are_printed_and_written(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, written = tmp_path / "trace.jsonl", tmp_path / "outcomes.json"
    trace.write_text("".join(json.dumps({"prompt": f"the same words, then {i}"}) + "\n" for i in range(20)))
    script.main(["--trace", str(trace), "--policies", "fcfs", "lpm", "--json", str(written)])
    outcomes = json.loads(written.read_text())
    assert [outcome["policy"] for outcome in outcomes] == ["fcfs", "lpm"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["policy", "fcfs", "lpm"]
    assert f"{outcomes[1]['hit_rate']:.4f}" in lines[2]
