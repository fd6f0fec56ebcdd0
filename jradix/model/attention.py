"""One layer's attention: store the new keys and values in the pool, then attend over the pages of each row."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jradix.model.quantized_kv import quantize
from jradix.pallas import ops
from jradix.pallas.layout import KEY, VALUE, page_size_of
from jradix.pallas.ops import XLA, Kernels
from jradix.pallas.scoring import Scoring


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Which pages each token of a step reads and writes; the same for every layer.

    The step's tokens are `decode_rows` rows with one new token each, then the extend rows' tokens back to back.
    Rows stand in the same order. Either part may be empty.

    Attributes:
        positions: int32 `[tokens]`, each token's position in its sequence.
        write_pages: int32 `[tokens]`, page id that takes the token; 0, the null page, for padding.
        page_table: int32 `[rows, max_pages]`, page ids of each row.
        seq_lens: int32 `[rows]`, positions a row holds once this step's tokens are written; 0 for padding rows.
        query_starts: int32 `[extend_rows + 1]`, extend row `r` owns tokens `[query_starts[r], query_starts[r + 1])`,
            counted from the first extend token.
        pages_per_layer: pages of one layer in the pool, the null page included.
        kernels: what computes attention.
        kv_scales: float32 `[layers, kv_heads, 2, head_dim]`, the keys' and the values'; None unless the pool is
            quantised.
    """

    positions: jax.Array
    write_pages: jax.Array
    page_table: jax.Array
    seq_lens: jax.Array
    query_starts: jax.Array
    pages_per_layer: int = field(metadata={"static": True})
    kernels: Kernels = field(default=XLA, metadata={"static": True})
    kv_scales: jax.Array | None = None

    @property
    def extend_rows(self) -> int:
        return self.query_starts.shape[0] - 1

    @property
    def decode_rows(self) -> int:
        return self.page_table.shape[0] - self.extend_rows


def paged_attention(
    pool: jax.Array,
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    inputs: AttentionInputs,
    layer: jax.Array | int,
    scoring: Scoring,
    sinks: jax.Array | None = None,
    *,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attend with `q` `[tokens, q_heads, head_dim]` after writing `keys` and `values` `[tokens, kv_heads, head_dim]`.

    All three are float32, rounded here: queries to `dtype`, in which attention is computed, the others to the pool's.

    Returns:
        `[tokens, q_heads, head_dim]` of `dtype`, and the updated pool (the argument is donated by the enclosing step).
    """
    scales = None if inputs.kv_scales is None else inputs.kv_scales[layer]
    if scales is not None:
        q *= _each_query_head(scales[:, KEY], q)
        keys = quantize(keys, scales[:, KEY], pool.dtype)
        values = quantize(values, scales[:, VALUE], pool.dtype)
    q, keys, values = q.astype(dtype), keys.astype(pool.dtype), values.astype(pool.dtype)
    first_page = layer * inputs.pages_per_layer
    pages = jnp.where(inputs.write_pages > 0, inputs.write_pages + first_page, -1)  # padding is written nowhere
    pool = ops.write_kv(pool, keys, values, pages, inputs.positions % page_size_of(pool), kernels=inputs.kernels)
    page_table = inputs.page_table + first_page
    split = inputs.decode_rows
    parts = []
    if split:
        rows = (page_table[:split], inputs.seq_lens[:split])
        parts.append(ops.decode_attention(q[:split], pool, *rows, scoring, sinks, kernels=inputs.kernels))
    if inputs.extend_rows:
        rows = (page_table[split:], inputs.seq_lens[split:], inputs.query_starts)
        parts.append(ops.extend_attention(q[split:], pool, *rows, scoring, sinks, kernels=inputs.kernels))
    out = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    if scales is not None:
        out = (out * _each_query_head(scales[:, VALUE], q)).astype(dtype)
    return out, pool


def _each_query_head(scale: jax.Array, q: jax.Array) -> jax.Array:
    """`[q_heads, head_dim]` of `[kv_heads, head_dim]`."""
    return jnp.repeat(scale, q.shape[1] // scale.shape[0], axis=0)
