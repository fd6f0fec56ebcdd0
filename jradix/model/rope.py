"""Rotary position embedding (Su et al., 2021) and the ways models stretch it to longer contexts."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jradix.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Radians per position of each pair of dimensions, float32 `[rotary_dim / 2]`, and the factor of cos and sin."""
    steps = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
    plain = 1.0 / rope.theta**steps
    scale = 1.0
    match rope.kind:
        case "default":
            freqs = plain
        case "linear":
            freqs = plain / rope.factor
        case "llama3":
            freqs = _llama3(rope, plain)
        case "yarn":
            freqs, scale = _yarn(rope, plain), _yarn_attention_factor(rope)
        case _:
            raise AssertionError(rope.kind)
    return freqs.astype(np.float32), scale


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, a linear ramp in between."""
    turns = rope.original_len * plain / (2 * math.pi)  # full turns over the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return plain * (kept + (1.0 - kept) / rope.factor)


def _yarn(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """YaRN (Peng et al., 2023), section 3.2: the ramp is linear in the index of the dimension."""

    def index_of(turns: float) -> float:
        """The dimension pair that makes so many full turns over the original context."""
        return rope.rotary_dim * math.log(rope.original_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # the published code's guard against a division by zero
    slowed = np.clip((np.arange(len(plain)) - low) / (high - low), 0.0, 1.0)
    return plain * (1.0 - slowed + slowed / rope.factor)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def growth(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return growth(rope.mscale) / growth(rope.mscale_all_dim)
    return growth(1.0)


def rope_tables(positions: jax.Array, rope: RopeConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each float32 `[tokens, rotary_dim / 2]`, of int32 `positions` `[tokens]`."""
    freqs, scale = inverse_frequencies(rope)
    angles = positions.astype(jnp.float32)[:, None] * freqs
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn the leading dimensions of each head of `x` `[tokens, ..., head_dim]`, float32.

    Dimension `i` is paired with `i + rotary_dim / 2`, as Hugging Face checkpoints order them (not with `i + 1`).
    """
    half = tables[0].shape[1]
    cos, sin = (table.reshape(table.shape[0], *[1] * (x.ndim - 2), half) for table in tables)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
