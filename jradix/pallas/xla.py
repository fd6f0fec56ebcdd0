"""Paged attention on XLA alone: a loop over blocks of gathered pages with an online softmax, for any backend.

Queries are cut into tiles that belong to one row each; a decode row is a tile of one query. Tiles are taken a group at
a time, and a group walks the keys and values of its rows block by block (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018; the blocking is that of FlashAttention, Dao et al., 2022). Pages that all rows of a
group start with are read once for the whole group (the idea of Hydragen, Juravsky et al., 2024), so groups end where a
run of rows with a common prefix does, and such rows should stand side by side. What is gathered at any moment is one
block of one group, however long the rows are. Loops end at the last group and at its longest row, so padding rows and
padded page tables cost nothing.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jradix.pallas.layout import kv_heads_of, page_size_of, read_pages
from jradix.pallas.scoring import LOG2_E, MASKED, Scoring
from jradix.pallas.tiling import cut_rows

GROUP_TILES = 16
GROUP_QUERIES = 768
"""Tiles, and queries of a KV head, that walk together: more share a prefix at once, but the short wait for the long."""
MIN_SHARERS = 4
"""So many rows with a common prefix get groups of their own: fewer are not worth the places that these leave empty."""
BLOCK_LEN = 128
"""Positions of keys gathered at a time for each tile of a group: what is gathered and its scores fit a core's cache."""
TALL_QUERIES = 256
"""From so many queries on, and for keys that a group shares, blocks are twice as long: the operations of a block take
a CPU 0.1 ms however small it is, which is more than ragged ends lose."""
MAX_TILE_LEN = 128


def _scores(q: jax.Array, keys: jax.Array, scoring: Scoring) -> jax.Array:
    return scoring.capped(jnp.einsum("nkqd,nksd->nkqs", q, keys, preferred_element_type=jnp.float32))


