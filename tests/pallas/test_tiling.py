"""Rows cut into tiles, against a plain loop."""

import jax.numpy as jnp
import numpy as np
import pytest

from jradix.pallas.tiling import cut_rows

ROWS = [
    pytest.param((5,), (5,), 0, id="one row"),
    pytest.param((9, 3, 17), (9, 1, 8), 3, id="ragged rows on cached prefixes, then padding"),
    pytest.param((0, 6, 0, 0, 8), (0, 6, 0, 0, 8), 2, id="empty rows between others"),
    pytest.param((0, 0), (0, 0), 4, id="no row at all"),
]


@pytest.mark.parametrize("tile_len", [1, 4, 16])
@pytest.mark.parametrize(("seq_lens", "new", "padding"), ROWS)
def test_every_query_lies_in_one_tile_of_its_row_in_order(
    seq_lens: tuple[int, ...], new: tuple[int, ...], padding: int, tile_len: int
) -> None:
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    num_tokens = int(starts[-1]) + padding
    tiling = cut_rows(jnp.asarray(seq_lens, jnp.int32), jnp.asarray(starts), num_tokens, tile_len)
    expected = [
        (row, seq_len - count + first, list(range(starts[row] + first, starts[row] + min(count, first + tile_len))))
        for row, (seq_len, count) in enumerate(zip(seq_lens, new, strict=True))
        for first in range(0, count, tile_len)
    ]
    counts = np.asarray(tiling.counts)
    found = [
        (int(tiling.rows[i]), int(tiling.starts[i]), np.asarray(tiling.tokens)[i, : counts[i]].tolist())
        for i in np.flatnonzero(counts)
    ]
    assert found == expected
    assert not counts[len(expected) :].any(), "tiles without queries come last"


@pytest.mark.parametrize(("seq_lens", "new", "padding"), ROWS)
def test_what_is_gathered_is_put_back_where_it_was_and_padding_is_zero(
    seq_lens: tuple[int, ...], new: tuple[int, ...], padding: int
) -> None:
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    num_tokens = int(starts[-1]) + padding
    q = 1.0 + jnp.arange(num_tokens * 6, dtype=jnp.float32).reshape(num_tokens, 2, 3)
    tiling = cut_rows(jnp.asarray(seq_lens, jnp.int32), jnp.asarray(starts), num_tokens, tile_len=4)
    back = np.asarray(tiling.put_back(tiling.gather(q)))
    np.testing.assert_array_equal(back[: starts[-1]], np.asarray(q)[: starts[-1]])
    assert not back[starts[-1] :].any()
