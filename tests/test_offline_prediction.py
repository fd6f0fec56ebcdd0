"""The prediction of hits, against the real scheduler on a paper device."""

from typing import Any

import numpy as np
import pytest

from jradix.offline import plan_batch
from jradix.offline_prediction import MAX_SIMULATED, Capacity, Simulation, simulate_hits
from tests.paper_device import VOCAB, PaperDevice


def few_shot(rng: np.random.Generator, count: int, stems: int, *, stem_len: int, own_len: int) -> list[np.ndarray]:
    """Prompts that begin with one of some stems, in random order."""
    known = [rng.integers(0, VOCAB, rng.integers(stem_len // 2, stem_len)) for _ in range(stems)]
    return [
        np.concatenate([known[rng.integers(stems)], rng.integers(0, VOCAB, own_len)]).astype(np.int32)
        for _ in range(count)
    ]


@pytest.mark.parametrize("num_pages", [30, 60, 150, 600])
@pytest.mark.parametrize("reorder", [False, True])
@pytest.mark.parametrize("granularity", [1, 4])
def test_the_scheduler_hits_what_was_predicted(num_pages: int, reorder: bool, granularity: int) -> None:
    prompts = few_shot(np.random.default_rng(0), 120, 12, stem_len=40, own_len=5)
    output_lens = [6] * 120
    capacity = Capacity(
        num_pages=num_pages, page_size=4, granularity=granularity, max_running_requests=4, chunked_prefill_size=16
    )
    plan = plan_batch(prompts, [None] * 120, output_lens, capacity)
    order = plan.order.tolist() if reorder else list(range(120))
    predicted = sum(simulate_hits(prompts, [None] * 120, output_lens, capacity, order))
    device = PaperDevice(num_pages, 4, rows=4, chunk=16, min_copied_tokens=granularity)
    for index in order:
        device.add(prompts[index].tolist(), output_lens[index])
    device.run()
    achieved = sum(request.cached_tokens for request in device.requests)
    assert 0 < predicted < plan.prompt_tokens
    # In the smallest pool the scheduler, which learns how long outputs are, admits more at once than is predicted.
    assert predicted == pytest.approx(achieved, abs=0.02 * plan.prompt_tokens)
    assert not reorder or predicted == plan.predicted


def test_a_sample_predicts_nearly_what_all_requests_do_and_simulates_no_more_than_it_may() -> None:
    count = 2_000
    prompts = few_shot(np.random.default_rng(1), count, 300, stem_len=90, own_len=10)
    output_lens = Counted([9] * count)
    limits = capacity(60, rows=8, page_size=32)
    plan = plan_batch(prompts, [None] * count, output_lens, limits)
    assert 0 < output_lens.num_asked <= MAX_SIMULATED
    in_full = sum(simulate_hits(prompts, [None] * count, output_lens, limits, plan.order))
    assert in_full < 0.97 * plan.bound  # so that to predict the bound would not do
    assert plan.predicted == pytest.approx(in_full, rel=0.01)


class Counted(list[int]):
    """Counts how often an item is asked for."""

    num_asked = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_asked += 1
        return super().__getitem__(index)


def test_prefixes_that_are_cached_before_the_batch_are_hit() -> None:
    prompts = [np.arange(start, start + 21, dtype=np.int32) for start in range(6)]
    cached = [0, 20, 7, 0, 8, 0]
    plan = plan_batch(prompts, [None] * 6, [1] * 6, capacity(100, rows=1), cached)
    assert plan.order.tolist()[:3] == [1, 2, 4]
    assert plan.bound == plan.predicted == 35


@pytest.mark.parametrize(("chunk", "hits"), [(64, [0, 8, 8]), (30, [0, 8, 10]), (10, [0, 10, 10])])
def test_a_page_can_be_copied_from_the_step_after_it_is_filled_but_read_at_once(chunk: int, hits: list[int]) -> None:
    stem = list(range(10))
    prompts = [np.array([*stem, *[20 + number] * 10], np.int32) for number in range(3)]
    assert simulate_hits(prompts, [None] * 3, [50] * 3, capacity(100, rows=3, chunk=chunk), range(3)) == hits


def test_requests_wait_for_a_slot_and_for_pages_and_those_larger_than_the_pool_hit_nothing() -> None:
    prompts = [np.array([1, 2, 3, 4, 5, last, last], np.int32) for last in (6, 7, 8)]
    assert simulate_hits(prompts, [None] * 3, [2] * 3, capacity(100, rows=1), range(3)) == [0, 5, 5]
    assert simulate_hits(prompts, [None] * 3, [2] * 3, capacity(2, rows=3), range(3)) == [0, 5, 5]
    assert simulate_hits(prompts, [None] * 3, [2, 30, 2], capacity(2, rows=3), range(3)) == [0, 0, 5]


def test_outputs_take_pages_of_their_own_even_after_equal_prompts() -> None:
    simulation = Simulation(capacity(100, rows=1))
    for _ in range(3):
        simulation.serve(np.arange(8, dtype=np.int32), 9)
    assert simulation.cache.num_evictable == 2 * 2  # of the outputs that have ended; the prompt is in use
    assert simulation.cache.num_free == 100 - 2 - 3 * 2


def capacity(num_pages: int, *, rows: int, chunk: int = 64, page_size: int = 4) -> Capacity:
    """Where a match may end at any token."""
    return Capacity(
        num_pages=num_pages,
        page_size=page_size,
        granularity=1,
        max_running_requests=rows,
        chunked_prefill_size=chunk,
    )
