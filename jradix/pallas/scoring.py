"""How a query and a key become a score: what every implementation of attention is told, and the formulas they share."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: MASKED - MASKED must not be NaN for a query that has seen nothing yet
LOG2_E = math.log2(math.e)


class Scoring(NamedTuple):
    """Static, because each combination is a program of its own.

    Attributes:
        scale: multiplies `query @ key`.
        window: a token sees itself and the `window - 1` positions before it; None for all.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`; None for no cap.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None

    @property
    def exponent(self) -> float:
        """What remains to multiply `capped` scores with inside the exponential: one pass less than scaling first."""
        return self.scale if self.soft_cap is None else 1.0

    def capped(self, products: jax.Array) -> jax.Array:
        """Scores of `query @ key` products, still to be multiplied by `exponent`."""
        if self.soft_cap is None:
            return products
        return self.soft_cap * jnp.tanh(products * (self.scale / self.soft_cap))

    def seen(self, q_pos: jax.Array, kv_pos: jax.Array) -> jax.Array:
        """Whether queries at `q_pos` attend to keys at `kv_pos`; the shapes broadcast."""
        seen = kv_pos <= q_pos
        return seen if self.window is None else seen & (kv_pos > q_pos - self.window)
