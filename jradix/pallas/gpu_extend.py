"""Attention of rows with one or more new tokens each on a Hopper GPU: `ops.extend_attention` on tensor cores."""

from typing import Any

import jax
import jax.numpy as jnp

from jradix.pallas.gpu_blocks import Blocks
from jradix.pallas.gpu_kernel import Tiles, attend, merge
from jradix.pallas.layout import kv_heads_of
from jradix.pallas.scoring import Scoring


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
    """See `ops.extend_attention`; the pool is split, and `gpu_blocks.unsupported` has nothing against the shapes.

    Args:
        blocks: `gpu_blocks.extend_blocks`.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    tokens, q_heads, head_dim = q.shape
    rows, kv_heads = page_table.shape[0], kv_heads_of(pool)
    group = q_heads // kv_heads
    tile_len = blocks.lines // group
    num_tiles = -(-tokens // tile_len) + rows - 1  # every row may waste a part of its last tile
    query_lens = jnp.diff(query_starts)
    tile_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-query_lens // tile_len), dtype=jnp.int32)])

    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(tile_starts, tile, side="right").astype(jnp.int32) - 1, 0, rows - 1)
    in_row = (tile - tile_starts[row]) * tile_len  # of a tile's first query
    num_queries = jnp.clip(query_lens[row] - in_row, 0, tile_len)
    first = jnp.where(num_queries > 0, (seq_lens - query_lens)[row] + in_row, 0)
    tiled = q.at[(query_starts[row] + in_row)[:, None] + jnp.arange(tile_len)].get(mode="clip")
    tiled = tiled.reshape(num_tiles, tile_len, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    tiled = tiled.reshape(num_tiles, kv_heads, tile_len * group, head_dim)
    tiled = jnp.pad(tiled, [(0, 0), (0, 0), (0, blocks.lines - tile_len * group), (0, 0)])
    tiles = Tiles(tiled, row, first, first + num_queries)

    mixes, lse = attend(tiles, pool, page_table, scoring, group=group, splits=1, blocks=blocks, interpret=interpret)
    shape = (1, num_tiles, kv_heads, tile_len, group)
    mixes = mixes[..., : tile_len * group, :].reshape(*shape, head_dim)
    lse = lse[..., : tile_len * group].reshape(shape)
    out = merge(mixes, lse, None if sinks is None else sinks.reshape(kv_heads, 1, group))
    out = out.transpose(0, 2, 1, 3, 4).reshape(num_tiles * tile_len, q_heads, head_dim)
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.searchsorted(query_starts, token, side="right").astype(jnp.int32) - 1
    owned = (row >= 0) & (row < rows)
    row = jnp.clip(row, 0, rows - 1)
    place = tile_starts[row] * tile_len + token - query_starts[row]  # a row's tiles stand side by side
    return jnp.where(owned[:, None, None], out.at[place].get(mode="clip"), 0)
