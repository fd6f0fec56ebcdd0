"""Activations against numpy in float64, far beyond the limits of the clamped one."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jradix.model.activation import Activation

GATE, UP = np.meshgrid([-20.0, -7.5, -1.0, 0.0, 0.3, 6.9, 7.1, 20.0], [-9.0, -7.0, -1.0, 0.0, 2.5, 7.5])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (Activation(), GATE * sigmoid(GATE) * UP),
        (Activation("gelu_tanh"), gelu_tanh(GATE) * UP),
        (
            Activation("clamped", alpha=1.702, limit=7.0),
            np.minimum(GATE, 7) * sigmoid(1.702 * np.minimum(GATE, 7)) * (np.clip(UP, -7, 7) + 1),
        ),
    ],
    ids=lambda x: getattr(x, "kind", ""),
)
def test_activations_follow_their_formulas(activation: Activation, expected: np.ndarray) -> None:
    gate_up = jnp.asarray(np.stack([GATE, UP], axis=1), jnp.float32)
    np.testing.assert_allclose(activation(gate_up), expected, rtol=1e-5, atol=1e-6)
