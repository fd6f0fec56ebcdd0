"""What the scheduler may rely on: sharing, locks, page ownership, refusals that change nothing."""

import random

import numpy as np
import pytest

from jradix.cache import Counters, Insert, Lock, Namespace, PrefixCache, StaleMatchError
from jradix.cache.explain import explain
from jradix.cache.namespace import UNSHARED
from jradix.cache.page import View, to_html
from jradix.cache.render import rows, to_dot, to_json, to_text


def counts(cache: PrefixCache) -> dict[str, int]:
    names = ("free", "evictable", "protected", "private")
    values = (cache.num_free, cache.num_evictable, cache.num_protected, cache.num_private)
    assert sum(values) == cache.num_total
    return {name: value for name, value in zip(names, values, strict=True) if value}


def cached(cache: PrefixCache, *tokens: int, namespace: object = None) -> tuple[int, list[int]]:
    match = cache.match(list(tokens), namespace)
    return match.num_tokens, match.pages.tolist()


def take(cache: PrefixCache, num_pages: int) -> np.ndarray:
    pages = cache.allocate(num_pages)
    assert pages is not None
    return pages


class Running:
    """A request by the book: match, lock, allocate; then insert and finish at will."""

    def __init__(self, cache: PrefixCache, tokens: list[int], max_new: int = 0, namespace: object = None) -> None:
        self.cache, self.tokens, self.namespace = cache, tokens, namespace
        self.match = cache.match(tokens[:-1], namespace)
        self.lock: Lock = cache.lock(self.match)
        self.num_owned = self.match.num_tokens
        new = cache.allocate(-(-(len(tokens) + max_new) // cache.page_size) - len(self.match.pages))
        if new is None:
            cache.unlock(self.lock)
            raise MemoryError
        self.pages = np.concatenate([self.match.pages, new])

    def insert(self, num_tokens: int | None = None) -> Insert:
        done = self.cache.insert(self.tokens[:num_tokens], self.pages, self.lock, self.namespace)
        self.pages, self.num_owned = done.pages, done.num_tokens
        return done

    @property
    def private(self) -> np.ndarray:
        return self.pages[self.num_owned // self.cache.page_size :]

    def abort(self) -> None:
        """As if nothing more had been computed than what was inserted."""
        self.cache.finish(self.tokens[: self.lock.num_tokens], self.pages, self.lock, self.namespace)

    def finish(self) -> None:
        self.cache.finish(self.tokens, self.pages, self.lock, self.namespace)


def cache_prompts(cache: PrefixCache, *prompts: list[int]) -> None:
    for prompt in prompts:
        Running(cache, prompt).finish()


def test_a_finished_request_leaves_whole_pages_and_a_second_one_reuses_them() -> None:
    cache = PrefixCache(10, 4, min_copied_tokens=None)
    first = Running(cache, list(range(10)))
    assert counts(cache) == {"free": 7, "private": 3}
    first.finish()
    assert counts(cache) == {"free": 8, "evictable": 2}
    second = Running(cache, list(range(10)))
    assert (second.match.num_tokens, second.match.pages.tolist()) == (8, [1, 2])
    assert counts(cache) == {"free": 7, "protected": 2, "private": 1}
    second.finish()
    cache.check()


def test_literature_example_of_three_prompts_gives_five_nodes_with_the_original_pages() -> None:
    cache = PrefixCache(20, 1)
    a, b, c = [101, 11, 12, 21, 22], [101, 11, 12, 31, 32], [101, 11, 99]
    cache_prompts(cache, a, b, c)
    nodes = {
        tuple(np.frombuffer(node.tokens, np.int32).tolist()): np.frombuffer(node.pages, np.int32).tolist()
        for node in cache._tree.subtree(cache._tree.roots[None])
        if node.tokens
    }
    # A owns pages 1..5; B allocated for its two own tokens only, and C for its one.
    assert nodes == {(101, 11): [1, 2], (12,): [3], (21, 22): [4, 5], (31, 32): [6, 7], (99,): [8]}
    cache.check()


def test_literature_example_of_lock_insert_unlock_evict() -> None:
    cache = PrefixCache(10, 1)
    system = [900, 10, 11, 12]
    cache_prompts(cache, system)
    assert counts(cache) == {"free": 6, "evictable": 4}
    request = Running(cache, [*system, 31, 32])
    assert request.match.num_tokens == 4
    assert counts(cache) == {"free": 4, "protected": 4, "private": 2}
    request.finish()
    assert counts(cache) == {"free": 4, "evictable": 6}
    assert cache.allocate(6) is not None
    assert cached(cache, *system, 31, 32) == (4, [1, 2, 3, 4])


def test_two_requests_computing_the_same_prompt_end_on_the_same_pages() -> None:
    cache = PrefixCache(20, 4)
    prompt = list(range(9))
    first, second = Running(cache, prompt, max_new=4), Running(cache, prompt, max_new=4)
    given = second.pages
    assert second.match.num_tokens == 0
    assert first.insert().pages.tolist() == [1, 2, 3, 4]
    rewritten = second.insert()
    assert rewritten.pages.tolist() == [1, 2, 7, 8], "pages 5 and 6 were duplicates"
    assert given.tolist() == [5, 6, 7, 8], "the caller's table is not written to"
    assert rewritten.num_tokens == 8
    assert counts(cache) == {"free": 14, "protected": 2, "private": 4}
    cache.check([*first.private, *second.private])
    first.finish()
    assert counts(cache)["protected"] == 2, "the second still holds them"
    second.finish()
    cache.check()


def test_insert_may_share_the_head_and_add_the_tail() -> None:
    cache = PrefixCache(20, 2)
    one, two = Running(cache, [1, 2, 3, 4, 5, 6]), Running(cache, [1, 2, 3, 4, 7, 8, 9])
    one.insert()
    assert two.insert().pages.tolist() == [1, 2, 6, 7]
    assert cached(cache, 1, 2, 3, 4, 7, 8) == (6, [1, 2, 6])
    assert cached(cache, 1, 2, 3, 4, 5, 6) == (6, [1, 2, 3])
    cache.check([*one.private, *two.private])


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_keys_shorter_than_a_page_match_nothing_and_make_no_node(tokens: list[int]) -> None:
    cache = PrefixCache(8, 4)
    cache_prompts(cache, [1, 2, 3, 4, 5])
    before = counts(cache)
    assert cached(cache, *tokens) == (0, [])
    lock = cache.lock(cache.match(tokens))
    pages = take(cache, 1)
    assert cache.insert(tokens, pages, lock).num_tokens == 0
    cache.free(pages)
    cache.unlock(lock)
    assert counts(cache) == before
    cache.check()


@pytest.mark.parametrize("copies", [1, None], ids=["tails", "no tails"])
@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
def test_nothing_leaks_at_any_length_near_a_page_edge(page_size: int, copies: int | None) -> None:
    lengths = {page_size - 1, page_size, page_size + 1, 2 * page_size - 1, 2 * page_size, 2 * page_size + 1} - {0}
    for prompt_len in sorted(lengths):
        for output_len in sorted({1, page_size - 1, page_size, page_size + 1} - {0}):
            cache = PrefixCache(6, page_size, min_copied_tokens=copies)
            for _ in range(2):
                request = Running(cache, list(range(prompt_len)), max_new=output_len)
                request.insert()
                request.tokens += [1000 + i for i in range(output_len)]
                request.finish()
                cache.check()
                num_pages, rest = divmod(prompt_len + output_len, page_size)
                assert counts(cache).get("evictable", 0) == num_pages + (copies is not None and rest > 0)
                assert not cache.num_protected + cache.num_private


def test_the_tree_counts_its_distinct_pages_after_many_shared_prefixes() -> None:
    rng = random.Random(0)
    cache = PrefixCache(64 * 5 + 300, 32)
    system = list(range(100))
    running: list[Running] = []
    for i in range(256):
        if len(running) == 64:
            running.pop(rng.randrange(64)).finish()
        running.append(Running(cache, [*system, *[i * 1000 + j for j in range(rng.randrange(60))]], max_new=8))
        running[-1].insert(rng.randrange(len(running[-1].tokens)))
    cache.check([page for request in running for page in request.private])
    while running:
        running.pop(rng.randrange(len(running))).finish()
    cache.check()
    assert counts(cache).keys() == {"free", "evictable"}


def test_a_locked_prefix_is_never_evicted_and_an_unlocked_one_is_evictable_again() -> None:
    cache = PrefixCache(8, 1)
    cache_prompts(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    lock = cache.lock(cache.match([1, 2, 3, 4, 5, 6, 7, 8]))
    assert counts(cache) == {"protected": 8}
    assert cache.allocate(1) is None
    cache.unlock(lock)
    assert counts(cache) == {"evictable": 8}
    assert cache.allocate(8) is not None
    assert cached(cache, 1) == (0, [])


def test_counters_survive_a_split_under_a_lock() -> None:
    cache = PrefixCache(10, 1)
    cache_prompts(cache, [1, 2, 3, 4, 5, 6])
    lock = cache.lock(cache.match([1, 2, 3, 4, 5, 6]))
    cache_prompts(cache, [1, 2, 3, 9])
    cache.check()
    assert counts(cache) == {"free": 3, "protected": 6, "evictable": 1}
    cache.unlock(lock)
    assert counts(cache) == {"free": 3, "evictable": 7}
    assert cache.allocate(10) is not None
    assert counts(cache) == {"private": 10}


def test_locks_end_in_any_order_while_paths_split_under_them() -> None:
    rng = random.Random(1)
    cache = PrefixCache(400, 2)
    cache_prompts(cache, list(range(100)))
    locks = []
    for _ in range(100):
        cut = rng.randrange(101)
        locks.append(cache.lock(cache.match(list(range(cut)))))
        cache_prompts(cache, [*range(rng.randrange(101)), 500 + rng.randrange(20), 7])
        cache.check()
    rng.shuffle(locks)
    for lock in locks:
        cache.unlock(lock)
        cache.check()
    assert counts(cache).keys() == {"free", "evictable"}


def test_unlocking_twice_is_refused_and_changes_nothing() -> None:
    cache = PrefixCache(4, 1)
    cache_prompts(cache, [1, 2])
    first, second = (cache.lock(cache.match([1, 2])) for _ in range(2))
    cache.unlock(first)
    with pytest.raises(AssertionError, match="unlocked already"):
        cache.unlock(first)
    assert counts(cache) == {"free": 2, "protected": 2}
    cache.check()
    cache.unlock(second)
    assert counts(cache) == {"free": 2, "evictable": 2}


@pytest.mark.parametrize("num_private", [2, 3, 4])
def test_allocation_one_page_short_leaves_everything_as_it_was(num_private: int) -> None:
    """Free and evictable pages one above, equal to, and one below the need."""
    cache = PrefixCache(8, 2)
    cache_prompts(cache, [1, 2, 3, 4, 5, 6])
    cache.allocate(num_private)
    before = counts(cache)
    pages = cache.allocate(5)
    if num_private <= 3:
        assert pages is not None
        assert len(set(pages.tolist())) == 5
    else:
        assert pages is None
        assert counts(cache) == before
        assert cached(cache, 1, 2, 3, 4, 5, 6) == (6, [1, 2, 3])


def test_a_request_that_finds_no_room_gives_up_its_lock() -> None:
    cache = PrefixCache(8, 1)
    cache_prompts(cache, [1, 2, 3, 4])
    with pytest.raises(MemoryError):
        Running(cache, [1, 2, 3, 4, *range(10, 16)])
    assert counts(cache) == {"free": 4, "evictable": 4}
    assert cached(cache, 1, 2, 3, 4) == (4, [1, 2, 3, 4])
    cache.check()


def test_a_lock_is_not_counted_as_room() -> None:
    """Of 8 pages 4 are cached; a request that hits them can get 4 more, not 8."""
    cache = PrefixCache(8, 1)
    cache_prompts(cache, [1, 2, 3, 4])
    assert cache.num_free + cache.num_evictable == 8
    lock = cache.lock(cache.match([1, 2, 3, 4]))
    assert cache.num_free + cache.num_evictable == 4
    assert cache.allocate(5) is None
    assert cache.allocate(4) is not None
    cache.unlock(lock)


@pytest.mark.parametrize("page_size", [1, 3])
def test_the_room_beside_a_match_is_known_without_locking_it(page_size: int) -> None:
    """Locked paths, pins that overlap with the match, and matches that end inside a node."""
    rng = random.Random(page_size)
    cache = PrefixCache(60, page_size, max_pinned_pages=20)
    cases = 0
    for step in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(8 * page_size))]
        match = cache.match(tokens)
        clock, expected = cache.clock, cache.num_allocatable_beside(match)
        assert cache.clock == clock
        lock = cache.lock(match)
        assert expected == cache.num_allocatable
        cache.unlock(lock)
        cases += expected < cache.num_allocatable
        cache.pin(rng.randrange(3), tokens)
        if step % 4:
            cache_prompts(cache, [*tokens, 1])
        else:
            cache.lock(cache.match(tokens[: rng.randrange(4) * page_size]))
    assert cases > 50
    cache.check()


def test_pages_inserted_in_a_chunk_outlive_a_retraction() -> None:
    cache = PrefixCache(8, 2)
    request = Running(cache, list(range(8)))
    request.insert(4)
    request.abort()
    other = cache.allocate(6)
    assert other is not None
    assert cached(cache, *range(8)) == (4, [1, 2])
    assert not {1, 2} & set(other.tolist())
    cache.check(other)


def test_an_evicted_prefix_is_a_miss_even_after_its_pages_hold_something_else() -> None:
    cache = PrefixCache(4, 2)
    cache_prompts(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    cache_prompts(cache, [9, 9, 9, 9, 9, 9, 9, 9])
    assert cached(cache, 1, 2, 3, 4) == (0, [])
    cache.check()


@pytest.mark.parametrize("how", ["evicted", "trimmed", "flushed"])
def test_locking_a_match_whose_pages_are_gone_is_refused(how: str) -> None:
    cache = PrefixCache(8, 2)
    cache_prompts(cache, [1, 2, 3, 4, 5, 6])
    match = cache.match([1, 2, 3, 4, 5, 6])
    cache_prompts(cache, [1, 2, 7, 8])  # splits the node: the match now ends below another
    if how == "flushed":
        cache.flush()
    else:
        cache.free(take(cache, 8 if how == "evicted" else 6))
    before = counts(cache)
    with pytest.raises(StaleMatchError, match="match again"):
        cache.lock(match)
    assert counts(cache) == before
    cache.check()


def test_a_match_stays_good_while_its_path_is_split() -> None:
    cache = PrefixCache(20, 1)
    cache_prompts(cache, [1, 2, 3, 4, 5, 6])
    match = cache.match([1, 2, 3, 4, 9])
    cache_prompts(cache, [1, 2, 7], [1, 2, 3, 4, 5, 8], [1, 2, 3, 8])
    lock = cache.lock(match)
    assert (lock.num_tokens, match.pages.tolist()) == (4, [1, 2, 3, 4])
    assert counts(cache)["protected"] == 4
    cache.unlock(lock)
    cache.check()


def test_namespaces_never_share_and_an_empty_one_is_forgotten() -> None:
    cache = PrefixCache(12, 2)
    for namespace in (None, "a", ("a",), ("a", None)):
        assert cached(cache, 1, 2, namespace=namespace) == (0, [])
        Running(cache, [1, 2, 3], namespace=namespace).finish()
        assert cached(cache, 1, 2, namespace=namespace)[0] == 2
        cache.check()
    for i in range(100):
        cache.unlock(cache.lock(cache.match([1, 2], f"user {i}")))
    assert len(cache._tree.roots) == 4
    cache.allocate(12)
    assert not cache._tree.roots


def test_inserting_under_a_lock_of_another_namespace_is_refused() -> None:
    cache = PrefixCache(4, 1)
    lock = cache.lock(cache.match([1], "a"))
    with pytest.raises(ValueError, match="namespace"):
        cache.insert([1], take(cache, 1), lock, "b")


def test_flush_drops_what_nobody_holds_and_says_how_many_pages() -> None:
    cache = PrefixCache(20, 1)
    cache_prompts(cache, [1, 2, 3, 4], [1, 2, 5, 6], [7, 8])
    lock = cache.lock(cache.match([1, 2, 3]))
    assert cache.flush() == 5
    assert counts(cache) == {"free": 17, "protected": 3}
    assert cached(cache, 1, 2, 3, 4) == (3, [1, 2, 3])
    cache.check()
    cache.unlock(lock)
    assert counts(cache) == {"free": 17, "evictable": 3}
    assert cache.flush() == 3
    assert cache.flush() == 0
    assert counts(cache) == {"free": 20}
    cache.check()


@pytest.mark.parametrize(
    ("prefix", "freed", "left"),
    [
        ([], 5, 0),
        ([1], 5, 0),
        ([1, 2], 5, 0),
        ([1, 2, 3], 4, 2),  # the page [3, 4] and what follows it; [1, 2] is shared
        ([1, 2, 3, 4], 4, 2),
        ([1, 2, 3, 4, 5, 6], 1, 4),
        ([1, 2, 3, 4, 7], 2, 4),
        ([1, 2, 3, 4, 7, 8, 9, 0], 1, 4),
        ([1, 2, 3, 4, 7, 8, 9, 0, 0], 0, 4),
        ([3], 0, 4),
        ([1, 3], 0, 4),
    ],
)
def test_flushing_a_prefix_drops_the_pages_that_begin_with_it(prefix: list[int], freed: int, left: int) -> None:
    cache = PrefixCache(20, 2)
    cache_prompts(cache, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8, 9, 0])
    Running(cache, [1, 2, 3, 4], namespace="other").finish()
    assert cache.flush_prefix(prefix) == freed
    assert cache.num_evictable == 7 - freed
    assert cached(cache, 1, 2, 3, 4)[0] == left
    assert cached(cache, 1, 2, 3, 4, namespace="other")[0] == 4
    cache.check()


def test_flushing_a_namespace_leaves_what_requests_hold_and_all_other_namespaces() -> None:
    cache = PrefixCache(20, 1)
    for namespace in (None, "a"):
        Running(cache, [1, 2, 3], namespace=namespace).finish()
    lock = cache.lock(cache.match([1], "a"))
    assert cache.flush_prefix(namespace="a") == 2
    assert (cached(cache, 1, 2, 3, namespace="a")[0], cached(cache, 1, 2, 3)[0]) == (1, 3)
    assert cache.flush_prefix(namespace="unknown") == 0
    cache.unlock(lock)
    assert cache.flush_prefix(namespace="a") == 1
    cache.check()


def test_a_namespace_of_tagged_fields_cannot_be_forged_with_strings() -> None:
    cache = PrefixCache(20, 1)
    namespaces = [
        None,
        "X",
        ("X", None),
        Namespace(),
        Namespace(adapter="X"),
        Namespace(salt="X"),
        Namespace(adapter="X", salt=""),
        Namespace(adapter=("X", 2)),  # the same name loaded again with other weights
        Namespace(adapter="X", weight_version=1),
    ]
    for namespace in namespaces:
        assert cached(cache, 1, 2, namespace=namespace) == (0, [])
        Running(cache, [1, 2], namespace=namespace).finish()
        assert cached(cache, 1, 2, namespace=namespace)[0] == 2
    cache.check()


def test_statistics_count_each_request_once_and_by_namespace() -> None:
    cache = PrefixCache(6, 2)
    Running(cache, [1, 2, 3, 4, 5, 6]).finish()
    second = Running(cache, [1, 2, 3, 4, 9, 9, 9], namespace=None)
    for end in (5, 6, 7):
        second.insert(end)
    second.abort()
    Running(cache, [1, 2, 3], namespace="a").finish()
    assert cache.statistics.by_namespace[None] == Counters(2, 5 + 6, 4, 6 + 2, 0, 0)
    assert cache.statistics.by_namespace["a"] == Counters(1, 2, 0, 3, 0, 0)
    cache.free(take(cache, 2))
    assert cache.statistics.by_namespace[None].evicted_tokens == 4, "neither of the two pages was free"
    cache.flush()
    total = cache.statistics.total
    assert (total.inserted_tokens, total.evicted_tokens, total.flushed_tokens) == (11, 4, 7)
    assert cache.statistics.window_hit_rate == 4 / 13


def test_refused_and_retracted_requests_count_neither_as_hits_nor_as_misses() -> None:
    cache = PrefixCache(6, 1)
    Running(cache, [1, 2, 3]).finish()
    before = cache.statistics.total
    with pytest.raises(MemoryError):
        Running(cache, list(range(9)))
    lock = cache.lock(cache.match([1, 2]), recomputation=True)
    cache.insert([1, 2, 3], [1, 2, *take(cache, 1)], lock)
    cache.unlock(lock)
    assert cache.statistics.total == before


def test_who_shares_nothing_leaves_nothing_and_is_not_counted() -> None:
    cache = PrefixCache(8, 2)
    Running(cache, [1, 2, 3]).finish()
    before = cache.statistics.total
    for _ in range(2):
        for tokens in ([1], [1, 2, 3], [1, 2, 3, 4]):
            request = Running(cache, tokens, max_new=1, namespace=UNSHARED)
            assert request.match.num_tokens == 0
            assert request.insert().num_tokens == 0
            cache.check(request.private.tolist())
            request.finish()
            assert counts(cache) == {"free": 6, "evictable": 2}
            assert list(cache.tree.roots) == [None]
    assert cache.statistics.total == before
    assert UNSHARED not in cache.statistics.by_namespace
    cache.check()


def test_a_disabled_cache_never_shares_and_never_leaks() -> None:
    cache = PrefixCache(4, 2, enabled=False)
    for _ in range(3):
        request = Running(cache, [1, 2, 3, 4])
        assert request.match.num_tokens == 0
        table = request.pages.tolist()
        assert request.insert().pages.tolist() == table
        request.finish()
        assert counts(cache) == {"free": 4}
    cache.check()


@pytest.mark.parametrize("bad", [[3, 3], [0], [-1], [9], [1], [4]])
def test_freeing_what_is_not_private_is_refused_and_changes_nothing(bad: list[int]) -> None:
    cache = PrefixCache(8, 1)
    cache_prompts(cache, [5])  # page 1 is the tree's
    cache.allocate(2)  # 2 and 3 are private, 4 is free
    before = counts(cache)
    with pytest.raises(AssertionError):
        cache.free(bad)
    assert counts(cache) == before
    cache.check([2, 3])


@pytest.mark.parametrize("table", [[1, 3, 3], [1, 3, 0], [1, 3, 9], [1, 3, 1], [1, 2, 3], [1, 3, 2]])
@pytest.mark.parametrize("tokens", [[5, 6, 7], [5, 8, 9]])
def test_inserting_pages_that_are_not_private_is_refused_and_changes_nothing(
    tokens: list[int], table: list[int]
) -> None:
    """Twice in one table, the null page, no page at all, owned by the tree; with and without a duplicate to free."""
    cache = PrefixCache(5, 1)
    cache_prompts(cache, [5, 6])  # pages 1 and 2
    lock = cache.lock(cache.match([5]))
    cache.allocate(2)  # 3 and 4
    before = counts(cache)
    with pytest.raises(AssertionError):
        cache.insert(tokens, table, lock)
    assert counts(cache) == before
    cache.check([3, 4])


def test_a_page_table_too_short_for_its_tokens_is_refused() -> None:
    cache = PrefixCache(5, 2)
    lock = cache.lock(cache.match([]))
    with pytest.raises(AssertionError, match="cannot hold"):
        cache.insert([1, 2, 3], take(cache, 1), lock)


@pytest.mark.parametrize("tokens", [[1.5], [2**31], [-(2**31) - 1], ["a"], [True]])
def test_token_ids_that_do_not_fit_int32_are_refused(tokens: list) -> None:
    cache = PrefixCache(4, 1)
    cache_prompts(cache, [1])
    with pytest.raises(ValueError, match="token ids"):
        cache.match(tokens)


def test_a_result_can_be_written_to_without_harm_to_the_cache() -> None:
    cache = PrefixCache(8, 2)
    request = Running(cache, [1, 2, 3, 4])
    table = request.pages.copy()
    done = cache.insert(request.tokens, table, request.lock)
    table[:] = done.pages[:] = 0
    assert cached(cache, 1, 2, 3, 4) == (4, [1, 2])
    with pytest.raises(ValueError, match="read-only"):
        cache.match([1, 2]).pages[0] = 3


def test_chains_of_thousands_of_nodes_need_no_recursion() -> None:
    """1,000 prompts each one token longer than the last, then one request that grows the chain to 5,000 nodes."""
    cache = PrefixCache(5_001, 1)
    for length in range(1, 1_001):
        Running(cache, list(range(length)), max_new=1).finish()
    request = Running(cache, list(range(5_000)))
    for length in range(1_001, 5_001):
        request.insert(length)
    request.abort()
    assert cached(cache, *range(5_000))[0] == 5_000
    assert len(list(cache._tree.subtree(cache._tree.roots[None]))) == 5_001
    cache.check()
    lock = cache.lock(cache.match(np.arange(4_999)))
    assert cache.flush() == 1
    cache.unlock(lock)
    cache.check()
    assert cache.flush() == 4_999


def test_nothing_that_looks_at_a_deep_tree_needs_recursion() -> None:
    """Events, pictures, explanations, pins, flushes, and evictions of a chain of 3,000 nodes."""
    cache = PrefixCache(3_100, 1, journal=True, max_pinned_pages=3_000)
    request = Running(cache, list(range(3_000)))
    for length in range(1, 3_001):
        request.insert(length)
    request.finish()
    assert cache.journal is not None
    assert len(cache.journal.drain()) == 3_000
    assert len(rows(cache, max_nodes=4_000)) == 3_000
    for picture in (to_text, to_json, to_dot):
        assert picture(cache)
    assert to_html(View.of(cache))
    assert explain(cache, [*range(2_500), 0]).diverged_at == 2_500
    assert cache.pin("all", list(range(2_900))) == 2_900
    assert cache.num_allocatable_beside(cache.match(list(range(2_950)))) == 150
    assert cache.flush_prefix(list(range(2_950))) == 51
    assert explain(cache, list(range(3_000))).reason == "flushed"
    cache.pins.remove("all")
    cache.free(take(cache, 200))
    assert explain(cache, list(range(3_000))).reason == "evicted"
    assert cache.flush() == 2_900
    cache.check()


def test_a_very_long_prompt_in_small_chunks_needs_no_recursion() -> None:
    cache = PrefixCache(12_500, 16)
    tokens = np.arange(200_000, dtype=np.int32)
    lock = cache.lock(cache.match(tokens[:-1]))
    pages = cache.allocate(12_500)
    assert pages is not None
    for end in range(16, 200_001, 16):
        pages = cache.insert(tokens[:end], pages, lock).pages
    cache.unlock(lock)
    cache.check()
    assert cache.match(tokens).num_tokens == 200_000
    assert cache.allocate(12_500) is not None


@pytest.mark.parametrize("seed", range(20))
def test_room_beside_a_match_once_others_end_is_what_it_is_when_they_have_ended(seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixCache(60, 2)
    stems = [[rng.randrange(3) for _ in range(12)] for _ in range(3)]

    def prompt() -> list[int]:
        return rng.choice(stems)[: rng.randrange(2, 13)] + [rng.randrange(3) for _ in range(rng.randrange(1, 5))]

    running = [Running(cache, prompt()) for _ in range(5)]
    for request in running:
        request.insert(rng.randrange(len(request.tokens) + 1))
    cache.pin("pinned", running[0].tokens)
    match = cache.match(prompt())
    ended = rng.sample(running, rng.randrange(6))
    expected = cache.num_allocatable_beside(match, [request.lock for request in ended])
    for request in ended:
        cache.unlock(request.lock)
    assert cache.num_allocatable_beside(match) == expected
    before = cache.num_allocatable
    cache.lock(match)
    assert cache.num_allocatable == expected, before


def test_matches_have_in_common_the_places_that_they_pass_together() -> None:
    cache = PrefixCache(60, 2)
    for tokens in ([1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 4, 4], [5, 5]):
        Running(cache, tokens).finish()
    paths = [cache.match(tokens).path() for tokens in ([1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 4, 4], [1, 1, 2, 2, 9, 9])]
    assert paths[0][1:] == paths[1][1:] == paths[2]
    assert paths[0][0] != paths[1][0]
    assert [len(path) for path in paths] == [3, 3, 2]
    assert cache.match([9]).path() == [None] == cache.match([5, 5]).path()[1:]
    assert cache.match([9], "salt").path() == ["salt"]
