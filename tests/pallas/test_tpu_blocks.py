"""Which blocks the TPU kernels take, and which geometries they refuse."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from jradix.pallas.geometry import Geometry
from jradix.pallas.tpu_blocks import (
    CHIPS,
    decode_blocks,
    extend_blocks,
    unsupported,
    vmem_bytes,
)

CORE_VMEM = {"v5e": 128 << 20, "v5p": 64 << 20, "v6e": 128 << 20, "7x": 64 << 20}  # jax._src.tpu_info
HEADS = [(9, 3), (32, 8), (16, 8), (8, 8), (32, 1), (64, 8)]
LLAMA = Geometry(32, 8, 128, 16, "bfloat16")


@pytest.mark.parametrize("generation", CHIPS)
def test_blocks_fit_vmem_with_a_quarter_to_spare(generation: str) -> None:
    chip = CHIPS[generation]
    assert chip.vmem_bytes <= CORE_VMEM[generation] / 2
    dtypes = (("bfloat16", None), ("float32", None), ("bfloat16", "int8"), ("float32", "float8_e4m3fn"))
    shapes = itertools.product(dtypes, HEADS, (64, 80, 96, 128, 256), (16, 32, 64, 128, 256))
    for (dtype, kv_dtype), (q_heads, kv_heads), head_dim, page_size in shapes:
        geometry = Geometry(q_heads, kv_heads, head_dim, page_size, dtype, kv_dtype)
        assert unsupported(generation, geometry, max_pages=2048) == []
        for blocks in (decode_blocks(generation, geometry), extend_blocks(generation, geometry)):
            assert vmem_bytes(blocks, geometry) <= 0.75 * blocks.vmem_bytes <= 0.75 * chip.vmem_bytes
            assert kv_heads % blocks.heads == 0


def test_what_blocks_take_is_what_the_kernel_allocates() -> None:
    """Counted by hand for decode rows of Llama 3.1 8B, two blocks of one page in flight."""
    blocks = replace(decode_blocks("v5e", LLAMA), pages=1, heads=1)
    queries = 8 * 16 * 128 * 2  # 4 of a KV head, padded to a tile of 16
    lines = 8 * 16 * 256 * 2
    softmax = 8 * 16 * (128 + 128 + 128) * 4
    values = 3 * 16 * 128 * 4 + 16 * 256 * 2
    assert vmem_bytes(blocks, LLAMA) == 4 * queries + 2 * lines + softmax + values
    widened = 16 * 256 * 2
    assert vmem_bytes(blocks, LLAMA._replace(kv_dtype="int8")) == 4 * queries + lines + softmax + values + widened


def test_blocks_are_as_long_as_copies_take() -> None:
    llama, smollm = LLAMA, Geometry(9, 3, 64, 16, "bfloat16")
    assert decode_blocks("v5e", llama).pages * 16 == 512  # 4 KiB a position
    assert decode_blocks("v6e", llama).pages * 16 == 1024
    assert decode_blocks("v5e", smollm).pages * 16 == 1024, "short rows would waste longer ones"
    assert decode_blocks("v5e", llama._replace(page_size=256)).pages == 2
    assert extend_blocks("v5e", llama).tile_len == 128
    assert extend_blocks("v5e", llama._replace(q_heads=128)).tile_len == 32


REFUSED = [
    ("v5e", LLAMA._replace(q_heads=30), 64, "30 query heads are no multiple of 8"),
    ("v5e", LLAMA._replace(head_dim=512), 64, "head_dim 512 is above 256"),
    ("v5e", LLAMA._replace(dtype="float16"), 64, "float16, not bfloat16 or float32"),
    ("v4", LLAMA, 64, "no block sizes for v4"),
    ("v5e", LLAMA, 100_000, "100000 pages a row"),
    ("v5p", Geometry(64, 64, 256, 256, "float32"), 64, "do not fit"),
]


@pytest.mark.parametrize(("generation", "geometry", "max_pages", "reason"), REFUSED, ids=[run[-1] for run in REFUSED])
def test_what_is_not_covered_says_why(generation: str, geometry: Any, max_pages: int, reason: str) -> None:
    [found] = unsupported(generation, geometry, max_pages)
    assert reason in found


def test_a_page_of_8_is_covered_in_float32() -> None:
    assert unsupported("v6e", LLAMA._replace(dtype="float32", page_size=8), 64) == []
