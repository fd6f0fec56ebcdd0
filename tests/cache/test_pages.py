"""The page allocator: every page in exactly one state, and refusals that change nothing."""

import numpy as np
import pytest

from jradix.cache.pages import FREE, PRIVATE, PageAllocator


def ids(*page_ids: int) -> np.ndarray:
    return np.array(page_ids, np.int32)


def counts(pages: PageAllocator) -> tuple[int, int, int]:
    return pages.num_free, pages.num_private, pages.num_tree


def test_pages_come_out_in_order_and_never_page_zero() -> None:
    pages = PageAllocator(5)
    assert pages.take(3).tolist() == [1, 2, 3]
    assert pages.take(2).tolist() == [4, 5]
    assert pages.take(0).tolist() == []
    assert counts(pages) == (0, 5, 0)


def test_a_page_returned_is_handed_out_again_once() -> None:
    pages = PageAllocator(3)
    taken = pages.take(3)
    pages.give_back(ids(2))
    assert pages.take(1).tolist() == [2]
    pages.give_back(taken)
    assert sorted(pages.take(3).tolist()) == [1, 2, 3]


@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_pool_without_pages_is_refused(num_pages: int) -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PageAllocator(num_pages)


@pytest.mark.parametrize("bad", [[3, 3], [1, 2, 1], [0], [0, 1], [-1], [6], [5], [1, 5], [4], [1, 4]])
def test_a_wrong_return_changes_nothing(bad: list[int]) -> None:
    """Twice in one call, the null page, no page at all, free already (5), owned by the tree (4)."""
    pages = PageAllocator(5)
    pages.adopt(pages.take(4)[3:])
    before = counts(pages), pages.free_ids.tolist(), pages.states.tolist()
    with pytest.raises(AssertionError):
        pages.give_back(ids(*bad))
    assert (counts(pages), pages.free_ids.tolist(), pages.states.tolist()) == before


def test_returning_a_page_twice_in_two_calls_is_refused() -> None:
    pages = PageAllocator(3)
    pages.take(3)
    pages.give_back(ids(3))
    with pytest.raises(AssertionError, match="page 3 is free"):
        pages.give_back(ids(3))
    assert counts(pages) == (1, 2, 0)


def test_taking_more_than_is_free_is_refused() -> None:
    pages = PageAllocator(3)
    with pytest.raises(AssertionError, match="asked for 4 pages, 3 are free"):
        pages.take(4)
    assert pages.states[1:].tolist() == [FREE] * 3


def test_the_returned_ids_do_not_alias_the_free_list() -> None:
    pages = PageAllocator(4)
    taken = pages.take(2)
    taken[:] = 99
    assert pages.take(2).tolist() == [3, 4]
    assert pages.states[1:].tolist() == [PRIVATE] * 4
