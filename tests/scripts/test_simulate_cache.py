"""The simulator: its bounds against exhaustive search, its reports, and its formats."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "simulate_cache.py"
spec = importlib.util.spec_from_file_location("simulate_cache", SCRIPT)
assert spec is not None
assert spec.loader is not None
simulate_cache = importlib.util.module_from_spec(spec)
sys.modules["simulate_cache"] = simulate_cache
spec.loader.exec_module(simulate_cache)


def requests(*prompts: list[int]) -> list:
    """Prompts of one-token pages; the token that is always computed is added."""
    return [
        simulate_cache.TraceRequest(np.array([*prompt, -1 - i], np.int32), np.zeros(0, np.int32))
        for i, prompt in enumerate(prompts)
    ]


def best_by_search(prompts: list[list[int]], num_pages: int) -> int:
    """The most pages that any choice of what to keep after each request can hit."""

    def prefixes(prompt: list[int]) -> list[tuple[int, ...]]:
        return [tuple(prompt[: i + 1]) for i in range(len(prompt))]

    states: dict[frozenset, int] = {frozenset(): 0}
    for prompt in prompts:
        pages = prefixes(prompt)
        after: dict[frozenset, int] = {}
        for kept, hits in states.items():
            hit = 0
            while hit < len(pages) and pages[hit] in kept:
                hit += 1
            everything = kept | set(pages)
            for choice in itertools.combinations(sorted(everything), min(num_pages, len(everything))):
                state = frozenset(choice)
                after[state] = max(after.get(state, 0), hits + hit)
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_what_exhaustive_search_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 2, rng.integers(1, 4)).tolist() for _ in range(7)]
    trace = simulate_cache.PageTrace.of(requests(*prompts), 1)
    num_tokens = sum(map(len, prompts))
    for num_pages in (1, 2, 3):
        outcome = trace.optimum(num_pages)
        assert round(outcome.hit_rate * num_tokens) == best_by_search(prompts, num_pages)


def test_no_policy_beats_the_optimum_and_none_the_infinite_cache() -> None:
    trace = list(simulate_cache.synthetic_few_shot(num_tasks=10, num_requests=200))
    outcomes = simulate_cache.simulate(trace, ["lru", "lfu", "adaptive"], [16], [200, 400])
    infinite = next(outcome.hit_rate for outcome in outcomes if outcome.policy == "infinite")
    for num_pages in (200, 400):
        here = {outcome.policy: outcome.hit_rate for outcome in outcomes if outcome.num_pages == num_pages}
        assert 0 < max(here["lru"], here["lfu"], here["adaptive"]) <= here["optimum"] <= infinite


def test_a_pool_that_holds_everything_reaches_the_infinite_cache() -> None:
    trace = list(simulate_cache.synthetic_chat(num_conversations=10, num_turns=3))
    infinite, optimum, lru = simulate_cache.simulate(trace, ["lru"], [16], [5_000])
    assert infinite.hit_rate == optimum.hit_rate == pytest.approx(lru.hit_rate)
    assert lru.evicted_pages == optimum.evicted_pages == 0


def test_requests_larger_than_the_pool_are_counted_as_misses() -> None:
    trace = requests([1, 2, 3, 4, 5, 6], [1, 2])
    outcome = simulate_cache.replay(trace, "lru", 1, 4)
    assert (outcome.refused_requests, outcome.hit_rate) == (1, 0)


def test_both_trace_formats_are_read_and_others_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [0, 1]}\n{"hash_ids": [0, 2]}\n')
    first, second = simulate_cache.read_trace(path, 4)
    assert first.prompt.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -1]
    assert second.prompt.tolist()[:8] == [0, 1, 2, 3, 8, 9, 10, 11]
    path.write_text('{"prompt": "ab"}\n')
    assert next(simulate_cache.read_trace(path, 4)).prompt.tolist() == [97, 98]
    path.write_text('{"text": "ab"}\n')
    with pytest.raises(ValueError, match=r"trace.jsonl:1: expected a `hash_ids` or a `prompt`"):
        list(simulate_cache.read_trace(path, 4))


def test_the_command_line_prints_a_table_and_writes_json_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"hash_ids": [0, i % 7, 10 + i % 5]}) + "\n" for i in range(60)))
    table, picture = tmp_path / "out.json", tmp_path / "out.png"
    simulate_cache.main(
        [str(path), "--pages", "5", "20", "--policies", "lru", "adaptive", "--json", str(table), "--plot", str(picture)]
    )
    printed = capsys.readouterr().out
    assert "60 requests" in printed
    outcomes = json.loads(table.read_text())
    assert [outcome["policy"] for outcome in outcomes] == ["infinite", *["optimum", "lru", "adaptive"] * 2]
    assert printed.count("adaptive") == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_neither_or_both_of_trace_and_load_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["trace.jsonl", "--synthetic", "chat"]):
        with pytest.raises(SystemExit):
            simulate_cache.main(arguments)
        assert "either a trace or --synthetic" in capsys.readouterr().err


FEW_SHOT = Path(__file__).parents[1] / "data" / "gsm8k_cot_nested_shots.jsonl"


@pytest.mark.parametrize("source", ["few-shot prompts", "synthetic few-shot", "synthetic chat"])
def test_with_copies_pages_of_64_tokens_hit_like_pages_of_one(source: str) -> None:
    if source == "few-shot prompts":
        trace = list(simulate_cache.read_trace(FEW_SHOT, 16))
    else:
        trace = list(simulate_cache.SYNTHETIC[source.removeprefix("synthetic ")](0))[:300]
    room = sum(len(request.prompt) + len(request.output) for request in trace)
    single = simulate_cache.replay(trace, "lru", 1, room)
    large = simulate_cache.replay(trace, "lru", 64, room // 64 + len(trace), copies=True)
    whole = simulate_cache.replay(trace, "lru", 64, room // 64 + len(trace))
    assert single.hit_rate > 0.4
    assert large.hit_rate == pytest.approx(single.hit_rate, abs=1e-9)
    assert whole.hit_rate < single.hit_rate
