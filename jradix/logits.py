"""What a request may do to its logits before its token is sampled: penalties, biases and a mask, as pure functions.

They apply in this order. Repetition penalty (Keskar et al., "CTRL", 2019): logits of tokens in the prompt or the output
are divided by it where positive and multiplied where negative. Frequency and presence penalty, as OpenAI defines them:
minus the one for each time a token stands in the output, minus the other once if it does. Biases are added. What the
mask does not allow becomes -inf, and of what it allows nothing is, so that some of it is sampled whatever a processor
has made of the logits. A row that asks for nothing keeps its logits, bit for bit.

*Counts*, int32 `[max_slots + 1, vocab]`, hold for each slot and token twice its count in the output, plus one if it is
in the prompt. The last row is nobody's.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from jradix.packing import viewed

WORD = 32
"""Bits of a word of the mask."""

LOWEST = -1e30
"""A logit that no other one is below, and that is finite after the division by any temperature."""


class Penalties(NamedTuple):
    """One entry a row; a row without penalties has a repetition penalty of 1, and the others are 0."""

    slot: Array  # int32 [rows]; past the last slot for a row without penalties
    count_last: Array  # int32 [rows]: whether the slot's last sampled token must still be counted
    frequency: Array  # f32 [rows]
    presence: Array  # f32 [rows]
    repetition: Array  # f32 [rows]

    @classmethod
    def unpack(cls, packed: Any) -> "Penalties":
        """The entries in `packed`, int32 `[5, rows]`, of the host (views) or of the device."""
        return cls(packed[0], packed[1], *(viewed(packed[row], np.float32) for row in (2, 3, 4)))


def token_counts(prompt_ids: npt.ArrayLike, output_ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """A slot's counts, `[vocab_size]`, on the host."""
    counts = 2 * np.bincount(np.asarray(output_ids, np.int32), minlength=vocab_size)
    counts[np.asarray(prompt_ids, np.int32)] += 1
    return counts.astype(np.int32)


def set_counts(counts: Array, slot: Array, values: Array) -> Array:
    """Counts with those of `slot` replaced by `values` `[vocab]`. Donate the counts."""
    return counts.at[slot].set(values)


def penalize(logits: Array, counts: Array, next_tokens: Array, packed: Array) -> tuple[Array, Array]:
    """Counts what the host has not seen, then subtracts the penalties.

    Args:
        logits: f32 [rows, vocab].
        counts: int32 [max_slots + 1, vocab]; donate them.
        next_tokens: int32 [max_slots + 1], the token that each slot sampled last.
        packed: int32 [5, rows], of `Penalties.unpack`.

    Returns:
        the logits, and the counts with the last tokens of rows that say `count_last`.
    """
    penalties = Penalties.unpack(packed)
    last = next_tokens.at[penalties.slot].get(mode="clip")
    counted = jnp.where(penalties.count_last > 0, penalties.slot, counts.shape[0])  # past the end: dropped
    counts = counts.at[counted, last].add(2, mode="drop")
    seen = counts.at[penalties.slot].get(mode="clip")
    in_output = seen >> 1
    frequency, presence, repetition = (column[:, None] for column in penalties[2:])
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, repeated, logits)
    return logits - frequency * in_output - jnp.where(in_output > 0, presence, 0.0), counts


def add_bias(logits: Array, packed: Array) -> Array:
    """Adds the biases of each row to its logits.

    Args:
        logits: f32 [rows, vocab].
        packed: int32 [2, rows, n], ids and the bits of f32 values; ids past the vocabulary pad.
    """
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, packed[0]].add(viewed(packed[1], np.float32), mode="drop")


def mask_words(vocab_size: int) -> int:
    """Words of a row of the mask."""
    return -(-vocab_size // WORD)


def apply_mask(logits: Array, allowed: Array) -> Array:
    """-inf for every token but the allowed. Rows that allow every token keep their logits.

    In others the allowed have LOWEST at least, so that one of them is sampled in any case: a processor that bans them
    all, or a broken model, would else make a grammar meet a token that it does not know.

    Args:
        logits: f32 [rows, vocab].
        allowed: uint32 [rows, mask_words(vocab)]; token i is bit i % 32 of word i // 32, as in llguidance.
    """
    rows, vocab = logits.shape
    bits = (allowed[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    may_follow = bits.reshape(rows, -1)[:, :vocab] > 0
    raised = jnp.where(may_follow.all(axis=1, keepdims=True), logits, jnp.fmax(logits, LOWEST))
    return jnp.where(may_follow, raised, -jnp.inf)
