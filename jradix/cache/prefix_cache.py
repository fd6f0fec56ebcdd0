"""The prefix cache as the scheduler sees it: match, lock, allocate, insert, unlock; eviction happens inside."""

import logging
from collections.abc import Hashable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from jradix.cache.eviction import Policy, make_queue
from jradix.cache.handles import Insert, Lock, Match, StaleMatchError
from jradix.cache.invariants import CacheInvariantError, find_violations
from jradix.cache.journal import Journal, Removal
from jradix.cache.pages import PRIVATE, PageAllocator, PageIds
from jradix.cache.pins import Pins
from jradix.cache.radix import (
    TOKEN_BYTES,
    Node,
    RadixTree,
    Root,
    TokenIds,
    as_page_ids,
    as_token_bytes,
)
from jradix.cache.reuse import ReuseQueue
from jradix.cache.statistics import CacheStatistics, Counters

LOG = logging.getLogger(__name__)


class PrefixCache:
    """Shares the KV pages of token prefixes between requests.

    Every page is at any time *free*, *private* (allocated, not in the tree), *protected* (in the tree under a lock)
    or *evictable* (in the tree, unlocked); the four always sum to `num_total`.

    The life of a request: ``match`` its prompt without the last token, ``lock`` the match, ``allocate`` pages for the
    rest, compute, ``insert`` what has been computed (as often as wanted), and at the end ``insert_tail`` the page that
    is not full, ``free`` the other pages past ``Insert.num_tokens`` and ``unlock``.

    A match may go on inside a page, its *head*: the request can copy that page on the device into one of its own and
    compute only what follows. Nothing protects or touches the page that is copied.

    Recency is exact for every page: a prefix counts as used when it is locked and when something is inserted behind
    it, and a hit on the head of a node does not refresh the node's tail, because `lock` splits it there.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        eviction_policy: str | Policy = "lru",
        enabled: bool = True,
        min_copied_tokens: int | None = 1,
        journal: bool = False,
        max_pinned_pages: int | None = None,
    ) -> None:
        """`num_pages` usable pages with ids 1..num_pages. `enabled=False`: nothing is ever cached.

        eviction_policy: a name (`EVICTION_POLICIES`), or a sort key such as `TailLRU`.
        min_copied_tokens: heads shorter than this are not worth a copy and never offered. None: no heads, no tails.
        max_pinned_pages: the budget of `pin`, a quarter of the pool if not given.
        journal: record what enters and leaves the tree, for `explain` and for routers; about 1 us a page.
        """
        self.page_size = page_size
        self.enabled = enabled
        self._min_copied_tokens = min_copied_tokens
        self._pages = PageAllocator(num_pages)
        self._tree = RadixTree(page_size)
        self._queue = make_queue(eviction_policy, num_pages, page_size)
        self.journal = Journal(num_pages, page_size) if journal else None
        self._learner = self._queue if isinstance(self._queue, ReuseQueue) else None
        self.statistics = CacheStatistics()
        self.pins = Pins(num_pages // 4 if max_pinned_pages is None else max_pinned_pages, self.unlock)
        self._has_complained = False
        self._num_protected = 0
        self._num_locks = 0
        self._clock = 0  # counts locks and inserts

    @property
    def num_total(self) -> int:
        return self._pages.num_total

    @property
    def num_free(self) -> int:
        return self._pages.num_free

    @property
    def num_private(self) -> int:
        return self._pages.num_private

    @property
    def num_protected(self) -> int:
        return self._num_protected

    @property
    def num_evictable(self) -> int:
        return self._pages.num_tree - self._num_protected

    @property
    def num_allocatable(self) -> int:
        """Pages that `allocate` could give: free, evictable, and those that only pins protect."""
        return self.num_free + self.num_evictable + (self.pins.num_releasable() if self.pins else 0)

    @property
    def granularity(self) -> int:
        """The fewest tokens by which a match can grow."""
        return min(self.page_size, self._min_copied_tokens or self.page_size)

    @property
    def tree(self) -> RadixTree:
        """To look at, not to change."""
        return self._tree

    def match(self, token_ids: TokenIds, namespace: Hashable | None = None) -> Match:
        """Look up the longest cached prefix of `token_ids`. Changes nothing, not even recency.

        Pass the prompt without its last token: one token must be computed to have logits.
        """
        root = self._tree.roots.get(namespace)
        if root is None:
            return Match(0, as_page_ids(b""), 0, 0, namespace, len(token_ids), None)
        tokens = as_token_bytes(token_ids)
        node, num_tokens, passed = self._tree.walk(root, tokens)
        pages = as_page_ids(b"".join(passed))
        head_len = head_page = 0
        if self._min_copied_tokens is not None:
            head_len, head_page = self._tree.head(node, num_tokens, tokens[num_tokens * TOKEN_BYTES :])
            if head_len < self._min_copied_tokens:
                head_len = head_page = 0
        return Match(num_tokens, pages, head_len, head_page, namespace, len(token_ids), node if num_tokens else None)

    def lock(self, match: Match, *, priority: int = 0, recomputation: bool = False) -> Lock:
        """Protect the matched prefix from eviction until `unlock`, and count it as used now.

        Lock before counting what is evictable. Raises StaleMatchError, changing nothing, if some of the matched pages
        have been evicted or flushed since the match. The request enters the statistics at its first `insert`, unless
        it is a `recomputation`: one that was retracted and would count twice. `priority`: for the policy of that name;
        a page keeps the highest of the requests that used it.
        """
        node = self._end_node(match)
        self._tick()
        self._num_locks += 1
        self._protect(node, None, priority)
        return Lock(node, match.namespace, self._clock, priority, None if recomputation else match)

    def unlock(self, lock: Lock) -> None:
        """End the protection. Pages without another lock become evictable; none is freed. AssertionError if repeated.

        `flush` leaves locked prefixes alone, so unlocking after a flush is nothing special.
        """
        end = lock.node
        assert end is not None, "this lock has been unlocked already"
        lock.node = None
        self._num_locks -= 1
        node: Node | None = end
        while node is not None:
            node.ref_count -= 1
            if node.reach < end.reach:  # noqa: PLR1730 - max() would double the loop's time
                node.reach = end.reach
            if not node.ref_count:
                self._num_protected -= node.num_pages
                if self._learner is not None and node.parent is not None:
                    self._learner.idle(node)
            # Recency is brought up to date here, once for all inserts under this lock: while it was held it did not
            # matter, and to touch the whole path in each insert would make a chunked prefill quadratic.
            if node.last_access < lock.time:  # noqa: PLR1730 - max() would double the loop's time
                node.last_access = lock.time
            node = node.parent
        self._offer(end)

    def allocate(self, num_pages: int, owner: Hashable = None) -> PageIds | None:
        """Private pages for a request, [num_pages] int32, evicting unlocked leaves as needed.

        None if free and evictable pages together are too few; then nothing has changed and nothing was evicted.
        Pins give way first, oldest first. `owner` names the request in the journal.
        """
        if num_pages > self.num_free + self.num_evictable:
            if num_pages > self.num_allocatable:
                return None
            while num_pages > self.num_free + self.num_evictable:
                self.pins.remove_oldest()
        if num_pages > self.num_free:
            self._evict(num_pages - self.num_free, owner)
        return self._pages.take(num_pages)

    def pin(
        self,
        name: Hashable,
        token_ids: TokenIds,
        namespace: Hashable | None = None,
        *,
        priority: int = 0,
        expires_at: float | None = None,
    ) -> int:
        """Keep what is cached of a prefix until unpinned, expired, or room is needed; returns its tokens.

        For a system prompt, or for a session that grows: pinning under the same name again moves the pin. 0, and an
        older pin of that name stays, if nothing is cached or the prefix exceeds the budget. End pins with
        ``pins.remove(name)`` and ``pins.remove_expired(now)``.
        """
        match = self.match(token_ids, namespace)
        if not match.num_tokens:
            return 0
        lock = self.lock(match, priority=priority, recomputation=True)
        return match.num_tokens if self.pins.add(name, lock, expires_at) else 0

    def free(self, pages: npt.ArrayLike) -> None:
        """Give back private pages. AssertionError, changing nothing, if any is free, in the tree, or not a page."""
        self._pages.give_back(np.asarray(pages, np.int32).reshape(-1))

    def insert(
        self,
        token_ids: TokenIds,
        pages: npt.ArrayLike,
        lock: Lock,
        namespace: Hashable | None = None,
        *,
        num_copied: int = 0,
    ) -> Insert:
        """Put the whole pages of a request's computed tokens into the tree, and extend `lock` over them.

        token_ids: the computed tokens from position 0, [tokens]. pages: the request's page table, at least
        ceil(tokens / page_size) ids, of which those under the lock are the tree's and the others private.
        Where the tree has a page for the same tokens already, ours is freed and the returned table names the tree's.
        With `enabled=False` the table comes back unchanged. num_copied: tokens of the match's head that the request has
        copied, for the statistics.
        """
        top = lock.node
        assert top is not None, "this lock has been unlocked already"
        if namespace != lock.namespace:
            raise ValueError(f"the lock is in namespace {lock.namespace!r}, got {namespace!r}: pass the same to both")
        table = np.array(pages, np.int32)
        start, end = top.end, len(token_ids) // self.page_size * self.page_size
        assert len(table) * self.page_size >= len(token_ids), f"{len(table)} pages cannot hold {len(token_ids)} tokens"
        if lock.uncounted is not None:
            match, lock.uncounted = lock.uncounted, None
            self.statistics.count_request(namespace, match.num_asked, match.num_tokens + num_copied)
        if not self.enabled or end <= start:
            return Insert(table, start)
        tokens = as_token_bytes(token_ids[start:end])
        own = table[start // self.page_size : end // self.page_size]  # a view: writing to it rewrites the table
        self._pages.require(own, PRIVATE)

        node, num_matched, passed = self._tree.walk(top, tokens)
        if start + num_matched < node.end:
            node = self._split(node, start + num_matched)
        lock.time = self._tick()
        if passed:
            num_shared = num_matched // self.page_size
            self._pages.give_back(own[:num_shared])
            own[:num_shared] = as_page_ids(b"".join(passed))
        if start + num_matched < end:
            new = own[num_matched // self.page_size :]
            known = self._drop_tail_within(node, tokens[num_matched * TOKEN_BYTES :][: self._tree.page_bytes])
            self._pages.adopt(new)
            self.statistics.of(namespace).inserted_tokens += len(new) * self.page_size - known
            if self.journal is not None:
                self.journal.stored(namespace, node, tokens[num_matched * TOKEN_BYTES :], new)
            node = self._tree.add_leaf(node, tokens[num_matched * TOKEN_BYTES :], new.tobytes(), self._clock)
            if self._learner is not None:
                self._recall(node)
        self._protect(node, top, lock.priority)
        lock.node = node
        return Insert(table, end)

    def insert_tail(self, token_ids: TokenIds, page: int, lock: Lock) -> bool:
        """Keep a finished request's computed tokens past its last whole page, which `page` holds, for others to copy.

        True: the tree has taken the page, evictable at once. False: it stays private, because the tokens are cached
        already, or there are none, or nothing is to be copied.
        """
        node = lock.node
        assert node is not None, "this lock has been unlocked already"
        if not self.enabled or self._min_copied_tokens is None or len(token_ids) == node.end:
            return False
        tail = as_token_bytes(token_ids[node.end :])
        assert len(tail) < self._tree.page_bytes, "the whole pages come first: insert them"
        if len(tail) < self._min_copied_tokens * TOKEN_BYTES:
            return False
        node.reach = max(node.reach, len(token_ids))
        leaf = self._tree.closest(node, tail)
        is_new = leaf is None or not leaf.tokens.startswith(tail)
        if leaf is None or is_new:
            known = self._drop_tail_within(node, tail)
            pages = np.array([page], np.int32)
            self._pages.require(pages, PRIVATE)
            self._pages.adopt(pages)
            self.statistics.of(lock.namespace).inserted_tokens += len(tail) // TOKEN_BYTES - known
            leaf = self._tree.add_leaf(node, tail, pages.tobytes(), lock.time)
        elif leaf.tokens != tail:
            return False
        self._queue.discard(leaf)
        leaf.uses += 1
        leaf.priority = max(leaf.priority, lock.priority)
        leaf.last_access = max(leaf.last_access, lock.time)
        self._queue.add(leaf)
        return is_new

    def flush(self) -> int:
        """Drop every unlocked node and return the number of pages freed.

        Prefixes locked by running requests stay, and stay matchable: `num_protected` says how many pages.
        """
        return self._drop(list(self._tree.roots.values()))

    def flush_prefix(self, token_ids: TokenIds = (), namespace: Hashable | None = None) -> int:
        """Drop every unlocked page whose tokens, counted from position 0, begin with `token_ids`.

        Without tokens: the whole namespace. Pages that end before the last of `token_ids` stay, since other prompts
        share them. Returns the number of pages freed; what running requests have locked stays.
        """
        root = self._tree.roots.get(namespace)
        if root is None:
            return 0
        tokens = as_token_bytes(token_ids)
        whole = max(0, len(token_ids) - 1) // self.page_size * self.page_size
        node, num_tokens, _ = self._tree.walk(root, tokens[: whole * TOKEN_BYTES])
        if num_tokens < whole:
            return 0
        if whole < node.end:
            node = self._split(node, whole)
        rest = tokens[whole * TOKEN_BYTES :]
        return self._drop([child for child in (node.children or {}).values() if child.tokens.startswith(rest)])

    def check(self, private_pages: Iterable[int] = (), *, strict: bool = True) -> list[str]:
        """A sentence for every broken invariant, none if all hold. O(size of cache).

        private_pages: the pages that requests hold outside the tree; none when idle. If something is broken, `strict`
        raises CacheInvariantError, which names it all; otherwise the first time is logged, and the cache goes on.
        """
        violations = find_violations(
            self._pages,
            self._tree,
            self._queue,
            num_protected=self._num_protected,
            num_locks=self._num_locks,
            private_pages=private_pages,
        )
        if violations and strict:
            raise CacheInvariantError(violations)
        if violations and not self._has_complained:
            self._has_complained = True
            LOG.error("the prefix cache is inconsistent: %s", "; ".join(violations))
        return violations

    def _end_node(self, match: Match) -> Node:
        """The node that ends where the match ends, split off if need be."""
        node = match.node
        if node is None:
            return self._tree.root(match.namespace)
        while node.parent is not None and node.parent.end >= match.num_tokens:  # split since the match
            node = node.parent
        if node.parent is None or node.end < match.num_tokens:
            raise StaleMatchError("pages of this match have been evicted since: match again, then lock")
        return node if node.end == match.num_tokens else self._split(node, match.num_tokens)

    def _split(self, node: Node, end: int) -> Node:
        """Cut `node` at token `end`; returns the upper part. The lower one may have another place in the queue now."""
        upper = self._tree.split(node, end)
        if node.ticket:
            self._queue.discard(node)
            self._queue.add(node)
        return upper

    def _tick(self) -> int:
        self._clock += 1
        if self._learner is not None:
            self._learner.tick(self._clock)
        return self._clock

    def _recall(self, leaf: Node) -> None:
        """Give those pages of a new leaf that had been evicted, always the first ones, their number of uses back."""
        assert self._learner is not None
        num_pages, uses = self._learner.returned(leaf.tokens, self._clock)
        if num_pages:
            whole = num_pages == leaf.num_pages
            known = leaf if whole else self._tree.split(leaf, leaf.start + num_pages * self.page_size)
            known.uses = uses

    def _protect(self, node: Node | None, top: Node | None, priority: int) -> None:
        """Add a lock to the nodes from `node` up to, not including, `top`."""
        while node is not top:
            assert node is not None, "the lock's node is not above the node to protect"
            if not node.ref_count:
                self._num_protected += node.num_pages
                self._queue.discard(node)
                if self._learner is not None and node.last_access < self._clock and node.parent is not None:
                    self._learner.reused(node, self._clock)
            node.ref_count += 1
            node.uses += 1
            if node.priority < priority:  # noqa: PLR1730 - max() would double the loop's time
                node.priority = priority
            node = node.parent

    def _drop_tail_within(self, node: Node, tokens: bytes) -> int:
        """Free the tail below `node` with which `tokens`, at most a page and about to enter there, begin, if any.

        Returns how many tokens it had, which are not new then.
        """
        tail = self._tree.tail_within(node, tokens)
        if tail is None:
            return 0
        self._queue.discard(tail)
        self._tree.detach(tail)
        self._pages.reclaim(as_page_ids(tail.pages))
        return tail.num_tokens

    def _offer(self, node: Node) -> None:
        """Queue `node` for eviction if it is an unlocked leaf now; forget it if it is an unlocked, empty root."""
        if node.children is None and not node.ref_count:
            if isinstance(node, Root):
                self._tree.roots.pop(node.namespace, None)
            else:
                self._queue.add(node)

    def _evict(self, num_pages: int, owner: Hashable) -> None:
        """Free exactly `num_pages` pages, trimming the last leaf from its tail. The caller knows that so many exist."""
        tree, queue, learner = self._tree, self._queue, self._learner
        freed: list[bytes] = []
        missing = num_pages
        while missing > 0:
            leaf = queue.first()
            available = len(leaf.pages) // TOKEN_BYTES
            gone = leaf.tokens if available <= missing else leaf.tokens[-missing * tree.page_bytes :]
            self._counters(leaf).evicted_tokens += len(gone) // TOKEN_BYTES
            if learner is not None and not tree.is_tail(leaf):  # of tails nothing is learned
                learner.evicted(gone, leaf.uses, leaf.last_access)
            if available > missing:
                freed.append(tree.trim(leaf, missing))
                break
            queue.discard(leaf)
            freed.append(leaf.pages)
            missing -= available
            self._offer(tree.detach(leaf))
        page_ids = as_page_ids(b"".join(freed))
        if self.journal is not None:
            self.journal.removed(page_ids, Removal("evicted", self._clock, num_pages, owner))
        self._pages.reclaim(page_ids)

    def _counters(self, node: Node) -> Counters:
        assert node.root is not None, "a root has no pages to count"
        return self.statistics.of(node.root.namespace)

    def _drop(self, tops: list[Node]) -> int:
        """Drop the unlocked nodes among `tops` and below; returns the number of pages freed."""
        freed: list[bytes] = []
        pending = list(tops)
        while pending:
            node = pending.pop()
            if node.parent is None or node.ref_count:
                pending.extend((node.children or {}).values())
                continue
            parent = self._tree.detach(node)
            counters = self._counters(node)
            for below in self._dismantle(node):
                freed.append(below.pages)
                counters.flushed_tokens += below.num_tokens
            self._offer(parent)
        page_ids = as_page_ids(b"".join(freed))
        if self.journal is not None:
            self.journal.removed(page_ids, Removal("flushed", self._clock))
            if not self._tree.roots:
                self.journal.cleared()
        self._pages.reclaim(page_ids)
        return len(page_ids)

    def _dismantle(self, top: Node) -> Iterator[Node]:
        """Take apart a detached subtree without locks. Unlinked nodes leave no cycles behind."""
        for node in self._tree.subtree(top):
            self._queue.discard(node)
            node.parent = node.children = None
            yield node
