"""The Hopper kernel below decode and extend: tiles of queries walk over the pages of their rows.

One warpgroup of a thread block only copies: pages stream from the pool into a ring of shared memory, a block of
positions at a time, while the others multiply what has arrived (warp specialization as in FlashAttention-3, Shah et
al., 2024). Query heads of a KV head are lines of one matmul. The softmax is online (Milakov and Gimelshein, 2018), in
powers of two. Blocks of a tile may be split among thread blocks, which is how few rows fill a GPU (FlashDecoding, Dao
et al., 2023): each yields a normalized mix of values and the logarithm of its denominator, which is all that `merge`
needs, and also all that it takes to add an attention sink afterwards, so the kernel knows nothing of sinks.
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
from jradix.pallas.scoring import Scoring

LOG2_E = math.log2(math.e)
MASKED = -1e30  # finite: MASKED - MASKED must not be NaN for a query that has seen nothing yet
CHUNK = 128
"""Columns of the output that are multiplied at a time: twice as many accumulators would leave the registers."""


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
        values, and base-2 logarithms of the sums of `exp(score)` they were divided by. Zeros and `MASKED` for parts
        with nothing to see; lines of no query hold anything.
    """
    num_tiles, kv_heads, lines, head_dim = tiles.q.shape
    page_size, block_len, stages = page_size_of(pool), blocks.block_len, blocks.stages
    workers = blocks.warpgroups
    lines_each = min(lines, LINES)
    assert lines == lines_each * workers and kv_heads == kv_heads_of(pool), (tiles.q.shape, pool.shape, blocks)
    piece = math.gcd(page_size, block_len)  # the most that lies both in one page and in one block
    exponent = scoring.exponent * LOG2_E
    chunks = [pl.ds(at, min(CHUNK, head_dim - at)) for at in range(0, head_dim, CHUNK)]

    def kernel(*refs: Any) -> None:
        # q: [tiles, kv_heads, lines, head_dim], GMEM, bf16. pool: [pages * kv_heads * 2, page_size, head_dim], GMEM,
        # bf16. table: [rows, max_pages]; rows, firsts, ends: [tiles], GMEM, int32. out, lse: what is returned, GMEM.
        # q_smem, which takes the output in the end: [workers, LINES, head_dim], k_smem and v_smem: [stages, block_len,
        # head_dim], p_smem: [workers, LINES, block_len], all SMEM, bf16. lse_smem: [workers, LINES], SMEM, f32.
        q, pool, table, rows, firsts, ends, out, lse, *scratch = refs
        q_smem, k_smem, v_smem, p_smem, lse_smem, q_arrived, arrived, freed, cleaned = scratch
        tile, head, split = lax.axis_index("tile"), lax.axis_index("head"), lax.axis_index("split")
        worker = lax.axis_index("warpgroup")
        row, first, end = rows[tile], firsts[tile], ends[tile]
        begin = 0 if scoring.window is None else lax.div(jnp.maximum(first - scoring.window + 1, 0), piece) * piece
        num_blocks = pl.cdiv(end - begin, block_len)
        share = pl.cdiv(num_blocks, splits)
        start = jnp.minimum(split * share, num_blocks)
        stop = jnp.minimum(start + share, num_blocks)

        @pl.when(worker == workers)
        def _copy_blocks() -> None:
            @pl.loop(start, stop)
            def _copy_block(block: jax.Array) -> None:
                stage = lax.rem(block - start, stages)
                position = begin + block * block_len
                # Page ids are asked for all at once, before the wait: each takes the memory half a microsecond.
                inside = [position + at < end for at in range(0, block_len, piece)]
                pages = [
                    table[row, lax.div(jnp.minimum(position + at, end - 1), page_size)]
                    for at in range(0, block_len, piece)
                ]

                @pl.when(block - start >= stages)
                def _wait_until_read() -> None:
                    plgpu.barrier_wait(freed.at[stage])

                for i, (page, is_inside) in enumerate(zip(pages, inside, strict=True)):
                    in_page = pl.ds(lax.rem(position + i * piece, page_size), piece)
                    in_block = pl.ds(i * piece, piece)

                    @pl.when(is_inside)
                    def _copy_piece(page=page, in_page=in_page, in_block=in_block) -> None:
                        for smem, which in ((k_smem, KEY), (v_smem, VALUE)):
                            plgpu.copy_gmem_to_smem(
                                pool.at[(page * kv_heads + head) * 2 + which, in_page],
                                smem.at[stage, in_block],
                                arrived.at[stage],
                            )

                    @pl.when(jnp.logical_not(is_inside))
                    def _arrive_anyway() -> None:
                        plgpu.barrier_arrive(arrived.at[stage])
                        plgpu.barrier_arrive(arrived.at[stage])

        @pl.when(worker < workers)
        def _compute() -> None:
            mine = pl.ds(worker * lines_each, lines_each)
            plgpu.copy_gmem_to_smem(
                q.at[tile, head, mine], q_smem.at[worker, pl.ds(0, lines_each)], q_arrived.at[worker]
            )
            plgpu.barrier_wait(q_arrived.at[worker])
            shape = (LINES, block_len)
            line = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            q_pos = first + lax.div(line + worker * LINES, group)

            def add_block(block: jax.Array, carry: tuple[jax.Array, jax.Array, list[jax.Array]]) -> Any:
                top, total, mixed = carry
                stage = lax.rem(block - start, stages)
                position = begin + block * block_len
                plgpu.barrier_wait(arrived.at[stage])

                def multiply_keys(acc: Any) -> jax.Array:
                    plgpu.wgmma(acc, q_smem.at[worker], k_smem.at[stage].T)
                    return acc[...]

                products = pl.run_scoped(multiply_keys, plgpu.ACC(shape, jnp.float32))
                scores = jnp.where(scoring.seen(q_pos, position + column), scoring.capped(products), MASKED)
                new_top = jnp.maximum(top, scores.max(axis=1))
                weights = jnp.exp2((scores - lax.broadcast_in_dim(new_top, shape, [0])) * exponent)
                decay = jnp.exp2((top - new_top) * exponent)
                total = total * decay + weights.sum(axis=1)
                p_smem[worker] = weights.astype(q.dtype)
                plgpu.commit_smem()

                @pl.when(position + block_len > end)
                def _clean() -> None:
                    @pl.when(worker == 0)
                    def _zero_values_past_the_end() -> None:
                        # What lies there, NaN included, must not reach a sum: 0 * NaN is NaN.
                        value_line = plgpu.broadcasted_iota(
                            jnp.int32, (block_len, head_dim), 0, layout=plgpu.Layout.WGMMA
                        )
                        v_smem[stage] = jnp.where(position + value_line < end, v_smem[stage], 0)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(cleaned)

                    plgpu.barrier_wait(cleaned)

                def multiply_values(columns: Any) -> jax.Array:
                    def multiply(acc: Any) -> jax.Array:
                        plgpu.wgmma(acc, p_smem.at[worker], v_smem.at[stage, :, columns])
                        return acc[...]

                    return pl.run_scoped(multiply, plgpu.ACC((LINES, columns.size), jnp.float32))

                mixed = [_scaled(m, decay) + multiply_values(columns) for m, columns in zip(mixed, chunks, strict=True)]
                plgpu.barrier_arrive(freed.at[stage])
                return new_top, total, mixed

            top = plgpu.layout_cast(jnp.full((LINES,), MASKED, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
            total = plgpu.layout_cast(jnp.full((LINES,), 0.0, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
            mixed = [
                plgpu.layout_cast(jnp.zeros((LINES, columns.size), jnp.float32), plgpu.Layout.WGMMA)
                for columns in chunks
            ]
            top, total, mixed = lax.fori_loop(start, stop, add_block, (top, total, mixed))
            total = jnp.where(total > 0, total, 1.0)
            for m, columns in zip(mixed, chunks, strict=True):
                q_smem[worker, :, columns] = _scaled(m, 1.0 / total).astype(q.dtype)
            lse_smem[worker] = jnp.maximum(top * exponent, MASKED) + jnp.log(total) * LOG2_E
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[worker, pl.ds(0, lines_each)], out.at[split, tile, head, mine])
            plgpu.copy_smem_to_gmem(lse_smem.at[worker], lse.at[split, tile, head, pl.ds(worker * LINES, LINES)])
            plgpu.wait_smem_to_gmem(0)

    dtype = tiles.q.dtype
    call = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((splits, *tiles.q.shape), dtype),
            jax.ShapeDtypeStruct((splits, num_tiles, kv_heads, LINES * workers), jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((workers, LINES, head_dim), dtype),
            plgpu.SMEM((stages, block_len, head_dim), dtype),
            plgpu.SMEM((stages, block_len, head_dim), dtype),
            plgpu.SMEM((workers, LINES, block_len), dtype),
            plgpu.SMEM((workers, LINES), jnp.float32),
            plgpu.Barrier(num_barriers=workers),
            plgpu.Barrier(num_arrivals=2 * block_len // piece, num_barriers=stages),
            plgpu.Barrier(num_arrivals=workers, num_barriers=stages),
            plgpu.Barrier(),
        ],
        grid=(num_tiles, kv_heads, splits),
        grid_names=("tile", "head", "split"),
        num_threads=workers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    lines_of_pool = pool.reshape(-1, page_size, head_dim)
    return call(tiles.q, lines_of_pool, page_table, tiles.rows, tiles.first, tiles.end)


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
