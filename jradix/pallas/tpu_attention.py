"""Paged attention of a TPU as one Mosaic kernel over work items: a few queries of one row and the pages they see.

An item is a tile of consecutive tokens of a row; a decode row is a tile of one token. The kernel takes one item a grid
step and walks its pages block by block with an online softmax (FlashAttention, Dao et al., 2022, on the pages of
PagedAttention, Kwon et al., 2023; one launch for rows of any length as in Ragged Paged Attention). Everything but the
queries stays in HBM: one copy brings all heads' keys and values of a page. While a block is multiplied the next one is
on its way, at an item's end the first block of the next item, so the copies never stop.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jradix.pallas.layout import LANES
from jradix.pallas.scoring import Scoring
from jradix.pallas.tpu_blocks import Blocks

MASKED = -1e30  # finite: MASKED - MASKED must not be NaN for a query that has seen nothing yet


class Items(NamedTuple):
    """Tiles of queries, each of one row.

    q: `[items, kv_heads, group * tile_len, head_dim]`, a KV head's query heads folded into the matmul's rows, a
        head's tokens side by side.
    rows: int32 `[items]`, the row of the page table.
    starts: int32 `[items]`, position of the first query; the others follow it.
    counts: int32 `[items]`, queries, at most `tile_len`; 0 for an item that is none.
    """

    q: jax.Array
    rows: jax.Array
    starts: jax.Array
    counts: jax.Array


def attend(
    items: Items,
    pool: jax.Array,
    page_table: jax.Array,
    scoring: Scoring,
    sinks: jax.Array | None,
    *,
    tile_len: int,
    blocks: Blocks,
    interpret: Any,
) -> jax.Array:
    """Attention output of every item, shaped and typed like `items.q`; zeros where there is no query.

    Args:
        pool: joined, `[pages, kv_heads, page_size, 2 * head_dim]`.
        page_table: int32 `[rows, max_pages]`, flat page ids; what lies past an item's last query is never looked at.
        scoring, sinks: as in `ops.extend_attention`.
        tile_len: tokens of an item.
        interpret: False or `pltpu.InterpretParams`.
    """
    num_items, kv_heads, queries, head_dim = items.q.shape
    line = pool.shape[-1]
    block_len = blocks.pages * pool.shape[2]
    # Multiplied by whole lines, a query padded with zeros meets the keys alone: lanes need no cutting unless they can
    # be cut at whole vectors.
    dense = head_dim % LANES == 0
    q = items.q if dense else jnp.pad(items.q, [(0, 0)] * 3 + [(0, line - head_dim)])
    width = head_dim if dense else line
    heads = queries // tile_len * kv_heads
    logits = jnp.full(heads, MASKED, jnp.float32) if sinks is None else sinks.astype(jnp.float32) / scoring.exponent
    tile = pl.BlockSpec((None, kv_heads, queries, width), lambda item, *_: (item, 0, 0, 0))
    out = pl.pallas_call(
        functools.partial(_kernel, scoring=scoring, tile_len=tile_len, heads_at_once=blocks.heads),
        out_shape=jax.ShapeDtypeStruct((num_items, kv_heads, queries, width), items.q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(num_items,),
            in_specs=[tile, pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=tile,
            scratch_shapes=[
                pltpu.SMEM((2, page_table.shape[1]), jnp.int32),
                pltpu.VMEM((2, kv_heads, block_len, line), pool.dtype),
                pltpu.VMEM((kv_heads, queries, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, queries, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, queries, width), jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=blocks.vmem_limit),
        interpret=interpret,
        name="paged_attention",
    )(items.rows, items.starts, items.counts, logits, q, page_table, pool)
    return out[..., width - head_dim :]


def _kernel(
    rows_ref,  # [items], SMEM, int32: each item's row of the page table
    starts_ref,  # [items], SMEM, int32: position of its first query
    counts_ref,  # [items], SMEM, int32: its queries
    sinks_ref,  # [q_heads], SMEM, f32: logits over the exponent
    q_ref,  # [kv_heads, queries, width], VMEM, f32 or bf16: of this item
    table_ref,  # [rows, max_pages], HBM, int32
    pool_ref,  # [pages, kv_heads, page_size, line], HBM, f32 or bf16
    out_ref,  # [kv_heads, queries, width], VMEM, as q
    pages_ref,  # [2, max_pages], SMEM, int32: page table of this item and of the next
    lines_ref,  # [2, kv_heads, block_len, line], VMEM, as pool: this block and the next
    top_ref,  # [kv_heads, queries, LANES], VMEM, f32: highest score so far, the same in all lanes
    total_ref,  # [kv_heads, queries, LANES], VMEM, f32: sum of weights so far, the same in all lanes
    mixed_ref,  # [kv_heads, queries, width], VMEM, f32: sum of weights * values so far
    turns_ref,  # [2], SMEM, int32: which half of pages_ref and of lines_ref is this item's
    pages_sem,  # [2] DMA semaphores, one for each half of pages_ref
    lines_sem,  # [2] DMA semaphores, one for each half of lines_ref
    *,
    scoring: Scoring,
    tile_len: int,
    heads_at_once: int,
):
    item, num_items = pl.program_id(0), pl.num_programs(0)
    kv_heads, queries, width = q_ref.shape
    page_size = pool_ref.shape[2]
    block_len = lines_ref.shape[2]
    block_pages = block_len // page_size
    group = queries // tile_len

    def next_item(first):
        return jax.lax.while_loop(
            lambda i: (i < num_items) & (counts_ref[jnp.minimum(i, num_items - 1)] == 0), lambda i: i + 1, first
        )

    def first_page(item):
        if scoring.window is None:
            return 0
        return jnp.maximum(starts_ref[item] - (scoring.window - 1), 0) // page_size

    def num_pages(item):
        return pl.cdiv(starts_ref[item] + counts_ref[item], page_size) - first_page(item)

    def pages_copy(item, turn):
        return pltpu.make_async_copy(table_ref.at[rows_ref[item]], pages_ref.at[turn], pages_sem.at[turn])

    def line_copies(item, block, turn, act):
        """One copy a page; all pages of a block report to one semaphore."""

        def copy(i, _):
            place = pl.ds(pl.multiple_of(i * page_size, page_size), page_size)
            act(i, lines_ref.at[turn, :, place], lines_sem.at[turn])
            return 0

        jax.lax.fori_loop(0, jnp.minimum(num_pages(item) - block * block_pages, block_pages), copy, 0)

    def start_lines(item, block, pages_turn, turn):
        first = first_page(item) + block * block_pages

        def start(i, place, sem):
            pltpu.make_async_copy(pool_ref.at[pages_ref[pages_turn, first + i]], place, sem).start()

        line_copies(item, block, turn, start)

    def wait_lines(item, block, turn):
        line_copies(item, block, turn, lambda _, place, sem: pltpu.make_async_copy(pool_ref.at[0], place, sem).wait())

    @pl.when(item == 0)
    def _():
        first = next_item(0)
        turns_ref[0] = 0
        turns_ref[1] = 0

        @pl.when(first < num_items)
        def _():
            pages_copy(first, 0).start()
            pages_copy(first, 0).wait()
            start_lines(first, 0, 0, 0)

    def add_block(block, turn, masked):
        """Scores and values of one block, for `heads_at_once` KV heads at a time."""
        start, end = starts_ref[item], starts_ref[item] + counts_ref[item]
        first = first_page(item) * page_size + block * block_len

        def add(chunk, _):
            heads = pl.ds(chunk * heads_at_once, heads_at_once)
            lines = lines_ref[turn, heads]
            if masked:
                place = jax.lax.broadcasted_iota(jnp.int32, lines.shape, 1)
                # What lies past the last query may be NaN, and 0 * NaN is NaN.
                lines = jnp.where(first + place < end, lines, 0)
            keys, values = lines[..., :width], lines[..., lines.shape[-1] - width :]
            scores = scoring.capped(_dot("nqd,nsd->nqs", q_ref[heads], keys))
            if masked:
                query = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1) % tile_len
                place = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
                scores = jnp.where(scoring.seen(start + query, first + place), scores, MASKED)
            old = top_ref[heads]
            top = jnp.maximum(old, scores.max(axis=-1, keepdims=True))
            weights = jnp.exp((scores - _widened(top, block_len)) * scoring.exponent)
            decay = jnp.exp((old - top) * scoring.exponent)
            top_ref[heads] = top
            total_ref[heads] = total_ref[heads] * decay + weights.sum(axis=-1, keepdims=True)
            mixed = _dot("nqs,nsd->nqd", weights.astype(values.dtype), values)
            mixed_ref[heads] = mixed_ref[heads] * _widened(decay, width) + mixed
            return 0

        jax.lax.fori_loop(0, kv_heads // heads_at_once, add, 0)

    @pl.when(counts_ref[item] == 0)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(counts_ref[item] > 0)
    def _():
        start, end = starts_ref[item], starts_ref[item] + counts_ref[item]
        pages_turn = turns_ref[0]
        following = next_item(item + 1)
        has_next = following < num_items

        @pl.when(has_next)
        def _():
            pages_copy(following, 1 - pages_turn).start()

        query_head = jax.lax.broadcasted_iota(jnp.int32, (queries, LANES), 0) // tile_len
        for head in range(kv_heads):
            sink = jnp.full((queries, LANES), sinks_ref[head * group])
            for i in range(1, group):
                sink = jnp.where(query_head == i, sinks_ref[head * group + i], sink)
            top_ref[head] = sink
        total_ref[...] = jnp.ones_like(total_ref)
        mixed_ref[...] = jnp.zeros_like(mixed_ref)
        num_blocks = pl.cdiv(num_pages(item), block_pages)

        def step(block, turn):
            last = block + 1 == num_blocks

            @pl.when(~last)
            def _():
                start_lines(item, block + 1, pages_turn, 1 - turn)

            @pl.when(last & has_next)
            def _():
                pages_copy(following, 1 - pages_turn).wait()
                start_lines(following, 0, 1 - pages_turn, 1 - turn)

            wait_lines(item, block, turn)
            first = first_page(item) * page_size + block * block_len
            whole = first + block_len <= start + 1
            if scoring.window is not None:
                whole &= first > end - 1 - scoring.window
            pl.when(whole)(lambda: add_block(block, turn, masked=False))
            pl.when(~whole)(lambda: add_block(block, turn, masked=True))
            return 1 - turn

        turns_ref[1] = jax.lax.fori_loop(0, num_blocks, step, turns_ref[1])
        turns_ref[0] = 1 - pages_turn
        is_query = jax.lax.broadcasted_iota(jnp.int32, mixed_ref.shape, 1) % tile_len < counts_ref[item]
        out = mixed_ref[...] / _widened(total_ref[...], width)
        out_ref[...] = jnp.where(is_query, out, 0.0).astype(out_ref.dtype)


def _dot(letters: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """In f32; a pool of f32 is kept for its digits, of which a TPU's default multiplication takes 8 bits."""
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.einsum(letters, a, b, precision=precision, preferred_element_type=jnp.float32)


def _widened(x: jax.Array, width: int) -> jax.Array:
    """`x`, whose lanes are all the same, with `width` lanes: whole vectors are repeated for nothing."""
    return jnp.concatenate([x] * pl.cdiv(width, LANES), axis=-1)[..., :width]