class Softmax(NamedTuple):
    """A softmax over the keys seen so far: `sum(exp(score - top) * value)` and `sum(exp(score - top))`.

    top, total: f32 `[n, kv_heads, queries, 1]`. mixed: f32 `[n, kv_heads, queries, head_dim]`.
    """

    top: jax.Array
    total: jax.Array
    mixed: jax.Array

    @classmethod
    def start(cls, q: jax.Array, sinks: jax.Array | None, exponent: float) -> "Softmax":
        """Before the first key: nothing, or each head's sink, a logit that comes with no value."""
        mixed = jnp.zeros(q.shape, jnp.float32)
        shape = (*q.shape[:3], 1)
        if sinks is None:
            return cls(jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), mixed)
        _, kv_heads, queries, _ = q.shape
        per_head = sinks.astype(jnp.float32).reshape(kv_heads, -1) / exponent
        per_query = jnp.repeat(per_head, queries // per_head.shape[1], axis=1)
        return cls(jnp.broadcast_to(per_query[None, :, :, None], shape), jnp.ones(shape, jnp.float32), mixed)

    def add(self, scores: jax.Array, values: jax.Array, exponent: float) -> "Softmax":
        """With one more block: scores `[n, kv_heads, queries, block_len]`, values `[n, kv_heads, block_len, head_dim]`.

        A query that has seen nothing yet gathers weights of exp(0) here; its first real score decays them to 0.
        """
        top = jnp.maximum(self.top, scores.max(axis=-1, keepdims=True))
        weights = _exp((scores - top) * exponent, values.dtype)
        decay = jnp.exp((self.top - top) * exponent)
        mixed = jnp.einsum("nkqs,nksd->nkqd", weights, values, preferred_element_type=jnp.float32)
        total = weights.sum(axis=-1, keepdims=True, dtype=jnp.float32)
        return Softmax(top, self.total * decay + total, self.mixed * decay + mixed)

    def result(self) -> jax.Array:
        return self.mixed / jnp.where(self.total > 0, self.total, 1.0)


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
    scoring: Scoring,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """See `ops.decode_attention`: every row is one tile of one query."""
    rows, q_heads, head_dim = q.shape
    kv_heads = kv_heads_of(pool)
    tiles = Tiles(q.reshape(rows, kv_heads, q_heads // kv_heads, head_dim), seq_lens[:, None] - 1, page_table)
    out = _attend(tiles, pool, scoring, sinks)
    return out.reshape(rows, q_heads, head_dim)


def extend_attention(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    query_starts: jax.Array,
    scoring: Scoring,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """See `ops.extend_attention`."""
    tokens, q_heads, head_dim = q.shape
    rows, kv_heads = page_table.shape[0], kv_heads_of(pool)
    tile_len = _tile_len(tokens, rows)
    tiling = cut_rows(seq_lens, query_starts, tokens, tile_len)
    place = jnp.arange(tile_len, dtype=jnp.int32)
    positions = jnp.where(place < tiling.counts[:, None], tiling.starts[:, None] + place, -1)
    grouped = tiling.gather(q).reshape(-1, tile_len, kv_heads, q_heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    tiles = Tiles(grouped.reshape(len(grouped), kv_heads, -1, head_dim), positions, page_table[tiling.rows])
    out = _attend(tiles, pool, scoring, sinks)
    out = out.reshape(grouped.shape).transpose(0, 3, 1, 2, 4)
    return tiling.put_back(out.reshape(-1, tile_len, q_heads, head_dim))


def _tile_len(tokens: int, rows: int) -> int:
    """Long tiles reread keys less often, short ones waste less at the end of each row."""
    return min(MAX_TILE_LEN, 1 << max(3, math.ceil(math.log2(max(1, tokens // rows))) - 1), tokens)


def _attend(tiles: Tiles, pool: jax.Array, scoring: Scoring, sinks: jax.Array | None) -> jax.Array:
    """Attention output of every tile, shaped and typed like `tiles.q`; tiles without queries come last."""
    num_tiles, _, queries, _ = tiles.q.shape
    size = min(num_tiles, GROUP_TILES, max(1, GROUP_QUERIES // queries))
    members, num_groups = _groups(tiles, size, min(tiles.page_table.shape[1], -(-BLOCK_LEN // page_size_of(pool))))

    def attend(group: jax.Array, out: jax.Array) -> jax.Array:
        some = members[group]
        picked = Tiles(
            tiles.q.at[some].get(mode="fill", fill_value=0),
            tiles.positions.at[some].get(mode="fill", fill_value=-1),
            tiles.page_table.at[some].get(mode="fill", fill_value=0),
        )
        return out.at[some].set(_attend_group(picked, pool, scoring, sinks), mode="drop")

    return jax.lax.fori_loop(0, num_groups, attend, jnp.zeros_like(tiles.q))


def _groups(tiles: Tiles, size: int, num_leading: int) -> tuple[jax.Array, jax.Array]:
    """Up to `size` neighbouring tiles a group: their indices, int32 `[tiles, size]`, and the number of groups.

    Runs of decode rows with the same `num_leading` first pages share no group with others, if they are long enough.
    Tiles of more queries just follow each other: arithmetic, not reading, is what they take time for, and that grows
    with the places left empty. Places without a tile hold `num_tiles`.
    """
    num_tiles = tiles.q.shape[0]
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    live = tiles.positions.max(axis=1) >= 0
    leading = tiles.page_table[:, :num_leading]
    starts = jnp.concatenate([jnp.ones(1, bool), (leading[1:] != leading[:-1]).any(axis=1)])  # of a run
    run = jnp.cumsum(starts) - 1
    shared = jnp.zeros(num_tiles, jnp.int32).at[run].add(live)[run] >= MIN_SHARERS
    breaks = starts & (shared | jnp.roll(shared, 1)) & (tiles.positions.shape[1] == 1)
    place = (tile - jax.lax.cummax(jnp.where(breaks, tile, 0))) % size
    group = jnp.cumsum(place == 0, dtype=jnp.int32) - 1
    members = jnp.full((num_tiles, size), num_tiles, jnp.int32)
    return members.at[jnp.where(live, group, num_tiles), place].set(tile, mode="drop"), jnp.where(
        live, group + 1, 0
    ).max()


def _attend_group(tiles: Tiles, pool: jax.Array, scoring: Scoring, sinks: jax.Array | None) -> jax.Array:
    """Attention of tiles that walk their keys together.

    First come the pages that all tiles share and see in full, then each tile's own: blocks that all queries see in
    full need no mask, the last ones do.
    """
    page_size, tile_len = page_size_of(pool), tiles.positions.shape[1]
    block_len = BLOCK_LEN if tiles.q.shape[2] < TALL_QUERIES else 2 * BLOCK_LEN
    block_pages = min(tiles.page_table.shape[1], max(1, block_len // page_size))
    block_len = block_pages * page_size
    page_table = jnp.pad(tiles.page_table, [(0, 0), (0, block_pages)])  # the last block may reach past the last page
    last = tiles.positions.max(axis=1)  # [tiles], -1 for a tile with no query
    end = last.max() + 1
    earliest = jnp.where(tiles.positions >= 0, tiles.positions, end).min()
    q_pos = jnp.tile(tiles.positions, (1, tiles.q.shape[2] // tile_len))[:, None, :, None]  # [tiles, 1, queries, 1]

    softmax = Softmax.start(tiles.q, sinks, scoring.exponent)
    if scoring.window is None:
        leader, shared_pages = _shared_pages(page_table, last >= 0)
        shared_pages = jnp.minimum(shared_pages, jnp.minimum(earliest + 1, end) // page_size)
        softmax = _add_shared(softmax, tiles.q, pool, leader, shared_pages, scoring)
        num_whole = (jnp.minimum(earliest + 1, end) - shared_pages * page_size) // block_len
        first_page = shared_pages
    else:
        first_page, num_whole = jnp.maximum(earliest - scoring.window + 1, 0) // page_size, 0
    first = first_page * page_size

    def gather(block: jax.Array) -> tuple[jax.Array, jax.Array]:
        at = first_page + block * block_pages
        return _read(pool, jax.lax.dynamic_slice_in_dim(page_table, at, block_pages, axis=1), tiles.q)

    def add_whole(block: jax.Array, softmax: Softmax) -> Softmax:
        keys, values = gather(block)
        return softmax.add(_scores(tiles.q, keys, scoring), values, scoring.exponent)

    def add_masked(block: jax.Array, softmax: Softmax) -> Softmax:
        keys, values = gather(block)
        kv_pos = first + block * block_len + jnp.arange(block_len, dtype=jnp.int32)
        # What lies past the row's last position, NaN included, must not reach a sum: 0 * NaN is NaN.
        values = jnp.where((kv_pos <= last[:, None])[:, None, :, None], values, 0)
        scores = jnp.where(scoring.seen(q_pos, kv_pos), _scores(tiles.q, keys, scoring), MASKED)
        return softmax.add(scores, values, scoring.exponent)

    if scoring.window is None:
        softmax = jax.lax.fori_loop(0, num_whole, add_whole, softmax)
    softmax = jax.lax.fori_loop(num_whole, -((first - end) // block_len), add_masked, softmax)
    return jnp.where(q_pos >= 0, softmax.result(), 0).astype(tiles.q.dtype)


def _add_shared(
    softmax: Softmax,
    q: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    num_pages: jax.Array,
    scoring: Scoring,
) -> Softmax:
    """Add the first `num_pages` of `pages`, which every tile of the group sees: their queries are one tall matmul."""
    num_tiles, kv_heads, queries, _ = q.shape
    block_pages = min(pages.shape[0], max(1, 2 * BLOCK_LEN // page_size_of(pool)))
    block_len = block_pages * page_size_of(pool)
    pages = jnp.pad(pages, (0, block_pages))  # the last block may reach past the last page

    def folded(x: jax.Array) -> jax.Array:
        return x.transpose(1, 0, 2, 3).reshape(1, kv_heads, num_tiles * queries, -1)

    def unfolded(x: jax.Array) -> jax.Array:
        return x.reshape(kv_heads, num_tiles, queries, -1).transpose(1, 0, 2, 3)

    tall = folded(q)

    def add(block: jax.Array, softmax: Softmax) -> Softmax:
        some = jax.lax.dynamic_slice_in_dim(pages, block * block_pages, block_pages)
        keys, values = _read(pool, some[None], q)
        shared = block * block_len + jnp.arange(block_len, dtype=jnp.int32) < num_pages * page_size_of(pool)
        scores = jnp.where(shared, _scores(tall, keys, scoring), MASKED)
        return softmax.add(scores, jnp.where(shared[:, None], values, 0), scoring.exponent)

    num_blocks = -(-num_pages // block_pages)
    return Softmax(*map(unfolded, jax.lax.fori_loop(0, num_blocks, add, Softmax(*map(folded, softmax)))))


def _read(pool: jax.Array, pages: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values of `pages` `[rows, n]` as `read_pages` gives them, typed like `q`."""
    keys, values = read_pages(pool, pages, q.shape[-1])
    return keys.astype(q.dtype), values.astype(q.dtype)


def _shared_pages(page_table: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A live tile's pages, and how many leading ones all live tiles have in common; a lone tile shares all its own."""
    leader = page_table[jnp.argmax(live)]
    same = jnp.where(live[:, None], page_table == leader, True).all(axis=0)
    return leader, jnp.where(same.all(), same.shape[0], jnp.argmin(same))


def _exp(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`exp(x)` for `x <= 0` as `dtype`.

    A softmax weight that is rounded to bfloat16 (relative error 2**-9) needs no exact exponential: 2**x is the
    exponent bits of its integer part times a cubic of its fraction, good to 1e-4. XLA's own costs 1.5 ns an element
    on a CPU and was a third of prefill; this is 3 times as fast (the idea of Schraudolph, 1999; FlashAttention-4 does
    the same on GPUs).
    """
    if dtype == jnp.float32:
        return jnp.exp(x)
    x = jnp.maximum(x * LOG2_E, -126.0)  # 2**-126 is the smallest normal number: as good as zero here
    whole = jnp.floor(x)
    fraction = x - whole
    mantissa = 1.0 + fraction * (0.69542 + fraction * (0.22631 + fraction * 0.07827))
    power = jax.lax.bitcast_convert_type((whole.astype(jnp.int32) + 127) << 23, jnp.float32)
    return (mantissa * power).astype(dtype)
