"""Attention of rows with one or more new tokens each on a Hopper GPU: `ops.extend_attention` on tensor cores."""

from typing import Any

import jax
import jax.numpy as jnp

from jradix.pallas.gpu_blocks import Blocks
from jradix.pallas.gpu_kernel import Tiles, attend, merge
from jradix.pallas.layout import kv_heads_of
from jradix.pallas.scoring import Scoring
from jradix.pallas.tiling import cut_rows


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
    kv_heads = kv_heads_of(pool)
    group = q_heads // kv_heads
    tile_len = blocks.lines // group
    tiling = cut_rows(seq_lens, query_starts, tokens, tile_len)
    queries = tiling.gather(q).reshape(-1, tile_len, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    queries = queries.reshape(len(queries), kv_heads, tile_len * group, head_dim)
    queries = jnp.pad(queries, [(0, 0), (0, 0), (0, blocks.lines - tile_len * group), (0, 0)])
    tiles = Tiles(queries, tiling.rows, tiling.starts, tiling.starts + tiling.counts)

    mixes, lse = attend(tiles, pool, page_table, scoring, group=group, splits=1, blocks=blocks, interpret=interpret)
    shape = (1, len(queries), kv_heads, tile_len, group)
    mixes = mixes[..., : tile_len * group, :].reshape(*shape, head_dim)
    lse = lse[..., : tile_len * group].reshape(shape)
    out = merge(mixes, lse, None if sinks is None else sinks.reshape(kv_heads, 1, group))
    return tiling.put_back(out.transpose(0, 2, 1, 3, 4).reshape(-1, tile_len, q_heads, head_dim))
