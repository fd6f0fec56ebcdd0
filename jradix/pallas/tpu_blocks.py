"""Block sizes of the TPU kernels as data, and which shapes the kernels cover: what must fit a chip's memories."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jradix.pallas.geometry import Geometry
from jradix.pallas.layout import LANES, line_len

MIB = 1 << 20
MAX_TABLE_PAGES = 32768
"""Of a row: two rows of the page table stand in SMEM, which has 1 MiB, and take a quarter of it."""
MIN_TILE_LEN, MAX_TILE_LEN = 16, 256
MARGIN = 0.75
"""Of the VMEM given to a kernel, so much is planned; the rest is for what the compiler spills."""


class Chip(NamedTuple):
    """What a generation likes.

    vmem_bytes: given to a kernel, half of a core's: XLA keeps other arrays of a step in the rest.
    decode_block_bytes: of keys and values that are on their way while others are multiplied. A copy takes about 1.5 us
        from its start to its end, in which HBM moves 1.2 MB (v5e), 2.5 MB (v6e), 2 MB (a core of v5p) or 5.5 MB (7x).
    tile_queries: lines of the matrix that a tile's queries make for a KV head. Keys are read once for them; 240 (v5e),
        170 (v5p), 560 (v6e) or 310 (7x) operations a byte are what the chip has time for.
    cores: of one device. A v5p shows its two as one device, a 7x as two.
    """

    vmem_bytes: int
    decode_block_bytes: int
    tile_queries: int
    cores: int = 1


CHIPS = {
    "v5e": Chip(64 * MIB, 2 * MIB, 512),
    "v5p": Chip(32 * MIB, 2 * MIB, 512, cores=2),
    "v6e": Chip(64 * MIB, 4 * MIB, 1024),
    "7x": Chip(32 * MIB, 4 * MIB, 512),
}
GENERATIONS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "7x"}
"""By jax's name for the kind of a device."""
NARROW = ("bfloat16", "int8", "float8_e4m3fn")
"""What keys and values may be beside the type of the queries, to which the kernel then widens them."""
BLOCK_LEN = 512
"""Positions of a block, if the bytes above allow: longer ones waste more at the ends of short rows."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a kernel takes at a time.

    Attributes:
        pages: pages of a block of keys and values; two such blocks are in VMEM.
        tile_len: tokens of an extend tile at most; 1 for decode.
        heads: KV heads that are multiplied at once; divides `kv_heads`.
        vmem_bytes: limit given to the compiler.
        cores: that take turns at the rows or tiles.
    """

    pages: int
    tile_len: int
    heads: int
    vmem_bytes: int
    cores: int = 1


def decode_blocks(generation: str, geometry: Geometry) -> Blocks:
    """Blocks for `tpu_decode`, where nothing else counts than that copies never stop."""
    chip = CHIPS[generation]
    line_bytes = geometry.kv_heads * line_len(geometry.head_dim) * geometry.pool_itemsize
    block_len = min(2 * BLOCK_LEN, chip.decode_block_bytes // line_bytes)
    heads = max(h for h in range(1, 9) if geometry.kv_heads % h == 0)  # small matrices: several keep the MXU busy
    return _fitting(Blocks(_pages(block_len, geometry), 1, heads, chip.vmem_bytes, chip.cores), geometry)


def extend_blocks(generation: str, geometry: Geometry) -> Blocks:
    """Blocks for `tpu_extend`, whose tiles are tall enough to be limited by arithmetic."""
    chip = CHIPS[generation]
    tile_len = _power_of_two(chip.tile_queries * geometry.kv_heads // geometry.q_heads)
    tile_len = min(max(tile_len, MIN_TILE_LEN), MAX_TILE_LEN)
    return _fitting(Blocks(_pages(BLOCK_LEN, geometry), tile_len, 1, chip.vmem_bytes, chip.cores), geometry)


def unsupported(generation: str, geometry: Geometry, max_pages: int) -> list[str]:
    """Why the kernels do not cover a geometry with rows of up to `max_pages` pages; empty if they do."""
    q_heads, kv_heads, head_dim, page_size, dtype, _ = geometry
    if generation not in CHIPS:
        return [f"no block sizes for {generation}, only for TPU {', '.join(CHIPS)}"]
    if dtype not in ("bfloat16", "float32"):
        return [f"queries of {dtype}, not bfloat16 or float32"]
    if geometry.pool_dtype not in (dtype, *NARROW):
        return [f"keys and values of {geometry.pool_dtype}, not {dtype} or {', '.join(NARROW)}"]
    reasons = []
    if q_heads % kv_heads:
        reasons.append(f"{q_heads} query heads are no multiple of {kv_heads} KV heads")
    if head_dim > 2 * LANES:
        reasons.append(f"head_dim {head_dim} is above {2 * LANES}")
    if max_pages > MAX_TABLE_PAGES:
        reasons.append(f"{max_pages} pages a row are more than the {MAX_TABLE_PAGES} that SMEM holds")
    if not reasons and not all(
        _fits(choose(generation, geometry), geometry) for choose in (decode_blocks, extend_blocks)
    ):
        reasons.append(
            f"two pages of {page_size} and {MIN_TILE_LEN} tokens' queries do not fit "
            f"{MARGIN * CHIPS[generation].vmem_bytes:.0f} bytes"
        )
    return reasons


def tile_lines(dtype: jax.typing.DTypeLike) -> int:
    """Lines of the smallest piece of a page that a copy can bring: a TPU packs numbers below 32 bits line-wise."""
    return 8 * 4 // jnp.dtype(dtype).itemsize


def vmem_bytes(blocks: Blocks, geometry: Geometry) -> int:
    """VMEM that the attention kernel plans to use: what it allocates, and the largest values it computes with."""
    itemsize, pool_itemsize, lines = geometry.itemsize, geometry.pool_itemsize, tile_lines(geometry.dtype)
    line = line_len(geometry.head_dim)
    width = max(line // 2, LANES)
    block_len = blocks.pages * geometry.page_size
    queries = _padded(geometry.group * blocks.tile_len, lines)
    a_head = (
        2 * 2 * queries * width * itemsize  # queries and output, while the next come and the last go
        + 2 * block_len * line * pool_itemsize
        + queries * (2 * LANES + width) * 4  # the softmax so far
    )
    copies = 1 if pool_itemsize == itemsize else 2  # of the lines: masked ones, and before that widened ones
    values = 3 * queries * _padded(block_len, LANES) * 4 + copies * block_len * line * itemsize  # with scores, weights
    return geometry.kv_heads * a_head + blocks.heads * values


def _fits(blocks: Blocks, geometry: Geometry) -> bool:
    return vmem_bytes(blocks, geometry) <= MARGIN * blocks.vmem_bytes


def _fitting(blocks: Blocks, geometry: Geometry) -> Blocks:
    """Smaller blocks, if these do not fit; as small as can be if none does."""
    while not _fits(blocks, geometry):
        if blocks.tile_len > MIN_TILE_LEN:
            blocks = replace(blocks, tile_len=blocks.tile_len // 2)
        elif blocks.pages > 1:
            blocks = replace(blocks, pages=blocks.pages // 2)
        elif blocks.heads > 1:
            blocks = replace(blocks, heads=1)
        else:
            break
    return blocks


def _pages(block_len: int, geometry: Geometry) -> int:
    return max(1, _power_of_two(block_len) // geometry.page_size)


def _power_of_two(x: int) -> int:
    """The largest up to `x`."""
    return 1 << max(0, x.bit_length() - 1)


def _padded(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
