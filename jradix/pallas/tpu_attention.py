"""Paged attention of a TPU as one Mosaic kernel over work items: a few queries of one row and the pages they see.

An item is a tile of consecutive tokens of a row; a decode row is a tile of one token. The kernel takes one item a grid
step and walks its pages block by block with an online softmax (FlashAttention, Dao et al., 2022, on the pages of
PagedAttention, Kwon et al., 2023; one launch for rows of any length as in Ragged Paged Attention). Everything but the
queries stays in HBM: one copy brings all heads' keys and values of a page. While a block is multiplied the next one is
on its way, at an item's end the first block of the next item, so the copies never stop.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jradix.pallas.layout import LANES
from jradix.pallas.scoring import MASKED, Scoring
from jradix.pallas.tpu_blocks import Blocks


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
    """Attention output of every item, shaped and typed like `items.q`.

    Zeros for items without queries; what stands after the queries of a tile that is not full is anything.

    Args:
        pool: joined, `[pages, kv_heads, page_size, line]`: keys, then values from the line's middle on. Where a half is
            longer than head_dim, the keys must be padded with zeros. Its numbers are widened to the type of `items.q`.
        page_table: int32 `[rows, max_pages]`, flat page ids; what lies past an item's last query is never looked at.
        scoring, sinks: as in `ops.extend_attention`.
        tile_len: tokens of an item.
        interpret: False or `pltpu.InterpretParams`.
    """
    num_items, kv_heads, queries, head_dim = items.q.shape
    items = _padded_to(items, blocks.cores)
    page_size, line = pool.shape[2:]
    # Lines are cut only between whole vectors. If values begin elsewhere, queries are padded with zeros, so that they
    # meet the keys alone when multiplied by whole lines, and weighted sums are taken of whole lines too.
    first_value = line // 2
    width = first_value if first_value % LANES == 0 else line
    q = jnp.pad(items.q, [(0, 0)] * 3 + [(0, width - head_dim)])
    heads = queries // tile_len * kv_heads
    logits = jnp.full(heads, MASKED, jnp.float32) if sinks is None else sinks.astype(jnp.float32) / scoring.exponent
    tile = pl.BlockSpec((None, kv_heads, queries, width), lambda core, step, *_: (step * blocks.cores + core, 0, 0, 0))
    out = pl.pallas_call(
        functools.partial(_kernel, scoring=scoring, tile_len=tile_len, heads_at_once=blocks.heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(blocks.cores, q.shape[0] // blocks.cores),
            in_specs=[tile, pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=tile,
            scratch_shapes=[
                pltpu.SMEM((2, page_table.shape[1]), jnp.int32),
                pltpu.VMEM((2, kv_heads, blocks.pages * page_size, line), pool.dtype),
                pltpu.VMEM((kv_heads, queries, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, queries, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, queries, width), jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=blocks.vmem_bytes
        ),
        interpret=interpret,
        name="paged_attention",
    )(items.rows, items.starts, items.counts, logits, q, page_table, pool)
    begin = width - first_value
    return out[:num_items, ..., begin : begin + head_dim]


def _padded_to(items: Items, multiple: int) -> Items:
    """With as many empty items more as it takes."""
    return Items(*(jnp.pad(x, [(0, -x.shape[0] % multiple)] + [(0, 0)] * (x.ndim - 1)) for x in items))


def _kernel(
    rows_ref,  # [items], SMEM, int32: each item's row of the page table
    starts_ref,  # [items], SMEM, int32: position of its first query
    counts_ref,  # [items], SMEM, int32: its queries
    sinks_ref,  # [q_heads], SMEM, f32: logits over the exponent
    q_ref,  # [kv_heads, queries, width], VMEM, f32 or bf16: of this item
    table_ref,  # [rows, max_pages], HBM, int32
    pool_ref,  # [pages, kv_heads, page_size, line], HBM, f32, bf16 or 8 bits
    out_ref,  # [kv_heads, queries, width], VMEM, as q
    pages_ref,  # [2, max_pages], SMEM, int32: page table of this item and of the next
    lines_ref,  # [2, kv_heads, block_len, line], VMEM, as pool: this block and the next
    top_ref,  # [kv_heads, queries, LANES], VMEM, f32
    total_ref,  # [kv_heads, queries, LANES], VMEM, f32
    mixed_ref,  # [kv_heads, queries, width], VMEM, f32
    turns_ref,  # [2], SMEM, int32: which half of pages_ref, and of lines_ref, is the next to be used
    pages_sem,  # [2] DMA semaphores, one for each half of pages_ref
    lines_sem,  # [2] DMA semaphores, one for each half of lines_ref
    *,
    scoring: Scoring,
    tile_len: int,
    heads_at_once: int,
) -> None:
    core, cores, step = pl.program_id(0), pl.num_programs(0), pl.program_id(1)
    item, num_items = step * cores + core, counts_ref.shape[0]
    kv_heads, block_len = lines_ref.shape[1:3]
    items, copied = (rows_ref, starts_ref, counts_ref), (table_ref, pool_ref, pages_ref, lines_ref)
    walk = _Walk(*items, *copied, pages_sem, lines_sem, scoring.window)
    softmax = _Softmax(top_ref, total_ref, mixed_ref, scoring, tile_len)

    @pl.when(step == 0)
    def _():
        first = walk.next_item(core, cores)
        turns_ref[0] = turns_ref[1] = 0

        @pl.when(first < num_items)
        def _():
            walk.start_pages(first, 0)
            walk.wait_pages(first, 0)
            walk.start_block(first, 0, 0, 0)

    @pl.when(counts_ref[item] == 0)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(counts_ref[item] > 0)
    def _():
        start, count, pages_turn = starts_ref[item], counts_ref[item], turns_ref[0]
        following = walk.next_item(item + cores, cores)
        has_next = following < num_items
        pl.when(has_next)(lambda: walk.start_pages(following, 1 - pages_turn))
        softmax.start(sinks_ref)
        num_blocks = walk.num_blocks(item)

        def add_block(block: jax.Array, turn: jax.Array) -> jax.Array:
            is_last = block + 1 == num_blocks

            @pl.when(~is_last)
            def _():
                walk.start_block(item, block + 1, pages_turn, 1 - turn)

            @pl.when(is_last & has_next)
            def _():
                walk.wait_pages(following, 1 - pages_turn)
                walk.start_block(following, 0, 1 - pages_turn, 1 - turn)

            walk.wait_block(item, block, turn)
            first = walk.first_page(item) * walk.page_size + block * block_len
            seen_by_all = first + block_len <= start + 1
            if scoring.window is not None:
                seen_by_all &= first >= start + count - scoring.window

            def add_heads(mask: _Mask | None) -> None:
                def add(i: jax.Array, _: None) -> None:
                    heads = pl.ds(i * heads_at_once, heads_at_once)
                    softmax.add(heads, q_ref[heads], lines_ref[turn, heads].astype(q_ref.dtype), mask)

                jax.lax.fori_loop(0, kv_heads // heads_at_once, add, None)

            pl.when(seen_by_all)(lambda: add_heads(None))
            pl.when(~seen_by_all)(lambda: add_heads(_Mask(start, start + count, first)))
            return 1 - turn

        turns_ref[1] = jax.lax.fori_loop(0, num_blocks, add_block, turns_ref[1])
        turns_ref[0] = 1 - pages_turn
        out_ref[...] = softmax.result().astype(out_ref.dtype)


class _Walk(NamedTuple):
    """The copies that bring items' pages, see `_kernel` for the refs. A `turn` is a half of a double buffer."""

    rows: Any
    starts: Any
    counts: Any
    table: Any
    pool: Any
    pages: Any
    lines: Any
    pages_sem: Any
    lines_sem: Any
    window: int | None

    @property
    def page_size(self) -> int:
        return self.pool.shape[2]

    @property
    def block_pages(self) -> int:
        return self.lines.shape[2] // self.page_size

    def next_item(self, item: jax.Array, step: jax.Array | int) -> jax.Array:
        """The first item with queries among `item` and those that follow in steps; past the last one if none has."""
        num_items = self.counts.shape[0]

        def is_empty(item: jax.Array) -> jax.Array:
            return (item < num_items) & (self.counts[jnp.minimum(item, num_items - 1)] == 0)

        return jax.lax.while_loop(is_empty, lambda item: item + step, item)

    def first_page(self, item: jax.Array) -> jax.Array | int:
        """The first page that a query of the item sees."""
        if self.window is None:
            return 0
        return jnp.maximum(self.starts[item] - (self.window - 1), 0) // self.page_size

    def num_pages(self, item: jax.Array) -> jax.Array:
        return pl.cdiv(self.starts[item] + self.counts[item], self.page_size) - self.first_page(item)

    def num_blocks(self, item: jax.Array) -> jax.Array:
        return pl.cdiv(self.num_pages(item), self.block_pages)

    def _pages_copy(self, item: jax.Array, turn: jax.Array | int) -> Any:
        return pltpu.make_async_copy(self.table.at[self.rows[item]], self.pages.at[turn], self.pages_sem.at[turn])

    def start_pages(self, item: jax.Array, turn: jax.Array | int) -> None:
        """The item's row of the page table: all rows' would not fit SMEM's 1 MiB."""
        self._pages_copy(item, turn).start()

    def wait_pages(self, item: jax.Array, turn: jax.Array | int) -> None:
        self._pages_copy(item, turn).wait()

    def _each_page(self, item: jax.Array, block: jax.Array | int, act: Callable) -> None:
        """`act(page of the item, its place in a block)` for the pages of a block that the item has."""
        first = block * self.block_pages

        def each(i: jax.Array, _: None) -> None:
            place = pl.ds(pl.multiple_of(i * self.page_size, self.page_size), self.page_size)
            act(self.first_page(item) + first + i, place)

        num_pages = jnp.minimum(self.num_pages(item) - first, self.block_pages)
        jax.lax.fori_loop(0, num_pages, each, None)

    def _page_copy(self, page: jax.Array | int, place: Any, turn: jax.Array | int) -> Any:
        return pltpu.make_async_copy(self.pool.at[page], self.lines.at[turn, :, place], self.lines_sem.at[turn])

    def start_block(
        self, item: jax.Array, block: jax.Array | int, pages_turn: jax.Array | int, turn: jax.Array | int
    ) -> None:
        """One copy a page, which also puts the heads first: all pages of a head become one matrix."""

        def start(page: jax.Array, place: Any) -> None:
            self._page_copy(self.pages[pages_turn, page], place, turn).start()

        self._each_page(item, block, start)

    def wait_block(self, item: jax.Array, block: jax.Array, turn: jax.Array) -> None:
        # A wait counts bytes: which page brings them is all the same.
        self._each_page(item, block, lambda _, place: self._page_copy(0, place, turn).wait())


