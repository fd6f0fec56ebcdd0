"""Block sizes of the GPU kernels."""
from dataclasses import dataclass

LINES = 64
"""Lines of a matmul that one warpgroup does."""


@dataclass(frozen=True, slots=True)
class Blocks:
    warpgroups: int
    block_len: int
    stages: int
