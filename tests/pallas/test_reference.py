"""The oracle itself, against a softmax written out in numpy over dense keys and values."""

import jax.numpy as jnp
import numpy as np
import pytest

from jradix.pallas import reference
from tests.pallas.cases import CASES, Case, dense_attention, make_inputs


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_reference_equals_a_dense_softmax(case: Case) -> None:
    inputs = make_inputs(case, jnp.float32)
    got = reference.extend_attention(*inputs.arrays(), scoring=inputs.scoring, sinks=inputs.sinks)
    np.testing.assert_allclose(got, dense_attention(case, inputs), atol=2e-5)
