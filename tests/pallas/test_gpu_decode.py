"""The decode kernel for Hopper GPUs, interpreted, on the shared cases."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix.pallas.gpu_blocks import Blocks
from jradix.pallas.gpu_decode import decode_attention, num_splits
from tests.pallas.cases import TOLERANCE, Case, Inputs, dense_attention, make_inputs, narrowed
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


def decoded(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel yields and what it should, for the rows that are not padding."""
    live = np.asarray(inputs.seq_lens) > 0
    q = inputs.q[np.maximum(np.cumsum(live) - 1, 0)]  # padding rows have one too
    attend = jax.jit(decode_attention, static_argnames=("scoring", "blocks", "interpret"))
    rows = (inputs.pool, inputs.page_table, inputs.seq_lens)
    got = attend(q, *rows, inputs.scoring, inputs.sinks, blocks=BLOCKS, interpret=INTERPRET)
    assert got.dtype == jnp.bfloat16
    assert not np.asarray(got)[~live].any(), "padding rows must come out as zeros"
    return np.asarray(got, np.float32)[live], dense_attention(case, inputs)[: live.sum()]


@pytest.mark.parametrize("name", SOME)
def test_decode_equals_the_reference_whatever_unowned_slots_hold(name: str) -> None:
    got, want = decoded(DECODE_CASES[name], make_inputs(DECODE_CASES[name], jnp.bfloat16))
    np.testing.assert_allclose(got, want, atol=TOLERANCE[jnp.bfloat16])


def test_a_pool_of_float8_is_read_as_the_numbers_that_it_holds() -> None:
    case = DECODE_CASES["window, soft cap and sinks"]
    case = replace(case, kv_heads=1, cached=(420, 3), new=(1, 1), window=400, extra_tokens=0)
    got, want = decoded(case, narrowed(make_inputs(case, jnp.bfloat16), "fp8"))
    np.testing.assert_allclose(got, want, atol=TOLERANCE[jnp.bfloat16])


def test_few_rows_are_split_until_they_fill_the_gpu_and_many_are_not() -> None:
    long = 128 * 64
    assert num_splits(1, long, BLOCKS) == 64, "no shorter than two blocks"
    assert num_splits(8 * 8, long, BLOCKS) == 5
    assert num_splits(8 * 64, long, BLOCKS) == 1
    assert num_splits(1, 16, BLOCKS) == 1
