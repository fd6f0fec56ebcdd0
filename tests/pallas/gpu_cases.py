"""The shared cases as the Mosaic GPU kernels take them, and how the kernels are interpreted."""

from dataclasses import replace

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jradix.pallas.gpu_blocks import Blocks
from tests.pallas.cases import CASES, as_decode

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
"""A race raises, so does a read outside of a buffer; what was never written is NaN. Warpgroups are threads that wait
for each other inside XLA's thread pool: with fewer threads than them (jax has as many as CPU devices) they hang."""
BLOCKS = Blocks(warpgroups=2, block_len=64, stages=2)
"""Shorter than on a GPU, so that more rows have several blocks."""

EXTEND_CASES = {case.name: replace(case, page_size=max(16, case.page_size)) for case in CASES}

lines_of_no_query_may_be_nan = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")


DECODE_CASES = {name: as_decode(case) for name, case in EXTEND_CASES.items()}
