"""The decode kernel for TPUs, interpreted, on the shared cases."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix.pallas.tpu_decode import decode_attention
from tests.pallas.cases import NARROW, TOLERANCE, Case, dense_attention, make_inputs, narrowed
from tests.pallas.tpu_cases import BLOCKS, DECODE_CASES, bucketed, interpreted, waits_missed

# The extend kernel, which is the same, runs on all of them.
RUNS = [(case, jnp.float32) for case in DECODE_CASES[1::3]] + [(case, jnp.bfloat16) for case in DECODE_CASES[5::9]]
DECODE = interpreted(decode_attention, ("scoring",), blocks=BLOCKS)


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=str)
def test_decode_equals_the_reference_whatever_unowned_slots_hold(case: Case, dtype: Any) -> None:
    inputs = make_inputs(case, dtype)
    padded = bucketed(inputs)
    live = np.asarray(padded.seq_lens) > 0
    q = padded.q[np.maximum(np.cumsum(live) - 1, 0)]  # padding rows have one too
    rows = (padded.joined_pool(), padded.page_table, padded.seq_lens)
    got = DECODE(q, *rows, scoring=inputs.scoring, sinks=inputs.sinks)
    assert got.dtype == dtype
    want = dense_attention(case, inputs)[: live.sum()]
    np.testing.assert_allclose(np.asarray(got, np.float32)[live], want, atol=TOLERANCE[dtype])
    assert not np.asarray(got)[~live].any(), "padding rows must come out as zeros"


@pytest.mark.parametrize(("to", "dtype"), [("int8", jnp.float32), ("fp8", jnp.bfloat16)])
def test_a_pool_of_8_bits_is_read_as_the_numbers_that_it_holds(to: str, dtype: Any) -> None:
    case = next(case for case in DECODE_CASES if case.name == "one prefix, soft cap and sinks")
    case = replace(case, page_size=32)
    inputs = narrowed(make_inputs(case, dtype), to)
    got = DECODE(
        inputs.q, inputs.joined_pool(), inputs.page_table, inputs.seq_lens, scoring=inputs.scoring, sinks=inputs.sinks
    )
    assert got.dtype == dtype
    want = dense_attention(case, inputs) / NARROW[to]
    np.testing.assert_allclose(np.asarray(got, np.float32) / NARROW[to], want, atol=TOLERANCE[dtype])


def test_no_wait_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the page table and of blocks; the extend kernel is the same."""
    case = next(case for case in DECODE_CASES if case.name == "decode rows of ragged lengths")
    inputs = make_inputs(case, jnp.float32)
    rows = (inputs.page_table, inputs.seq_lens)

    def run(interpret: Any, more_pages: int) -> jax.Array:
        pool = jnp.pad(inputs.joined_pool(), [(0, more_pages), (0, 0), (0, 0), (0, 0)])
        return decode_attention(inputs.q, pool, *rows, inputs.scoring, blocks=BLOCKS, interpret=interpret)

    assert waits_missed(monkeypatch, run) == [True] * 3
