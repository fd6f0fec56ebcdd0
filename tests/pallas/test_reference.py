"""The oracle itself, against a softmax written out in numpy over dense keys and values."""

import jax.numpy as jnp
import numpy as np
import pytest

from jradix.pallas import reference
from tests.pallas.cases import CASES, Case, Inputs, make_inputs


def dense_attention(case: Case, inputs: Inputs) -> np.ndarray:
    out = np.zeros(inputs.q.shape)
    pool, q = np.asarray(inputs.pool, np.float64), np.asarray(inputs.q, np.float64)
    starts = np.asarray(inputs.query_starts)
    for row, seq_len in enumerate(np.asarray(inputs.seq_lens)):
        for token in range(starts[row], starts[row + 1]):
            position = seq_len - starts[row + 1] + token
            first = 0 if case.window is None else max(0, position - case.window + 1)
            where = np.arange(first, position + 1)
            page = np.asarray(inputs.page_table)[row, where // case.page_size]
            for head in range(case.q_heads):
                kv = pool[page, head * case.kv_heads // case.q_heads, :, where % case.page_size]
                scores = kv[:, 0] @ q[token, head] * inputs.scale
                if case.soft_cap:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                sink = float(inputs.sinks[head]) if inputs.sinks is not None else -np.inf
                weights = np.exp(scores - max(scores.max(), sink))
                out[token, head] = weights @ kv[:, 1] / (weights.sum() + np.exp(sink - max(scores.max(), sink)))
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_equals_a_dense_softmax(case: Case) -> None:
    inputs = make_inputs(case, jnp.float32)
    got = reference.extend_attention(
        *inputs.arrays(), scale=inputs.scale, window=case.window, soft_cap=case.soft_cap, sinks=inputs.sinks
    )
    np.testing.assert_allclose(got, dense_attention(case, inputs), atol=2e-5)
