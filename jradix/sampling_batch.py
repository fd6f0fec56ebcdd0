"""Turns what the rows of a plan ask of their tokens into padded arrays: sampling, penalties, biases, log-probabilities.

A feature that no row of a step uses has no array, and launches nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jradix.batch import first_tokens, known_token, row_indices
from jradix.config import StepShape
from jradix.logit_processor import LogitProcessor, ProcessedRows, packed_processor_rows
from jradix.logits import Penalties, mask_words
from jradix.logprobs import logprob_width
from jradix.packing import viewed
from jradix.request import RequestState
from jradix.sampling import GREEDY_BELOW, SamplingArrays
from jradix.sampling_params import MAX_BIASES
from jradix.schedule_plan import PlannedRow, StepPlan
from jradix.token_logprobs import TokenLogprobs

INT32_MAX = 2**31 - 1
FLOAT32_MAX, FLOAT32_TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
MAX_SUPPRESSED_IDS = 16
"""The most ids that `min_new_tokens` can keep from being sampled: EOS and stop ids of one request."""

type Ints = npt.NDArray[np.int32]
type IndexedRows = Sequence[tuple[int, PlannedRow]]
"""Rows of a plan, each with its place among the step's padded rows."""


class CountedTokens(NamedTuple):
    """A slot whose counts the host sets: the tokens that its request had when it was given the slot."""

    slot: int
    prompt_ids: Ints
    output_ids: Sequence[int]


class PenaltyInputs(NamedTuple):
    """Of a step with penalties: what to set first, and each row's, of `Penalties.unpack`."""

    counted: Sequence[CountedTokens]
    packed: Ints


class PromptSpan(NamedTuple):
    """Which prompt tokens some log-probabilities belong to.

    Entries `[offset, offset + num_tokens)` are those of tokens `[position, position + num_tokens)` of `plan.rows[row]`.
    """

    row: int
    position: int
    offset: int
    num_tokens: int


class PromptLogprobInputs(NamedTuple):
    """Prompt tokens whose log-probabilities a step reports, `max_tokens` with padding."""

    spans: Sequence[PromptSpan]
    tokens: Ints  # [2, max_tokens]: the token of the step that comes before, and the id; -1 pads the ids
    given_ids: Ints  # [max_tokens, width]


@dataclass(slots=True)
class SamplingInputs:
    """What a step samples and reports, and how, as arrays of the host. None, or nothing, where no row asks.

    Attributes:
        sampling: of `build_sampling`; None if every row that samples is greedy.
        penalties: frequency, presence and repetition.
        bias: int32 `[2, rows, MAX_BIASES]`, ids and the bits of f32 values; ids of INT32_MAX pad.
        processors: each with its rows, of `ProcessedRows.unpack`.
        mask: uint32 `[rows, mask_words(vocab)]`, see `logits.apply_mask`; whoever knows grammars sets it.
        given_ids: int32 `[rows, width]`, if a row wants log-probabilities of what it samples; -1 pads.
        prompt_logprobs: prompt tokens to report.
        hidden_states: whether to report those of all the step's tokens.
    """

    sampling: Ints | None = None
    penalties: PenaltyInputs | None = None
    bias: Ints | None = None
    processors: Sequence[tuple[LogitProcessor, Ints]] = ()
    mask: npt.NDArray[np.uint32] | None = None
    given_ids: Ints | None = None
    prompt_logprobs: PromptLogprobInputs | None = None
    hidden_states: bool = False


def build_sampling_inputs(plan: StepPlan, shape: StepShape, max_prompt_logprobs: int) -> SamplingInputs:
    """All of it for one step, but for the mask.

    Args:
        max_prompt_logprobs: of `Features`.
    """
    every = list(zip(row_indices(plan, shape), plan.rows, strict=True))
    rows = [(index, row) for index, row in every if row.samples]
    adjusted = [(index, row) for index, row in rows if row.request.adjusts_logits]
    return SamplingInputs(
        sampling=build_sampling(rows, shape.rows),
        penalties=build_penalties(adjusted, shape.rows),
        bias=build_bias(adjusted, shape.rows),
        processors=build_processors(adjusted, shape.rows),
        given_ids=build_given_ids(rows, shape.rows),
        prompt_logprobs=build_prompt_logprobs(plan, shape, max_prompt_logprobs),
        hidden_states=any(row.request.return_hidden_states for row in plan.rows),
    )


