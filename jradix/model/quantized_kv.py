"""Keys and values in 8 bits, each layer, KV head and channel with a scale of its own, which is not part of the pool.

Keys have channels that are far larger than others at every token, so a scale for each channel keeps more of them than
one for each token (KIVI, Liu et al., 2024). Such scales also cost attention nothing: queries are multiplied by those of
the keys before it, and its output by those of the values, so that kernels only widen the numbers that they read.
"""

from typing import Any

import jax
import jax.numpy as jnp


def is_quantized(dtype: Any) -> bool:
    """Whether a pool of this type needs scales."""
    return jnp.dtype(dtype).itemsize == 1


def largest_number(dtype: Any) -> float:
    return float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)


def quantize(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """`x` over `scale`, rounded to `dtype`; what is too large for that becomes its largest number."""
    limit = largest_number(dtype)
    x = jnp.clip(x.astype(jnp.float32) / scale, -limit, limit)
    return (jnp.round(x) if jnp.issubdtype(dtype, jnp.integer) else x).astype(dtype)
