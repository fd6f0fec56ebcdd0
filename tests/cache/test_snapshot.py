"""A tree that was taken apart into arrays comes back with its pages' content, its recency and its namespaces."""

import random
from collections.abc import Hashable

import numpy as np
import pytest

from jradix.cache import PrefixCache, radix
from jradix.cache.eviction import EVICTION_POLICIES
from jradix.cache.snapshot import Snapshot, take
from tests.cache.paged_text import PagedText, evict_all, known_pages, random_tokens

NAMESPACES: list[Hashable] = [None, "a", "b"]


@pytest.fixture(autouse=True)
def sorted_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small trees, too, find the closest child through the sorted order of wide nodes."""
    monkeypatch.setattr(radix, "FEW_CHILDREN", 2)


def used_text(rng: random.Random, num_pages: int = 60, page_size: int = 4, policy: str = "lru") -> PagedText:
    text = PagedText(PrefixCache(num_pages, page_size, eviction_policy=policy))
    for _ in range(60):
        text.serve(random_tokens(rng), rng.choice(NAMESPACES), rng.randrange(3))
    return text


def restored(text: PagedText, num_pages: int, rng: random.Random, policy: str = "lru") -> PagedText:
    """Another cache with the snapshot of `text`, entered in ranges of random lengths."""
    snapshot, content = text.saved()
    other = PagedText(PrefixCache(num_pages, text.cache.page_size, eviction_policy=policy))
    restoration = other.cache.restore(snapshot)
    start = 0
    while start < len(content):
        stop = min(len(content), start + rng.randint(1, 7))
        other.restore(restoration, content, start, stop)
        other.cache.check()
        start = stop
    assert restoration.is_done
    return other


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_restored_cache_holds_the_same_and_evicts_in_the_same_order(policy: str) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        text = used_text(rng, policy=policy)
        other = restored(text, 60 + seed, rng, policy)
        assert known_pages(other.cache) == known_pages(text.cache)
        assert other.cache.clock == text.cache.clock
        for prompt in [random_tokens(rng) for _ in range(20)]:
            for namespace in NAMESPACES:
                ours, theirs = other.cache.match(prompt, namespace), text.cache.match(prompt, namespace)
                assert (ours.num_tokens, ours.head_len) == (theirs.num_tokens, theirs.head_len)
        if policy != "adaptive":  # which goes by what it has learned, and that is not kept
            assert evict_all(other.cache) == evict_all(text.cache)


def test_a_smaller_pool_keeps_whole_prefixes_of_what_was_used_last() -> None:
    for seed in range(12):
        rng = random.Random(seed)
        text = used_text(rng)
        known = known_pages(text.cache)
        other = restored(text, rng.randint(1, len(known) - 1), rng)
        kept = known_pages(other.cache)
        assert len(kept) == other.cache.num_total
        assert kept.items() <= known.items()
        assert min(past[0] for past in kept.values()) >= max(known[prefix][0] for prefix in known.keys() - kept.keys())
        for namespace, tokens in kept:
            whole = (len(tokens) - 1) // 4 * 4
            assert not whole or (namespace, tokens[:whole]) in kept


def test_what_is_under_a_lock_is_saved_as_used_now_and_its_tails_after_it() -> None:
    text = PagedText(PrefixCache(20, 4))
    text.serve([1, 2, 3, 4, 5, 6])
    held = text.start([1, 2, 3, 4, 9, 9, 9, 9, 9])
    text.serve([7, 7, 7, 7])
    snapshot, _ = text.saved()
    assert held is not None
    assert snapshot.rows[:, 3].tolist() == sorted(snapshot.rows[:, 3].tolist(), reverse=True)
    other = restored(text, 20, random.Random(0))
    assert known_pages(other.cache)[None, (1, 2, 3, 4, 9, 9, 9, 9)][0] == text.cache.clock
    assert other.cache.match([1, 2, 3, 4, 5, 6, 7]).head_len == 2


def test_requests_and_flushes_during_a_restoration_find_only_what_is_true() -> None:
    """The content of every page that a match finds is compared, see `PagedText.start`."""
    for seed in range(40):
        rng = random.Random(seed)
        text = used_text(rng)
        snapshot, content = text.saved()
        other = PagedText(PrefixCache(rng.choice([15, 40, 90]), 4, eviction_policy=rng.choice(EVICTION_POLICIES)))
        restoration = other.cache.restore(snapshot)
        running = []
        start = 0
        while start < len(content):
            action = rng.random()
            tokens, namespace = random_tokens(rng), rng.choice(NAMESPACES)
            if action < 0.3:
                stop = min(len(content), start + rng.randint(1, 5))
                other.restore(restoration, content, start, stop)
                start = stop
            elif action < 0.7:
                other.serve(tokens, namespace)
            elif action < 0.85:
                started = other.start(tokens, namespace)
                running += [(tokens, namespace, *started)] if started else []
            elif action < 0.9:
                other.cache.flush_prefix(tokens[:2], namespace)
            if running and rng.random() < 0.4:
                tokens, namespace, lock, table = running.pop(rng.randrange(len(running)))
                other.cache.finish(tokens, table, lock, namespace)
            private = [page for tokens, _, lock, table in running for page in table[lock.num_tokens // 4 :].tolist()]
            other.cache.check(private)
        for tokens, namespace, lock, table in running:
            other.cache.finish(tokens, table, lock, namespace)
        other.cache.check()
        for prompt in [random_tokens(rng) for _ in range(20)]:
            other.serve(prompt, rng.choice(NAMESPACES))


def test_what_hung_below_an_evicted_page_is_left_out() -> None:
    """The first row of two pages loses its last before the second row comes."""
    text = PagedText(PrefixCache(20, 4))
    text.serve([1] * 8)
    text.serve([1] * 8 + [2] * 4)
    snapshot, content = text.saved()
    assert len(snapshot.rows) == 2
    for num_evicted in (1, 2):
        other = PagedText(PrefixCache(3, 4))
        restoration = other.cache.restore(snapshot)
        other.restore(restoration, content, 0, 2)
        pages = other.cache.allocate(1 + num_evicted)
        assert pages is not None
        other.cache.free(pages)
        other.restore(restoration, content, 2, 3)
        assert len(known_pages(other.cache)) == 2 - num_evicted
        other.cache.check()


def test_what_requests_have_cached_already_is_cut_where_the_snapshot_goes_another_way() -> None:
    text = PagedText(PrefixCache(20, 4))
    text.serve([1] * 8)
    text.serve([1] * 8 + [2] * 4)
    snapshot, content = text.saved()
    other = PagedText(PrefixCache(20, 4))
    restoration = other.cache.restore(snapshot)
    other.serve([1] * 16)
    other.restore(restoration, content, 0, 3)
    assert other.cache.num_evictable == 5
    assert other.cache.match([1] * 8 + [2] * 4).num_tokens == 12
    other.serve([1] * 16 + [2] * 4)  # the content is compared
    other.cache.check()


def test_what_was_restored_is_older_than_what_requests_have_cached_meanwhile() -> None:
    text = PagedText(PrefixCache(20, 4))
    text.serve([1, 1, 1, 1])
    snapshot, content = text.saved()
    other = PagedText(PrefixCache(20, 4))
    restoration = other.cache.restore(snapshot)
    other.serve([2, 2, 2, 2])
    other.restore(restoration, content, 0, 1)
    assert evict_all(other.cache) == [(None, (1, 1, 1, 1)), (None, (2, 2, 2, 2))]


def test_namespaces_that_are_not_wanted_are_left_out() -> None:
    text = PagedText(PrefixCache(20, 4))
    text.serve([1, 2, 3, 4, 5], "mine")
    text.serve([1, 2, 3, 4, 5], "yours")
    snapshot = take(text.cache.tree, text.cache.clock, lambda namespace: namespace == "mine")
    assert snapshot.namespaces == ("mine",)
    assert len(snapshot.pages) == 2
    assert snapshot.tokens.tolist() == [1, 2, 3, 4, 5]


def test_a_tail_is_kept_only_where_copies_are_made() -> None:
    text = PagedText(PrefixCache(20, 4))
    text.serve([1, 2, 3, 4, 5, 6])
    snapshot, content = text.saved()
    for shortest, num_pages in ((None, 1), (3, 1), (2, 2)):
        other = PagedText(PrefixCache(20, 4, min_copied_tokens=shortest))
        other.restore(other.cache.restore(snapshot), content, 0, 2)
        assert other.cache.num_evictable == num_pages
        other.cache.check()


def test_only_a_new_cache_of_the_same_page_size_can_be_restored() -> None:
    nothing = Snapshot(4, 0, (), np.zeros((0, 8), np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32))
    with pytest.raises(AssertionError, match="pages of 4 tokens, not 8"):
        PrefixCache(20, 8).restore(nothing)
    text = PagedText(PrefixCache(20, 4))
    text.serve([1, 2, 3, 4])
    with pytest.raises(AssertionError, match="only a new cache"):
        text.cache.restore(nothing)


def test_the_prefixes_of_a_snapshot_are_those_that_nothing_goes_on_from() -> None:
    for seed in range(8):
        text = used_text(random.Random(seed))
        pages = known_pages(text.cache)
        longest = {
            (namespace, tokens)
            for namespace, tokens in pages
            if not any(space == namespace and other[: len(tokens)] == tokens != other for space, other in pages)
        }
        found = [(namespace, tuple(tokens.tolist())) for namespace, tokens in text.saved()[0].prefixes()]
        assert set(found) == longest
        assert len(found) == len(longest)
        ages = [pages[prefix][0] for prefix in found]
        assert ages == sorted(ages)