def build_sampling(rows: IndexedRows, num_rows: int) -> Ints | None:
    """Sampling parameters of each row, for `unpack_sampling`, or None when every row is plainly greedy.

    Rows are positioned at the token being sampled, so a request's random numbers depend on nothing but its seed.
    """
    if all(_plainly_greedy(row) for _, row in rows):
        return None
    packed = np.zeros((packed_sampling_rows(), num_rows), np.int32)
    arrays: Any = unpack_sampling(packed)  # views: to write to them fills `packed`
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
    return SamplingArrays(
        temperature=viewed(packed[0], np.float32),
        top_k=packed[1],
        top_p=viewed(packed[2], np.float32),
        min_p=viewed(packed[3], np.float32),
        seed=viewed(packed[4], np.uint32),
        position=packed[5],
        suppress_ids=packed[6:].T,
    )


def build_penalties(rows: IndexedRows, num_rows: int) -> PenaltyInputs | None:
    """Each row's penalties, and the counts of requests that sample for the first time since they have their slot."""
    penalized = [(index, row) for index, row in rows if row.request.has_penalties]
    if not penalized:
        return None
    packed = np.zeros((5, num_rows), np.int32)
    arrays: Any = Penalties.unpack(packed)
    arrays.slot[:] = INT32_MAX  # clipped to the row that is nobody's
    arrays.repetition[:] = 1
    counted: list[CountedTokens] = []
    for index, row in penalized:
        request, params = row.request, row.request.params
        if host_counts_last(row.start + row.num_tokens, request.prompt_len, request.num_counted):
            outputs = request.output_ids[: request.num_counted]
            counted.append(CountedTokens(request.slot, request.prompt_ids, outputs))
        else:
            arrays.count_last[index] = 1
        arrays.slot[index] = request.slot
        arrays.frequency[index] = params.frequency_penalty
        arrays.presence[index] = params.presence_penalty
        arrays.repetition[index] = max(params.repetition_penalty, FLOAT32_TINY)
    return PenaltyInputs(counted, packed)


def host_counts_last(end: int, prompt_len: int, num_counted: int) -> bool:
    """Whether the last token that a sampling row reads is one of those that the host counts.

    The host counts a request's tokens once, when it first samples in a slot: the prompt and the outputs it had when it
    was given the slot. Nothing else can then be before the token it samples, be its row a whole prompt, the last
    uncached token of one, or what a retraction took back. From the next row on the last token is one that the device
    sampled in this slot, and has not counted yet.

    Args:
        end: tokens of the request up to and with those of the row.
        prompt_len: of the request.
        num_counted: outputs it had when it was given the slot.
    """
    return end <= prompt_len + num_counted


def build_bias(rows: IndexedRows, num_rows: int) -> Ints | None:
    """Ids and values of `logit_bias`, see `SamplingInputs`."""
    biased = [(index, row.request.params.logit_bias) for index, row in rows if row.request.params.logit_bias]
    if not biased:
        return None
    packed = np.zeros((2, num_rows, MAX_BIASES), np.int32)
    packed[0] = INT32_MAX
    values: Any = viewed(packed[1], np.float32)
    for index, bias in biased:
        packed[0, index, : len(bias)] = np.fromiter(bias, np.int32, len(bias))
        values[index, : len(bias)] = np.fromiter(bias.values(), np.float32, len(bias))
    return packed


