"""Which unlocked leaf goes next: the eviction policies, and the queue of candidates they order."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from jradix.cache.radix import Node

Policy = Callable[[Node], Any]
"""A leaf's sort key; the smallest is evicted first. It may depend only on what a lock changes: a leaf's key is taken
when it becomes a candidate, and it stops being one when it is locked."""

POLICIES: dict[str, Policy] = {
    "lru": lambda node: node.last_access,
}


class EvictionQueue:
    """The unlocked leaves in the order of the policy: O(log candidates) to add and to take the first.

    Removal is lazy. A node's `ticket` names its one valid entry; entries with an older ticket are skipped when they
    surface, and swept when they outnumber the valid ones.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown eviction_policy {policy!r}: choose one of {', '.join(sorted(POLICIES))}")
        self._key = POLICIES[policy]
        self._heap: list[tuple[Any, int, Node]] = []
        self._last_ticket = 0
        self._num_valid = 0

    def __len__(self) -> int:
        return self._num_valid

    def add(self, leaf: Node) -> None:
        """`leaf` has become a candidate."""
        self._last_ticket = leaf.ticket = self._last_ticket + 1
        self._num_valid += 1
        # Tickets are unique, so that two nodes with equal keys are never compared, and the earlier goes first.
        heappush(self._heap, (self._key(leaf), leaf.ticket, leaf))

    def discard(self, node: Node) -> None:
        """`node` is no candidate any more; nothing happens if it was none."""
        if node.ticket:
            node.ticket = 0
            self._num_valid -= 1
            if len(self._heap) > 2 * self._num_valid + 64:
                self._heap = [entry for entry in self._heap if entry[1] == entry[2].ticket]
                heapify(self._heap)

    def first(self) -> Node:
        """The candidate to evict next. It stays in the queue."""
        heap = self._heap
        while heap[0][1] != heap[0][2].ticket:
            heappop(heap)
        return heap[0][2]

    def violations(self) -> list[str]:
        """Sentences about entries that do not agree with the nodes' tickets."""
        valid = [entry for entry in self._heap if entry[1] == entry[2].ticket]
        found = [f"the queue counts {self._num_valid} entries and holds {len(valid)}"] * (len(valid) != self._num_valid)
        return found + [
            f"a queued leaf has the key {self._key(leaf)} and is queued under {key}"
            for key, _, leaf in valid
            if key != self._key(leaf)
        ]