class _Mask(NamedTuple):
    """Where a block lies: position of the item's first query, of the first key after it, and of the block's first."""

    start: jax.Array
    end: jax.Array
    first: jax.Array


class _Softmax(NamedTuple):
    """The softmax over the keys seen so far, in VMEM, f32; every query has a line.

    top: `[kv_heads, queries, LANES]`, highest score, the same in all lanes.
    total: `[kv_heads, queries, LANES]`, sum of `exp(score - top)`, the same in all lanes.
    mixed: `[kv_heads, queries, width]`, sum of `exp(score - top) * value`.
    """

    top: Any
    total: Any
    mixed: Any
    scoring: Scoring
    tile_len: int

    def start(self, sinks: Any) -> None:
        """Before the first key there is the sink of each head, a logit that comes with no value.

        One that is `MASKED` is as good as none: its weight of 1 decays to 0 with the first key.
        """
        kv_heads, queries, _ = self.top.shape
        group = queries // self.tile_len
        member = jax.lax.broadcasted_iota(jnp.int32, (queries, LANES), 0) // self.tile_len
        for head in range(kv_heads):
            logit = jnp.full((queries, LANES), sinks[head * group])
            for i in range(1, group):
                logit = jnp.where(member == i, sinks[head * group + i], logit)
            self.top[head] = logit
        self.total[...] = jnp.ones_like(self.total)
        self.mixed[...] = jnp.zeros_like(self.mixed)

    def add(self, heads: Any, q: jax.Array, lines: jax.Array, mask: _Mask | None) -> None:
        """One more block of some KV heads: q `[heads, queries, width]`, lines `[heads, block_len, line]`."""
        _, block_len, line = lines.shape
        width, exponent = q.shape[-1], self.scoring.exponent
        if mask is not None:
            # What lies past the last query may be NaN, and 0 * NaN is NaN.
            place = jax.lax.broadcasted_iota(jnp.int32, lines.shape, 1)
            lines = jnp.where(mask.first + place < mask.end, lines, 0)
        keys, values = lines[..., :width], lines[..., line - width :]
        scores = self.scoring.capped(_dot("nqd,nsd->nqs", q, keys))
        if mask is not None:
            query = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1) % self.tile_len
            place = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
            scores = jnp.where(self.scoring.seen(mask.start + query, mask.first + place), scores, MASKED)
        old = self.top[heads]
        top = jnp.maximum(old, scores.max(axis=-1, keepdims=True))
        weights = jnp.exp((scores - _widened(top, block_len)) * exponent)
        decay = jnp.exp((old - top) * exponent)
        self.top[heads] = top
        self.total[heads] = self.total[heads] * decay + weights.sum(axis=-1, keepdims=True)
        mixed = _dot("nqs,nsd->nqd", weights.astype(values.dtype), values)
        self.mixed[heads] = self.mixed[heads] * _widened(decay, width) + mixed

    def result(self) -> jax.Array:
        return self.mixed[...] / _widened(self.total[...], self.mixed.shape[-1])


def _dot(letters: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """In f32; numbers of f32 are kept for their digits, of which a TPU's default multiplication takes 8 bits."""
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.einsum(letters, a, b, precision=precision, preferred_element_type=jnp.float32)


def _widened(x: jax.Array, width: int) -> jax.Array:
    """`x`, whose lanes are all the same, with `width` lanes: whole vectors are repeated for nothing."""
    return jnp.concatenate([x] * pl.cdiv(width, LANES), axis=-1)[..., :width]
