"""Random operations against a model that knows nothing of trees: a dictionary of prefixes with page-level LRU.

The model predicts every match, every page id that is shared, and every eviction, page by page; `check()` runs after
each operation. JRADIX_RANDOM_OPERATIONS sets the length of the seeded run.
"""

import os
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jradix.cache import Lock, PrefixCache, radix
from jradix.cache.eviction import POLICIES
from jradix.cache.render import rows

NUM_OPERATIONS = int(os.environ.get("JRADIX_RANDOM_OPERATIONS", "4000"))
Prefix = tuple[Hashable, tuple[int, ...]]  # namespace and tokens; of a tail the last page is not full


@dataclass
class CachedPage:
    """What the model knows of the last page of one prefix."""

    page: int
    last_used: int
    num_locks: int = 0


@dataclass
class ModelLock:
    num_pages: int
    last_used: int


@pytest.fixture(autouse=True)
def sorted_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small trees, too, find the closest child through the sorted order of wide nodes."""
    monkeypatch.setattr(radix, "FEW_CHILDREN", 2)


class PageModel:
    """Exact page-level LRU by search: evicts the unlocked page without a successor that was used longest ago."""

    def __init__(self, page_size: int, *, copies: bool = True) -> None:
        self.page_size = page_size
        self.copies = copies
        self.pages: dict[Prefix, CachedPage] = {}  # tails too
        self.now = 0

    def prefix(self, namespace: Hashable, tokens: list[int], num_pages: int) -> Prefix:
        return namespace, tuple(tokens[: num_pages * self.page_size])

    def path(self, namespace: Hashable, tokens: list[int], num_pages: int) -> list[CachedPage]:
        return [self.pages[self.prefix(namespace, tokens, i)] for i in range(1, num_pages + 1)]

    def match(self, namespace: Hashable, tokens: list[int]) -> list[int]:
        """The pages of the longest cached prefix."""
        found: list[int] = []
        while (len(found) + 1) * self.page_size <= len(tokens):
            cached = self.pages.get(self.prefix(namespace, tokens, len(found) + 1))
            if cached is None:
                break
            found.append(cached.page)
        return found

    def heads(self, namespace: Hashable, tokens: list[int]) -> dict[int, int]:
        """Pages that continue the longest cached prefix, and how many of their tokens agree with `tokens`."""
        whole = len(self.match(namespace, tokens)) * self.page_size
        found: dict[int, int] = {}
        for (space, prefix), cached in self.pages.items():
            follows = whole < len(prefix) <= whole + self.page_size and list(prefix[:whole]) == tokens[:whole]
            if self.copies and space == namespace and follows:
                pairs = zip(prefix[whole:], tokens[whole:], strict=False)
                found[cached.page] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return found

    def insert_tail(self, namespace: Hashable, tokens: list[int], page: int, lock: ModelLock) -> None:
        whole = lock.num_pages * self.page_size
        if not self.copies or len(tokens) == whole:
            return
        tail = namespace, tuple(tokens)
        if tail in self.pages:
            self.pages[tail].last_used = max(self.pages[tail].last_used, lock.last_used)
            return
        covered = any(
            space == namespace
            and len(tokens) < len(prefix) <= whole + self.page_size
            and tail[1] == prefix[: len(tokens)]
            for space, prefix in self.pages
        )
        if not covered:
            self.drop_tails_within(namespace, tokens)
            self.pages[tail] = CachedPage(page, lock.last_used)

    def drop_tails_within(self, namespace: Hashable, tokens: list[int]) -> None:
        """Tails of the last page of `tokens` that it begins with."""
        whole = (len(tokens) - 1) // self.page_size * self.page_size
        for length in range(whole + 1, len(tokens)):
            self.pages.pop((namespace, tuple(tokens[:length])), None)

    def lock(self, namespace: Hashable, tokens: list[int], num_pages: int) -> ModelLock:
        self.now += 1
        for cached in self.path(namespace, tokens, num_pages):
            cached.num_locks += 1
        return ModelLock(num_pages, self.now)

    def unlock(self, namespace: Hashable, tokens: list[int], lock: ModelLock) -> None:
        for cached in self.path(namespace, tokens, lock.num_pages):
            cached.num_locks -= 1
            cached.last_used = max(cached.last_used, lock.last_used)

    def insert(self, namespace: Hashable, tokens: list[int], table: list[int], lock: ModelLock) -> None:
        """Rewrites `table` in place."""
        num_pages = len(tokens) // self.page_size
        if num_pages <= lock.num_pages:
            return
        self.now += 1
        lock.last_used = self.now
        for i in range(lock.num_pages, num_pages):
            self.drop_tails_within(namespace, tokens[: (i + 1) * self.page_size])
            cached = self.pages.setdefault(self.prefix(namespace, tokens, i + 1), CachedPage(table[i], self.now))
            cached.num_locks += 1
            table[i] = cached.page
        lock.num_pages = num_pages

    def num_evictable(self) -> int:
        return sum(not cached.num_locks for cached in self.pages.values())

    def evict(self, num_pages: int) -> None:
        for _ in range(num_pages):
            inner = {
                (namespace, tokens[: (len(tokens) - 1) // self.page_size * self.page_size])
                for namespace, tokens in self.pages
            }
            ends = [prefix for prefix, cached in self.pages.items() if not cached.num_locks and prefix not in inner]
            del self.pages[min(ends, key=lambda prefix: self.pages[prefix].last_used)]

    def forget(self, num_pages: int, cache: PrefixCache) -> None:
        """Another policy than LRU has evicted: believe it, as far as it took unlocked pages, and that many."""
        kept = {page for row in rows(cache) for page in row.pages}
        gone = [prefix for prefix, cached in self.pages.items() if cached.page not in kept]
        assert len(gone) == num_pages
        for prefix in gone:
            assert not self.pages.pop(prefix).num_locks

    def flush(self) -> int:
        gone = [prefix for prefix, cached in self.pages.items() if not cached.num_locks]
        for prefix in gone:
            del self.pages[prefix]
        return len(gone)


@dataclass
class Request:
    namespace: Hashable
    tokens: list[int]
    lock: Lock
    model_lock: ModelLock
    table: list[int]
    num_computed: int
    prompt_len: int


class Pair:
    """The cache and the model, driven side by side and compared after every operation."""

    def __init__(self, page_size: int, num_pages: int, policy: str = "lru", *, copies: bool = True) -> None:
        min_copied_tokens = 1 if copies else None
        self.cache = PrefixCache(num_pages, page_size, eviction_policy=policy, min_copied_tokens=min_copied_tokens)
        self.policy = policy
        self.model = PageModel(page_size, copies=copies)
        self.running: list[Request] = []

    def start(self, namespace: Hashable, tokens: list[int], max_new: int) -> bool:
        cache, model = self.cache, self.model
        match = cache.match(tokens[:-1], namespace)
        assert match.pages.tolist() == model.match(namespace, tokens[:-1])
        assert match.num_tokens == len(match.pages) * cache.page_size
        heads = model.heads(namespace, tokens[:-1])
        assert match.head_len == max(heads.values(), default=0)
        assert heads.get(match.head_page, 0) == match.head_len
        lock = cache.lock(match)
        model_lock = model.lock(namespace, tokens, len(match.pages))
        need = -(-(len(tokens) + max_new) // cache.page_size) - len(match.pages)
        num_free, room = cache.num_free, cache.num_free + model.num_evictable()
        new = cache.allocate(need)
        assert (new is None) == (need > room)
        if new is None:
            assert cache.num_free == num_free
            cache.unlock(lock)
            model.unlock(namespace, tokens, model_lock)
        else:
            if self.policy == "lru":
                model.evict(max(0, need - num_free))
            else:
                model.forget(max(0, need - num_free), cache)
            table = [*match.pages.tolist(), *new.tolist()]
            request = Request(namespace, tokens, lock, model_lock, table, match.num_tokens, len(tokens))
            self.running.append(request)
        self.compare()
        return new is not None

    def compute(self, index: int, num_tokens: int) -> None:
        """A chunk of prefill: its whole pages enter the tree."""
        request = self.running[index % len(self.running)]
        request.num_computed = min(request.num_computed + num_tokens, len(request.tokens))
        self.insert(request)
        self.compare()

    def generate(self, index: int, token: int) -> None:
        """One token of output, if the prompt is computed and the table has room for it."""
        request = self.running[index % len(self.running)]
        room = len(request.table) * self.cache.page_size
        if request.num_computed == len(request.tokens) < room:
            request.tokens.append(token)
            request.num_computed += 1

    def insert(self, request: Request) -> None:
        computed = request.tokens[: request.num_computed]
        done = self.cache.insert(computed, request.table, request.lock, request.namespace)
        self.model.insert(request.namespace, computed, request.table, request.model_lock)
        assert done.pages.tolist() == request.table
        assert done.num_tokens == request.model_lock.num_pages * self.cache.page_size == request.lock.num_tokens

    def stop(self, index: int, *, insert: bool) -> None:
        """The end of a request: finished (what is computed enters the tree) or aborted."""
        request = self.running.pop(index % len(self.running))
        computed = request.tokens[: request.num_computed if insert else 0]
        self.cache.finish(computed, request.table, request.lock, request.namespace, prompt_len=request.prompt_len)
        # The model has no nodes, but a prompt's pages enter, and count as used, before those of the output.
        self.model.insert(request.namespace, computed[: request.prompt_len], request.table, request.model_lock)
        self.model.insert(request.namespace, computed, request.table, request.model_lock)
        held = request.model_lock.num_pages
        if len(computed) > held * self.cache.page_size:
            self.model.insert_tail(request.namespace, computed, request.table[held], request.model_lock)
        self.model.unlock(request.namespace, request.tokens, request.model_lock)
        self.compare()

    def flush(self) -> None:
        assert self.cache.flush() == self.model.flush()
        self.compare()

    def compare(self) -> None:
        private = [page for request in self.running for page in request.table[request.model_lock.num_pages :]]
        self.cache.check(private)
        assert self.cache.num_evictable == self.model.num_evictable()
        assert self.cache.num_protected == len(self.model.pages) - self.model.num_evictable()
        assert self.cache.num_private == len(private)

    def finish_all(self) -> None:
        while self.running:
            self.stop(0, insert=True)
        assert self.cache.num_free + self.cache.num_evictable == self.cache.num_total
        for namespace, tokens in list(self.model.pages):
            match = self.cache.match(list(tokens), namespace)
            assert match.pages.tolist() == self.model.match(namespace, list(tokens))
            assert match.num_tokens + match.head_len == len(tokens) or not self.model.copies


def make_prompt(page_size: int, variants: Sequence[int], tail_len: int, last: int) -> list[int]:
    """Pages that differ nowhere (0) or in one token somewhere, and a tail shorter than a page that ends in `last`."""
    tokens: list[int] = []
    for variant in variants:
        page = [7] * page_size
        if variant:
            page[(5 * variant - 6) % page_size] = 7 + variant
        tokens += page
    tail = [7] * (tail_len % page_size)
    return [*tokens, *tail[1:], last] if tail else tokens or [last]


class CacheMachine(RuleBasedStateMachine):
    """Hypothesis chooses the operations, and shrinks a failure to the fewest."""

    pair: Pair

    @initialize(page_size=st.sampled_from([1, 3, 16, 64]), num_pages=st.integers(2, 24), copies=st.booleans())
    def make(self, page_size: int, num_pages: int, copies: bool) -> None:
        self.pair = Pair(page_size, num_pages, copies=copies)

    @rule(
        namespace=st.sampled_from([None, "a", ("a",)]),
        variants=st.lists(st.integers(0, 12), max_size=8),
        tail_len=st.integers(0, 63),
        last=st.integers(7, 20),
        max_new=st.integers(0, 3),
    )
    def start(self, namespace: Hashable, variants: list[int], tail_len: int, last: int, max_new: int) -> None:
        self.pair.start(namespace, make_prompt(self.pair.cache.page_size, variants, tail_len, last), max_new)

    @precondition(lambda self: self.pair.running)
    @rule(index=st.integers(0, 9), num_tokens=st.integers(1, 200))
    def compute(self, index: int, num_tokens: int) -> None:
        self.pair.compute(index, num_tokens)

    @precondition(lambda self: self.pair.running)
    @rule(index=st.integers(0, 9), token=st.integers(7, 9))
    def generate(self, index: int, token: int) -> None:
        self.pair.generate(index, token)

    @precondition(lambda self: self.pair.running)
    @rule(index=st.integers(0, 9), insert=st.booleans())
    def stop(self, index: int, insert: bool) -> None:
        self.pair.stop(index, insert=insert)

    @rule()
    def flush(self) -> None:
        self.pair.flush()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.finish_all()


TestCacheAgainstModel = CacheMachine.TestCase
TestCacheAgainstModel.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_a_long_random_run_agrees_with_the_model(page_size: int) -> None:
    run_at_random(page_size, "lru", NUM_OPERATIONS // 4)


@pytest.mark.parametrize("policy", [*sorted(set(POLICIES) - {"lru"}), "adaptive"])
def test_every_policy_evicts_unlocked_pages_only_and_as_many_as_needed(policy: str) -> None:
    run_at_random(3, policy, NUM_OPERATIONS // 8)


def run_at_random(page_size: int, policy: str, num_operations: int) -> None:
    rng = random.Random(page_size)
    pair = Pair(page_size, 24, policy)
    for step in range(num_operations):
        if step % 500 == 499:  # now and then another pool, from tiny to roomy
            pair.finish_all()
            pair = Pair(page_size, rng.choice([2, 5, 12, 24, 60]), policy, copies=rng.random() < 0.8)
        kind = rng.random()
        if kind < 0.4 or not pair.running:
            variants = [rng.randrange(13) if rng.random() < 0.3 else 0 for _ in range(rng.randrange(9))]
            prompt = make_prompt(page_size, variants, rng.randrange(page_size), rng.randrange(7, 21))
            pair.start(rng.choice([None, None, "a", ("a",)]), prompt, rng.randrange(3))
        elif kind < 0.6:
            pair.compute(rng.randrange(99), rng.randrange(1, 4 * page_size))
        elif kind < 0.7:
            pair.generate(rng.randrange(99), rng.randrange(7, 10))
        elif kind < 0.995:
            pair.stop(rng.randrange(99), insert=rng.random() < 0.8)
        else:
            pair.flush()
    pair.finish_all()


def test_the_model_itself_evicts_the_oldest_page_that_ends_a_prefix() -> None:
    model = PageModel(1)
    for tokens, pages in (([1, 2, 3], [1, 2, 3]), ([1, 9], [1, 4])):
        lock = model.lock(None, tokens, 0)
        model.insert(None, tokens, list(pages), lock)
        model.unlock(None, tokens, lock)
    model.evict(2)
    assert model.match(None, [1, 2, 3]) == [1]
    assert model.match(None, [1, 9]) == [1, 4]
    assert np.all(np.array([cached.num_locks for cached in model.pages.values()]) == 0)
