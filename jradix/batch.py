"""Turns a step plan into padded arrays: the one place where shapes are padded to a bucket."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jradix.config import Buckets, StepShape
from jradix.model.attention import AttentionInputs
from jradix.pallas.ops import XLA, Kernels
from jradix.request import Request
from jradix.schedule_plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What a step program reads, as views of one int32 vector: each array handed to a device costs the host 20 us.

    Attributes:
        token_ids: int32 `[tokens]`; `-1 - slot` stands for the token that slot sampled last, still on the device.
        attention: positions and pages of each token and row.
        logits_at: int32 `[rows]`, the token whose logits each row wants.
        sample_slots: int32 `[rows]`, the slot that takes the row's next token; past the last slot for none.
    """

    token_ids: jax.Array
    attention: AttentionInputs
    logits_at: jax.Array
    sample_slots: jax.Array

    @classmethod
    def unpack(cls, packed: Any, shape: StepShape, pages_per_layer: int, kernels: Kernels = XLA) -> "StepArrays":
        """The arrays in `packed` `[packed_len(shape)]`, of the host or, inside a program, of the device."""
        pieces: list[Any] = []
        start = 0
        for piece in _pieces(shape):
            stop = start + math.prod(piece)
            pieces.append(packed[start:stop].reshape(piece))
            start = stop
        token_ids, positions, write_pages, page_table, seq_lens, query_starts, logits_at, sample_slots = pieces
        attention = AttentionInputs(
            positions, write_pages, page_table, seq_lens, query_starts, pages_per_layer, kernels
        )
        return cls(token_ids, attention, logits_at, sample_slots)


def packed_len(shape: StepShape) -> int:
    """Length of the vector that holds a step's arrays."""
    return sum(map(math.prod, _pieces(shape)))


def _pieces(shape: StepShape) -> tuple[tuple[int, ...], ...]:
    tokens, rows = (shape.tokens,), (shape.rows,)
    return tokens, tokens, tokens, (shape.rows, shape.max_pages), rows, (shape.extend_rows + 1,), rows, rows


def step_shape(plan: StepPlan, buckets: Buckets) -> StepShape:
    """The smallest bucket that holds the plan."""
    pages = max(row.request.num_pages for row in plan.rows)
    if not plan.extend:
        return buckets.decode_shape(len(plan.decode), pages)
    tokens = sum(row.num_tokens for row in plan.extend)
    return buckets.extend_shape(len(plan.decode), tokens, len(plan.extend), pages)


def row_indices(plan: StepPlan, shape: StepShape) -> list[int]:
    """Where each of `plan.rows` lies among the step's padded rows."""
    return [*range(len(plan.decode)), *range(shape.decode_rows, shape.decode_rows + len(plan.extend))]


def first_tokens(plan: StepPlan, shape: StepShape) -> list[int]:
    """Where the first token of each of `plan.rows` lies among the step's padded tokens."""
    lengths = [row.num_tokens for row in plan.extend]
    return [*range(len(plan.decode)), *accumulate(lengths[:-1], initial=shape.decode_rows)][: len(plan.rows)]


def build_arrays(
    plan: StepPlan,
    shape: StepShape,
    page_tables: npt.NDArray[np.int32],
    page_size: int,
    pages_per_layer: int,
) -> npt.NDArray[np.int32]:
    """Lay the plan out in the bucket, as the vector that `StepArrays.unpack` takes apart; a fresh one for each step,
    because the device may alias it. Padding tokens have the null page and belong to no row.
    """
    packed = np.zeros(packed_len(shape), np.int32)
    step: Any = StepArrays.unpack(packed, shape, pages_per_layer)  # views: to write to them fills `packed`
    attention = step.attention
    step.sample_slots[:] = len(page_tables)

    count = len(plan.decode)
    if count:
        slots = np.array([row.request.slot for row in plan.decode], np.int32)
        at = np.array([row.start for row in plan.decode], np.int32)
        write_from = np.array([row.write_from for row in plan.decode], np.int32)
        step.token_ids[:count] = [known_token(row.request, row.start) for row in plan.decode]
        attention.positions[:count] = at
        attention.page_table[:count] = page_tables[slots, : shape.max_pages]
        attention.write_pages[:count] = np.where(at < write_from, 0, page_tables[slots, at // page_size])
        attention.seq_lens[:count] = at + 1
        step.logits_at[:count] = np.arange(count)
        step.sample_slots[:count] = slots

    start = 0
    for index, row in enumerate(plan.extend):
        stop = start + row.num_tokens
        at_token = slice(shape.decode_rows + start, shape.decode_rows + stop)
        at_row = shape.decode_rows + index
        pages = page_tables[row.request.slot]
        at = np.arange(row.start, row.start + row.num_tokens, dtype=np.int32)
        step.token_ids[at_token] = row.request.token_ids(row.start + row.num_tokens)[row.start :]
        attention.positions[at_token] = at
        attention.write_pages[at_token] = np.where(at < row.write_from, 0, pages[at // page_size])
        attention.page_table[at_row] = pages[: shape.max_pages]
        attention.seq_lens[at_row] = row.start + row.num_tokens
        step.logits_at[at_row] = at_token.stop - 1
        if row.samples:
            step.sample_slots[at_row] = row.request.slot
        attention.query_starts[index + 1] = start = stop
    attention.query_starts[len(plan.extend) + 1 :] = start
    return packed


def build_copies(plan: StepPlan, max_copies: int) -> npt.NDArray[np.int32] | None:
    """Pages to copy before the step, `[2, max_copies]`, sources and targets; target 0 pads. None if there are none."""
    if not plan.copies:
        return None
    copies = np.zeros((2, max_copies), np.int32)
    copies[:, : len(plan.copies)] = np.transpose(plan.copies)
    return copies


def known_token(request: Request, position: int) -> int:
    """The token at a position of a request, or `-1 - slot` where only the device has it, as the slot's last sampled."""
    index = position - request.prompt_len
    if index < 0:
        return int(request.prompt_ids[index])
    return request.output_ids[index] if index < len(request.output_ids) else -1 - request.slot
