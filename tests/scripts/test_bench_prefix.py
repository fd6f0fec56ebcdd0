"""The prefix benchmark on a tiny model: what it counts, that the cache changes no output, and what it predicts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jradix import EngineConfig
from tests.tiny_engine import start


@pytest.fixture(scope="module")
def bench(load_script: Callable[[str], Any]) -> Any:
    return load_script("bench_prefix")


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_the_command_line_runs_all_scenarios_and_the_cache_saves_what_it_ideally_can(
    bench: Any, tmp_path: Path, tiny_path: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    numbers, picture = tmp_path / "prefix.json", tmp_path / "prefix.png"
    model = ["--model-path", str(tiny_path("llama")), "--dtype", "float32", "--max-running-requests", "1"]
    bench.main(["--quick", "--repeats", "1", *model, "--json", str(numbers), "--plot", str(picture)])

    printed = capsys.readouterr().out
    results = json.loads(numbers.read_text())["scenarios"]
    assert [result["name"] for result in results] == ["chat", "system", "code", "documents"]
    by_name = {result["name"]: result for result in results}
    for result in results:
        assert result["cached_tokens"] == result["ideal_cached_tokens"] > 0, result["name"]
        assert result["equal_outputs"] == 1.0, result["name"]
        assert result["ratio"] == pytest.approx(result["off_s"] / result["on_s"])
        assert result["bound"] > 1
        assert result["peak_memory_mib"] > 50
        assert str(result["cached_tokens"]) in printed
    # Four prompts of 100 + 9 tokens on one prefix, that each but the first finds.
    assert by_name["system"]["prompt_tokens"] == 4 * 109
    assert by_name["system"]["cached_tokens"] == 3 * 100
    # Chat: the first turn shares the system prompt; a later one all of the turn before but its last token.
    turn_lens = [70 + 20, 90 + 6 + 20, 116 + 6 + 20]
    assert by_name["chat"]["prompt_tokens"] == 3 * sum(turn_lens)
    assert by_name["chat"]["cached_tokens"] == 2 * 70 + 3 * (90 + 5) + 3 * (116 + 5)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_one_by_one_saves_more_and_the_cache_is_empty_and_on_afterwards(
    bench: Any, tiny_path: Callable[[str], Path]
) -> None:
    engine = start(tiny_path("llama"), page_size=16, max_running_requests=2, max_total_tokens=1024)
    scenario = bench.Scenario("system", "one system prompt", 1, 2, 50, 6, 3)
    runs = [
        bench.run_scenario(engine, scenario, cached=cached, one_by_one=one_by_one, seed=3)
        for cached, one_by_one in ((True, True), (True, False), (False, True))
    ]
    assert [run.cached_tokens for run in runs] == [
        50,
        48,
        0,
    ]  # side by side, the page that both share a part of is not there yet
    assert [len(run.waves) for run in runs] == [2, 1, 2]
    assert runs[0].outputs == runs[1].outputs == runs[2].outputs
    assert engine.cache.enabled
    assert engine.cache.num_free == engine.cache.num_total


@pytest.mark.parametrize(
    ("prompts", "outputs", "expected"),
    [
        ([tokens(1, 2, 3, 4, 5), tokens(1, 2, 3, 9, 9)], [[7], [7]], 3),
        ([tokens(1, 2, 3, 4), tokens(1, 2, 3, 4)], [[7], [7]], 3),  # the last token is computed again
        ([tokens(1, 2), tokens(1, 2, 3, 4, 8)], [[3, 4, 6], [7]], 4),  # 3 and 4 are an earlier output
        ([tokens(1, 2), tokens(1, 2, 3, 4, 8)], [[3, 4], [7]], 3),  # 4 was sampled last: it has no KV
        ([tokens(1, 2, 3, 4, 5, 6), tokens(1, 2, 9, 4, 8, 8)], [[7], [7]], 2),  # 4 is equal, behind a difference
        ([tokens(1, 2, 3), tokens(4, 2, 3)], [[7], [7]], 0),  # equal tokens behind a difference are no prefix
    ],
)
def test_ideal_counts_tokens_shared_with_an_earlier_sequence(
    bench: Any, prompts: list[np.ndarray], outputs: list[list[int]], expected: int
) -> None:
    assert bench.ideal_cached_tokens(prompts, outputs) == expected


def test_an_engine_that_spends_just_its_costs_reaches_the_prediction(bench: Any) -> None:
    scenario = bench.Scenario("system", "one system prompt", 1, 4, 100, 28, 11)
    prompts = [tokens(*range(128)) for _ in range(4)]
    outputs = [[0] * 11] * 4
    prefill_token, decode_step = 0.5, 3.0
    off = bench.Run(4 * 128 * prefill_token + 10 * decode_step, [prompts], outputs, 0)
    on = bench.Run((4 * 128 - 288) * prefill_token + 10 * decode_step, [prompts], outputs, 288)
    config = EngineConfig(model_path="a model", page_size=16)
    result = bench.summarize(scenario, [on], [off], [bench.Costs(prefill_token, decode_step)], config)
    assert result.ratio == pytest.approx(result.predicted_ratio)
    assert result.of_predicted == pytest.approx(1)
    assert result.bound == pytest.approx(512 / (512 - 288))
