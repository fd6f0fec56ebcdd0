"""What enters and leaves the tree: events for routers, and a memory of removals for `explain`."""

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np

from jradix.cache.pages import PageIds
from jradix.cache.radix import TOKEN_BYTES, Node


@dataclass(frozen=True, slots=True)
class Stored:
    """Pages have entered the tree. A hash covers a page and its whole prefix, namespace included."""

    page_hashes: tuple[int, ...]
    parent_hash: int | None  # of the page before the first; None at position 0
    token_ids: tuple[int, ...]
    page_size: int
    namespace: Hashable


@dataclass(frozen=True, slots=True)
class Removed:
    page_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The tree is empty."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Why pages left the tree."""

    kind: Literal["evicted", "flushed"]
    time: int  # of the cache's clock, which counts locks and inserts
    num_pages: int = 0  # that were needed at once
    owner: Hashable = None  # the request that needed them, if it gave its name


class Journal:
    """Follows the tree page by page, but for tails. Hashes are deterministic: other machines can compute them."""

    def __init__(self, num_pages: int, page_size: int, *, max_events: int = 100_000) -> None:
        """max_events: kept until `drain`; then the oldest are lost, which `num_lost` counts."""
        self.num_lost = 0
        self._page_size = page_size
        self._hash_of = [0] * (num_pages + 1)  # by page id; 0 for tails and for pages outside the tree
        self._events: deque[Stored | Removed | Cleared] = deque(maxlen=max_events)
        # By page hash, oldest first; a plain dict would skip all that it has lost whenever the oldest is taken.
        self._removals: OrderedDict[int, Removal] = OrderedDict()
        self._max_removals = 4 * num_pages

    def drain(self) -> list[Stored | Removed | Cleared]:
        """The events since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def hashes(self, namespace: Hashable, tokens: bytes, parent: int | None = None) -> list[int]:
        """The hash of each page of `tokens`, the first of which follows the page with hash `parent`."""
        if parent is not None:
            chain = parent.to_bytes(8, "little")
        else:
            chain = blake2b(repr(namespace).encode(), digest_size=8).digest()
        found: list[int] = []
        page_bytes = self._page_size * TOKEN_BYTES
        for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
            chain = blake2b(tokens[start : start + page_bytes], digest_size=8, key=chain).digest()
            found.append(int.from_bytes(chain, "little"))
        return found

    def removal(self, page_hash: int) -> Removal | None:
        """Why the page with this hash left the tree, if that is remembered and it has not come back."""
        return self._removals.get(page_hash)

    def stored(self, namespace: Hashable, parent: Node, tokens: bytes, page_ids: PageIds) -> None:
        parent_hash = self._hash_of[int.from_bytes(parent.pages[-TOKEN_BYTES:], "little")] if parent.pages else None
        hashes = self.hashes(namespace, tokens, parent_hash)
        for page, page_hash in zip(page_ids.tolist(), hashes, strict=True):
            self._hash_of[page] = page_hash
            self._removals.pop(page_hash, None)
        token_ids = tuple(np.frombuffer(tokens, np.int32).tolist())
        self._record(Stored(tuple(hashes), parent_hash, token_ids, self._page_size, namespace))

    def removed(self, page_ids: PageIds, cause: Removal) -> None:
        hashes: list[int] = []
        for page in page_ids.tolist():
            if self._hash_of[page]:
                hashes.append(self._hash_of[page])
                self._hash_of[page] = 0
        if not hashes:
            return
        self._record(Removed(tuple(hashes)))
        self._removals.update(dict.fromkeys(hashes, cause))
        while len(self._removals) > self._max_removals:
            self._removals.popitem(last=False)

    def cleared(self) -> None:
        self._record(Cleared())

    def _record(self, event: Stored | Removed | Cleared) -> None:
        self.num_lost += len(self._events) == self._events.maxlen
        self._events.append(event)
