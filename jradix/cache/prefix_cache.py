"""The prefix cache as the scheduler sees it: match, lock, allocate, insert, finish; eviction happens inside."""

import logging
from collections import Counter
from collections.abc import Hashable, Iterable

import numpy as np
import numpy.typing as npt

from jradix.cache.contents import Contents
from jradix.cache.eviction import Policy
from jradix.cache.handles import Insert, Lock, Match, StaleMatchError
from jradix.cache.invariants import CacheInvariantError, find_violations
from jradix.cache.kept_logprobs import KeptLogprobs
from jradix.cache.namespace import UNSHARED
from jradix.cache.pages import PRIVATE, PageIds
from jradix.cache.pins import Pins
from jradix.cache.radix import TOKEN_BYTES, Node, RadixTree, TokenIds, as_page_ids, as_token_bytes
from jradix.cache.snapshot import Restoration, Snapshot
from jradix.cache.unread import UnreadPages

LOG = logging.getLogger(__name__)


class PrefixCache:
    """Shares the KV pages of token prefixes between requests.

    Every page is at any time *free*, *private* (allocated, not in the tree), *protected* (in the tree under a lock)
    or *evictable* (in the tree, unlocked); the four always sum to `num_total`.

    The life of a request: ``match`` its prompt without the last token, ``lock`` the match, ``allocate`` pages for the
    rest, compute, ``insert`` what has been computed (as often as wanted), and ``finish``.

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
        journal: record what enters and leaves the tree, for `explain` and for routers; about 3 us a page.
        """
        self.page_size = page_size
        self.enabled = enabled
        if min_copied_tokens is not None and min_copied_tokens < 1:
            raise ValueError(f"min_copied_tokens must be at least 1, or None for no copies, got {min_copied_tokens}")
        if max_pinned_pages is not None and max_pinned_pages < 0:
            raise ValueError(f"max_pinned_pages must be at least 0, got {max_pinned_pages}")
        self._min_copied_tokens = min_copied_tokens
        self._contents = Contents(num_pages, page_size, eviction_policy, journal)
        self._pages, self._tree = self._contents.pages, self._contents.tree
        self.journal, self.statistics = self._contents.journal, self._contents.statistics
        self.pins = Pins(num_pages // 4 if max_pinned_pages is None else max_pinned_pages, self.unlock)
        self.kept_logprobs: KeptLogprobs | None = None
        self.unread: UnreadPages | None = None
        """Told of all pages that are handed out, while somebody reads a snapshot."""
        self._has_complained = False
        self._num_protected = 0
        self._num_locks = 0

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

    def num_allocatable_beside(self, match: Match, ended: Iterable[Lock] = ()) -> int:
        """What `num_allocatable` would be if `match`, which is not stale, were locked: its pages are no room for it.

        ended: locks that would have been ended before; what pages their requests hold beside them is not counted.
        """
        not_held = (
            Counter(self.pins.count_by_node()) if self.pins else Counter[Node]()
        )  # references that are no obstacle
        num_pages, released = self.num_allocatable, set[Node]()
        for lock in ended:
            node = lock.node
            while node is not None:
                not_held[node] += 1
                released.add(node)
                node = node.parent
        num_pages += sum(node.num_pages for node in released if node.ref_count == not_held[node])
        node = match.node
        while node is not None:
            if node.ref_count == not_held[node]:
                num_pages -= max(0, min(node.end, match.num_tokens) - node.start) // self.page_size
            node = node.parent
        return num_pages

    @property
    def clock(self) -> int:
        """Counts locks and inserts: the time of the cache, in which recency is told."""
        return self._contents.clock

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

        Count what is evictable after it, or with `num_allocatable_beside`. Raises StaleMatchError, changing nothing, if
        some of the matched pages have been evicted or flushed since the match. The request enters the statistics at its
        first `insert`, unless it is a `recomputation`: one that was retracted and would count twice. `priority`: for
        the policy of that name; a page keeps the highest of the requests that used it.
        """
        node = self._end_node(match)
        self._contents.tick()
        self._num_locks += 1
        self._protect(node, None, priority)
        return Lock(node, match.namespace, self.clock, priority, None if recomputation else match)

    def unlock(self, lock: Lock) -> None:
        """End the protection. Pages without another lock become evictable; none is freed. AssertionError if repeated.

        `flush` leaves locked prefixes alone, so unlocking after a flush is nothing special.
        """
        end = lock.node
        assert end is not None, "this lock has been unlocked already"
        lock.node = None
        self._num_locks -= 1
        learner = self._contents.learner
        node: Node | None = end
        while node is not None:
            node.ref_count -= 1
            if node.reach < end.reach:  # noqa: PLR1730 - max() would double the loop's time
                node.reach = end.reach
            if not node.ref_count:
                self._num_protected -= node.num_pages
                if learner is not None and node.parent is not None:
                    learner.idle(node)
            # Recency is brought up to date here, once for all inserts under this lock: while it was held it did not
            # matter, and to touch the whole path in each insert would make a chunked prefill quadratic.
            if node.last_access < lock.time:  # noqa: PLR1730 - max() would double the loop's time
                node.last_access = lock.time
            node = node.parent
        self._contents.offer(end)

    def allocate(self, num_pages: int, owner: Hashable = None) -> PageIds | None:
        """Private pages for a request, [num_pages] int32, evicting unlocked leaves as needed.

        None if `num_allocatable` is too few; then nothing has changed and nothing was evicted. Where evicting is not
        enough, pins give way, oldest first. `owner` names the request in the journal.
        """
        if num_pages > self.num_free + self.num_evictable:
            if num_pages > self.num_allocatable:
                return None
            while num_pages > self.num_free + self.num_evictable:
                self.pins.remove_oldest()
        if num_pages > self.num_free:
            self._contents.evict(num_pages - self.num_free, owner)
        pages = self._pages.take(num_pages)
        if self.kept_logprobs is not None:
            self.kept_logprobs.forget(pages)
        if self.unread is not None:
            self.unread.hand_out(pages)
        return pages

    def keep_logprobs(self) -> KeptLogprobs:
        """Begin to keep log-probabilities of cached tokens beside their pages, if that has not begun yet."""
        if self.kept_logprobs is None:
            self.kept_logprobs = KeptLogprobs(self.num_total, self.page_size)
        return self.kept_logprobs

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
        With `enabled=False`, or UNSHARED, the table comes back unchanged. num_copied: tokens of the match's head
        that the request has copied, for the statistics; less those of the match that it computes all the same.
        """
        top = lock.node
        assert top is not None, "this lock has been unlocked already"
        if namespace != lock.namespace:
            raise ValueError(f"the lock is in namespace {lock.namespace!r}, got {namespace!r}: pass the same to both")
        table = np.array(pages, np.int32)
        start, end = top.end, len(token_ids) // self.page_size * self.page_size
        assert len(table) * self.page_size >= len(token_ids), f"{len(table)} pages cannot hold {len(token_ids)} tokens"
        if namespace is UNSHARED:
            return Insert(table, start)
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
            node = self._contents.split(node, start + num_matched)
        lock.time = self._contents.tick()
        if passed:
            num_shared = num_matched // self.page_size
            self._pages.give_back(own[:num_shared])
            own[:num_shared] = as_page_ids(b"".join(passed))
        if start + num_matched < end:
            new = own[num_matched // self.page_size :]
            node = self._contents.add_leaf(node, namespace, tokens[num_matched * TOKEN_BYTES :], new)
        self._protect(node, top, lock.priority)
        lock.node = node
        return Insert(table, end)

    def finish(
        self,
        token_ids: TokenIds,
        pages: npt.ArrayLike,
        lock: Lock,
        namespace: Hashable | None = None,
        *,
        prompt_len: int | None = None,
    ) -> None:
        """End a request, for whatever reason: leave what it has computed to others, give back all its other pages.

        Arguments as for `insert`; nothing new is inserted if `token_ids` are no longer than the lock. The last page, if
        it is not full, stays as a tail for others to copy. prompt_len: the prompt gets a node of its own, so that the
        output after it is evicted first.
        """
        if prompt_len is not None and prompt_len < len(token_ids):
            pages = self.insert(token_ids[:prompt_len], pages, lock, namespace).pages
        table, _ = self.insert(token_ids, pages, lock, namespace)
        held = lock.num_tokens // self.page_size
        if len(token_ids) > lock.num_tokens:
            held += self._insert_tail(token_ids[lock.num_tokens :], int(table[held]), lock)
        self._pages.give_back(table[held:])
        self.unlock(lock)

    def _insert_tail(self, token_ids: TokenIds, page: int, lock: Lock) -> bool:
        """Keep tokens after the lock, fewer than a page, in `page`. False: it stays private, being of no use."""
        if not self.enabled or self._min_copied_tokens is None or len(token_ids) < self._min_copied_tokens:
            return False
        if lock.namespace is UNSHARED:
            return False
        node = lock.node
        assert node is not None, "this lock has been unlocked already"
        node.reach = max(node.reach, node.end + len(token_ids))
        return self._contents.add_tail(node, lock.namespace, as_token_bytes(token_ids), page, lock.time, lock.priority)

    def flush(self) -> int:
        """Drop every unlocked node and return the number of pages freed.

        Prefixes locked by running requests stay, and stay matchable: `num_protected` says how many pages.
        """
        return self._contents.drop(list(self._tree.roots.values()))

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
            node = self._contents.split(node, whole)
        rest = tokens[whole * TOKEN_BYTES :]
        return self._contents.drop([child for child in (node.children or {}).values() if child.tokens.startswith(rest)])

    def restore(self, snapshot: Snapshot) -> Restoration:
        """Begin to enter what another cache of this page size held, before anything else happens in this one.

        The clock goes on from there, so that all of it is older than whatever comes now.
        """
        assert not self.clock, "only a new cache can begin with a snapshot"
        assert snapshot.page_size == self.page_size, f"pages of {snapshot.page_size} tokens, not {self.page_size}"
        self._contents.clock = snapshot.clock
        return Restoration(self._contents, self.allocate, self._min_copied_tokens, snapshot)

    def check(self, private_pages: Iterable[int] = (), *, strict: bool = True) -> list[str]:
        """A sentence for every broken invariant, none if all hold. O(size of cache).

        private_pages: the pages that requests hold outside the tree; none when idle. If something is broken, `strict`
        raises CacheInvariantError, which names it all; otherwise the first time is logged, and the cache goes on.
        """
        violations = find_violations(
            self._pages,
            self._tree,
            self._contents.queue,
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
        return node if node.end == match.num_tokens else self._contents.split(node, match.num_tokens)

    def _protect(self, node: Node | None, top: Node | None, priority: int) -> None:
        """Add a lock to the nodes from `node` up to, not including, `top`."""
        queue, learner = self._contents.queue, self._contents.learner
        while node is not top:
            assert node is not None, "the lock's node is not above the node to protect"
            if not node.ref_count:
                self._num_protected += node.num_pages
                queue.discard(node)
                if learner is not None and node.last_access < self.clock and node.parent is not None:
                    learner.reused(node, self.clock)
            node.ref_count += 1
            node.uses += 1
            if node.priority < priority:  # noqa: PLR1730 - max() would double the loop's time
                node.priority = priority
            node = node.parent
