"""What is in the tree, and everything that changes together when pages enter or leave it.

That is the tree itself, the pages' owners, the queue of eviction candidates, the statistics, the journal, and what the
adaptive policy learns. Locks are none of its business: it only ever removes nodes that nobody has locked.
"""

from collections.abc import Hashable, Iterator

import numpy as np

from jradix.cache.eviction import Policy, make_queue
from jradix.cache.journal import Journal, Removal
from jradix.cache.pages import PRIVATE, PageAllocator, PageIds
from jradix.cache.radix import TOKEN_BYTES, Node, RadixTree, Root, as_page_ids
from jradix.cache.reuse import ReuseQueue
from jradix.cache.statistics import CacheStatistics, Counters


class Contents:
    """The tree with the pages it owns."""

    def __init__(self, num_pages: int, page_size: int, eviction_policy: str | Policy, journal: bool) -> None:
        self.pages = PageAllocator(num_pages)
        self.tree = RadixTree(page_size)
        self.queue = make_queue(eviction_policy, num_pages, page_size)
        self.learner = self.queue if isinstance(self.queue, ReuseQueue) else None
        self.journal = Journal(num_pages, page_size) if journal else None
        self.statistics = CacheStatistics()
        self.clock = 0  # counts locks and inserts

    def tick(self) -> int:
        self.clock += 1
        if self.learner is not None:
            self.learner.tick(self.clock)
        return self.clock

    def split(self, node: Node, end: int) -> Node:
        """Cut `node` at token `end`; returns the upper part. The lower one may have another place in the queue now."""
        upper = self.tree.split(node, end)
        if node.ticket:
            self.queue.discard(node)
            self.queue.add(node)
        return upper

    def add_leaf(self, parent: Node, namespace: Hashable, tokens: bytes, new: PageIds) -> Node:
        """Append whole pages, which have been required to be private, below `parent`, for the caller to lock."""
        known = self._drop_tail_within(parent, tokens[: self.tree.page_bytes])
        self.pages.adopt(new)
        self.statistics.of(namespace).inserted_tokens += len(tokens) // TOKEN_BYTES - known
        if self.journal is not None:
            self.journal.stored(namespace, parent, tokens, new)
        leaf = self.tree.add_leaf(parent, tokens, new.tobytes(), self.clock)
        if self.learner is not None:
            num_pages, uses = self.learner.returned(tokens, self.clock, namespace)
            if num_pages:  # these had been evicted, and get their number of uses back
                whole = num_pages == leaf.num_pages
                back = leaf if whole else self.tree.split(leaf, leaf.start + num_pages * self.tree.page_size)
                back.uses = uses
        return leaf

    def add_tail(self, parent: Node, namespace: Hashable, tail: bytes, page: int, time: int, priority: int) -> bool:
        """Keep less than a page of tokens, in `page`, below `parent`, as a candidate that was used at `time`.

        False: the page stays private, because a tail or a page of the tree begins with these tokens.
        """
        leaf = self.tree.closest(parent, tail)
        is_new = leaf is None or not leaf.tokens.startswith(tail)
        if leaf is None or is_new:
            pages = np.array([page], np.int32)
            self.pages.require(pages, PRIVATE)
            known = self._drop_tail_within(parent, tail)
            self.pages.adopt(pages)
            self.statistics.of(namespace).inserted_tokens += len(tail) // TOKEN_BYTES - known
            leaf = self.tree.add_leaf(parent, tail, pages.tobytes(), time)
        elif leaf.tokens != tail:
            return False
        self.queue.discard(leaf)
        leaf.uses += 1
        leaf.priority = max(leaf.priority, priority)
        leaf.last_access = max(leaf.last_access, time)
        self.queue.add(leaf)
        return is_new

    def restore(self, parent: Node, namespace: Hashable, tokens: bytes, new: PageIds) -> Node:
        """Append private pages with a past, or a tail, below `parent`: as nothing else beside begins. Offer it then."""
        known = self._drop_tail_within(parent, tokens[: self.tree.page_bytes])
        self.queue.discard(parent)  # it was a leaf perhaps
        self.pages.require(new, PRIVATE)
        self.pages.adopt(new)
        self.statistics.of(namespace).inserted_tokens += len(tokens) // TOKEN_BYTES - known
        if self.journal is not None and len(tokens) >= self.tree.page_bytes:
            self.journal.stored(namespace, parent, tokens, new)
        return self.tree.add_leaf(parent, tokens, new.tobytes(), self.clock)

    def offer(self, node: Node) -> None:
        """Queue `node` for eviction if it is an unlocked leaf now; forget it if it is an unlocked, empty root."""
        if node.children is None and not node.ref_count:
            if isinstance(node, Root):
                self.tree.roots.pop(node.namespace, None)
            else:
                self.queue.add(node)

    def evict(self, num_pages: int, owner: Hashable) -> None:
        """Free exactly `num_pages` pages, trimming the last leaf from its tail. The caller knows that so many exist."""
        tree, queue, learner = self.tree, self.queue, self.learner
        freed: list[bytes] = []
        missing = num_pages
        while missing > 0:
            leaf = queue.first()
            available = len(leaf.pages) // TOKEN_BYTES
            gone = leaf.tokens if available <= missing else leaf.tokens[-missing * tree.page_bytes :]
            self._counters(leaf).evicted_tokens += len(gone) // TOKEN_BYTES
            if learner is not None and not tree.is_tail(leaf):  # of tails nothing is learned
                assert leaf.root is not None, "a root is no leaf"
                learner.evicted(gone, leaf.uses, leaf.last_access, leaf.root.namespace)
            if available > missing:
                freed.append(tree.trim(leaf, missing))
                break
            queue.discard(leaf)
            freed.append(leaf.pages)
            missing -= available
            self.offer(tree.detach(leaf))
        page_ids = as_page_ids(b"".join(freed))
        if self.journal is not None:
            self.journal.removed(page_ids, Removal("evicted", self.clock, num_pages, owner))
        self.pages.reclaim(page_ids)

    def drop(self, tops: list[Node]) -> int:
        """Flush the unlocked nodes among `tops` and below; returns the number of pages freed."""
        freed: list[bytes] = []
        pending = list(tops)
        while pending:
            node = pending.pop()
            if node.parent is None or node.ref_count:
                pending.extend((node.children or {}).values())
                continue
            parent = self.tree.detach(node)
            counters = self._counters(node)
            for below in self._dismantle(node):
                freed.append(below.pages)
                counters.flushed_tokens += below.num_tokens
            self.offer(parent)
        page_ids = as_page_ids(b"".join(freed))
        if self.journal is not None:
            self.journal.removed(page_ids, Removal("flushed", self.clock))
            if not self.tree.roots:
                self.journal.cleared()
        self.pages.reclaim(page_ids)
        return len(page_ids)

    def _drop_tail_within(self, node: Node, tokens: bytes) -> int:
        """Free the tail below `node` with which `tokens`, at most a page and about to enter there, begin, if any.

        Returns how many tokens it had, which are not new then.
        """
        tail = self.tree.tail_within(node, tokens)
        if tail is None:
            return 0
        self.queue.discard(tail)
        self.tree.detach(tail)
        self.pages.reclaim(as_page_ids(tail.pages))
        return tail.num_tokens

    def _dismantle(self, top: Node) -> Iterator[Node]:
        """Take apart a detached subtree without locks. Unlinked nodes leave no cycles behind."""
        for node in self.tree.subtree(top):
            self.queue.discard(node)
            node.parent = node.children = None
            yield node

    def _counters(self, node: Node) -> Counters:
        assert node.root is not None, "a root has no pages to count"
        return self.statistics.of(node.root.namespace)
