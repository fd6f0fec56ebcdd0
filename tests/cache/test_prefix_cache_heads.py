"""Matches that end inside a page: heads to copy, and the tails that finished requests leave for it."""

import random

import numpy as np
import pytest

from jradix.cache import PrefixCache
from jradix.cache.eviction import POLICIES, TailLRU

PAGE_SIZE = 8


def finish(cache: PrefixCache, tokens: list[int], namespace: object = None, priority: int = 0) -> list[int]:
    """A request from its match to its end; returns the pages it had, the last one a tail if it is not full."""
    match = cache.match(tokens[:-1], namespace)
    lock = cache.lock(match, priority=priority)
    new = cache.allocate(-(-len(tokens) // cache.page_size) - len(match.pages))
    assert new is not None
    pages = cache.insert(tokens, np.concatenate([match.pages, new]), lock, namespace).pages
    cache.finish(tokens, pages, lock, namespace)
    cache.check()
    return pages.tolist()


def head(cache: PrefixCache, tokens: list[int], namespace: object = None) -> tuple[int, int, int]:
    match = cache.match(tokens, namespace)
    return match.num_tokens, match.head_len, match.head_page


def test_a_match_that_ends_inside_an_edge_offers_the_next_page_of_the_edge() -> None:
    cache = PrefixCache(20, PAGE_SIZE)
    pages = finish(cache, list(range(32)))
    assert head(cache, [*range(19), 99, 98]) == (16, 3, pages[2])
    assert head(cache, list(range(19))) == (16, 3, pages[2])
    assert head(cache, [*range(16), 99]) == (16, 0, 0)


def test_of_many_children_the_one_with_most_tokens_in_common_is_offered() -> None:
    rng = random.Random(0)
    cache = PrefixCache(2000, PAGE_SIZE)
    kept: dict[int, list[int]] = {}
    for _ in range(300):
        tail = [rng.randrange(3) for _ in range(rng.randrange(1, 2 * PAGE_SIZE))]
        pages = finish(cache, [*range(PAGE_SIZE), *tail])
        kept[pages[1]] = tail[:PAGE_SIZE]
    for _ in range(300):
        asked = [rng.randrange(3) for _ in range(rng.randrange(1, PAGE_SIZE))]
        common = {
            page: next(
                (i for i, (a, b) in enumerate(zip(asked, tail, strict=False)) if a != b), min(len(asked), len(tail))
            )
            for page, tail in kept.items()
        }
        _, length, page = head(cache, [*range(PAGE_SIZE), *asked])
        assert length == max(common.values())
        assert not length or common[page] == length


def test_a_tail_is_offered_in_its_namespace_only() -> None:
    cache = PrefixCache(20, PAGE_SIZE)
    [page] = finish(cache, [1, 2, 3], "tenant")
    assert head(cache, [1, 2, 9], "tenant") == (0, 2, page)
    assert head(cache, [1, 2, 9]) == (0, 0, 0)


def test_a_longer_tail_takes_the_place_of_a_shorter_one() -> None:
    cache = PrefixCache(20, PAGE_SIZE)
    finish(cache, [1, 2, 3])
    [page] = finish(cache, [1, 2, 3, 4])
    assert cache.num_evictable == 1
    assert head(cache, [1, 2, 3, 4, 5]) == (0, 4, page)


def test_a_tail_that_is_cached_already_is_not_kept_twice() -> None:
    cache = PrefixCache(20, PAGE_SIZE)
    finish(cache, list(range(PAGE_SIZE)))
    finish(cache, list(range(5)))
    assert cache.num_evictable == 1


def test_a_page_that_begins_with_a_tail_replaces_it() -> None:
    cache = PrefixCache(20, PAGE_SIZE)
    finish(cache, list(range(PAGE_SIZE + 3)))
    finish(cache, list(range(2 * PAGE_SIZE)))
    assert cache.num_evictable == 2
    assert cache.statistics.total.evicted_tokens == 0


def test_a_tail_used_again_is_evicted_after_others() -> None:
    cache = PrefixCache(3, PAGE_SIZE)
    finish(cache, [1, 2, 3])
    finish(cache, [4, 5, 6])
    finish(cache, [1, 2, 3])
    assert cache.allocate(2) is not None
    assert head(cache, [1, 2, 3])[1] == 3
    assert head(cache, [4, 5, 6])[1] == 0


@pytest.mark.parametrize("policy", [*POLICIES, "adaptive"])
def test_tails_are_evicted_and_counted_by_their_tokens(policy: str) -> None:
    cache = PrefixCache(4, PAGE_SIZE, eviction_policy=policy)
    finish(cache, list(range(PAGE_SIZE + 3)))
    finish(cache, [50, 51])
    assert cache.statistics.total.inserted_tokens == PAGE_SIZE + 5
    assert cache.allocate(4) is not None
    assert cache.statistics.total.evicted_tokens == PAGE_SIZE + 5
    cache.check(range(1, 5))


def test_a_prefix_is_flushed_with_its_tails() -> None:
    cache = PrefixCache(20, PAGE_SIZE)
    finish(cache, list(range(PAGE_SIZE + 3)))
    finish(cache, [0, 1, 99])
    assert cache.flush_prefix([0, 1, 2]) == 2
    assert cache.statistics.total.flushed_tokens == PAGE_SIZE + 3
    assert head(cache, [0, 1, 2])[:2] == (0, 2)
    assert cache.flush() == 1


def test_copied_tokens_count_as_hit() -> None:
    cache = PrefixCache(20, PAGE_SIZE)
    finish(cache, list(range(12)))
    match = cache.match([*range(11), 99])
    lock = cache.lock(match)
    new = cache.allocate(1)
    assert new is not None
    cache.insert([*range(11), 99], np.concatenate([match.pages, new]), lock, num_copied=match.head_len)
    cache.free(new)
    cache.unlock(lock)
    assert cache.statistics.total.hit_tokens == 11


def test_without_copies_there_are_neither_heads_nor_tails() -> None:
    cache = PrefixCache(20, PAGE_SIZE, min_copied_tokens=None)
    finish(cache, list(range(12)))
    assert cache.num_evictable == 1
    assert head(cache, list(range(7))) == (0, 0, 0)


def test_events_are_about_whole_pages_alone() -> None:
    cache = PrefixCache(2, PAGE_SIZE, journal=True)
    assert cache.journal is not None
    finish(cache, [1, 2, 3])
    assert cache.allocate(2) is not None
    assert cache.journal.drain() == []


def test_a_tail_too_short_to_be_copied_is_not_kept() -> None:
    cache = PrefixCache(20, PAGE_SIZE, min_copied_tokens=4)
    finish(cache, list(range(PAGE_SIZE + 3)))
    assert cache.num_evictable == 1
    finish(cache, [50, 51, 52, 53])
    assert cache.num_evictable == 2


def test_a_tail_has_the_priority_of_the_request_that_left_it() -> None:
    cache = PrefixCache(2, PAGE_SIZE, eviction_policy="priority")
    finish(cache, [1, 2, 3], priority=9)
    finish(cache, [4, 5, 6], priority=1)
    assert cache.allocate(1) is not None
    assert head(cache, [1, 2, 3])[1] == 3


def test_a_tail_used_often_outlives_those_used_once() -> None:
    cache = PrefixCache(3, PAGE_SIZE, eviction_policy="lfu")
    for _ in range(3):
        finish(cache, [1, 2, 3])
    finish(cache, [9] * PAGE_SIZE)
    finish(cache, [8] * PAGE_SIZE)
    assert cache.allocate(1) is not None
    assert head(cache, [1, 2, 3])[1] == 3


def test_the_recency_of_a_tail_never_goes_back() -> None:
    cache = PrefixCache(6, PAGE_SIZE)
    slow = cache.lock(cache.match([1, 2]))
    finish(cache, [7, 7, 7])
    finish(cache, [1, 2, 3])
    pages = cache.allocate(1)
    assert pages is not None
    cache.finish([1, 2, 3], pages, slow)
    assert cache.allocate(5) is not None
    assert head(cache, [1, 2, 3])[1] == 3


def test_a_leaf_that_is_split_in_the_queue_takes_its_new_place() -> None:
    cache = PrefixCache(16, 1, eviction_policy=TailLRU(uncached_len=3))
    finish(cache, list(range(8)))
    lock = cache.lock(cache.match(list(range(6))))
    cache.check()
    cache.unlock(lock)
    cache.check()


def test_what_was_inserted_and_neither_evicted_nor_flushed_is_cached() -> None:
    cache = PrefixCache(20, PAGE_SIZE)
    for length in (2, 3, PAGE_SIZE, PAGE_SIZE + 3, PAGE_SIZE + 2, 3 * PAGE_SIZE + 1):
        finish(cache, list(range(length)))
    assert cache.statistics.total.inserted_tokens == 3 * PAGE_SIZE + 1
    cache.flush()
    assert cache.statistics.total.flushed_tokens == 3 * PAGE_SIZE + 1
