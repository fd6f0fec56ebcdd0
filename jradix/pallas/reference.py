"""Paged attention in plain jax.numpy, a row at a time in float32: the oracle of every other implementation."""

import jax
import jax.numpy as jnp

from jradix.pallas.layout import kv_heads_of, page_size_of, read_pages
from jradix.pallas.scoring import Scoring


def extend_attention(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    query_starts: jax.Array,
    scoring: Scoring,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of each row's new tokens over all its positions; arguments as in `ops.extend_attention`."""
    tokens, q_heads, head_dim = q.shape
    rows, max_pages = page_table.shape
    kv_heads, page_size = kv_heads_of(pool), page_size_of(pool)
    kv_len = max_pages * page_size
    out = jnp.zeros((tokens, q_heads, head_dim), jnp.float32)
    token, kv_pos = jnp.arange(tokens), jnp.arange(kv_len)
    for row in range(rows):
        keys, values = (x[0].astype(jnp.float32) for x in read_pages(pool, page_table[row : row + 1], head_dim))
        q_pos = seq_lens[row] - query_starts[row + 1] + token
        mine = (token >= query_starts[row]) & (token < query_starts[row + 1])
        held = kv_pos < seq_lens[row]
        seen = scoring.seen(q_pos[:, None], kv_pos[None, :]) & held[None, :]
        grouped = q.astype(jnp.float32).reshape(tokens, kv_heads, -1, head_dim)
        products = jnp.einsum("tkgd,ksd->tkgs", grouped, jnp.where(held[None, :, None], keys, 0))
        scores = scoring.capped(products) * scoring.exponent
        weights = _masked_softmax(scores, seen[:, None, None, :], sinks, kv_heads)
        mixed = jnp.einsum("tkgs,ksd->tkgd", weights, jnp.where(held[None, :, None], values, 0))
        out = jnp.where(mine[:, None, None], mixed.reshape(tokens, q_heads, head_dim), out)
    return out.astype(q.dtype)


def _masked_softmax(scores: jax.Array, seen: jax.Array, sinks: jax.Array | None, kv_heads: int) -> jax.Array:
    """Softmax over the last axis; a fully masked row is all zeros. A sink is one more logit per head with no value."""
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1)
    if sink is not None:
        top = jnp.maximum(top, sink)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total += jnp.exp(sink - top)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 0.0)
