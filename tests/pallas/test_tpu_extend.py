"""The extend kernel for TPUs, interpreted, on the shared cases."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jradix.pallas.tpu_extend import extend_attention
from tests.pallas.cases import TOLERANCE, Case, dense_attention, make_inputs
from tests.pallas.tpu_cases import BLOCKS, EXTEND_CASES, bucketed, interpreted

RUNS = [(case, jnp.float32) for case in EXTEND_CASES] + [(case, jnp.bfloat16) for case in EXTEND_CASES[::6]]
EXTEND = interpreted(extend_attention, ("scoring",), blocks=BLOCKS)


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=str)
def test_extend_equals_the_reference_whatever_unowned_slots_hold(case: Case, dtype: Any) -> None:
    inputs = make_inputs(case, dtype)
    padded = bucketed(inputs)
    rows = (padded.page_table, padded.seq_lens, padded.query_starts)
    got = EXTEND(padded.q, padded.joined_pool(), *rows, scoring=inputs.scoring, sinks=inputs.sinks)
    assert got.dtype == dtype
    got, tokens = np.asarray(got, np.float32), inputs.is_query.sum()
    np.testing.assert_allclose(got[:tokens], dense_attention(case, inputs)[:tokens], atol=TOLERANCE[dtype])
    assert not got[tokens:].any(), "tokens of no row must come out as zeros"
