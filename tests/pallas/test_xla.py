"""The XLA path against the reference, on the shared cases, and the bound on what it gathers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix.pallas import xla
from jradix.pallas.scoring import Scoring
from tests.pallas.cases import CASES, NARROW, TOLERANCE, Case, dense_attention, make_inputs, narrowed

DECODE_CASES = [case for case in CASES if set(case.new) <= {0, 1}]


NARROW_CASES = ("mixed decode and prefill", "window, soft cap and sinks", "decode rows on one prefix")
EXTEND_RUNS = [(case, jnp.float32) for case in CASES] + [(case, jnp.bfloat16) for case in CASES[::6]]


@pytest.mark.parametrize(("case", "dtype"), EXTEND_RUNS, ids=str)
def test_extend_equals_the_reference_whatever_unowned_slots_hold(case: Case, dtype: Any) -> None:
    inputs = make_inputs(case, dtype)
    attend = jax.jit(xla.extend_attention, static_argnames="scoring")
    got = attend(*inputs.arrays(), scoring=inputs.scoring, sinks=inputs.sinks)
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float32), dense_attention(case, inputs), atol=TOLERANCE[dtype])
    assert not np.asarray(got)[~inputs.is_query].any(), "tokens of no row must come out as zeros"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: case.name)
def test_decode_equals_the_reference_whatever_unowned_slots_hold(case: Case, dtype: Any) -> None:
    inputs = make_inputs(case, dtype)
    rows = len(case.new)
    q = inputs.q[:rows]
    got = xla.decode_attention(q, *inputs.arrays()[1:4], scoring=inputs.scoring, sinks=inputs.sinks)
    want = dense_attention(case, inputs)[:rows]
    live = np.asarray(inputs.seq_lens) > 0
    np.testing.assert_allclose(np.asarray(got, np.float32)[live], want[: live.sum()], atol=TOLERANCE[dtype])
    assert not np.asarray(got)[~live].any()


@pytest.mark.parametrize(("to", "dtype"), [("int8", jnp.float32), ("fp8", jnp.bfloat16)])
@pytest.mark.parametrize("name", NARROW_CASES)
def test_a_pool_of_8_bits_is_read_as_the_numbers_that_it_holds(name: str, to: str, dtype: Any) -> None:
    case = next(case for case in CASES if case.name == name)
    inputs = narrowed(make_inputs(case, dtype), to)
    attend = jax.jit(xla.extend_attention, static_argnames="scoring")
    got = attend(*inputs.arrays(), scoring=inputs.scoring, sinks=inputs.sinks)
    assert got.dtype == dtype
    want = dense_attention(case, inputs) / NARROW[to]
    np.testing.assert_allclose(np.asarray(got, np.float32) / NARROW[to], want, atol=TOLERANCE[dtype])
    assert not np.asarray(got)[~inputs.is_query].any()


def test_temporaries_do_not_grow_with_the_page_table() -> None:
    """A block of gathered keys is bounded, however long the longest row may become."""
    heads, head_dim, page_size, rows = 3, 64, 16, 16

    def temporary_bytes(max_pages: int) -> int:
        shapes = [
            jax.ShapeDtypeStruct((rows, heads * 3, head_dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((20_000, heads, 2, page_size, head_dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((rows, max_pages), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        ]
        attend = functools.partial(xla.decode_attention, scoring=Scoring(0.1))
        analysis = jax.jit(attend).lower(*shapes).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary_bytes(4096) < temporary_bytes(128) + 3 * rows * 4096 * 4
    assert temporary_bytes(4096) < 16 << 20
