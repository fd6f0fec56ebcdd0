"""The adaptive policy: what a page is worth, what it remembers of evicted pages, and what it buys."""

import numpy as np
import pytest

from jradix.cache import PrefixCache
from jradix.cache.radix import Node
from jradix.cache.reuse import (
    NUM_BUCKETS,
    GhostTable,
    ReuseQueue,
    ReuseTimes,
    bucket_of,
    class_of,
    worth_by_age,
)


def reuse_at(*ages: int) -> list[float]:
    histogram = [0.0] * NUM_BUCKETS
    for age in ages:
        histogram[bucket_of(age)] += 1
    return histogram


def tokens(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def test_buckets_grow_with_age() -> None:
    buckets = [bucket_of(age) for age in (0, 1, 2, 5, 100, 10_000, 2**40)]
    assert buckets == sorted(buckets)
    assert (buckets[0], buckets[-1]) == (0, NUM_BUCKETS - 1)


def test_classes_never_fall_with_uses() -> None:
    classes = [class_of(uses) for uses in range(1, 1_000)]
    assert classes == sorted(classes)
    assert classes[:4] == [0, 1, 2, 3]


def test_a_page_that_is_never_reused_is_worth_nothing() -> None:
    assert not any(worth_by_age(100.0, [0.0] * NUM_BUCKETS))


def test_worth_falls_with_age_when_reuse_comes_early() -> None:
    worth = worth_by_age(100.0, reuse_at(*[2] * 50, *[10] * 10, *[60] * 2))
    ages = [worth[bucket_of(age)] for age in (1, 5, 30, 100)]
    assert ages == sorted(ages, reverse=True)
    assert ages[0] > 5 * ages[1]
    assert ages[-1] == 0


def test_worth_rises_with_age_when_reuse_comes_late() -> None:
    """Then the newest pages go first, and the older ones wait for their reward."""
    worth = worth_by_age(100.0, reuse_at(*[1_000] * 50))
    ages = [worth[bucket_of(age)] for age in (1, 100, 500, 900)]
    assert ages == sorted(ages)
    assert ages[-1] > 2 * ages[0] > 0


def test_worth_is_the_best_rate_over_all_waiting_times() -> None:
    """A histogram of two spikes against a plain search."""
    reused = reuse_at(*[4] * 5, *[300] * 60)
    worth = worth_by_age(100.0, reused)
    starts = 2.0 ** (np.arange(NUM_BUCKETS + 1) / 4) - 1
    for age in (0, 8, 20, 30, 40):
        best, hits, spent, waiting = 0.0, 0.0, 0.0, 100.0 - sum(reused[:age])
        for bucket in range(age, NUM_BUCKETS):
            hits += reused[bucket]
            spent += (waiting - reused[bucket] / 2) * (starts[bucket + 1] - starts[bucket])
            waiting -= reused[bucket]
            best = max(best, hits / spent)
        assert worth[age] == pytest.approx(best)


def test_old_observations_fade() -> None:
    times = ReuseTimes()
    times.started[0] = 1_000
    for _ in range(500):
        times.learn()
    assert times.started[0] < 1


def test_ghosts_remember_runs_of_pages_by_their_ends() -> None:
    ghosts = GhostTable(1 << 12, 2)
    ghosts.put(tokens(5, 6, 7, 8), uses=3, last_access=40)
    ghosts.put(tokens(1, 2, 3, 4), uses=7, last_access=50)
    returned = ghosts.take(tokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 9))
    assert returned == [(1, 50, 7), (1, 50, 7), (1, 40, 3), (1, 40, 3)]
    assert ghosts.take(tokens(1, 2, 3, 4)) == [], "a ghost returns once"


def test_ghosts_fill_the_pages_between_the_ends_of_a_run() -> None:
    ghosts = GhostTable(1 << 12, 1)
    ghosts.put(tokens(*range(100)), uses=2, last_access=9)
    assert ghosts.take(tokens(*range(120))) == [(1, 9, 2), (99, 9, 2)]


