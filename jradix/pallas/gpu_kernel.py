"""The Hopper kernel below decode and extend: tiles of queries walk over the pages of their rows.

One warpgroup of a thread block only copies: pages stream from the pool into a ring of shared memory, a block of
positions at a time, while the others multiply what has arrived (warp specialization as in FlashAttention-3, Shah et
al., 2024). Query heads of a KV head are lines of one matmul. The softmax is online (Milakov and Gimelshein, 2018), in
powers of two. Blocks of a tile may be split among thread blocks, which is how few rows fill a GPU (FlashDecoding, Dao
et al., 2023): each yields a normalized mix of values and the logarithm of its denominator, which is all that `merge`
needs, and also all that it takes to add an attention sink afterwards, so the kernel knows nothing of sinks.

Tensor cores multiply 16 bits from shared memory. A pool of 8 bits streams through the same ring in 8, and the copying
warpgroup, which has little to do, widens a block there before it lets the next one take its place.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jradix.pallas.gpu_blocks import LINES, Blocks
from jradix.pallas.layout import KEY, VALUE, kv_heads_of, page_size_of
from jradix.pallas.scoring import LOG2_E, MASKED, Scoring

CHUNK = 128
"""Columns of the output that are multiplied at a time: twice as many accumulators would leave the registers."""

WIDENING = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 32), (16, 32), (8, 32), (8,))), warp_dims=(-7,), lane_dims=(-2, -3), vector_dim=-1
)
"""Whole lines of 32 numbers: a thread loads 8 of 8 bits at once and stores them in 16, no two in the same bank."""


class Tiles(NamedTuple):
    """Queries cut into tiles of one row each.

    q: `[tiles, kv_heads, lines, head_dim]`; line `i` is query `i // group` of the tile, `group` heads for each query.
    rows: int32 `[tiles]`, whose pages a tile walks over.
    first: int32 `[tiles]`, the position of the tile's first query.
    end: int32 `[tiles]`, one past the position of its last query; 0, as `first` then is, if it has none.
    """

    q: jax.Array
    rows: jax.Array
    first: jax.Array
    end: jax.Array


class _Plan(NamedTuple):
    """What is known when the kernel is compiled; see `attend`."""

    scoring: Scoring
    group: int
    splits: int
    blocks: Blocks
    lines: int
    kv_heads: int
    page_size: int
    head_dim: int
    widens: bool

    @property
    def piece(self) -> int:
        """The most positions that lie both in one page and in one block, wherever: what one copy brings."""
        return math.gcd(self.page_size, self.blocks.block_len)

    @property
    def lines_each(self) -> int:
        """Lines of the tile for each warpgroup. A decode's few are not padded to `LINES` outside of the kernel."""
        return self.lines // self.blocks.warpgroups

    @property
    def exponent(self) -> float:
        """Multiplies scores to make them exponents of 2."""
        return self.scoring.exponent * LOG2_E

    @property
    def chunks(self) -> list[Any]:
        return [pl.ds(at, min(CHUNK, self.head_dim - at)) for at in range(0, self.head_dim, CHUNK)]