def build_processors(rows: IndexedRows, num_rows: int) -> tuple[tuple[LogitProcessor, Ints], ...]:
    """For each processor that a row asks for, the rows as it meets them."""
    found: dict[LogitProcessor, Ints] = {}
    for index, row in rows:
        request, params = row.request, row.request.params
        processor = params.custom_logit_processor
        if processor is None:
            continue
        if processor not in found:
            found[processor] = np.zeros((packed_processor_rows(), num_rows), np.int32)
        arrays: Any = ProcessedRows.unpack(found[processor])
        end, custom = row.start + row.num_tokens, params.custom_params or ()
        arrays.wanted[index] = 1
        arrays.row.position[index] = end
        arrays.row.num_output[index] = end - request.prompt_len
        arrays.row.last_token[index] = known_token(request, end - 1)
        arrays.row.params[index, : len(custom)] = custom
    return tuple(found.items())


def build_given_ids(rows: IndexedRows, num_rows: int) -> Ints | None:
    """Ids whose log-probabilities rows want beside their sampled token's; None if no row wants any."""
    wanting = [(index, row.request.logprobs) for index, row in rows if row.request.logprobs is not None]
    if not wanting:
        return None
    ids = np.full((num_rows, _width(asked for _, asked in wanting)), -1, np.int32)
    for index, asked in wanting:
        ids[index, : len(asked.given_ids)] = asked.given_ids
    return ids


def build_prompt_logprobs(plan: StepPlan, shape: StepShape, max_tokens: int) -> PromptLogprobInputs | None:
    """Prompt tokens to report: those that follow a token of this step, from where each request wants them on."""
    spans: list[PromptSpan] = []
    offset = 0
    for index, row in enumerate(plan.rows):
        if row.request.logprobs is None:
            continue
        first = max(row.start + 1, row.request.logprobs.start)
        count = min(row.start + row.num_tokens + 1, row.request.prompt_len) - first
        if count > 0:
            spans.append(PromptSpan(index, first, offset, count))
            offset += count
    if not spans:
        return None
    tokens = np.full((2, max_tokens), -1, np.int32)
    asked_of = [plan.rows[span.row].request.logprobs for span in spans]
    given = np.full((max_tokens, _width(asked for asked in asked_of if asked is not None)), -1, np.int32)
    first_token = first_tokens(plan, shape)
    for asked, (row, position, offset, count) in zip(asked_of, spans, strict=True):
        assert asked is not None
        planned, entries = plan.rows[row], slice(offset, offset + count)
        before = first_token[row] + position - 1 - planned.start
        tokens[0, entries] = np.arange(before, before + count)
        tokens[1, entries] = planned.request.prompt_ids[position : position + count]
        given[entries, : len(asked.given_ids)] = asked.given_ids
    return PromptLogprobInputs(spans, tokens, given)


def build_mask(plan: StepPlan, shape: StepShape, vocab_size: int) -> npt.NDArray[np.uint32]:
    """Which tokens each row may sample, for `SamplingInputs.mask`: what its grammar allows, or all.

    Call it when all earlier tokens of the rows with a grammar have been collected.
    """
    mask = allow_all(shape.rows, vocab_size)
    for index, row in zip(row_indices(plan, shape), plan.rows, strict=True):
        request = row.request
        if row.samples and request.constraint is not None and request.state is not RequestState.FINISHED:
            request.constraint.fill(mask[index])
    return mask


def allow_all(num_rows: int, vocab_size: int) -> npt.NDArray[np.uint32]:
    """A mask that allows every token."""
    return np.full((num_rows, mask_words(vocab_size)), 0xFFFFFFFF, np.uint32)


def _width(every: Iterable[TokenLogprobs]) -> int:
    return max(logprob_width(asked.num_top, len(asked.given_ids)) for asked in every)


def _plainly_greedy(row: PlannedRow) -> bool:
    return row.request.params.temperature < GREEDY_BELOW and not _below_minimum(row)


def _below_minimum(row: PlannedRow) -> bool:
    """Whether the token this row samples comes before `min_new_tokens`."""
    sampled_before = row.start + row.num_tokens - row.request.prompt_len
    return sampled_before < row.request.params.min_new_tokens
