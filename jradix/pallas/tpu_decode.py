"""Attention of one new token a row on a TPU."""

from typing import Any

import jax
import jax.numpy as jnp

from jradix.pallas.layout import kv_heads_of
from jradix.pallas.scoring import Scoring
from jradix.pallas.tpu_attention import Items, attend
from jradix.pallas.tpu_blocks import Blocks


def decode_attention(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    scoring: Scoring,
    sinks: jax.Array | None = None,
    *,
    blocks: Blocks,
    interpret: Any = False,
) -> jax.Array:
    """See `ops.decode_attention`; `pool` is joined, and every row is an item of one query."""
    rows, q_heads, head_dim = q.shape
    kv_heads = kv_heads_of(pool)
    items = Items(
        q.reshape(rows, kv_heads, q_heads // kv_heads, head_dim),
        jnp.arange(rows, dtype=jnp.int32),
        seq_lens - 1,
        jnp.minimum(seq_lens, 1),
    )
    out = attend(items, pool, page_table, scoring, sinks, tile_len=1, blocks=blocks, interpret=interpret)
    return out.reshape(rows, q_heads, head_dim)
