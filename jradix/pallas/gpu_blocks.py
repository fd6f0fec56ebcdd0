"""Block sizes of the Mosaic GPU kernels, and what these kernels do not cover.

A Hopper multiprocessor has 227 KB of shared memory and must have 36 KB of keys and values on their way to use its share
of the memory's bandwidth (36 bytes a nanosecond, for a microsecond). Longer blocks spread what a block costs besides
(waits, reductions, the hand-over of weights through shared memory) over more positions, and end where the registers do.
"""

from dataclasses import dataclass, replace

from jradix.pallas.geometry import Geometry

LINES = 64
"""Lines of a matmul that one warpgroup does; fewer take as long."""
MULTIPROCESSORS = 132
"""Of an H100 or H200."""
SHARED_MEMORY = 232_448
"""Bytes that a thread block may have."""
NARROW = ("int8", "float8_e4m3fn")
"""What keys and values may be besides what queries are: 8 bits, widened in shared memory."""
MAX_GROUP = 2 * LINES
"""Query heads of a KV head: a third computing warpgroup would leave too few registers to each."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a thread block works.

    Attributes:
        warpgroups: that compute, `LINES` lines of queries each; one more copies.
        block_len: positions of keys and values that arrive and are multiplied together.
        stages: blocks that shared memory holds as they come, of 8 bits one more in 16.
    """

    warpgroups: int
    block_len: int
    stages: int

    @property
    def lines(self) -> int:
        return self.warpgroups * LINES

    def shared_bytes(self, geometry: Geometry) -> int:
        """Shared memory for 16-bit queries and weights, keys and values, and what reductions and barriers take."""
        block = 2 * self.block_len * geometry.head_dim
        kept = self.stages * block * geometry.pool_itemsize
        if geometry.pool_itemsize == 1:
            kept += 2 * block
        return 2 * self.lines * (geometry.head_dim + self.block_len) + kept + 4 * self.lines + 4096


DECODE = {64: Blocks(1, 64, 4), 128: Blocks(1, 128, 2), 256: Blocks(1, 64, 2)}
"""By the largest head_dim that they are for. Up to 64, two thread blocks fit on a multiprocessor: 128 registers."""
EXTEND = {64: Blocks(2, 128, 3), 128: Blocks(2, 128, 2), 256: Blocks(1, 64, 2)}
"""Beyond 128, only groups that need a second warpgroup get one: its accumulators spill."""


def decode_blocks(geometry: Geometry) -> Blocks:
    """For tiles of one query, all its heads of a KV head."""
    return _fitting(DECODE, geometry)


def extend_blocks(geometry: Geometry) -> Blocks:
    """For tiles of as many queries, all their heads of a KV head, as fit."""
    return _fitting(EXTEND, geometry)


def _fitting(table: dict[int, Blocks], geometry: Geometry) -> Blocks:
    blocks = table[min(size for size in table if size >= geometry.head_dim)]
    blocks = replace(blocks, warpgroups=max(blocks.warpgroups, -(-geometry.group // LINES)))
    if geometry.pool_itemsize == 1:
        more = replace(blocks, stages=blocks.stages + 1)  # with half the bytes on their way in each
        return more if more.shared_bytes(geometry) <= SHARED_MEMORY else blocks
    return blocks


def unsupported(geometry: Geometry, compute_capability: str) -> list[str]:
    """Why the kernels do not cover a model on a chip, such as "9.0"; empty if they do."""
    _, _, head_dim, page_size, dtype, _ = geometry
    reasons = []
    if not compute_capability.startswith("9."):
        reasons.append(f"wgmma instructions need compute capability 9, this GPU has {compute_capability or 'none'}")
    if dtype not in ("bfloat16", "float16"):
        reasons.append(f"tensor cores multiply bfloat16 and float16, not {dtype}")
    if geometry.pool_dtype not in (dtype, *NARROW):
        reasons.append(f"keys and values of {geometry.pool_dtype} are not widened, only {' and '.join(NARROW)} are")
    if head_dim % 16 or not 16 <= head_dim <= max(DECODE):
        reasons.append(f"head_dim {head_dim} is no multiple of 16 up to {max(DECODE)}")
    if geometry.q_heads % geometry.kv_heads:
        reasons.append(f"{geometry.q_heads} query heads are no multiple of {geometry.kv_heads} KV heads")
    if page_size % 8:
        reasons.append(f"page size {page_size} is no multiple of 8, the lines of a tile in shared memory")
    if geometry.group > MAX_GROUP:
        reasons.append(
            f"{geometry.group} query heads of a KV head are more than {MAX_GROUP}, the lines of a tile of queries"
        )
    return reasons
