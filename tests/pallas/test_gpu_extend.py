"""The extend kernel for Hopper GPUs, interpreted, on the shared cases."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jradix.pallas.gpu_extend import extend_attention
from tests.pallas.cases import NARROW, TOLERANCE, Case, Inputs, dense_attention, make_inputs, narrowed
from tests.pallas.gpu_cases import BLOCKS, EXTEND_CASES, INTERPRET, lines_of_no_query_may_be_nan

SOME = [
    "empty rows between others",
    "mixed decode and prefill",
    "pages longer than any row",
    "smollm heads",
    "head_dim 256",
    "window, soft cap and sinks",
    "one prefix and a window",
    "huge table tails",
]
pytestmark = lines_of_no_query_may_be_nan


def extended(case: Case, inputs: Inputs | None = None) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel yields and what it should; for the case's own inputs by default."""
    inputs = inputs or make_inputs(case, jnp.bfloat16)
    attend = jax.jit(extend_attention, static_argnames=("scoring", "blocks", "interpret"))
    got = attend(*inputs.arrays(), inputs.scoring, inputs.sinks, blocks=BLOCKS, interpret=INTERPRET)
    assert got.dtype == jnp.bfloat16
    assert not np.asarray(got)[~inputs.is_query].any(), "tokens of no row must come out as zeros"
    return np.asarray(got, np.float32), dense_attention(case, inputs)


@pytest.mark.parametrize("name", SOME)
def test_extend_equals_the_reference_whatever_unowned_slots_hold(name: str) -> None:
    got, want = extended(EXTEND_CASES[name])
    np.testing.assert_allclose(got, want, atol=TOLERANCE[jnp.bfloat16])


def test_a_pool_of_int8_is_read_as_the_numbers_that_it_holds() -> None:
    case = replace(EXTEND_CASES["one kv head for all"], cached=(200, 0), new=(20, 5), window=150)
    got, want = extended(case, narrowed(make_inputs(case, jnp.bfloat16), "int8"))
    np.testing.assert_allclose(got / NARROW["int8"], want / NARROW["int8"], atol=TOLERANCE[jnp.bfloat16])


@pytest.mark.skipif(not hasattr(INTERPRET, "on_race"), reason="jax before 0.12 prints races and goes on")
def test_a_missing_wait_for_a_copy_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = plgpu.barrier_wait
    calls = iter(range(100))
    # The fourth wait in the kernel's text is for a block of keys and values.
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None if next(calls) == 3 else wait(barrier))
    with pytest.raises(Exception, match="RACE DETECTED"):
        extended(EXTEND_CASES["one token of one row"])


def test_pages_of_8_are_the_smallest() -> None:
    got, want = extended(replace(EXTEND_CASES["several queries on a cached prefix"], page_size=8))
    np.testing.assert_allclose(got, want, atol=TOLERANCE[jnp.bfloat16])
