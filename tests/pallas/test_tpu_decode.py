"""The decode kernel for TPUs, interpreted, on the shared cases."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jradix.pallas.tpu_decode import decode_attention
from tests.pallas.cases import TOLERANCE, Case, dense_attention, make_inputs
from tests.pallas.tpu_cases import BLOCKS, DECODE_CASES, INTERPRET

RUNS = [(case, jnp.float32) for case in DECODE_CASES] + [(case, jnp.bfloat16) for case in DECODE_CASES[::3]]


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=str)
def test_decode_equals_the_reference_whatever_unowned_slots_hold(case: Case, dtype: Any) -> None:
    inputs = make_inputs(case, dtype)
    live = np.asarray(inputs.seq_lens) > 0
    q = inputs.q[np.maximum(np.cumsum(live) - 1, 0)]  # padding rows have one too
    rows = (inputs.joined_pool(), inputs.page_table, inputs.seq_lens)
    got = decode_attention(q, *rows, inputs.scoring, inputs.sinks, blocks=BLOCKS, interpret=INTERPRET)
    assert got.dtype == dtype
    want = dense_attention(case, inputs)[: live.sum()]
    np.testing.assert_allclose(np.asarray(got, np.float32)[live], want, atol=TOLERANCE[dtype])
    assert not np.asarray(got)[~live].any(), "padding rows must come out as zeros"
