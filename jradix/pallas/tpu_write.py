"""Stores new tokens' keys and values in the pool on a TPU, in place: many small read-modify-writes in flight at once.

A token's line is smaller than what a copy can place in HBM: a tile of `8 * 4 / itemsize` lines, 16 of bfloat16. So a
tile is brought to VMEM, its lines are set, and it goes back. A token of a decode row has a tile of its own, and 64 of
them must not wait 64 times for a copy both ways (a microsecond each): tiles take turns in a ring of buffers, and the
copies of several are always on their way in either direction.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jradix.pallas.layout import join
from jradix.pallas.tpu_blocks import tile_lines

BUFFERS = 16
AHEAD = 8  # loads on their way; as many stores
CHUNK_BYTES = 2 << 20  # of the tokens' lines in VMEM, and twice that while the next are fetched


def write_tokens(
    pool: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    interpret: Any = False,
) -> jax.Array:
    """See `layout.write_tokens`; `pool` is joined, and aliased by the result.

    Tokens of one page must be neighbours, in the order of their offsets: two tiles that are in flight at once must not
    be the same, or one of the writes is lost.
    """
    tokens, kv_heads, _ = keys.shape
    page_size, line = pool.shape[2:]
    tile_len = tile_lines(pool.dtype)
    lines = join(keys, values).astype(pool.dtype)[:, :, None]  # a line is a tile of its own: any token can be picked
    # In VMEM, such a line takes 4 bytes for each of its numbers, whatever their type.
    chunk = min(tokens, max(8, CHUNK_BYTES // (kv_heads * line * 4) // 8 * 8))
    num_chunks = pl.cdiv(tokens, chunk)
    inside = (pages >= 0) & (pages < pool.shape[0])
    tiles = jnp.where(inside, pages * (page_size // tile_len) + offsets // tile_len, -1)
    tiles, slots = (
        jnp.pad(x, (0, num_chunks * chunk - tokens), constant_values=-1) for x in (tiles, offsets % tile_len)
    )
    return pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_chunks,),
            in_specs=[
                pl.BlockSpec((chunk, kv_heads, 1, line), lambda i, *_: (i, 0, 0, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.SMEM((chunk + 1,), jnp.int32),
                pltpu.VMEM((BUFFERS, kv_heads, tile_len, line), pool.dtype),
                pltpu.SemaphoreType.DMA((BUFFERS,)),
                pltpu.SemaphoreType.DMA((BUFFERS,)),
            ],
        ),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="write_tokens",
    )(tiles, slots, lines, pool)


def _kernel(
    tiles_ref,  # [tokens], SMEM, int32: each token's tile, counted through the pool; -1 for none
    slots_ref,  # [tokens], SMEM, int32: its line in the tile
    lines_ref,  # [chunk, kv_heads, 1, line], VMEM, as pool: of this chunk's tokens
    _,  # the pool before
    pool_ref,  # [pages, kv_heads, page_size, line], HBM, f32, bf16 or 8 bits
    runs_ref,  # [chunk + 1], SMEM, int32: first token of each run of tokens in one tile, then the chunk's end
    buffers_ref,  # [BUFFERS, kv_heads, tile_len, line], VMEM, as pool
    load_sem,  # [BUFFERS] DMA semaphores
    store_sem,  # [BUFFERS] DMA semaphores
):
    chunk, kv_heads, _, line = lines_ref.shape
    tile_len = buffers_ref.shape[2]
    tiles_a_page = pool_ref.shape[2] // tile_len
    begin = pl.program_id(0) * chunk

    def note(token, last):
        """The run that the token belongs to."""
        run = last + (tiles_ref[token] != tiles_ref[token - 1])
        pl.when(run > last)(lambda: runs_ref.__setitem__(run, token))
        return run

    runs_ref[0] = begin
    num_runs = 1 + jax.lax.fori_loop(begin + 1, begin + chunk, note, 0)
    runs_ref[num_runs] = begin + chunk

    def is_stored(run):
        return tiles_ref[runs_ref[run]] >= 0

    def is_loaded(run):
        """Not if every line of the tile is set."""
        first, last = runs_ref[run], runs_ref[run + 1] - 1
        whole = (last - first == tile_len - 1) & (slots_ref[first] == 0) & (slots_ref[last] == tile_len - 1)
        return is_stored(run) & ~whole

    def tile(run):
        at = tiles_ref[runs_ref[run]]
        return pool_ref.at[
            at // tiles_a_page, :, pl.ds(pl.multiple_of(at % tiles_a_page * tile_len, tile_len), tile_len)
        ]

    def load(run):
        buffer = run % BUFFERS
        return pltpu.make_async_copy(tile(run), buffers_ref.at[buffer], load_sem.at[buffer])

    def store(run):
        buffer = run % BUFFERS
        return pltpu.make_async_copy(buffers_ref.at[buffer], tile(run), store_sem.at[buffer])

    def set_lines(run):
        slot = jax.lax.broadcasted_iota(jnp.int32, (kv_heads, tile_len, line), 1)

        def set_line(token, lines):
            return jnp.where(slot == slots_ref[token], lines_ref[token - begin], lines)

        buffer = run % BUFFERS
        buffers_ref[buffer] = jax.lax.fori_loop(runs_ref[run], runs_ref[run + 1], set_line, buffers_ref[buffer])

    def step(i, _):
        @pl.when((i >= BUFFERS) & (i < num_runs))
        def _():
            pl.when(is_stored(i - BUFFERS))(lambda: store(i - BUFFERS).wait())

        @pl.when(i < num_runs)
        def _():
            pl.when(is_loaded(i))(lambda: load(i).start())

        run = i - AHEAD

        @pl.when(run >= 0)
        def _():
            pl.when(is_loaded(run))(lambda: load(run).wait())

            @pl.when(is_stored(run))
            def _():
                set_lines(run)
                store(run).start()

        return 0

    jax.lax.fori_loop(0, num_runs + AHEAD, step, 0)

    # The next chunk may begin in the tile that this one ends in.
    def finish(run, _):
        pl.when(is_stored(run))(lambda: store(run).wait())
        return 0

    jax.lax.fori_loop(jnp.maximum(num_runs - BUFFERS, 0), num_runs, finish, 0)
