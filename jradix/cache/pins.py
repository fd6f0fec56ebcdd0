"""Soft pins: prefixes kept for their names, a system prompt or a session, within a budget and until room is needed."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from jradix.cache.handles import Lock
from jradix.cache.radix import Node


@dataclass(slots=True)
class Pin:
    lock: Lock
    expires_at: float | None  # seconds of whatever clock the caller uses; None: never


class Pins:
    """Named locks that give way. The oldest go first: when the budget is exceeded, and when an allocation would fail.

    A pin is a lock like a request's, so that its pages count as protected while it lasts. Pages that a running request
    holds as well stay protected when the pin goes.
    """

    def __init__(self, max_pages: int, unlock: Callable[[Lock], None]) -> None:
        self.max_pages = max_pages
        self._unlock = unlock
        self._pins: dict[Hashable, Pin] = {}  # oldest first

    def __contains__(self, name: Hashable) -> bool:
        return name in self._pins

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_pages(self) -> int:
        """Distinct pages under pins. O(nodes on the pinned paths)."""
        return sum(node.num_pages for node in self.count_by_node())

    def add(self, name: Hashable, lock: Lock, expires_at: float | None = None) -> bool:
        """Take over `lock` under `name`, replacing an older pin of that name.

        False if alone it exceeds the budget: then it is unlocked, and an older pin of that name stays.
        """
        older = self._pins.pop(name, None)
        self._pins[name] = Pin(lock, expires_at)
        if self._pages_of(lock) > self.max_pages:
            self.remove(name)
            if older is not None:
                self._pins[name] = older
            return False
        if older is not None:
            self._unlock(older.lock)
        while self.num_pages > self.max_pages:
            self.remove_oldest()
        return True

    def remove(self, name: Hashable) -> bool:
        """False if there is no pin of this name: it may have given way before."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._unlock(pin.lock)
        return pin is not None

    def remove_oldest(self) -> None:
        self.remove(next(iter(self._pins)))

    def remove_all(self) -> None:
        while self._pins:
            self.remove_oldest()

    def remove_expired(self, now: float) -> int:
        """End the pins whose time is up; returns how many."""
        expired = [name for name, pin in self._pins.items() if pin.expires_at is not None and pin.expires_at <= now]
        for name in expired:
            self.remove(name)
        return len(expired)

    def num_releasable(self) -> int:
        """Pages that would become evictable if all pins went: those that no request holds beside them."""
        return sum(node.num_pages for node, num_pins in self.count_by_node().items() if node.ref_count == num_pins)

    def count_by_node(self) -> dict[Node, int]:
        """How many pins lie on each node."""
        counts: dict[Node, int] = {}
        for pin in self._pins.values():
            node = pin.lock.node
            while node is not None:
                counts[node] = counts.get(node, 0) + 1
                node = node.parent
        return counts

    def _pages_of(self, lock: Lock) -> int:
        pages, node = 0, lock.node
        while node is not None:
            pages += node.num_pages
            node = node.parent
        return pages
