"""Turns a step plan into padded arrays: the one place where shapes are padded to a bucket."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jradix.config import Buckets, StepShape
from jradix.model.attention import AttentionInputs
from jradix.pallas.ops import XLA, Kernels
from jradix.sampling import GREEDY_BELOW, SamplingArrays
from jradix.scheduler import PlannedRow, StepPlan

INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_SUPPRESSED_IDS = 16
"""The most ids that `min_new_tokens` can keep from being sampled: EOS and stop ids of one request."""


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
        step.token_ids[:count] = [_input_token(row) for row in plan.decode]
        attention.positions[:count] = at
        attention.page_table[:count] = page_tables[slots, : shape.max_pages]
        attention.write_pages[:count] = page_tables[slots, at // page_size]
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


def build_sampling(plan: StepPlan, shape: StepShape) -> npt.NDArray[np.int32] | None:
    """Sampling parameters of each row, for `unpack_sampling`, or None when every sampling row is plainly greedy.

    Rows are positioned at the token being sampled, so a request's random numbers depend on nothing but its seed.
    """
    rows = [(index, row) for index, row in zip(row_indices(plan, shape), plan.rows, strict=True) if row.samples]
    if all(_plainly_greedy(row) for _, row in rows):
        return None
    packed = np.zeros((packed_sampling_rows(), shape.rows), np.int32)
    arrays: Any = unpack_sampling(packed)  # views again
    arrays.top_p[:] = 1
    arrays.suppress_ids[:] = -1
    for index, row in rows:
        params = row.request.params
        arrays.temperature[index] = min(params.temperature, FLOAT32_MAX)
        arrays.top_k[index] = min(params.top_k, INT32_MAX)
        arrays.top_p[index] = params.top_p
        arrays.min_p[index] = params.min_p
        arrays.seed[index] = row.request.seed
        arrays.position[index] = row.start + row.num_tokens
        if _below_minimum(row):
            ids = sorted(row.request.stop_ids)
            arrays.suppress_ids[index, : len(ids)] = ids
    return packed


def packed_sampling_rows() -> int:
    """Rows of the matrix that holds the sampling parameters, a column for each row of the step."""
    return 6 + MAX_SUPPRESSED_IDS


def unpack_sampling(packed: Any) -> SamplingArrays:
    """The parameters in `packed`, int32 `[packed_sampling_rows(), rows]`, of the host or of the device."""

    def typed(index: int, dtype: Any) -> Any:
        column = packed[index]
        return column.view(dtype) if isinstance(column, np.ndarray) else jax.lax.bitcast_convert_type(column, dtype)

    return SamplingArrays(
        temperature=typed(0, np.float32),
        top_k=packed[1],
        top_p=typed(2, np.float32),
        min_p=typed(3, np.float32),
        seed=typed(4, np.uint32),
        position=packed[5],
        suppress_ids=packed[6:].T,
    )


def _input_token(row: PlannedRow) -> int:
    """The token a decode row starts from: its id where the host knows it, else a reference to the device's copy."""
    request, index = row.request, row.start - row.request.prompt_len
    if index < 0:
        return int(request.prompt_ids[index])
    return request.output_ids[index] if index < len(request.output_ids) else -1 - request.slot


def _plainly_greedy(row: PlannedRow) -> bool:
    return row.request.params.temperature < GREEDY_BELOW and not _below_minimum(row)


def _below_minimum(row: PlannedRow) -> bool:
    """Whether the token this row samples comes before `min_new_tokens`."""
    sampled_before = row.start + row.num_tokens - row.request.prompt_len
    return sampled_before < row.request.params.min_new_tokens
