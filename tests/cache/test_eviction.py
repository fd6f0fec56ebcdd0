"""Who is evicted: the queue, exact page-level LRU, and a cost that does not grow with the tree."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from jradix.cache import PrefixCache
from jradix.cache.eviction import POLICIES, HeapQueue, Policy, TailLRU
from jradix.cache.radix import Node


def cache_prompt(cache: PrefixCache, tokens: list[int], priority: int = 0) -> None:
    match = cache.match(tokens[:-1])
    lock = cache.lock(match, priority=priority)
    new = cache.allocate(-(-len(tokens) // cache.page_size) - len(match.pages))
    assert new is not None
    cache.finish(tokens, np.concatenate([match.pages, new]), lock)


def squeeze(cache: PrefixCache, num_pages: int) -> None:
    """Evict exactly so many pages."""
    pages = cache.allocate(cache.num_free + num_pages)
    assert pages is not None
    cache.free(pages)


def hit_tokens(cache: PrefixCache, tokens: list[int]) -> int:
    return cache.match(tokens).num_tokens


def count_calls(work: Callable[[], object]) -> int:
    """Python and C calls made by `work`: a measure of time that does not depend on the machine."""
    calls = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown eviction_policy 'best'.*lru"):
        PrefixCache(1, 1, eviction_policy="best")


def test_the_least_recently_used_prefix_goes_first() -> None:
    cache = PrefixCache(6, 1)
    for prompt in ([1, 1], [2, 2], [3, 3]):
        cache_prompt(cache, prompt)
    cache.unlock(cache.lock(cache.match([1, 1])))
    squeeze(cache, 2)
    assert [hit_tokens(cache, [i, i]) for i in (1, 2, 3)] == [2, 0, 2]
    squeeze(cache, 2)
    assert [hit_tokens(cache, [i, i]) for i in (1, 2, 3)] == [2, 0, 0]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [3, 4, 1, 2, 5]),
        ("mru", [5, 2, 1, 4, 3]),
        ("fifo", [1, 2, 3, 4, 5]),
        ("filo", [5, 4, 3, 2, 1]),
        ("lfu", [3, 4, 5, 2, 1]),
        ("slru", [3, 4, 2, 5, 1]),
        ("priority", [3, 1, 2, 5, 4]),
        (lambda node: -node.uses, [1, 2, 3, 4, 5]),
    ],
)
def test_each_policy_evicts_in_its_own_order(policy: str | Policy, order: list[int]) -> None:
    """1 is used three times, 2 twice, 4 has the higher priority, 5 is the newest."""
    cache = PrefixCache(5, 1, eviction_policy=policy)
    for prompt in (1, 2, 3, 4):
        cache_prompt(cache, [prompt], priority=7 if prompt == 4 else 0)
    for prompt in (1, 1, 2):
        cache.unlock(cache.lock(cache.match([prompt])))
    cache_prompt(cache, [5])
    evicted: list[int] = []
    for _ in range(5):
        cache.check()
        squeeze(cache, 1)
        evicted += [prompt for prompt in range(1, 6) if not hit_tokens(cache, [prompt]) and prompt not in evicted]
    assert evicted == order


def test_a_shared_prefix_keeps_the_highest_priority() -> None:
    cache = PrefixCache(6, 1, eviction_policy="priority")
    cache_prompt(cache, [1, 2], priority=5)
    cache_prompt(cache, [1, 3], priority=1)
    cache_prompt(cache, [4], priority=2)
    squeeze(cache, 1)
    assert [hit_tokens(cache, [1, 2]), hit_tokens(cache, [1, 3]), hit_tokens(cache, [4])] == [2, 1, 1]
    squeeze(cache, 1)
    assert [hit_tokens(cache, [1, 2]), hit_tokens(cache, [4])] == [2, 0]


def test_both_parts_of_a_split_node_keep_its_priority() -> None:
    cache = PrefixCache(6, 1, eviction_policy="priority")
    cache_prompt(cache, [1, 2], priority=5)
    cache_prompt(cache, [1, 3], priority=0)
    cache_prompt(cache, [4], priority=2)
    assert (cache.flush_prefix([1, 2]), cache.flush_prefix([1, 3])) == (1, 1)
    squeeze(cache, 1)
    assert (hit_tokens(cache, [1]), hit_tokens(cache, [4])) == (1, 0)


def test_tail_lru_first_gives_up_what_no_latency_target_needs() -> None:
    """Of 8 tokens the last 4 may be computed again; 2 are expected on top: tokens from 8 + 2 - 4 = 6 on go first."""
    cache = PrefixCache(12, 1, eviction_policy=TailLRU(uncached_len=4, next_prompt_len=2))
    other, chat = [1] * 3, [5] * 8
    cache_prompt(cache, other)
    for length in (4, 6, 8):  # the chat grows, and with it what its earlier parts are needed for
        cache_prompt(cache, chat[:length])
    squeeze(cache, 2)
    assert (hit_tokens(cache, other), hit_tokens(cache, chat)) == (3, 6), "though the tail is the most recent"
    squeeze(cache, 1)
    assert (hit_tokens(cache, other), hit_tokens(cache, chat)) == (2, 6), "plain LRU; the bar stays where it was"


def test_a_policy_can_give_up_the_output_of_a_request_and_keep_its_prompt() -> None:
    """Of 16 tokens the last 10 may be computed again, among them all 8 of the output, but not all of the prompt."""
    cache = PrefixCache(28, 1, eviction_policy=TailLRU(uncached_len=10))
    other, tokens = [1] * 12, [5] * 16
    cache_prompt(cache, other)
    lock = cache.lock(cache.match([]))
    pages = cache.allocate(16)
    assert pages is not None
    cache.finish(tokens, pages, lock, prompt_len=8)
    squeeze(cache, 8)
    assert (hit_tokens(cache, other), hit_tokens(cache, tokens)) == (12, 8), "though the output is the most recent"


def test_looking_up_does_not_count_as_use() -> None:
    cache = PrefixCache(4, 1)
    cache_prompt(cache, [1, 1])
    cache_prompt(cache, [2, 2])
    cache.match([1, 1])
    squeeze(cache, 2)
    assert (hit_tokens(cache, [1, 1]), hit_tokens(cache, [2, 2])) == (0, 2)


def test_pages_are_trimmed_off_the_tail_of_a_leaf() -> None:
    cache = PrefixCache(10, 2)
    cache_prompt(cache, list(range(20)))
    for left in range(9, -1, -1):
        squeeze(cache, 1)
        assert hit_tokens(cache, list(range(20))) == 2 * left
        cache.check()


def test_a_hit_on_the_head_does_not_keep_the_tail() -> None:
    cache = PrefixCache(8, 1)
    cache_prompt(cache, [1, 2, 3, 4])
    cache_prompt(cache, [5, 6, 7, 8])
    cache.unlock(cache.lock(cache.match([1, 2])))
    squeeze(cache, 2)
    assert hit_tokens(cache, [1, 2, 3, 4]) == 2, "the tail [3, 4] is the oldest"
    squeeze(cache, 4)
    assert (hit_tokens(cache, [1, 2]), hit_tokens(cache, [5, 6, 7, 8])) == (2, 0)


def test_a_parent_that_becomes_a_leaf_is_a_candidate_at_once() -> None:
    cache = PrefixCache(8, 1)
    cache_prompt(cache, [1, 2])
    cache_prompt(cache, [1, 2, 3])
    cache_prompt(cache, [1, 2, 4])
    cache_prompt(cache, [9])
    squeeze(cache, 4)
    assert (hit_tokens(cache, [1, 2]), hit_tokens(cache, [9])) == (0, 1)
    cache.check()


def test_eviction_frees_exactly_what_is_missing() -> None:
    cache = PrefixCache(40, 1)
    for i in range(10):
        cache_prompt(cache, [i * 10 + j for j in range(4)])
    for missing in (1, 3, 4, 5, 8):
        before = cache.num_evictable
        assert cache.num_free == 0
        pages = cache.allocate(missing)
        assert cache.num_evictable == before - missing
        assert pages is not None
        cache.free(pages)
        for i in range(10):
            cache_prompt(cache, [i * 10 + j for j in range(4)])


@pytest.mark.parametrize(("policy", "most"), [("lru", 40), ("adaptive", 60)])
def test_one_eviction_costs_the_same_in_a_big_tree(policy: str, most: int) -> None:
    def calls_per_eviction(num_leaves: int) -> float:
        cache = PrefixCache(num_leaves, 1, eviction_policy=policy)
        for i in range(num_leaves):
            cache_prompt(cache, [i])
        return count_calls(lambda: [cache.allocate(1) for _ in range(200)]) / 200

    assert calls_per_eviction(20_000) <= calls_per_eviction(300) < most


def test_stale_entries_of_the_queue_are_swept() -> None:
    cache = PrefixCache(10, 1)
    cache_prompt(cache, [1, 2, 3])
    for _ in range(10_000):
        cache.unlock(cache.lock(cache.match([1, 2, 3])))
    assert isinstance(cache._contents.queue, HeapQueue)
    assert len(cache._contents.queue._heap) < 100
    cache.check()


def test_a_queue_takes_in_order_and_forgets_what_was_discarded() -> None:
    queue = HeapQueue(POLICIES["lru"])
    nodes = [Node(None, b"", b"", 0, now) for now in (5, 3, 9, 1)]
    for node in nodes:
        queue.add(node)
    queue.discard(nodes[3])
    queue.discard(nodes[3])
    taken = []
    while len(queue):
        taken.append(queue.first())
        queue.discard(taken[-1])
    assert [node.last_access for node in taken] == [3, 5, 9]
