"""What the Mosaic GPU kernels cover, and that their blocks fit into a multiprocessor."""

import pytest

from jradix.pallas.geometry import Geometry
from jradix.pallas.gpu_blocks import MAX_GROUP, SHARED_MEMORY, decode_blocks, extend_blocks, unsupported

LLAMA = Geometry(q_heads=32, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize("group", [1, 3, 8, 64, 65, MAX_GROUP])
@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
def test_whatever_is_covered_has_blocks_that_fit(head_dim: int, group: int, kv_dtype: str | None) -> None:
    geometry = LLAMA._replace(q_heads=group, kv_heads=1, head_dim=head_dim, kv_dtype=kv_dtype)
    assert not unsupported(geometry, "9.0")
    for blocks in decode_blocks(geometry), extend_blocks(geometry):
        assert blocks.shared_bytes(geometry) <= SHARED_MEMORY
        assert blocks.lines >= group
        assert blocks.block_len % 64 == 0, "registers hold lines of values 64 at a time"


@pytest.mark.parametrize(
    ("geometry", "compute_capability", "reason"),
    [
        (LLAMA, "8.0", "compute capability 9, this GPU has 8.0"),
        (LLAMA, "10.0", "compute capability 9, this GPU has 10.0"),
        (LLAMA._replace(dtype="float32"), "9.0", "not float32"),
        (LLAMA._replace(kv_dtype="float16"), "9.0", "keys and values of float16"),
        (LLAMA._replace(head_dim=72), "9.0", "head_dim 72"),
        (LLAMA._replace(head_dim=512), "9.0", "head_dim 512"),
        (LLAMA._replace(page_size=4), "9.0", "page size 4"),
        (LLAMA._replace(q_heads=256, kv_heads=1), "9.0", "256 query heads"),
    ],
)
def test_what_is_not_covered_is_told_with_the_reason(geometry: Geometry, compute_capability: str, reason: str) -> None:
    (told,) = unsupported(geometry, compute_capability)
    assert reason in told