class _Shared(NamedTuple):
    """References to what the warpgroups of a thread block share.

    q: `[warpgroups, LINES, head_dim]`, SMEM, 16 bits; holds the output in the end.
    keys, values: `[stages, block_len, head_dim]`, SMEM, typed like the pool.
    wide: `[2, block_len, head_dim]`, SMEM, 16 bits, keys and values of one block; None if the pool has 16 bits.
    weights: `[warpgroups, LINES, block_len]`, SMEM, 16 bits.
    lse: `[warpgroups, LINES]`, SMEM, f32.
    q_arrived, arrived: barriers, one for each warpgroup's queries and one for each stage.
    widened: barriers, for keys and values; None without `wide`.
    freed: barriers: what was multiplied may be overwritten, of `wide` keys and values, else each stage.
    cleaned: a barrier, used once: the last block is clean.
    """

    q: Any
    keys: Any
    values: Any
    wide: Any
    weights: Any
    lse: Any
    q_arrived: Any
    arrived: Any
    widened: Any
    freed: Any
    cleaned: Any

    @classmethod
    def types(cls, plan: _Plan, dtype: jnp.dtype, pool_dtype: jnp.dtype) -> "_Shared":
        workers, block_len, stages = plan.blocks.warpgroups, plan.blocks.block_len, plan.blocks.stages
        return cls(
            q=plgpu.SMEM((workers, LINES, plan.head_dim), dtype),
            keys=plgpu.SMEM((stages, block_len, plan.head_dim), pool_dtype),
            values=plgpu.SMEM((stages, block_len, plan.head_dim), pool_dtype),
            wide=plgpu.SMEM((2, block_len, plan.head_dim), dtype) if plan.widens else None,
            weights=plgpu.SMEM((workers, LINES, block_len), dtype),
            lse=plgpu.SMEM((workers, LINES), jnp.float32),
            q_arrived=plgpu.Barrier(num_barriers=workers),
            arrived=plgpu.Barrier(num_arrivals=2 * block_len // plan.piece, num_barriers=stages),
            widened=plgpu.Barrier(num_barriers=2) if plan.widens else None,
            freed=plgpu.Barrier(num_arrivals=workers, num_barriers=2 if plan.widens else stages),
            cleaned=plgpu.Barrier(),
        )


def attend(
    tiles: Tiles,
    pool: jax.Array,
    page_table: jax.Array,
    scoring: Scoring,
    *,
    group: int,
    splits: int,
    blocks: Blocks,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of every tile to each of `splits` parts of what it sees.

    Args:
        pool: split, see `layout`.
        page_table: int32 `[rows, max_pages]`, flat page ids; entries past a tile's `end` are not looked at.
        group: query heads of a KV head.

    Returns:
        `[splits, tiles, kv_heads, lines, head_dim]` and f32 `[splits, tiles, kv_heads, LINES * warpgroups]`: mixes of
        values, and base-2 logarithms of the sums of `exp(score)` they were divided by. Zeros and something far below
        any logarithm for parts with nothing to see; lines of no query hold anything.
    """
    num_tiles, kv_heads, lines, head_dim = tiles.q.shape
    assert kv_heads == kv_heads_of(pool)
    assert lines == blocks.lines or lines <= LINES == blocks.lines
    widens = pool.dtype != tiles.q.dtype
    plan = _Plan(scoring, group, splits, blocks, lines, kv_heads, page_size_of(pool), head_dim, widens)

    def paged_attention(*refs: Any) -> None:  # profiles show this name
        _kernel(plan, *refs)

    call = plgpu.kernel(
        paged_attention,
        out_type=[
            jax.ShapeDtypeStruct((splits, *tiles.q.shape), tiles.q.dtype),
            jax.ShapeDtypeStruct((splits, num_tiles, kv_heads, blocks.lines), jnp.float32),
        ],
        scratch_types=[_Shared.types(plan, tiles.q.dtype, pool.dtype)],
        grid=(num_tiles, kv_heads, splits),
        grid_names=("tile", "head", "split"),
        num_threads=blocks.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    lines_of_pool = pool.reshape(-1, plan.page_size, head_dim)
    return call(tiles.q, lines_of_pool, page_table, tiles.rows, tiles.first, tiles.end)


def _kernel(
    plan: _Plan,
    q: Any,  # [tiles, kv_heads, lines, head_dim], GMEM, 16 bits
    pool: Any,  # [pages * kv_heads * 2, page_size, head_dim], GMEM, 8 or 16 bits
    table: Any,  # [rows, max_pages], GMEM, int32
    rows: Any,  # [tiles], GMEM, int32, as are firsts and ends
    firsts: Any,
    ends: Any,
    out: Any,  # [splits, tiles, kv_heads, lines, head_dim], GMEM, 16 bits
    lse: Any,  # [splits, tiles, kv_heads, LINES * warpgroups], GMEM, f32
    shared: _Shared,
) -> None:
    tile, head, split = lax.axis_index("tile"), lax.axis_index("head"), lax.axis_index("split")
    worker = lax.axis_index("warpgroup")
    walk = _Walk.of(plan, split, firsts[tile], ends[tile])

    @pl.when(worker == plan.blocks.warpgroups)
    def _() -> None:
        _copy_blocks(plan, walk, pool, table.at[rows[tile]], head, shared)

    @pl.when(worker < plan.blocks.warpgroups)
    def _() -> None:
        mine = pl.ds(worker * plan.lines_each, plan.lines_each)
        q_smem = shared.q.at[worker, pl.ds(0, plan.lines_each)]
        plgpu.copy_gmem_to_smem(q.at[tile, head, mine], q_smem, shared.q_arrived.at[worker])
        plgpu.barrier_wait(shared.q_arrived.at[worker])
        _compute(plan, walk, worker, shared)
        plgpu.copy_smem_to_gmem(q_smem, out.at[split, tile, head, mine])
        lse_lines = pl.ds(worker * LINES, LINES)
        plgpu.copy_smem_to_gmem(shared.lse.at[worker], lse.at[split, tile, head, lse_lines])
        plgpu.wait_smem_to_gmem(0)


class _Walk(NamedTuple):
    """One thread block's part of what a tile sees: the blocks `[start, stop)` of those from position `begin` on.

    first, end: positions of the tile's queries, see `Tiles`.
    """

    first: jax.Array
    end: jax.Array
    begin: jax.Array
    start: jax.Array
    stop: jax.Array

    @classmethod
    def of(cls, plan: _Plan, split: jax.Array, first: jax.Array, end: jax.Array) -> "_Walk":
        begin = jnp.zeros_like(first)
        if plan.scoring.window is not None:
            begin = lax.div(jnp.maximum(first - plan.scoring.window + 1, 0), plan.piece) * plan.piece
        num_blocks = pl.cdiv(end - begin, plan.blocks.block_len)
        share = pl.cdiv(num_blocks, plan.splits)
        start = jnp.minimum(split * share, num_blocks)
        return cls(first, end, begin, start, jnp.minimum(start + share, num_blocks))

    def stage(self, plan: _Plan, block: jax.Array) -> jax.Array:
        return lax.rem(block - self.start, plan.blocks.stages)

    def position(self, plan: _Plan, block: jax.Array) -> jax.Array:
        return self.begin + block * plan.blocks.block_len


def _copy_blocks(plan: _Plan, walk: _Walk, pool: Any, pages: Any, head: jax.Array, shared: _Shared) -> None:
    """The copying warpgroup: pages of a row (`[max_pages]`, GMEM, int32) into stages, as these become free."""

    @pl.loop(walk.start, walk.stop)
    def _(block: jax.Array) -> None:
        stage = walk.stage(plan, block)
        arrived = shared.arrived.at[stage]
        positions = [walk.position(plan, block) + at for at in range(0, plan.blocks.block_len, plan.piece)]
        # Page ids are asked for all at once and before the wait: each takes the memory half a microsecond.
        ids = [pages[lax.div(jnp.minimum(position, walk.end - 1), plan.page_size)] for position in positions]

        @pl.when(block - walk.start >= plan.blocks.stages)
        def _() -> None:
            _vacate(plan, stage, shared)

        for i, (position, page) in enumerate(zip(positions, ids, strict=True)):
            in_page = pl.ds(lax.rem(position, plan.page_size), plan.piece)
            in_block = pl.ds(i * plan.piece, plan.piece)

            @pl.when(position < walk.end)
            def _(page: jax.Array = page, in_page: Any = in_page, in_block: Any = in_block) -> None:
                for smem, which in ((shared.keys, KEY), (shared.values, VALUE)):
                    line = (page * plan.kv_heads + head) * 2 + which
                    plgpu.copy_gmem_to_smem(pool.at[line, in_page], smem.at[stage, in_block], arrived)

            @pl.when(position >= walk.end)
            def _() -> None:
                plgpu.barrier_arrive(arrived)
                plgpu.barrier_arrive(arrived)

    @pl.loop(jnp.maximum(walk.start, walk.stop - plan.blocks.stages), walk.stop)
    def _(block: jax.Array) -> None:  # leaves no barrier with an arrival that nobody has waited for
        _vacate(plan, walk.stage(plan, block), shared)

    if plan.widens:
        for which in KEY, VALUE:
            plgpu.barrier_wait(shared.freed.at[which])


def _vacate(plan: _Plan, stage: jax.Array, shared: _Shared) -> None:
    """Ends when nobody needs the block in a stage any more: it was multiplied, or widened."""
    if not plan.widens:
        plgpu.barrier_wait(shared.freed.at[stage])
        return
    plgpu.barrier_wait(shared.arrived.at[stage])
    for which, narrow in (KEY, shared.keys), (VALUE, shared.values):
        plgpu.barrier_wait(shared.freed.at[which])
        lines = narrow[stage]
        if plan.head_dim % 32 == 0:
            lines = plgpu.layout_cast(lines, WIDENING)
        shared.wide[which] = _widened(lines, shared.wide.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.widened.at[which])


def _widened(narrow: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The same numbers in 16 bits, by way of the type that instructions widen to."""
    return narrow.astype(jnp.bfloat16 if narrow.dtype == jnp.int8 else jnp.float16).astype(dtype)


def _compute(plan: _Plan, walk: _Walk, worker: jax.Array, shared: _Shared) -> None:
    """A computing warpgroup: from `shared.q` and the blocks that arrive, the output in `shared.q` and `shared.lse`."""
    shape = (LINES, plan.blocks.block_len)
    line = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    q_pos = walk.first + lax.div(line + worker * LINES, plan.group)
    if plan.widens:
        for which in KEY, VALUE:
            plgpu.barrier_arrive(shared.freed.at[which])  # nothing is there yet

    def add_block(block: jax.Array, softmax: tuple[jax.Array, jax.Array, list[jax.Array]]) -> Any:
        top, total, mixed = softmax
        stage, position = walk.stage(plan, block), walk.position(plan, block)
        if plan.widens:
            # The compiler must not know the index: it would keep the addresses of all factors in registers.
            zero = jnp.minimum(walk.end - 1 - position, 0)
            keys, values = shared.wide.at[KEY + zero], shared.wide.at[VALUE + zero]
            plgpu.barrier_wait(shared.widened.at[KEY])
        else:
            keys, values = shared.keys.at[stage], shared.values.at[stage]
            plgpu.barrier_wait(shared.arrived.at[stage])
        products = _matmul(shared.q.at[worker], keys.T)
        if plan.widens:
            plgpu.barrier_arrive(shared.freed.at[KEY])
        scores = jnp.where(plan.scoring.seen(q_pos, position + column), plan.scoring.capped(products), MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp2((scores - lax.broadcast_in_dim(new_top, shape, [0])) * plan.exponent)
        decay = jnp.exp2((top - new_top) * plan.exponent)
        total = total * decay + weights.sum(axis=1)
        shared.weights[worker] = weights.astype(shared.weights.dtype)
        plgpu.commit_smem()
        if plan.widens:
            plgpu.barrier_wait(shared.widened.at[VALUE])

        @pl.when(position + plan.blocks.block_len > walk.end)
        def _() -> None:
            _clean(walk.end - position, worker, values, shared.cleaned)

        mixed = [
            _scaled(chunk, decay) + _matmul(shared.weights.at[worker], values.at[:, columns])
            for chunk, columns in zip(mixed, plan.chunks, strict=True)
        ]
        plgpu.barrier_arrive(shared.freed.at[VALUE if plan.widens else stage])
        return new_top, total, mixed

    per_line = plgpu.Layout.WGMMA.reduce(1)
    top = plgpu.layout_cast(jnp.full((LINES,), MASKED, jnp.float32), per_line)
    total = plgpu.layout_cast(jnp.zeros((LINES,), jnp.float32), per_line)
    zeros = [jnp.zeros((LINES, chunk.size), jnp.float32) for chunk in plan.chunks]
    mixed = [plgpu.layout_cast(zero, plgpu.Layout.WGMMA) for zero in zeros]
    top, total, mixed = lax.fori_loop(walk.start, walk.stop, add_block, (top, total, mixed))
    total = jnp.where(total > 0, total, 1.0)
    for chunk, columns in zip(mixed, plan.chunks, strict=True):
        shared.q[worker, :, columns] = _scaled(chunk, 1.0 / total).astype(shared.q.dtype)
    shared.lse[worker] = top * plan.exponent + jnp.log(total) * LOG2_E
    plgpu.commit_smem()


def _matmul(a: Any, b: Any) -> jax.Array:
    """`a @ b` of two references to shared memory, in f32."""

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def _clean(held: jax.Array, worker: jax.Array, values: Any, cleaned: Any) -> None:
    """Zero the lines of the last block from `held` on: whatever lies there, times a weight of 0 may still be NaN."""

    @pl.when(worker == 0)
    def _() -> None:
        line = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
        values[...] = jnp.where(line < held, values[...], 0)
        plgpu.commit_smem()
        plgpu.barrier_arrive(cleaned)

    plgpu.barrier_wait(cleaned)


def _scaled(lines: jax.Array, factors: jax.Array) -> jax.Array:
    return lines * lax.broadcast_in_dim(factors, lines.shape, [0])


def merge(mixes: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """One attention of all parts.

    Args:
        mixes: `[splits, ..., head_dim]`, as from `attend`.
        lse: `[splits, ...]`.
        sinks: logits of their own that come with no value; broadcast against the end of `lse`.

    Returns:
        `[..., head_dim]`, typed like `mixes`.
    """
    if sinks is not None:
        sinks = sinks.astype(jnp.float32) * LOG2_E
    elif len(mixes) == 1:
        return mixes[0]
    top = lse.max(axis=0)
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    weights = jnp.exp2(lse - top)
    total = weights.sum(axis=0)
    if sinks is not None:
        total += jnp.exp2(sinks - top)
    mixed = (weights[..., None] * mixes.astype(jnp.float32)).sum(axis=0)
    return (mixed / total[..., None]).astype(mixes.dtype)
