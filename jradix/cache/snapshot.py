"""The tree as plain arrays, and back into a cache that is in use. Knows neither files nor devices.

A snapshot lists nodes in the order in which they are worth keeping: those used last first, and no node before its
parent, so that whatever has room for a part of it keeps whole prefixes.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jradix.cache.contents import Contents
from jradix.cache.pages import PageIds
from jradix.cache.radix import TOKEN_BYTES, Node, RadixTree, Root, as_page_ids


class Row(NamedTuple):
    """One node. Times are those of the cache's clock."""

    parent: int  # the row of its parent; -1 for a root, which has no row
    namespace: int  # the place in `Snapshot.namespaces`
    num_tokens: int
    last_access: int
    created: int
    uses: int
    priority: int
    reach: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a cache held at one moment.

    Attributes:
        page_size: tokens.
        clock: of the cache; nothing was used later.
        namespaces: those that have rows.
        rows: int64 `[nodes, 8]`, the fields of `Row`.
        tokens: int32 `[tokens]`, those of all rows one after the other.
        pages: int32 `[pages]`, likewise: where the content was when the snapshot was taken.
    """

    page_size: int
    clock: int
    namespaces: tuple[Hashable, ...]
    rows: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    pages: PageIds

    @property
    def page_counts(self) -> npt.NDArray[np.int64]:
        """`[nodes]`; a tail has one page, which is not full."""
        return -(-self.rows[:, Row._fields.index("num_tokens")] // self.page_size)

    def prefixes(self) -> Iterator[tuple[Hashable, npt.NDArray[np.int32]]]:
        """The longest prefixes, each with its namespace and all its tokens from the root on; the latest used last."""
        rows = [Row(*row) for row in self.rows.tolist()]
        ends = np.cumsum([row.num_tokens for row in rows], dtype=np.int64)
        parents = {row.parent for row in rows}
        for leaf in reversed(range(len(rows))):
            if leaf not in parents:
                path = [leaf]
                while rows[path[-1]].parent >= 0:
                    path.append(rows[path[-1]].parent)
                parts = [self.tokens[ends[place] - rows[place].num_tokens : ends[place]] for place in reversed(path)]
                yield self.namespaces[rows[leaf].namespace], np.concatenate(parts)


def take(tree: RadixTree, clock: int, is_wanted: Callable[[Hashable], bool] = lambda _: True) -> Snapshot:
    """All nodes of the namespaces that are wanted. What is locked counts as used now."""
    nodes: list[Node] = []
    for namespace, root in tree.roots.items():
        if is_wanted(namespace):
            nodes += [node for node in tree.subtree(root) if node is not root]
    # A stable sort keeps parents, which are used no earlier than their children, before them.
    nodes.sort(key=lambda node: -_last_use(node, clock))
    places: dict[Node, int] = {node: place for place, node in enumerate(nodes)}
    namespaces: dict[Hashable, int] = {}
    rows: list[Row] = []
    for node in nodes:
        assert node.root is not None, "a root has no row"
        assert node.parent is not None, "the tree holds a detached node"
        namespace = namespaces.setdefault(node.root.namespace, len(namespaces))
        past = (_last_use(node, clock), node.created, node.uses, node.priority, node.reach)
        rows.append(Row(places.get(node.parent, -1), namespace, node.num_tokens, *past))
    return Snapshot(
        tree.page_size,
        clock,
        tuple(namespaces),
        np.array(rows, np.int64).reshape(-1, len(Row._fields)),
        as_page_ids(b"".join(node.tokens for node in nodes)),
        as_page_ids(b"".join(node.pages for node in nodes)),
    )


def _last_use(node: Node, clock: int) -> int:
    return clock if node.ref_count else node.last_access


class Restoration:
    """Enters a snapshot into a cache range by range, while requests come and go.

    It takes free pages and evicts nothing. What requests have cached meanwhile stays theirs; what hung below something
    that was evicted meanwhile is left out.
    """

    def __init__(
        self,
        contents: Contents,
        allocate: Callable[[int], PageIds | None],
        min_tail_tokens: int | None,
        snapshot: Snapshot,
    ) -> None:
        """See `PrefixCache.restore`. min_tail_tokens: the shortest tail to keep, None for none."""
        self._contents, self._allocate, self._min_tail_tokens = contents, allocate, min_tail_tokens
        self._rows = [Row(*row) for row in snapshot.rows.tolist()]
        self._namespaces = snapshot.namespaces
        self._tokens, self._page_size = snapshot.tokens, snapshot.page_size
        self._first_pages = [0, *np.cumsum(snapshot.page_counts).tolist()]
        self._first_tokens = [0, *np.cumsum([row.num_tokens for row in self._rows]).tolist()]
        self._ends: list[tuple[Node, int] | None] = [None] * len(self._rows)  # live node and token where each row ends
        self._row = 0
        self.num_pages = 0
        """How many the cache has taken."""
        self._is_full = False  # there were too few free pages, and nothing more is entered

    @property
    def is_done(self) -> bool:
        """Nothing more will be entered: all is, or the cache is full."""
        return self._is_full or self._row == len(self._rows)

    def enter(self, start: int, stop: int) -> tuple[list[int], PageIds]:
        """Enter pages `[start, stop)` of the snapshot; ranges follow each other from 0 on.

        Returns which of them the cache has taken, counted from `start`, and their new ids. The caller writes their
        content before anybody can read it.
        """
        taken: list[int] = []
        pages: list[PageIds] = []
        page = start
        while page < stop and not self._is_full:
            first, end = self._first_pages[self._row], self._first_pages[self._row + 1]
            here = min(stop, end)
            offset, new = self._enter(self._row, page - first, here - first)
            taken += range(first + offset - start, first + offset - start + len(new))
            pages.append(new)
            page = here
            self._row += here == end
        self.num_pages += len(taken)
        return taken, np.concatenate([np.zeros(0, np.int32), *pages])

    def _enter(self, index: int, start: int, stop: int) -> tuple[int, PageIds]:
        """Pages `[start, stop)` of a row. Returns the first that was taken, and the new ids of it and those after."""
        row = self._rows[index]
        above = self._node_above(index, start)
        self._ends[index] = None
        if above is None:
            return start, np.zeros(0, np.int32)
        first = self._first_tokens[index] + start * self._page_size
        last = self._first_tokens[index] + min(stop * self._page_size, row.num_tokens)
        tokens = self._tokens[first:last].tobytes()
        if row.num_tokens < self._page_size:
            pages = self._enter_tail(row, above, tokens)
        else:
            start, pages = self._enter_pages(index, above, start, tokens)
        if isinstance(above, Root):
            self._contents.offer(above)  # which forgets it if it has stayed empty
        return start, pages

    def _node_above(self, index: int, start: int) -> Node | None:
        """The node of the cache that ends where page `start` of the row begins, if it is still there."""
        row = self._rows[index]
        if not start and row.parent < 0:
            return self._contents.tree.root(self._namespaces[row.namespace])
        known = self._ends[index if start else row.parent]
        if known is None:
            return None
        node, end = known
        return node if node.parent is not None and node.end == end else None  # else it was evicted, whole or its tail

    def _enter_pages(self, index: int, above: Node, start: int, tokens: bytes) -> tuple[int, PageIds]:
        contents, row = self._contents, self._rows[index]
        page_bytes = contents.tree.page_bytes
        node, num_known, _ = contents.tree.walk(above, tokens)
        if above.end + num_known < node.end:
            node = contents.split(node, above.end + num_known)
        tokens = tokens[num_known * TOKEN_BYTES :]
        missing = len(tokens) // page_bytes
        num_pages = min(missing, contents.pages.num_free)
        self._is_full = num_pages < missing
        pages = self._take(num_pages)
        if num_pages:
            node = contents.restore(node, self._namespaces[row.namespace], tokens[: num_pages * page_bytes], pages)
            self._remember(node, row)
        if not self._is_full:
            self._ends[index] = node, node.end
        return start + num_known // self._page_size, pages

    def _enter_tail(self, row: Row, above: Node, tokens: bytes) -> PageIds:
        closest = self._contents.tree.closest(above, tokens)
        is_known = closest is not None and closest.tokens.startswith(tokens)
        if is_known or self._min_tail_tokens is None or row.num_tokens < self._min_tail_tokens:
            return np.zeros(0, np.int32)
        self._is_full = not self._contents.pages.num_free
        pages = self._take(not self._is_full)
        if len(pages):
            tail = self._contents.restore(above, self._namespaces[row.namespace], tokens, pages)
            self._remember(tail, row)
        return pages

    def _take(self, num_pages: int) -> PageIds:
        pages = self._allocate(num_pages)
        assert pages is not None, "free pages cannot be had"
        return pages

    def _remember(self, node: Node, row: Row) -> None:
        node.last_access, node.created, node.uses = row.last_access, row.created, row.uses
        node.priority, node.reach = row.priority, row.reach
        self._contents.offer(node)
