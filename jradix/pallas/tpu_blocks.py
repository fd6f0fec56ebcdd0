"""Block sizes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Blocks:
    pages: int
    queries: int
    heads: int
    vmem_limit: int
