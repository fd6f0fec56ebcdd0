"""The only door to attention over the KV pool: picks the implementation for a device, says why, and calls it."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from jradix.pallas import gpu_blocks, gpu_decode, gpu_extend, layout, tpu_blocks, tpu_decode, tpu_extend, tpu_write, xla
from jradix.pallas.geometry import Geometry
from jradix.pallas.scoring import Scoring


@dataclass(frozen=True, slots=True)
class Kernels:
    """The implementation of attention that an engine uses. Static: a program is compiled for one.

    Attributes:
        name: "xla" runs everywhere; the others are Pallas kernels for one kind of device.
        chip: a TPU's generation such as "v6e", a GPU's compute capability.
        joined_pages: whether the pool must be joined, see `layout`.
        reasons: why no Pallas kernels are used; empty if they are.
        interpret: how to run Pallas kernels on a CPU, slowly, for tests; False to compile them.
    """

    name: Literal["xla", "tpu", "gpu"]
    chip: str = ""
    joined_pages: bool = False
    reasons: tuple[str, ...] = ()
    interpret: Any = False


XLA = Kernels("xla")


def choose(platform: str, device: str, geometry: Geometry, max_pages: int) -> Kernels:
    """The best implementation for rows of up to `max_pages` pages.

    platform: "cpu", "gpu" or "tpu". device: of a TPU jax's name for its kind, of a GPU its compute capability.

    Raises:
        ValueError: a TPU cannot keep pages of this size as they are; whatever read them would copy the whole pool.
    """
    if platform == "tpu":
        lines = tpu_blocks.tile_lines(geometry.pool_dtype)
        if geometry.page_size % lines:
            raise ValueError(
                f"page_size must be a multiple of {lines} on a TPU in {geometry.pool_dtype}, got {geometry.page_size}: "
                "its memory holds so many lines together"
            )
        chip = tpu_blocks.GENERATIONS.get(device, device)
        reasons = tpu_blocks.unsupported(chip, geometry, max_pages)
        return Kernels("xla" if reasons else "tpu", chip, joined_pages=True, reasons=tuple(reasons))
    if platform == "gpu":
        reasons = gpu_blocks.unsupported(geometry, device)
        return Kernels("xla" if reasons else "gpu", device, reasons=tuple(reasons))
    return replace(XLA, reasons=(f"Pallas kernels are for TPUs and Hopper GPUs, this is a {platform}",))


def write_kv(
    pool: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    kernels: Kernels = XLA,
) -> jax.Array:
    """Store the new tokens' keys and values.

    Args:
        pool: split or joined, see `layout`; donated by the step that calls this.
        keys, values: `[tokens, kv_heads, head_dim]`.
        pages, offsets: int32 `[tokens]`, flat page id (layer included) and place inside the page. A page id
            outside the pool drops the write. Tokens of one page are neighbours, in the order of their offsets.

    Returns:
        The updated pool.
    """
    if kernels.name == "tpu":
        return tpu_write.write_tokens(pool, keys, values, pages, offsets, interpret=kernels.interpret)
    return layout.write_tokens(pool, keys, values, pages, offsets)


def extend_attention(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    query_starts: jax.Array,
    scoring: Scoring,
    sinks: jax.Array | None = None,
    *,
    kernels: Kernels = XLA,
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
    rows = (page_table, seq_lens, query_starts, scoring, sinks)
    geometry = _geometry(q, pool)
    if kernels.name == "tpu":
        blocks = tpu_blocks.extend_blocks(kernels.chip, geometry)
        return tpu_extend.extend_attention(q, pool, *rows, blocks=blocks, interpret=kernels.interpret)
    if kernels.name == "gpu":
        blocks = gpu_blocks.extend_blocks(geometry)
        return gpu_extend.extend_attention(q, pool, *rows, blocks=blocks, interpret=kernels.interpret)
    return xla.extend_attention(q, pool, *rows)


def decode_attention(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    scoring: Scoring,
    sinks: jax.Array | None = None,
    *,
    kernels: Kernels = XLA,
) -> jax.Array:
    """Attention of one new token a row: `extend_attention` where token `r` is row `r`'s last position."""
    rows = (page_table, seq_lens, scoring, sinks)
    geometry = _geometry(q, pool)
    if kernels.name == "tpu":
        blocks = tpu_blocks.decode_blocks(kernels.chip, geometry)
        return tpu_decode.decode_attention(q, pool, *rows, blocks=blocks, interpret=kernels.interpret)
    if kernels.name == "gpu":
        blocks = gpu_blocks.decode_blocks(geometry)
        return gpu_decode.decode_attention(q, pool, *rows, blocks=blocks, interpret=kernels.interpret)
    return xla.decode_attention(q, pool, *rows)


def _geometry(q: jax.Array, pool: jax.Array) -> Geometry:
    _, q_heads, head_dim = q.shape
    heads = (q_heads, layout.kv_heads_of(pool), head_dim)
    return Geometry(*heads, layout.page_size_of(pool), q.dtype.name, pool.dtype.name)
