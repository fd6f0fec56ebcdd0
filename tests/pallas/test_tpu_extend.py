"""The extend kernel for TPUs, interpreted, on the shared cases."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jradix.pallas.tpu_extend import extend_attention
from tests.pallas.cases import NARROW, TOLERANCE, Case, dense_attention, make_inputs, narrowed
from tests.pallas.tpu_cases import BLOCKS, EXTEND_CASES, INTERPRET, bucketed, interpreted

RUNS = [(case, jnp.float32) for case in EXTEND_CASES] + [(case, jnp.bfloat16) for case in EXTEND_CASES[2::6]]
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


@pytest.mark.parametrize(("to", "dtype"), [("fp8", jnp.float32), ("int8", jnp.bfloat16)])
def test_a_pool_of_8_bits_is_read_as_the_numbers_that_it_holds(to: str, dtype: Any) -> None:
    case = next(case for case in EXTEND_CASES if case.name == "window, soft cap and sinks")
    case = replace(case, page_size=32)
    inputs = narrowed(make_inputs(case, dtype), to)
    rows = (inputs.page_table, inputs.seq_lens, inputs.query_starts)
    got = EXTEND(inputs.q, inputs.joined_pool(), *rows, scoring=inputs.scoring, sinks=inputs.sinks)
    assert got.dtype == dtype
    want = dense_attention(case, inputs) / NARROW[to]
    np.testing.assert_allclose(np.asarray(got, np.float32) / NARROW[to], want, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("head_dim", [80, 96])
def test_lines_may_be_no_whole_vectors(head_dim: int) -> None:
    case = replace(EXTEND_CASES[4], head_dim=head_dim)
    inputs = make_inputs(case, jnp.float32)
    rows = (inputs.page_table, inputs.seq_lens, inputs.query_starts)
    got = EXTEND(inputs.q, inputs.joined_pool(), *rows, scoring=inputs.scoring)
    np.testing.assert_allclose(got, dense_attention(case, inputs), atol=TOLERANCE[jnp.float32])


def test_cores_take_turns_at_the_tiles() -> None:
    """Two simulated cores, each with buffers of its own."""
    case = next(case for case in EXTEND_CASES if case.name == "empty rows between others")
    inputs = make_inputs(case, jnp.float32)
    rows = (inputs.page_table, inputs.seq_lens, inputs.query_starts)
    how = {"blocks": replace(BLOCKS, cores=2), "interpret": replace(INTERPRET, num_cores_or_threads=2)}
    extend = interpreted(extend_attention, ("scoring",), **how)
    got = extend(inputs.q, inputs.joined_pool(), *rows, scoring=inputs.scoring)
    np.testing.assert_allclose(got, dense_attention(case, inputs), atol=TOLERANCE[jnp.float32])
