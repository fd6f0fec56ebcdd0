"""Which unlocked leaf goes next: the simple eviction policies, and the queue of candidates they order."""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

from jradix.cache.radix import Node
from jradix.cache.reuse import ReuseQueue

Policy = Callable[[Node], Any]
"""A leaf's sort key; the smallest is evicted first. It may depend only on what a lock changes: a leaf's key is taken
when it becomes a candidate, and it stops being one when it is locked."""

POLICIES: dict[str, Policy] = {
    "lru": lambda node: node.last_access,
    "mru": lambda node: -node.last_access,
    "fifo": lambda node: node.created,
    "filo": lambda node: -node.created,
    "lfu": lambda node: (node.uses, node.last_access),
    # Two segments: what was reused at least twice outlives all the rest, and each segment is LRU.
    "slru": lambda node: (node.uses > 2, node.last_access),
    "priority": lambda node: (node.priority, node.last_access),
}


EVICTION_POLICIES = tuple(sorted([*POLICIES, "adaptive"]))


@dataclass(frozen=True, slots=True)
class TailLRU:
    """Tail-optimised LRU (Zhang et al., arXiv 2510.15152): first what no latency target needs, then plain LRU.

    A conversation of L tokens whose next turn adds about `next_prompt_len` tokens meets its target if at most
    `uncached_len` tokens must be computed, so of its L tokens those from ``L + next_prompt_len - uncached_len`` on
    need not be kept. L is the longest the path has ever been: what was trimmed must not lower the bar again.
    """

    uncached_len: int
    next_prompt_len: int = 0

    def __call__(self, node: Node) -> tuple[bool, int]:
        needed = node.reach + self.next_prompt_len - self.uncached_len
        return node.start < needed, node.last_access


class EvictionQueue(Protocol):
    """The unlocked leaves, in the order in which they will be evicted."""

    def __len__(self) -> int: ...

    def add(self, leaf: Node) -> None:
        """`leaf` has become a candidate."""

    def discard(self, node: Node) -> None:
        """`node` is no candidate any more; nothing happens if it was none."""

    def first(self) -> Node:
        """The candidate to evict next. It stays in the queue, which must not be empty."""
        ...

    def violations(self) -> list[str]:
        """Sentences about what is wrong in the queue."""
        ...


class HeapQueue:
    """Candidates ordered by a policy's key: O(log candidates) to add and to take the first.

    Removal is lazy. A node's `ticket` names its one valid entry; entries with an older ticket are skipped when they
    surface, and swept when they are half as many as the valid ones.
    """

    def __init__(self, policy: Policy) -> None:
        self._key = policy
        self._heap: list[tuple[Any, int, Node]] = []
        self._last_ticket = 0
        self._num_valid = 0

    def __len__(self) -> int:
        return self._num_valid

    def add(self, leaf: Node) -> None:
        self._last_ticket = leaf.ticket = self._last_ticket + 1
        self._num_valid += 1
        # Tickets are unique, so that two nodes with equal keys are never compared, and the earlier goes first.
        heappush(self._heap, (self._key(leaf), leaf.ticket, leaf))

    def discard(self, node: Node) -> None:
        if node.ticket:
            node.ticket = 0
            self._num_valid -= 1
            if 2 * len(self._heap) > 3 * self._num_valid + 128:
                self._heap = [entry for entry in self._heap if entry[1] == entry[2].ticket]
                heapify(self._heap)

    def first(self) -> Node:
        heap = self._heap
        while heap[0][1] != heap[0][2].ticket:
            heappop(heap)
        return heap[0][2]

    def violations(self) -> list[str]:
        valid = [entry for entry in self._heap if entry[1] == entry[2].ticket]
        found = [f"the queue counts {self._num_valid} entries and holds {len(valid)}"] * (len(valid) != self._num_valid)
        return found + [
            f"a queued leaf has the key {self._key(leaf)} and is queued under {key}"
            for key, _, leaf in valid
            if key != self._key(leaf)
        ]


def make_queue(policy: str | Policy, num_pages: int, page_size: int) -> EvictionQueue:
    """The queue of a policy, given by name or as a sort key. ValueError if there is none of that name."""
    if policy == "adaptive":
        return ReuseQueue(num_pages, page_size)
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"unknown eviction_policy {policy!r}: choose one of {', '.join(EVICTION_POLICIES)}")
        policy = POLICIES[policy]
    return HeapQueue(policy)
