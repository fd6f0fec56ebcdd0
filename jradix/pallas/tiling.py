"""Cuts rows of new tokens into tiles of one row each, and puts back what was computed for the tiles."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiling(NamedTuple):
    """Tiles of consecutive tokens of one row each; tiles without queries come last.

    rows: int32 `[tiles]`, the row of each.
    starts: int32 `[tiles]`, position of the first query; the others follow it. 0 if there is none.
    counts: int32 `[tiles]`, queries, at most `tile_len`.
    tokens: int32 `[tiles, tile_len]`, index of each query among the step's tokens; anything where there is no query.
    places: int32 `[tokens]`, where each token lies among all places of tiles; -1 for a token of no row.
    """

    rows: jax.Array
    starts: jax.Array
    counts: jax.Array
    tokens: jax.Array
    places: jax.Array

    def gather(self, q: jax.Array) -> jax.Array:
        """`[tokens, ...]` -> `[tiles, tile_len, ...]`."""
        return q.at[self.tokens].get(mode="clip")

    def put_back(self, out: jax.Array) -> jax.Array:
        """`[tiles, tile_len, ...]` -> `[tokens, ...]`, zeros for tokens of no row."""
        flat = out.reshape(-1, *out.shape[2:])
        owned = (self.places >= 0).reshape(-1, *[1] * (flat.ndim - 1))
        return jnp.where(owned, flat.at[self.places].get(mode="clip"), 0)


def cut_rows(seq_lens: jax.Array, query_starts: jax.Array, num_tokens: int, tile_len: int) -> Tiling:
    """Tiles of `tile_len` tokens, for the `seq_lens` and `query_starts` of `ops.extend_attention`."""
    num_rows = seq_lens.shape[0]
    num_tiles = -(-num_tokens // tile_len) + num_rows - 1  # every row may waste a part of its last tile
    query_lens = jnp.diff(query_starts)
    tiles_of_row = -(-query_lens // tile_len)
    ends = jnp.cumsum(tiles_of_row, dtype=jnp.int32)

    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    rows = jnp.minimum(jnp.searchsorted(ends, tile, side="right").astype(jnp.int32), num_rows - 1)
    first = (tile - (ends - tiles_of_row)[rows]) * tile_len  # of the row's new tokens
    counts = jnp.clip(query_lens[rows] - first, 0, tile_len)
    starts = jnp.where(counts > 0, (seq_lens - query_lens)[rows] + first, 0)
    tokens = (query_starts[rows] + first)[:, None] + jnp.arange(tile_len, dtype=jnp.int32)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(query_starts, token, side="right").astype(jnp.int32) - 1
    owned = (row >= 0) & (row < num_rows)
    row = jnp.clip(row, 0, num_rows - 1)
    # A row's tiles stand side by side and all but the last are full, so its tokens do too.
    places = (ends - tiles_of_row)[row] * tile_len + token - query_starts[row]
    return Tiling(rows, starts, counts, tokens, jnp.where(owned, places, -1))
