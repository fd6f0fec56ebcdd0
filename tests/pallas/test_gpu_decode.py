"""The decode kernel for Hopper GPUs, interpreted, on the shared cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix.pallas.gpu_blocks import Blocks
from jradix.pallas.gpu_decode import decode_attention, num_splits
from tests.pallas.cases import TOLERANCE, dense_attention, make_inputs
from tests.pallas.gpu_cases import DECODE_CASES, INTERPRET, lines_of_no_query_may_be_nan

BLOCKS = Blocks(warpgroups=1, block_len=64, stages=2)
SOME = [
    "decode rows of ragged lengths",
    "no row at all",
    "one kv head for all",
    "head_dim 80",
    "window across pages",
    "extend rows on one prefix",
    "one prefix, soft cap and sinks",
]
pytestmark = lines_of_no_query_may_be_nan


@pytest.mark.parametrize("name", SOME)
def test_decode_equals_the_reference_whatever_unowned_slots_hold(name: str) -> None:
    case = DECODE_CASES[name]
    inputs = make_inputs(case, jnp.bfloat16)
    live = np.asarray(inputs.seq_lens) > 0
    q = inputs.q[np.maximum(np.cumsum(live) - 1, 0)]  # padding rows have one too
    attend = jax.jit(decode_attention, static_argnames=("scoring", "blocks", "interpret"))
    rows = (inputs.pool, inputs.page_table, inputs.seq_lens)
    got = attend(q, *rows, inputs.scoring, inputs.sinks, blocks=BLOCKS, interpret=INTERPRET)
    assert got.dtype == jnp.bfloat16
    want = dense_attention(case, inputs)[: live.sum()]
    np.testing.assert_allclose(np.asarray(got, np.float32)[live], want, atol=TOLERANCE[jnp.bfloat16])
    assert not np.asarray(got)[~live].any(), "padding rows must come out as zeros"


def test_few_rows_are_split_until_they_fill_the_gpu_and_many_are_not() -> None:
    long = 128 * 64
    assert num_splits(1, long, BLOCKS) == 64, "no shorter than two blocks"
    assert num_splits(8 * 8, long, BLOCKS) == 5
    assert num_splits(8 * 64, long, BLOCKS) == 1
    assert num_splits(1, 16, BLOCKS) == 1
