"""What a gated MLP makes of its two halves."""

import math
from dataclasses import dataclass
from typing import Final, Literal

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True)
class Activation:
    """A product of the activated gate and the up half (Shazeer, "GLU variants improve transformer", 2020).

    Attributes:
        kind: "silu" and "gelu_tanh" activate the gate; "clamped" is `gate * sigmoid(alpha * gate) * (up + 1)` of a
            gate of at most `limit` and an up half within `limit` of 0.
    """

    kind: Literal["silu", "gelu_tanh", "clamped"] = "silu"
    alpha: float = 1.0
    limit: float = math.inf

    def __call__(self, gate_up: jax.Array) -> jax.Array:
        """Float32 `[rows, 2, mlp]` -> `[rows, mlp]`."""
        gate, up = gate_up[:, 0], gate_up[:, 1]
        match self.kind:
            case "silu":
                return jax.nn.silu(gate) * up
            case "gelu_tanh":
                return jax.nn.gelu(gate, approximate=True) * up
            case "clamped":
                gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
                return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1.0)


SILU: Final = Activation()
