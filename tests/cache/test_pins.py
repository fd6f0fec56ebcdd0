"""Pins keep prefixes against eviction, and give way to a budget, to time, and to requests."""

from jradix.cache import PrefixCache

from .test_journal import cache_prompt


def warm(max_pinned_pages: int | None = None) -> PrefixCache:
    cache = PrefixCache(12, 1, max_pinned_pages=max_pinned_pages)
    cache_prompt(cache, [1, 2, 3, 4])
    cache_prompt(cache, [1, 2, 5, 6])
    cache_prompt(cache, [7, 8])
    return cache


def test_a_pinned_prefix_outlives_newer_ones() -> None:
    cache = warm()
    assert cache.pin("system", [1, 2, 9]) == 2
    pages = cache.allocate(10)
    assert pages is not None
    assert cache.match([1, 2]).num_tokens == 2
    assert "system" in cache.pins
    cache.check(pages)


def test_pins_give_way_when_an_allocation_would_fail_otherwise_the_oldest_first() -> None:
    cache = warm(max_pinned_pages=12)
    cache.pin("first", [1, 2, 3, 4])
    cache.pin("second", [7, 8])
    pages = cache.allocate(9)
    assert pages is not None
    assert ("first" in cache.pins, "second" in cache.pins) == (False, True)
    cache.check(pages)


def test_an_allocation_that_fails_even_without_pins_leaves_them() -> None:
    cache = warm(max_pinned_pages=12)
    cache.pin("a", [1, 2, 3, 4])
    lock = cache.lock(cache.match([1, 2]))
    assert cache.allocate(11) is None, "two pages are a request's"
    assert "a" in cache.pins
    pages = cache.allocate(10)
    assert pages is not None
    assert "a" not in cache.pins
    assert cache.match([1, 2, 3]).num_tokens == 2
    cache.unlock(lock)
    cache.check(pages)


def test_the_budget_counts_shared_pages_once_and_drops_the_oldest() -> None:
    cache = warm(max_pinned_pages=6)
    cache.pin("a", [1, 2, 3, 4])
    cache.pin("b", [1, 2, 5, 6])
    assert (len(cache.pins), cache.pins.num_pages, cache.num_protected) == (2, 6, 6)
    cache.pin("c", [7, 8])
    assert ("a" in cache.pins, cache.pins.num_pages) == (False, 6)
    cache.check()


def test_a_prefix_above_the_budget_is_not_pinned_and_an_older_pin_stays() -> None:
    cache = warm(max_pinned_pages=3)
    assert cache.pin("a", [1, 2]) == 2
    assert cache.pin("a", [1, 2, 3, 4]) == 0
    assert cache.pin("a", [99]) == 0
    assert (cache.num_protected, cache.pins.num_pages) == (2, 2)
    cache.check()


def test_a_session_moves_its_pin_as_it_grows_and_ends_or_times_out() -> None:
    cache = warm()
    cache.pin("session", [1, 2], expires_at=10.0)
    assert cache.pin("session", [1, 2, 3], expires_at=20.0) == 3
    assert (len(cache.pins), cache.num_protected) == (1, 3)
    assert cache.pins.remove_expired(15.0) == 0
    assert cache.pins.remove_expired(20.0) == 1
    assert cache.num_protected == 0
    cache.pin("session", [1, 2])
    assert cache.pins.remove("session")
    assert not cache.pins.remove("session")
    assert cache.num_protected == 0
    cache.check()


def test_a_flush_leaves_pins_and_statistics_do_not_count_them() -> None:
    cache = warm()
    before = cache.statistics.total
    cache.pin("a", [1, 2])
    assert cache.statistics.total == before
    cache.flush()
    assert cache.match([1, 2]).num_tokens == 2
