"""The extend kernel for TPUs, interpreted, on the shared cases."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jradix.pallas.tpu_extend import extend_attention
from tests.pallas.cases import TOLERANCE, Case, dense_attention, make_inputs
from tests.pallas.tpu_cases import BLOCKS, EXTEND_CASES, INTERPRET

RUNS = [(case, jnp.float32) for case in EXTEND_CASES] + [(case, jnp.bfloat16) for case in EXTEND_CASES[::3]]


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=str)
def test_extend_equals_the_reference_whatever_unowned_slots_hold(case: Case, dtype: Any) -> None:
    inputs = make_inputs(case, dtype)
    rows = (inputs.page_table, inputs.seq_lens, inputs.query_starts)
    arrays = (inputs.q, inputs.joined_pool(), *rows)
    got = extend_attention(*arrays, inputs.scoring, inputs.sinks, blocks=BLOCKS, interpret=INTERPRET)
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float32), dense_attention(case, inputs), atol=TOLERANCE[dtype])
    assert not np.asarray(got)[~inputs.is_query].any(), "tokens of no row must come out as zeros"
