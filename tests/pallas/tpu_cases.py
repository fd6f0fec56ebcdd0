"""The shared cases as the TPU kernels take them, and how the kernels are interpreted."""

from dataclasses import replace

from jax.experimental.pallas import tpu as pltpu

from jradix.pallas.tpu_blocks import Blocks
from tests.pallas.cases import CASES, Case

INTERPRET = pltpu.InterpretParams(detect_races=True)
"""A race raises, so does a read outside of a buffer; what was never written is NaN, and copies come at the last moment:
when something waits for them."""
BLOCKS = Blocks(pages=2, tile_len=16, heads=1, vmem_bytes=1 << 24)
"""So small that most rows have several blocks."""

EXTEND_CASES = [replace(case, page_size=max(16, case.page_size)) for case in CASES]


def as_decode(case: Case) -> Case:
    """One query a row, the last of its tokens."""
    cached = tuple(cached + max(0, new - 1) for cached, new in zip(case.cached, case.new, strict=True))
    return replace(case, cached=cached, new=tuple(min(new, 1) for new in case.new), extra_tokens=case.new.count(0))


DECODE_CASES = [as_decode(case) for case in EXTEND_CASES]
