"""Events replay to the tree's contents, hashes cover the whole prefix, and memory is bounded."""

import random

import numpy as np

from jradix.cache import PrefixCache
from jradix.cache.journal import Cleared, Journal, Removed, Stored
from jradix.cache.render import rows


def cache_prompt(cache: PrefixCache, tokens: list[int], namespace: object = None) -> None:
    match = cache.match(tokens, namespace)
    lock = cache.lock(match)
    new = cache.allocate(-(-len(tokens) // cache.page_size) - len(match.pages), owner="someone")
    assert new is not None
    cache.finish(tokens, np.concatenate([match.pages, new]), lock, namespace)


def journal_of(cache: PrefixCache) -> Journal:
    assert cache.journal is not None
    return cache.journal


def test_a_router_that_follows_the_events_knows_what_is_cached() -> None:
    rng = random.Random(0)
    cache = PrefixCache(30, 2, journal=True)
    known: set[int] = set()
    journal = journal_of(cache)
    for step in range(300):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(2, 16))]
        namespace = rng.choice([None, "a"])
        cache_prompt(cache, tokens, namespace)
        if step % 50 == 49:
            cache.flush()
        for event in journal.drain():
            if isinstance(event, Stored):
                assert event.parent_hash is None or event.parent_hash in known
                assert len(event.token_ids) == 2 * len(event.page_hashes)
                known |= set(event.page_hashes)
            elif isinstance(event, Removed):
                assert set(event.page_hashes) <= known
                known -= set(event.page_hashes)
            else:
                known.clear()
        assert len(known) == sum((row.end - row.start) // 2 for row in rows(cache)), "tails are left out"
        cached = cache.match(tokens, namespace).num_tokens
        hashes = journal.hashes(namespace, np.array(tokens, np.int32).tobytes())
        assert [page_hash in known for page_hash in hashes] == [2 * i < cached for i in range(len(hashes))]


def test_hashes_cover_prefix_and_namespace() -> None:
    journal = Journal(4, 2)
    tokens = np.array([1, 2, 3, 4], np.int32).tobytes()
    first, second = journal.hashes(None, tokens)
    assert journal.hashes("a", tokens)[0] != first
    assert journal.hashes(None, tokens[8:]) != [second]
    assert journal.hashes(None, tokens[8:], parent=first) == [second]


def test_an_emptied_tree_says_so() -> None:
    cache = PrefixCache(4, 1, journal=True)
    cache_prompt(cache, [1, 2])
    lock = cache.lock(cache.match([1]))
    cache.flush()
    assert not any(isinstance(event, Cleared) for event in journal_of(cache).drain())
    cache.unlock(lock)
    cache.flush()
    assert isinstance(journal_of(cache).drain()[-1], Cleared)


def test_events_nobody_drains_are_lost_and_counted() -> None:
    journal = Journal(4, 1, max_events=3)
    for _ in range(5):
        journal.cleared()
    assert (len(journal.drain()), journal.num_lost) == (3, 2)


def test_removals_are_forgotten_in_the_end_and_when_the_page_comes_back() -> None:
    cache = PrefixCache(2, 1, journal=True)
    journal = journal_of(cache)
    for i in range(100):
        cache_prompt(cache, [i, i])
    assert len(journal._removals) <= 8
    (first, _) = journal.hashes(None, np.array([98, 98], np.int32).tobytes())
    removal = journal.removal(first)
    assert removal is not None
    assert (removal.kind, removal.num_pages, removal.owner) == ("evicted", 2, "someone")
    cache_prompt(cache, [98, 98])
    assert journal.removal(first) is None
