"""What the cache hands out: a match to consider, a lock to hold, and what an insert did."""

from collections.abc import Hashable
from typing import NamedTuple

from jradix.cache.pages import PageIds
from jradix.cache.radix import Node


class StaleMatchError(RuntimeError):
    """A match was locked after its pages had been evicted: match again."""


class Match(NamedTuple):
    """The longest cached prefix at the time of asking. Only a candidate: nothing protects its pages before `lock`."""

    num_tokens: int  # whole pages
    pages: PageIds  # [num_tokens / page_size], read-only
    head_len: int  # tokens that agree beyond those, fewer than a page
    head_page: int  # the page that begins with them; 0 if there is none
    namespace: Hashable
    num_asked: int  # tokens looked up
    node: Node | None  # where the match ends, perhaps inside it; None when nothing matched

    def path(self) -> list[Hashable]:
        """The places in the tree that the match passes, from its end up to its namespace.

        As long as the tree does not change, two matches have in common what they pass together.
        """
        places: list[Hashable] = []
        node = self.node
        while node is not None and node.parent is not None:
            places.append(node)
            node = node.parent
        return [*places, self.namespace]


class Lock:
    """A request's hold on a prefix. It stays valid through splits, and `insert` extends it; only `unlock` ends it."""

    __slots__ = ("namespace", "node", "priority", "time", "uncounted")

    def __init__(self, node: Node, namespace: Hashable, time: int, priority: int, uncounted: Match | None) -> None:
        self.node: Node | None = node  # the prefix ends where this node ends; None once unlocked
        self.namespace = namespace
        self.time = time  # of the last use of the prefix through this handle
        self.priority = priority
        self.uncounted = uncounted  # what the statistics do not know yet

    @property
    def num_tokens(self) -> int:
        """Tokens of the protected prefix."""
        assert self.node is not None, "this lock has been unlocked already"
        return self.node.end


class Insert(NamedTuple):
    """What `insert` did to a request's page table."""

    pages: PageIds  # the table to go on with, as long as the one given
    num_tokens: int  # the request's tokens that are in the tree now, protected by its lock; pages past it stay private
