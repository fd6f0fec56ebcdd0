"""Log-probabilities under the model itself, of sampled tokens and of prompts: before temperature, penalties and masks.

A row's numbers are the same bits in any batch. NaN logits count as -inf and +inf as the largest finite number; the
log-probability of -inf is -inf.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jradix.packing import viewed
from jradix.rowwise import add_up, first_ids, fixed_point, mass, ordered

LOGPROB_WIDTHS = (0, 32, 128)
"""How many likeliest tokens, and as many given ones, a program reports of each row."""

MAX_TOP_LOGPROBS = LOGPROB_WIDTHS[-1]
"""The most likeliest tokens that a request may ask for."""

MAX_LOGPROB_IDS = LOGPROB_WIDTHS[-1]
"""The most ids whose log-probabilities a request may ask for."""

PROMPT_BLOCK = 128
"""Prompt tokens whose logits exist at a time: 75 MB of them for a vocabulary of 150,000."""

FIXED_POINT_PARTS = 3
"""Two would lose up to 1e-4 in the long tail of a large vocabulary."""


class Logprobs(NamedTuple):
    """Log-probabilities of `n` rows or prompt tokens, arrays of the device or of the host."""

    chosen: Any  # f32 [n]: of the token that was sampled, or that follows in the prompt
    rank: Any  # int32 [n]: its place among all, from 1; equal ones stand by id
    top: Any  # f32 [n, width]: the likeliest, in order; -inf past the vocabulary
    top_ids: Any  # int32 [n, width]: their ids; -1 past the vocabulary
    given: Any  # f32 [n, width]: of the ids that were given; -inf where -1 was

    def packed(self) -> Array:
        """All of it as int32 [n, 2 + 3 * width], on the device."""
        columns = (self.chosen[:, None], self.rank[:, None], self.top, self.top_ids, self.given)
        return jnp.concatenate([viewed(column, np.int32) for column in columns], axis=1)

    def part(self, start: int, stop: int) -> "Logprobs":
        """Those of rows `[start, stop)`, on the host."""
        return Logprobs(*(array[start:stop] for array in self))

    @classmethod
    def unpack(cls, packed: Any) -> "Logprobs":
        """What `packed` holds, on the host."""
        width = (packed.shape[1] - 2) // 3
        top, top_ids, given = (packed[:, 2 + i * width : 2 + (i + 1) * width] for i in range(3))
        floats = [np.ascontiguousarray(part).view(np.float32) for part in (packed[:, 0], top, given)]
        return cls(floats[0], packed[:, 1], floats[1], top_ids, floats[2])


def logprob_width(num_top: int, num_given: int) -> int:
    """The smallest of LOGPROB_WIDTHS that holds both."""
    return next(width for width in LOGPROB_WIDTHS if width >= max(num_top, num_given))


def logprobs(logits: Array, token_ids: Array, given_ids: Array) -> Logprobs:
    """Log-probabilities of each row.

    Args:
        logits: f32 [n, vocab].
        token_ids: int32 [n], the chosen tokens.
        given_ids: int32 [n, width], padded with -1; the width is one of LOGPROB_WIDTHS.
    """
    logits = ordered(logits)
    vocab, width = logits.shape[1], given_ids.shape[1]
    largest = jnp.max(logits, axis=-1)
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)  # in a row of -inf alone
    weights = jnp.exp(logits - largest[:, None])
    log_mass = jnp.log(mass(fixed_point(weights, vocab, FIXED_POINT_PARTS), vocab))

    def at(ids: Array) -> Array:  # int32 [n, k]
        found = jnp.take_along_axis(logits, jnp.clip(ids, 0, vocab - 1), axis=-1)
        normal = found - largest[:, None] - log_mass[:, None]
        return jnp.where((ids >= 0) & (found > -jnp.inf), normal, -jnp.inf)

    ids = token_ids[:, None]
    chosen_logit = jnp.take_along_axis(logits, ids, axis=-1)
    before = (logits > chosen_logit) | ((logits == chosen_logit) & (jnp.arange(vocab) < ids))
    [num_before] = add_up(before.astype(jnp.int32))
    top_ids = first_ids(logits, width) if width else given_ids
    top_ids = jnp.pad(top_ids, ((0, 0), (0, width - top_ids.shape[1])), constant_values=-1)
    return Logprobs(at(ids)[:, 0], num_before + 1, at(top_ids), top_ids, at(given_ids))


def prompt_logprobs(
    hidden: Array,
    target_ids: Array,
    given_ids: Array,
    logits_of: Callable[[Array], Array],
    *,
    block: int,
) -> Array:
    """Log-probabilities of prompt tokens, from the hidden states of the tokens before them, a block at a time.

    The logits of all tokens never exist together.

    Args:
        hidden: [tokens, hidden], tokens a multiple of the block.
        target_ids: int32 [tokens], the prompt's next tokens; -1 from the first padding token on.
        given_ids: int32 [tokens, width], see `logprobs`.
        logits_of: the model's head, [block, hidden] -> f32 [block, vocab].
        block: static.

    Returns:
        what `Logprobs.packed` gives; zeros for whole blocks of padding.
    """

    def one_block(index: Array, found: Array) -> Array:
        def part(array: Array) -> Array:
            return lax.dynamic_slice_in_dim(array, index * block, block)

        result = logprobs(logits_of(part(hidden)), jnp.maximum(part(target_ids), 0), part(given_ids))
        return lax.dynamic_update_slice_in_dim(found, result.packed(), index * block, axis=0)

    [count] = add_up((target_ids >= 0).astype(jnp.int32))
    nothing = jnp.zeros((len(hidden), 2 + 3 * given_ids.shape[1]), jnp.int32)
    return lax.fori_loop(0, (count + block - 1) // block, one_block, nothing)
