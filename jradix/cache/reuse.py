"""The adaptive eviction policy: learns how long pages wait for their next use, and keeps those worth the space.

Pages are put in classes by how often they were used so far. For each class the policy keeps a histogram of *reuse
times*: how long an idle page waited until it was used again, also when it had been evicted meanwhile, which a table of
ghosts remembers. The worth of a page idle for time `a` is the best rate of hits per page and time that waiting can
earn,

    worth(a) = max over t > a of  P(reused in (a, t]) / E[time kept in (a, t]],

the Gittins index of the problem "when to give up waiting", and close to the hit density of LHD (Beckmann et al.,
NSDI 2018). The leaf of least worth goes first. Where reuse gets less likely with age this is LRU within a class; where
pages come back only after longer than the pool can hold them all, it keeps some of them for long and drops the rest at
once, which LRU cannot. As long as nothing has been learned, it is LRU.

All of it is plain Python: numpy takes longer for a handful of numbers than their arithmetic.
"""

from array import array
from bisect import bisect_right
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from math import exp, inf, log2
from zlib import crc32

from jradix.cache.radix import TOKEN_BYTES, Node

# Pages used once, twice, ... and so on: the first use count of each class. Beyond a few uses the ratio matters.
CLASS_STARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
NUM_CLASSES = len(CLASS_STARTS)
MAX_USES = 255  # higher counts are not told apart
BUCKETS_PER_OCTAVE = 4  # of reuse time
NUM_BUCKETS = 24 * BUCKETS_PER_OCTAVE
LEARN_EVERY = 256  # ticks of the clock between two updates of the worth tables
MEMORY = 64  # updates after which old observations count 1/e

NOTHING = (inf, 0)  # the rank of no leaf

_CLASSES = [max(0, bisect_right(CLASS_STARTS, uses) - 1) for uses in range(MAX_USES + 1)]  # by uses
_BUCKET_STARTS = [2.0 ** (bucket / BUCKETS_PER_OCTAVE) - 1.0 for bucket in range(NUM_BUCKETS + 1)]  # ticks


def class_of(uses: int) -> int:
    return _CLASSES[uses] if uses < MAX_USES else NUM_CLASSES - 1


def bucket_of(age: int) -> int:
    """The histogram bucket of a reuse time in ticks."""
    return min(int(log2(1 + age) * BUCKETS_PER_OCTAVE), NUM_BUCKETS - 1)


class ReuseTimes:
    """Histograms of reuse times by class, and the worth tables computed from them."""

    def __init__(self) -> None:
        self.started = [0.0] * NUM_CLASSES  # idle intervals begun, in pages
        self.reused = [[0.0] * NUM_BUCKETS for _ in range(NUM_CLASSES)]  # of those, ended by a use, by their length
        self.worth = [[0.0] * NUM_BUCKETS for _ in range(NUM_CLASSES)]  # hits per page and tick, by age

    def learn(self) -> None:
        """Recompute `worth`, and let old observations fade."""
        fade = exp(-1 / MEMORY)
        for row, reused in enumerate(self.reused):
            if any(reused):
                self.worth[row] = worth_by_age(self.started[row], reused)
                self.reused[row] = [count * fade for count in reused]
            self.started[row] *= fade


def worth_by_age(started: float, reused: list[float]) -> list[float]:
    """The best hits per page and tick for a page of each age, [buckets], see the top of this file.

    started: idle intervals begun. reused: those ended by a use, by the bucket of their length, [buckets].
    """
    points = [(0.0, 0.0)]  # time kept and hits up to the start of each bucket
    time = hits = 0.0
    num_buckets = max((bucket + 1 for bucket, count in enumerate(reused) if count), default=0)  # worth 0 after those
    for bucket, count in enumerate(reused[:num_buckets]):
        time += max(started - hits - count / 2, 1e-9) * (_BUCKET_STARTS[bucket + 1] - _BUCKET_STARTS[bucket])
        hits += count
        points.append((time, hits))
    # The best slope from a point to any later one leads to the next corner of the concave hull of all later points,
    # which a scan from the end keeps on a stack, each corner with the slope from it to the next.
    worth = [0.0] * NUM_BUCKETS
    hull = [(time, hits, -inf)]
    for bucket in range(num_buckets - 1, -1, -1):
        time, hits = points[bucket]
        while True:
            corner_time, corner_hits, onward = hull[-1]
            slope = (corner_hits - hits) / (corner_time - time)
            if slope > onward:
                break
            hull.pop()
        worth[bucket] = slope
        hull.append((time, hits, slope))
    return worth


