"""Turns a step plan into padded arrays: the one place where shapes are padded to a bucket."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jradix.config import Buckets, StepShape
from jradix.model.attention import AttentionInputs
from jradix.sampling import GREEDY_BELOW, SamplingArrays
from jradix.scheduler import PlannedRow, StepPlan

INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_SUPPRESSED_IDS = 16
"""The most ids that `min_new_tokens` can keep from being sampled: EOS and stop ids of one request."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StepArrays:
    """What a step program reads, on the host; fresh arrays each step, because the device may alias them.

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
) -> StepArrays:
    """Lay the plan out in the bucket. Padding tokens write to the null page and belong to no row."""
    token_ids = _zeros(shape.tokens)
    positions = _zeros(shape.tokens)
    write_pages = _zeros(shape.tokens)
    page_table = _zeros(shape.rows, shape.max_pages)
    seq_lens = _zeros(shape.rows)
    logits_at = _zeros(shape.rows)
    sample_slots = _zeros(shape.rows) + len(page_tables)
    query_starts = _zeros(shape.extend_rows + 1)

    count = len(plan.decode)
    if count:
        slots = np.array([row.request.slot for row in plan.decode], np.int32)
        at = np.array([row.start for row in plan.decode], np.int32)
        token_ids[:count] = [_input_token(row) for row in plan.decode]
        positions[:count] = at
        page_table[:count] = page_tables[slots, : shape.max_pages]
        write_pages[:count] = page_tables[slots, at // page_size]
        seq_lens[:count] = at + 1
        logits_at[:count] = np.arange(count)
        sample_slots[:count] = slots

    start = 0
    for index, row in enumerate(plan.extend):
        stop = start + row.num_tokens
        at_token = slice(shape.decode_rows + start, shape.decode_rows + stop)
        at_row = shape.decode_rows + index
        pages = page_tables[row.request.slot]
        at = np.arange(row.start, row.start + row.num_tokens, dtype=np.int32)
        token_ids[at_token] = row.request.token_ids(row.start + row.num_tokens)[row.start :]
        positions[at_token] = at
        write_pages[at_token] = pages[at // page_size]
        page_table[at_row] = pages[: shape.max_pages]
        seq_lens[at_row] = row.start + row.num_tokens
        logits_at[at_row] = at_token.stop - 1
        if row.samples:
            sample_slots[at_row] = row.request.slot
        query_starts[index + 1] = start = stop
    query_starts[len(plan.extend) + 1 :] = start

    attention = AttentionInputs(positions, write_pages, page_table, seq_lens, query_starts, pages_per_layer)
    return StepArrays(token_ids, attention, logits_at, sample_slots)


def build_copies(plan: StepPlan, max_copies: int) -> npt.NDArray[np.int32] | None:
    """Pages to copy before the step, `[2, max_copies]`, sources and targets; target 0 pads. None if there are none."""
    if not plan.copies:
        return None
    copies = _zeros(2, max_copies)
    copies[:, : len(plan.copies)] = np.transpose(plan.copies)
    return copies


def build_sampling(plan: StepPlan, shape: StepShape) -> SamplingArrays | None:
    """Sampling parameters of each row, or None when every sampling row is plainly greedy.

    Rows are positioned at the token being sampled, so a request's random numbers depend on nothing but its seed.
    """
    rows = [(index, row) for index, row in zip(row_indices(plan, shape), plan.rows, strict=True) if row.samples]
    if all(_plainly_greedy(row) for _, row in rows):
        return None
    columns: dict[str, Any] = {
        "temperature": np.zeros(shape.rows, np.float32),
        "top_k": np.zeros(shape.rows, np.int32),
        "top_p": np.ones(shape.rows, np.float32),
        "min_p": np.zeros(shape.rows, np.float32),
        "seed": np.zeros(shape.rows, np.uint32),
        "position": np.zeros(shape.rows, np.int32),
        "suppress_ids": np.full((shape.rows, MAX_SUPPRESSED_IDS), -1, np.int32),
    }
    for index, row in rows:
        params = row.request.params
        columns["temperature"][index] = min(params.temperature, FLOAT32_MAX)
        columns["top_k"][index] = min(params.top_k, INT32_MAX)
        columns["top_p"][index] = params.top_p
        columns["min_p"][index] = params.min_p
        columns["seed"][index] = row.request.seed
        columns["position"][index] = row.start + row.num_tokens
        if _below_minimum(row):
            ids = sorted(row.request.stop_ids)
            columns["suppress_ids"][index, : len(ids)] = ids
    return SamplingArrays(**columns)


def _zeros(*shape: int) -> Any:
    """int32 zeros. Any, because a compiled step takes host arrays where its types say `jax.Array`."""
    return np.zeros(shape, np.int32)


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
