"""The only door to attention over the KV pool: checks shapes and picks the implementation for this backend."""

import jax

from jradix.pallas import layout, xla
from jradix.pallas.scoring import Scoring


def write_kv(pool: jax.Array, keys: jax.Array, values: jax.Array, pages: jax.Array, offsets: jax.Array) -> jax.Array:
    """Store the new tokens' keys and values.

    Args:
        pool: split or joined, see `layout`; donated by the step that calls this.
        keys, values: `[tokens, kv_heads, head_dim]`.
        pages, offsets: int32 `[tokens]`, flat page id (layer included) and place inside the page. A page id
            outside the pool drops the write.

    Returns:
        The updated pool.
    """
    return layout.write_tokens(pool, keys, values, pages, offsets)


def extend_attention(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    query_starts: jax.Array,
    scoring: Scoring,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of rows with one or more new tokens each, on top of what the pool already holds.

    Args:
        q: `[tokens, q_heads, head_dim]`, the rows' new tokens back to back.
        pool: see `write_kv`; the new tokens are already in it.
        page_table: int32 `[rows, max_pages]`, flat page ids (layer included); entries past a row's length are ignored.
        seq_lens: int32 `[rows]`, positions of each row in the pool, new tokens included; 0 for a padding row.
        query_starts: int32 `[rows + 1]`, row `r` owns the tokens `[query_starts[r], query_starts[r + 1])`,
            which are its last positions.
        scoring: scale, window and soft cap.
        sinks: `[q_heads]`, one more logit per head that takes probability and gives nothing.

    Returns:
        `[tokens, q_heads, head_dim]`, zeros for tokens of no row.
    """
    return xla.extend_attention(q, pool, page_table, seq_lens, query_starts, scoring, sinks)


def decode_attention(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    scoring: Scoring,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of one new token a row: `extend_attention` where token `r` is row `r`'s last position."""
    return xla.decode_attention(q, pool, page_table, seq_lens, scoring, sinks)