class GhostTable:
    """Remembers of evicted pages when they were last used and how often. A direct-mapped table of bounded size.

    Of each run of pages evicted together only the first and the last are put in. A page is recognised by a checksum of
    its own tokens and its namespace, not of its whole prefix: a mistake costs a wrong observation and never a wrong
    hit. Newer ghosts overwrite older ones of the same slot.
    """

    def __init__(self, num_slots: int, page_size: int) -> None:
        num_bits = max(1, (num_slots - 1).bit_length())
        self._shift = 32 - num_bits
        self._tags = array("I", bytes(4 << num_bits))  # 0: nothing here
        self._records = array("q", bytes(8 << num_bits))  # time of the last access * 256 + uses
        self._ahead = array("I", bytes(4 << num_bits))  # bytes of tokens from this page to the last of its run
        self._page_bytes = page_size * TOKEN_BYTES

    def put(self, tokens: bytes, uses: int, last_access: int, namespace: Hashable = None) -> None:
        """A run of pages has been evicted."""
        seed = _seed_of(namespace)
        record = last_access * 256 + min(uses, MAX_USES)
        last = len(tokens) - self._page_bytes
        for start in (0, last) if last else (0,):
            checksum = crc32(tokens[start : start + self._page_bytes], seed)
            slot = checksum >> self._shift
            self._tags[slot], self._records[slot], self._ahead[slot] = checksum | 1, record, last - start

    def take(self, tokens: bytes, namespace: Hashable = None) -> list[tuple[int, int, int]]:
        """(pages, last access, uses) of the runs at the head of `tokens`, up to the last page that is remembered."""
        tags, shift, page_bytes, num_bytes = self._tags, self._shift, self._page_bytes, len(tokens)
        runs: list[tuple[int, int, int]] = []
        seed = _seed_of(namespace)
        start = begin = 0
        while start < num_bytes:
            checksum = crc32(tokens[start : start + page_bytes], seed)
            slot = checksum >> shift
            if tags[slot] == checksum | 1:
                tags[slot] = 0
                # A page between two remembered ones belongs to the run that ends at the second.
                num_pages = (start - begin) // page_bytes + 1
                runs.append((num_pages, self._records[slot] >> 8, self._records[slot] & 255))
                begin = start + page_bytes
                last = start + self._ahead[slot]
                if begin <= last < num_bytes:
                    checksum = crc32(tokens[last : last + page_bytes], seed)
                    if tags[checksum >> shift] == checksum | 1:
                        start = last - page_bytes  # nothing between them needs to be looked up
            start += page_bytes
        return runs


def _seed_of(namespace: Hashable) -> int:
    """Of checksums: uses that pages had elsewhere would tell one tenant what another has asked."""
    return crc32(repr(namespace).encode())


