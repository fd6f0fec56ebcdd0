"""The page allocator: which of the pool's pages are free, private to a request, or owned by the tree."""

import numpy as np
import numpy.typing as npt

FREE, PRIVATE, TREE = 0, 1, 2
STATE_NAMES = ("free", "private", "in the tree")
FEW_PAGES = 24  # up to so many a Python loop reads or sets states in less than the 1 to 2 us that numpy takes

PageIds = npt.NDArray[np.int32]


class PageAllocator:
    """Hands out page ids 1..num_pages. Page 0 is the null page, which nobody owns.

    A page moves ``free -> private -> free`` or ``free -> private -> tree -> free``. Every move checks the state it
    starts from, so that a page freed twice, or freed while the tree owns it, is an ``AssertionError`` that changes
    nothing.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"the pool needs at least one page, got num_pages={num_pages}: give it more memory")
        self.num_total = num_pages
        self.num_free = num_pages
        self.num_tree = 0
        # A stack that is popped from its end; only stack[:num_free] means anything. Page 1 comes out first.
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._bytes = bytearray(num_pages + 1)
        self._state = np.frombuffer(self._bytes, np.uint8)  # the same memory, FREE at first

    @property
    def num_private(self) -> int:
        return self.num_total - self.num_free - self.num_tree

    @property
    def free_ids(self) -> PageIds:
        """The free pages, [num_free], a copy."""
        return self._stack[: self.num_free].copy()

    @property
    def states(self) -> npt.NDArray[np.uint8]:
        """The state of every page id, [num_total + 1]; entry 0 means nothing. Not a copy: do not write to it."""
        return self._state

    def take(self, num_pages: int) -> PageIds:
        """free -> private. The caller has made sure that so many are free."""
        assert 0 <= num_pages <= self.num_free, f"asked for {num_pages} pages, {self.num_free} are free"
        top = self.num_free
        self.num_free = top - num_pages
        page_ids = self._stack[self.num_free : top][::-1].copy()
        self._set(page_ids, PRIVATE)
        return page_ids

    def give_back(self, page_ids: PageIds) -> None:
        """private -> free."""
        self.require(page_ids, PRIVATE)
        self._push(page_ids)

    def adopt(self, page_ids: PageIds) -> None:
        """private -> tree. The caller has required them to be private."""
        self._set(page_ids, TREE)
        self.num_tree += len(page_ids)

    def reclaim(self, page_ids: PageIds) -> None:
        """tree -> free."""
        assert self._all_in(page_ids, TREE), "the tree gives back a page that it does not own"
        self.num_tree -= len(page_ids)
        self._push(page_ids)

    def require(self, page_ids: PageIds, state: int) -> None:
        """Raise AssertionError unless all ids are real pages in `state`, none of them twice."""
        ids = page_ids.tolist()
        if not ids:
            return
        assert min(ids) >= 1, f"page ids must lie in 1..{self.num_total}, got {ids}"
        assert max(ids) <= self.num_total, f"page ids must lie in 1..{self.num_total}, got {ids}"
        assert len(set(ids)) == len(ids), f"a page is listed twice in {ids}"
        if not self._all_in(page_ids, state):
            wrong = ids[int((self._state[page_ids] != state).argmax())]
            raise AssertionError(
                f"pages must be {STATE_NAMES[state]}, but page {wrong} is {STATE_NAMES[self._state[wrong]]}"
            )

    def _push(self, page_ids: PageIds) -> None:
        top = self.num_free + len(page_ids)
        self._stack[self.num_free : top] = page_ids
        self._set(page_ids, FREE)
        self.num_free = top

    def _all_in(self, page_ids: PageIds, state: int) -> bool:
        if len(page_ids) > FEW_PAGES:
            return self._state.take(page_ids).tobytes().count(state) == len(page_ids)
        return [self._bytes[page] for page in page_ids.tolist()].count(state) == len(page_ids)

    def _set(self, page_ids: PageIds, state: int) -> None:
        if len(page_ids) > FEW_PAGES:
            self._state[page_ids] = state
        else:
            states = self._bytes
            for page in page_ids.tolist():
                states[page] = state
