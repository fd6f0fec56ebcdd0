"""Paged attention on XLA alone: a loop over blocks of gathered pages with an online softmax, for any backend.

Queries are cut into tiles that belong to one row each; a decode row is a tile of one query. Tiles are taken a group at
a time, and a group walks the keys and values of its rows block by block (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018; the blocking is that of FlashAttention, Dao et al., 2022). What is gathered at any
moment is one block of one group: at most `BLOCK_BYTES` of keys and as much of values, however long the rows are.
Loops end at the longest row of the group, so padded page tables cost nothing.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jradix.pallas.layout import kv_heads_of, page_size_of, read_pages

BLOCK_BYTES = 1 << 20  # keys of one block stay in the 2 MB of a core's second-level cache beside their values
MAX_TILE_LEN = 128
MASKED = -1e30  # finite: exp(MASKED - MASKED) must not be NaN for a row that has seen nothing yet


class Tiles(NamedTuple):
    """Queries cut into tiles of one row each.

    q: `[tiles, kv_heads, group * tile_len, head_dim]`, all query heads of a KV head folded into the matmul's rows.
    positions: int32 `[tiles, tile_len]`, each query's position; -1 where there is no query.
    page_table: int32 `[tiles, max_pages]`.
    """

    q: jax.Array
    positions: jax.Array
    page_table: jax.Array


def decode_attention(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """See `ops.decode_attention`: every row is one tile of one query."""
    rows, q_heads, head_dim = q.shape
    kv_heads = kv_heads_of(pool)
    tiles = Tiles(q.reshape(rows, kv_heads, q_heads // kv_heads, head_dim), seq_lens[:, None] - 1, page_table)
    out = _attend(tiles, pool, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
    return out.reshape(rows, q_heads, head_dim)


def extend_attention(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    query_starts: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """See `ops.extend_attention`."""
    tokens, q_heads, head_dim = q.shape
    rows, kv_heads = page_table.shape[0], kv_heads_of(pool)
    tile_len = _tile_len(tokens, rows)
    num_tiles = -(-tokens // tile_len) + rows - 1  # every row may waste a part of its last tile
    query_lens = jnp.diff(query_starts)
    tile_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-query_lens // tile_len), dtype=jnp.int32)])

    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(tile_starts, tile, side="right").astype(jnp.int32) - 1, 0, rows - 1)
    in_row = (tile - tile_starts[row])[:, None] * tile_len + jnp.arange(tile_len, dtype=jnp.int32)
    is_query = (in_row >= 0) & (in_row < query_lens[row][:, None])
    positions = jnp.where(is_query, (seq_lens - query_lens)[row][:, None] + in_row, -1)
    tiled = q.at[query_starts[row][:, None] + in_row].get(mode="clip")  # [tiles, tile_len, q_heads, head_dim]
    tiled = tiled.reshape(num_tiles, tile_len, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    tiles = Tiles(tiled.reshape(num_tiles, kv_heads, -1, head_dim), positions, page_table[row])

    out = _attend(tiles, pool, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
    out = out.reshape(num_tiles, kv_heads, -1, tile_len, head_dim).transpose(0, 3, 1, 2, 4)
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.searchsorted(query_starts, token, side="right").astype(jnp.int32) - 1
    owned = (row >= 0) & (row < rows)
    row = jnp.clip(row, 0, rows - 1)
    in_row = token - query_starts[row]
    flat = (tile_starts[row] + in_row // tile_len) * tile_len + in_row % tile_len
    back = out.reshape(num_tiles * tile_len, q_heads, head_dim).at[flat].get(mode="clip")
    return jnp.where(owned[:, None, None], back, 0)


def _tile_len(tokens: int, rows: int) -> int:
    """Long tiles reread keys less often, short ones waste less where many rows share the tokens."""
    return min(MAX_TILE_LEN, 1 << max(3, math.ceil(math.log2(max(1, tokens // rows)))), tokens)


def _attend(
    tiles: Tiles, pool: jax.Array, *, scale: float, window: int | None, soft_cap: float | None, sinks: jax.Array | None
) -> jax.Array:
    """Attention output of every tile, shaped and typed like `tiles.q`."""
    num_tiles, kv_heads, queries, head_dim = tiles.q.shape
    page_size, max_pages = page_size_of(pool), tiles.page_table.shape[1]
    page_bytes = kv_heads * page_size * head_dim * pool.dtype.itemsize
    group = min(num_tiles, max(1, BLOCK_BYTES // (page_bytes * max(1, 128 // page_size))))
    block_pages = min(max_pages, max(1, BLOCK_BYTES // (page_bytes * group)))

    def attend_group(some: Tiles) -> jax.Array:
        return _attend_group(some, pool, block_pages, scale, window, soft_cap, sinks)

    if group == num_tiles:
        return attend_group(tiles)
    num_groups = -(-num_tiles // group)
    padding = num_groups * group - num_tiles
    grouped = Tiles(
        *(
            jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), constant_values=fill).reshape(
                num_groups, group, *x.shape[1:]
            )
            for x, fill in zip(tiles, (0, -1, 0), strict=True)
        )
    )
    return jax.lax.map(attend_group, grouped).reshape(-1, kv_heads, queries, head_dim)[:num_tiles]


def _attend_group(
    tiles: Tiles,
    pool: jax.Array,
    block_pages: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    num_tiles, kv_heads, queries, head_dim = tiles.q.shape
    tile_len = tiles.positions.shape[1]
    block_len = block_pages * page_size_of(pool)
    q_pos = jnp.tile(tiles.positions, (1, queries // tile_len))[:, None, :, None]  # [tiles, 1, queries, 1]
    last = tiles.positions.max(axis=1)  # [tiles], -1 for a tile with no query
    padding = -tiles.page_table.shape[1] % block_pages
    page_table = jnp.pad(tiles.page_table, [(0, 0), (0, padding)])

    def step(block: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, mixed = carry
        pages = jax.lax.dynamic_slice_in_dim(page_table, block * block_pages, block_pages, axis=1)
        keys, values = read_pages(pool, pages)
        kv_pos = block * block_len + jnp.arange(block_len, dtype=jnp.int32)
        # Whatever lies past the row's last position, NaN included, must not reach a sum: 0 * NaN is NaN.
        values = jnp.where((kv_pos <= last[:, None])[:, None, :, None], values, 0)
        scores = jnp.einsum("nkqd,nksd->nkqs", tiles.q, keys, preferred_element_type=jnp.float32) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = kv_pos <= q_pos
        if window is not None:
            seen &= kv_pos > q_pos - window
        scores = jnp.where(seen, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - new_top), 0.0)
        decay = jnp.exp(top - new_top)
        total = total * decay + weights.sum(axis=-1, keepdims=True)
        mixed = mixed * decay + jnp.einsum(
            "nkqs,nksd->nkqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        return new_top, total, mixed

    if sinks is None:
        top = jnp.full((num_tiles, kv_heads, queries, 1), MASKED, jnp.float32)
        total = jnp.zeros_like(top)
    else:
        per_query = jnp.repeat(sinks.astype(jnp.float32).reshape(kv_heads, -1), tile_len, axis=1)
        top = jnp.broadcast_to(per_query[None, :, :, None], (num_tiles, kv_heads, queries, 1))
        total = jnp.ones_like(top)
    mixed = jnp.zeros((num_tiles, kv_heads, queries, head_dim), jnp.float32)
    first = jnp.int32(0)
    if window is not None:
        earliest = jnp.where(tiles.positions >= 0, tiles.positions, jnp.iinfo(jnp.int32).max).min()
        first = jnp.maximum(earliest - window + 1, 0) // block_len
    _, total, mixed = jax.lax.fori_loop(first, last.max() // block_len + 1, step, (top, total, mixed))
    return (mixed / jnp.where(total > 0, total, 1.0)).astype(tiles.q.dtype)