class ReuseQueue:
    """The candidates by class; each class can give its longest and its shortest idle leaf."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._times = ReuseTimes()
        self._ghosts = GhostTable(8 * num_pages, page_size)
        self._now = 0
        self._learned_at = 0
        self._last_ticket = 0
        self._num_valid = 0
        # Each leaf is in two heaps of its class: 2 * class holds the oldest first, 2 * class + 1 the newest. Removal is
        # lazy, as in HeapQueue.
        self._heaps: list[list[tuple[int, int, Node]]] = [[] for _ in range(2 * NUM_CLASSES)]
        # The heap to evict from, and the rank of the best leaf elsewhere, until the clock advances.
        self._choice: int | None = None
        self._runner_up = NOTHING

    def __len__(self) -> int:
        return self._num_valid

    def add(self, leaf: Node) -> None:
        self._last_ticket = leaf.ticket = self._last_ticket + 1
        self._num_valid += 1
        oldest = 2 * class_of(leaf.uses)
        heappush(self._heaps[oldest], (leaf.last_access, leaf.ticket, leaf))
        heappush(self._heaps[oldest + 1], (-leaf.last_access, leaf.ticket, leaf))
        if self._choice is not None and self._rank(leaf, oldest // 2) < self._runner_up:
            self._choice = None

    def discard(self, node: Node) -> None:
        if node.ticket:
            node.ticket = 0
            self._num_valid -= 1
            oldest = 2 * class_of(node.uses)
            for index in (oldest, oldest + 1):
                heap = self._heaps[index]
                if 2 * len(heap) > 3 * self._num_valid + 128:
                    self._heaps[index] = [entry for entry in heap if entry[1] == entry[2].ticket]
                    heapify(self._heaps[index])

    def first(self) -> Node:
        """The leaf of least worth; among equals the one idle for longest. Of each class two leaves are looked at."""
        if self._choice is None or self._head_rank(self._choice) > self._runner_up:
            best, self._runner_up = NOTHING, NOTHING
            for index, heap in enumerate(self._heaps):
                if heap and (rank := self._head_rank(index)) < self._runner_up:
                    if rank < best:
                        rank, best, self._choice = best, rank, index
                    self._runner_up = rank
        assert self._choice is not None, "there is no leaf to evict"
        return self._heaps[self._choice][0][2]

    def _head_rank(self, index: int) -> tuple[float, int]:
        heap = self._heaps[index]
        while heap and heap[0][1] != heap[0][2].ticket:
            heappop(heap)
        return self._rank(heap[0][2], index // 2) if heap else NOTHING

    def _rank(self, leaf: Node, row: int) -> tuple[float, int]:
        return self._times.worth[row][bucket_of(self._now - leaf.last_access)], leaf.last_access

    def violations(self) -> list[str]:
        found: list[str] = []
        for name, heaps in (("oldest", self._heaps[::2]), ("newest", self._heaps[1::2])):
            valid = sum(entry[1] == entry[2].ticket for heap in heaps for entry in heap)
            if valid != self._num_valid:
                found.append(f"the queue counts {self._num_valid} entries and holds {valid} by {name}")
        return found

    def idle(self, node: Node) -> None:
        """The last lock on `node` has ended: its pages begin to wait for the next use."""
        self._times.started[class_of(node.uses)] += node.num_pages

    def reused(self, node: Node, now: int) -> None:
        """The waiting of `node`, whose `uses` do not count this use yet, has ended."""
        self._times.reused[class_of(node.uses)][bucket_of(now - node.last_access)] += node.num_pages

    def evicted(self, tokens: bytes, uses: int, last_access: int, namespace: Hashable) -> None:
        """The pages of `tokens`, whole ones, have been evicted."""
        self._ghosts.put(tokens, uses, last_access, namespace)

    def returned(self, tokens: bytes, now: int, namespace: Hashable) -> tuple[int, int]:
        """New pages enter the tree: how many of them, from the first on, had been evicted, and their uses before."""
        runs = self._ghosts.take(tokens, namespace)
        middle = sum(num_pages for num_pages, _, _ in runs) // 2
        passed = typical = 0
        for num_pages, last_access, uses in runs:
            self._times.reused[class_of(uses)][bucket_of(now - last_access)] += num_pages
            if passed <= middle:
                typical = uses
            passed += num_pages
        return passed, typical

    def tick(self, now: int) -> None:
        """The cache's clock has advanced."""
        self._now = now
        self._choice = None
        if now - self._learned_at >= LEARN_EVERY:
            self._learned_at = now
            self._times.learn()
