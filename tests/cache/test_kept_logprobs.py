"""What is known of cached tokens stays with their pages, and never with a page's next tokens."""

import numpy as np

from jradix.cache.kept_logprobs import KeptLogprobs

TABLE = np.array([3, 1, 2], np.int32)


def test_values_are_found_by_position_whatever_page_they_lie_in() -> None:
    kept = KeptLogprobs(num_pages=4, page_size=4)
    kept.record(TABLE, 3, np.array([-1.0, -2.0, -3.0], np.float32))
    found = kept.read(TABLE, 2, 7)
    np.testing.assert_array_equal(found, np.array([np.nan, -1, -2, -3, np.nan], np.float32))
    other_table = np.array([4, 1], np.int32)  # another request that shares the page of positions 4 to 7
    np.testing.assert_array_equal(kept.read(other_table, 3, 6), np.array([np.nan, -2, -3], np.float32))


def test_a_page_with_other_tokens_knows_nothing() -> None:
    kept = KeptLogprobs(num_pages=4, page_size=4)
    kept.record(TABLE, 0, np.zeros(12, np.float32))
    kept.forget(np.array([1], np.int32))
    assert np.isnan(kept.read(TABLE, 0, 12)).tolist() == [False] * 4 + [True] * 4 + [False] * 4


def test_a_copied_head_brings_its_values_and_no_more() -> None:
    kept = KeptLogprobs(num_pages=4, page_size=4)
    kept.record(TABLE, 0, np.arange(4, dtype=np.float32))
    kept.copy_head(3, 4, 2)
    np.testing.assert_array_equal(kept.read(np.array([4], np.int32), 0, 4), [0, 1, np.nan, np.nan])
