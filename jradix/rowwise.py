"""Sums, orders and maxima over each row's vocabulary that are the same bits whatever rows stand beside it.

XLA adds floats in an order that changes with the number of rows (on CPU below some 4000 elements), and with it the last
bit. Integers add up to the same sum in any order, so weights are added as fixed-point numbers.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

BLOCK_SIZE = 32
"""The first tokens of a row's order are searched in the blocks, of so many logits each, with the largest maxima."""


def ordered(logits: Array) -> Array:
    """f32 logits that are totally ordered: no NaN (-inf instead), no +inf, no negative zero."""
    logits = logits.astype(jnp.float32)
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, jnp.finfo(jnp.float32).max))
    return jnp.where(logits == 0, 0.0, logits)


def first_ids(logits: Array, size: int) -> Array:
    """Ids of the first tokens of the order (largest logit first, equal ones by id), int32 [rows, min(size, vocab)].

    The largest `size` logits lie in the `size` blocks with the largest maxima: each of those blocks holds at least one
    logit that precedes everything in the blocks left out. With the blocks sorted by place, a stable top-k of their
    elements breaks ties by id.

    Args:
        logits: f32 [rows, vocab], of `ordered`.
        size: static.
    """
    rows, vocab = logits.shape
    if vocab <= size * BLOCK_SIZE:
        return lax.top_k(logits, min(size, vocab))[1]
    padding = -vocab % BLOCK_SIZE
    blocks = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf).reshape(rows, -1, BLOCK_SIZE)
    chosen = jnp.sort(lax.top_k(jnp.max(blocks, axis=-1), size)[1], axis=-1)  # [rows, size]
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, -1)
    places = lax.top_k(candidates, size)[1]
    block_ids = jnp.take_along_axis(chosen, places // BLOCK_SIZE, axis=-1)
    return block_ids * BLOCK_SIZE + places % BLOCK_SIZE


def unit(vocab: int) -> float:
    """The power of two in which `fixed_point` counts: the parts of a whole row must add up within int32."""
    return float(1 << min(15, 31 - (vocab - 1).bit_length()))


def fixed_point(weights: Array, vocab: int, num_parts: int = 2) -> tuple[Array, ...]:
    """Weights in [0, 1] as int32 parts, `part[0] / unit + part[1] / unit**2 + ...`.

    A part holds 15 bits for a vocabulary below 65536, and fewer for a larger one.
    """
    scale, parts, rest = unit(vocab), [], weights
    for part in range(num_parts):
        rest *= scale
        whole = jnp.minimum(jnp.floor(rest) if part < num_parts - 1 else jnp.round(rest), scale - 1)
        parts.append(whole.astype(jnp.int32))
        rest -= whole
    return tuple(parts)


def value(parts: Sequence[Array], vocab: int) -> Array:
    """The f32 number of (sums of) fixed-point parts."""
    number = parts[-1].astype(jnp.float32) / unit(vocab)
    for part in reversed(parts[:-1]):
        number = (part.astype(jnp.float32) + number) / unit(vocab)
    return number


def add_up(*operands: Array) -> tuple[Array, ...]:
    """Sums of int32 arrays over the last axis, in one reduction: apart, XLA's CPU code takes three times as long."""
    zeros = tuple(jnp.int32(0) for _ in operands)
    add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))  # noqa: E731
    return tuple(lax.reduce(operands, zeros, add, dimensions=(operands[0].ndim - 1,)))


def mass(parts: tuple[Array, ...], vocab: int) -> Array:
    """The f32 sum of fixed-point weights over the last axis."""
    return value(add_up(*parts), vocab)


def running_mass(parts: Sequence[Array], vocab: int) -> Array:
    """Mass of each place and those before it; for few places, where n * n sums compile and run faster than a scan."""
    places = jnp.arange(parts[0].shape[-1])
    until = places[:, None] >= places  # [n, n]
    return value(add_up(*(jnp.where(until, part[:, None, :], 0) for part in parts)), vocab)
