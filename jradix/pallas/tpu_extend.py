"""Attention of rows with one or more new tokens each, on a TPU: cuts them into tiles for `tpu_attention`."""

from typing import Any

import jax
from jax.experimental import pallas as pl

from jradix.pallas.layout import kv_heads_of
from jradix.pallas.scoring import Scoring
from jradix.pallas.tiling import cut_rows
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
    rows, kv_heads = page_table.shape[0], kv_heads_of(pool)
    tile_len = min(blocks.tile_len, max(MIN_TILE_LEN, pl.next_power_of_2(tokens // rows)))
    tiling = cut_rows(seq_lens, query_starts, tokens, tile_len)
    grouped = tiling.gather(q).reshape(-1, tile_len, kv_heads, q_heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    items = Items(grouped.reshape(len(grouped), kv_heads, -1, head_dim), tiling.rows, tiling.starts, tiling.counts)
    out = attend(items, pool, page_table, scoring, sinks, tile_len=tile_len, blocks=blocks, interpret=interpret)
    out = out.reshape(grouped.shape).transpose(0, 3, 1, 2, 4)
    return tiling.put_back(out.reshape(-1, tile_len, q_heads, head_dim))