def test_ghosts_are_bounded_and_the_newest_stay() -> None:
    ghosts = GhostTable(64, 1)
    for i in range(10_000):
        ghosts.put(tokens(i), uses=1, last_access=i)
    assert ghosts.take(tokens(9_999)) == [(1, 9_999, 1)]
    assert ghosts.take(tokens(5)) == []


def request(cache: PrefixCache, prompt: list[int]) -> int:
    match = cache.match(prompt[:-1])
    lock = cache.lock(match)
    pages = cache.allocate(len(prompt) - match.num_tokens)
    assert pages is not None
    cache.finish(prompt, np.concatenate([match.pages, pages]), lock)
    return match.num_tokens


def hits(policy: str, prompts: list[list[int]], num_pages: int) -> int:
    cache = PrefixCache(num_pages, 1, eviction_policy=policy)
    total = sum(request(cache, prompt) for prompt in prompts)
    cache.check()
    return total


def leaf(uses: int, last_access: int) -> Node:
    node = Node(None, b"", b"", 0, last_access)
    node.uses = uses
    return node


def test_a_new_candidate_of_less_worth_goes_first() -> None:
    queue = ReuseQueue(8, 1)
    queue._times.worth[:2] = [[1.0] * NUM_BUCKETS, [2.0] * NUM_BUCKETS]
    once, twice = leaf(1, 5), leaf(2, 1)
    queue.tick(10)
    queue.add(twice)
    assert queue.first() is twice
    queue.add(once)
    assert queue.first() is once


def test_worth_is_taken_at_the_age_of_now() -> None:
    """What was used once is worth much when fresh and little later; what was used twice is in between throughout."""
    queue = ReuseQueue(8, 1)
    queue._times.worth[:2] = [[5.0] * 8 + [0.5] * (NUM_BUCKETS - 8), [1.0] * NUM_BUCKETS]
    once, twice = leaf(1, 100), leaf(2, 100)
    queue.add(once)
    queue.add(twice)
    queue.tick(101)
    assert queue.first() is twice
    queue.tick(200)
    assert queue.first() is once


def test_stale_entries_of_both_heaps_are_swept() -> None:
    queue = ReuseQueue(8, 1)
    node = leaf(1, 1)
    for _ in range(5_000):
        queue.add(node)
        queue.discard(node)
    assert sum(map(len, queue._heaps)) < 200


def test_a_loop_larger_than_the_pool_keeps_a_part_where_lru_keeps_nothing() -> None:
    prompts = [[10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3] for i in range(100)] * 20
    assert hits("lru", prompts, 200) == 0
    # A pool of half the loop can serve half of it; learning takes a few rounds.
    assert hits("adaptive", prompts, 200) > 0.25 * 3 * len(prompts)


def test_popular_prompts_survive_a_flood_of_single_ones() -> None:
    rng = np.random.default_rng(0)
    prompts = []
    for i in range(2_000):
        popular = int(rng.integers(40))
        prompts += [[popular] * 4, [1_000 + i] * 4]
    lru, adaptive = hits("lru", prompts, 80), hits("adaptive", prompts, 80)
    assert adaptive > 1.3 * lru


def test_without_reuse_pressure_it_hits_what_lru_hits() -> None:
    rng = np.random.default_rng(1)
    recent: list[list[int]] = []
    prompts = []
    for i in range(3_000):
        if recent and rng.random() < 0.7:
            prompts.append(recent[-1 - int(rng.geometric(0.2)) % len(recent)])
        else:
            prompts.append([i] * 4)
        recent = [*recent, prompts[-1]][-30:]
    assert hits("adaptive", prompts, 60) >= 0.97 * hits("lru", prompts, 60)


def test_ghosts_of_one_namespace_do_not_return_in_another() -> None:
    ghosts = GhostTable(1 << 12, 2)
    ghosts.put(tokens(1, 2, 3, 4), uses=9, last_access=50, namespace="a")
    assert ghosts.take(tokens(1, 2, 3, 4), namespace="b") == ghosts.take(tokens(1, 2, 3, 4)) == []
    assert ghosts.take(tokens(1, 2, 3, 4), namespace="a") == [(1, 50, 9), (1, 50, 9)]
