"""Attention of rows with one or more new tokens each, on a TPU: cuts them into tiles for `tpu_attention`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jradix.pallas.scoring import Scoring
from jradix.pallas.tpu_attention import Items, attend
from jradix.pallas.tpu_blocks import MIN_TILE_LEN, Blocks


def extend_attention(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    query_starts: jax.Array,
    scoring: Scoring,
    sinks: jax.Array | None = None,
    *,
    blocks: Blocks,
    interpret: Any = False,
) -> jax.Array:
    """See `ops.extend_attention`; `pool` is joined. Each row's tokens are cut into tiles."""
    tokens, q_heads, head_dim = q.shape
    rows, kv_heads = page_table.shape[0], pool.shape[1]
    tile_len = min(blocks.tile_len, max(MIN_TILE_LEN, pl.next_power_of_2(tokens // rows)))
    num_tiles = pl.cdiv(tokens, tile_len) + rows - 1  # every row may waste a part of its last tile
    query_lens = jnp.diff(query_starts)
    ends = jnp.cumsum(pl.cdiv(query_lens, tile_len), dtype=jnp.int32)  # [rows], of each row's tiles
    begins = ends - pl.cdiv(query_lens, tile_len)

    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, tile, side="right").astype(jnp.int32), rows - 1)
    first = (tile - begins[row]) * tile_len  # of the row's new tokens
    token = (query_starts[row] + first)[:, None] + jnp.arange(tile_len, dtype=jnp.int32)
    tiled = q.at[token].get(mode="clip").reshape(num_tiles, tile_len, kv_heads, -1, head_dim)
    items = Items(
        tiled.transpose(0, 2, 3, 1, 4).reshape(num_tiles, kv_heads, -1, head_dim),
        row,
        (seq_lens - query_lens)[row] + first,
        jnp.clip(query_lens[row] - first, 0, tile_len),
    )
    out = attend(items, pool, page_table, scoring, sinks, tile_len=tile_len, blocks=blocks, interpret=interpret)

    out = out.reshape(num_tiles, kv_heads, -1, tile_len, head_dim).transpose(0, 3, 1, 2, 4)
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.searchsorted(query_starts, token, side="right").astype(jnp.int32) - 1
    owned = (row >= 0) & (row < rows)
    row = jnp.clip(row, 0, rows - 1)
    place = begins[row] * tile_len + token - query_starts[row]
    back = out.reshape(num_tiles * tile_len, q_heads, head_dim).at[place].get(mode="clip")
    return jnp.where(owned[:, None, None], back, 0)
