"""Predicts how many prompt tokens a batch will find cached: runs it through a real cache, without model or device."""

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jradix.cache.eviction import Policy
from jradix.cache.prefix_cache import Lock, PrefixCache

MAX_SIMULATED = 1_000
"""Requests that are simulated at most, at 0.1 to 0.2 ms each: of a larger batch, a sample."""

NUM_STRETCHES = 4
"""A sample is so many runs of requests that follow each other: neighbours are what a request hits."""

Prompts = Sequence[npt.NDArray[np.int32]]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What of an engine decides which prefixes are cached when a request asks for them.

    Attributes:
        num_pages: of the pool, without the null page.
        page_size: tokens.
        granularity: the fewest tokens by which a match can grow, as `PrefixCache.granularity`.
        max_running_requests: that are alive at once.
        chunked_prefill_size: prompt tokens of a step.
        eviction_policy: as of `PrefixCache`.
    """

    num_pages: int
    page_size: int
    granularity: int
    max_running_requests: int
    chunked_prefill_size: int
    eviction_policy: str | Policy = "lru"


def predict_hits(
    prompts: Prompts,
    namespaces: Sequence[Hashable],
    output_lens: Sequence[int],
    capacity: Capacity,
    order: Integers,
    ideal: Integers,
    cached_lens: Integers,
    max_simulated: int = MAX_SIMULATED,
) -> int:
    """Tokens that the requests of a batch in depth-first order are expected to find cached, all together.

    Of more than `max_simulated` requests, stretches of the order are simulated, spread evenly; the tokens hit there,
    over those hit at best, are taken for the whole batch's. An order that is not depth-first would hit what was
    computed long before a stretch: simulate all of it.

    Args:
        order: the indices of the requests as they will run, int64 `[requests]`.
        ideal: tokens that they would hit, run one by one in an infinite cache, in that order, int64 `[requests]`.
        cached_lens: tokens of each prompt that are cached before, int64 `[requests]`, in the order of `prompts`.
    """
    num_requests, length, warm_up = len(order), len(order), 0
    starts = [0]
    if num_requests > max_simulated:
        length = max(1, max_simulated // NUM_STRETCHES)
        starts = np.linspace(0, num_requests - length, NUM_STRETCHES).astype(int).tolist()
        warm_up = min(length // 4, capacity.max_running_requests)  # until it is as in the middle of a batch
    hit = at_best = 0
    for start in starts:
        hits = simulate_hits(
            prompts, namespaces, output_lens, capacity, order[start : start + length].tolist(), cached_lens
        )
        counted_from = warm_up if start else 0
        hit += sum(hits[counted_from:])
        at_best += int(ideal[start + counted_from : start + length].sum())
    return round(hit * int(ideal.sum()) / at_best) if at_best else 0


def simulate_hits(
    prompts: Prompts,
    namespaces: Sequence[Hashable],
    output_lens: Sequence[int],
    capacity: Capacity,
    order: Iterable[int],
    cached_lens: Sequence[int] | Integers | None = None,
) -> list[int]:
    """Tokens that each of the requests in `order`, indices, finds cached, in that order.

    The cache begins with the first `cached_lens` tokens of these requests' prompts; None: empty.
    """
    simulation, indices = Simulation(capacity), list(order)
    if cached_lens is not None:
        for index in indices:
            if cached_lens[index]:
                simulation.remember(prompts[index][: cached_lens[index]], namespaces[index])
    return [simulation.serve(prompts[index], output_lens[index], namespaces[index]) for index in indices]


@dataclass(frozen=True, slots=True, order=True)
class _Running:
    """A request that is alive; they end in this order."""

    end: int  # the step in which it ends
    number: int
    tokens: npt.NDArray[np.int32]  # prompt and output
    pages: npt.NDArray[np.int32]
    lock: Lock


class Simulation:
    """An engine on paper: first come, first served, as many at once as there are slots, pages and prompt tokens.

    Time is counted in steps. A request takes the steps that its uncached tokens need, beside those of others, then one
    for each token of output. Pages for prompt and output are taken at once. Output is made up and matches nothing.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self.cache = PrefixCache(
            capacity.num_pages,
            capacity.page_size,
            eviction_policy=capacity.eviction_policy,
            min_copied_tokens=capacity.granularity if capacity.granularity < capacity.page_size else None,
        )
        self._step = 0
        self._budget = capacity.chunked_prefill_size  # prompt tokens that fit this step
        self._filling: set[int] = set()  # pages that this step fills: there is nothing to copy yet
        self._running: list[_Running] = []  # a heap
        self._num_served = 0

    def serve(self, prompt: npt.NDArray[np.int32], output_len: int, namespace: Hashable = None) -> int:
        """Admit a request as soon as there is room; returns the tokens it hits, 0 if it is larger than the pool."""
        cache, page_size = self.cache, self._capacity.page_size
        self._num_served += 1
        # The last token of the output is never fed back: it has no KV.
        output = np.full(max(0, output_len - 1), -self._num_served, np.int32)
        tokens = np.concatenate([prompt, output])
        num_pages = -(-len(tokens) // page_size)
        if not self._budget:
            self._advance_to(self._step + 1)
        while True:
            if len(self._running) < self._capacity.max_running_requests:
                match = cache.match(prompt[:-1], namespace)
                if num_pages - len(match.pages) <= cache.num_allocatable_beside(match):
                    break
            if not self._running:
                return 0
            self._advance_to(max(self._step, self._running[0].end))
        copied = 0 if match.head_page in self._filling else match.head_len
        lock = cache.lock(match)
        new = cache.allocate(num_pages - len(match.pages))
        assert new is not None, "counted as allocatable"
        pages = cache.insert(prompt, np.concatenate([match.pages, new]), lock, namespace, num_copied=copied).pages
        hit = match.num_tokens + copied
        last_chunk = self._compute(len(prompt) - hit)
        self._filling.update(pages[(len(prompt) - last_chunk) // page_size : -(-len(prompt) // page_size)].tolist())
        heapq.heappush(self._running, _Running(self._step + output_len, self._num_served, tokens, pages, lock))
        return hit

    def remember(self, tokens: npt.NDArray[np.int32], namespace: Hashable = None) -> None:
        """Cache tokens that were computed earlier, if there is room."""
        match = self.cache.match(tokens, namespace)
        num_pages = -(-len(tokens) // self._capacity.page_size) - len(match.pages)
        if num_pages <= min(self.cache.num_free, self.cache.num_allocatable_beside(match)):
            lock = self.cache.lock(match)
            new = self.cache.allocate(num_pages)
            assert new is not None, "there are free pages"
            self.cache.finish(tokens, np.concatenate([match.pages, new]), lock, namespace)

    def _compute(self, num_tokens: int) -> int:
        """Spend steps on prompt tokens; returns how many of them the last of these steps computes."""
        while num_tokens > self._budget:
            num_tokens -= self._budget
            self._advance_to(self._step + 1)
        self._budget -= num_tokens
        return num_tokens

    def _advance_to(self, step: int) -> None:
        """Go on to another step and end the requests that have all their output by then."""
        if step > self._step:
            self._step, self._budget = step, self._capacity.chunked_prefill_size
            self._filling.clear()
        while self._running and self._running[0].end <= step:
            ended = heapq.heappop(self._running)
            self.cache.finish(ended.tokens, ended.pages, ended.lock, ended.lock.namespace)
