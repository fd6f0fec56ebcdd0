"""What rows ask of their tokens, laid out in padded arrays; what nobody asks for has none."""

from typing import Any

import jax
import numpy as np
import pytest

from jradix.config import StepShape
from jradix.logit_processor import ProcessedRows
from jradix.logits import Penalties
from jradix.request import Request
from jradix.sampling_batch import (
    CountedTokens,
    PromptSpan,
    SamplingInputs,
    build_sampling_inputs,
    host_counts_last,
    unpack_sampling,
)
from jradix.sampling_params import SamplingParams
from jradix.schedule_plan import PlannedRow, StepPlan
from jradix.token_logprobs import TokenLogprobs

SHAPE = StepShape(decode_rows=3, extend_tokens=12, extend_rows=3, max_pages=4)
MAX_PROMPT_LOGPROBS = 16
UNSET = 2**31 - 1


def row(
    slot: int,
    start: int,
    num_tokens: int,
    *,
    samples: bool = True,
    outputs: int = 0,
    report: dict[str, Any] | None = None,
    hidden_states: bool = False,
    num_counted: int = 0,
    **params: Any,
) -> PlannedRow:
    """Prompts have 10 tokens, 100 * slot + position; known outputs are 1000 + index. report: of `TokenLogprobs`."""
    prompt_ids = np.arange(100 * slot, 100 * slot + 10, dtype=np.int32)
    request = Request(
        id=str(slot),
        prompt_ids=prompt_ids,
        params=SamplingParams.from_dict({"temperature": 0.0} | params),
        stop_ids=frozenset({7, 3}),
        max_new_tokens=20,
        seed=40 + slot,
        slot=slot,
        output_ids=[1000 + index for index in range(outputs)],
        logprobs=None
        if report is None
        else TokenLogprobs(prompt_ids, **({"start": 10, "num_top": 0, "given_ids": ()} | report)),
        return_hidden_states=hidden_states,
        num_counted=num_counted,
    )
    return PlannedRow(request, start, num_tokens, samples, start)


def inputs(*decode: PlannedRow, extend: tuple[PlannedRow, ...] = ()) -> SamplingInputs:
    return build_sampling_inputs(StepPlan(list(decode), list(extend)), SHAPE, MAX_PROMPT_LOGPROBS)


def test_plainly_greedy_steps_have_no_arrays() -> None:
    everything = {"given_ids": (1,)}
    hot = row(0, 3, 6, samples=False, report=everything, temperature=1.0, presence_penalty=1.0, logit_bias={3: 1.0})
    built = inputs(row(1, 11, 1, outputs=2), extend=(hot,))
    assert built == SamplingInputs(), "a row that samples nothing asked for it"


def test_sampling_arrays_hold_each_rows_own_parameters() -> None:
    sampled = row(2, 0, 10, temperature=0.5, top_k=2**40, top_p=0.9, min_p=0.1)
    sampling = unpack_sampling(inputs(row(1, 11, 1, outputs=2), extend=(sampled,)).sampling)
    assert np.asarray(sampling.temperature).tolist() == [0, 0, 0, 0.5, 0, 0]
    assert np.asarray(sampling.top_k)[3] == 2**31 - 1
    assert np.asarray(sampling.top_p)[[0, 3]].tolist() == pytest.approx([1.0, 0.9])
    assert np.asarray(sampling.min_p)[3] == pytest.approx(0.1)
    assert np.asarray(sampling.seed)[3] == 42
    assert np.asarray(sampling.position)[[0, 3]].tolist() == [12, 10], "where the sampled token will stand"
    assert (np.asarray(sampling.suppress_ids) == -1).all()


@pytest.mark.parametrize(("outputs", "held_back"), [(0, True), (1, True), (2, False)])
def test_stop_ids_are_held_back_before_the_minimum(outputs: int, held_back: bool) -> None:
    packed = inputs(row(1, 9 + outputs, 1, outputs=outputs, min_new_tokens=2)).sampling
    if not held_back:
        assert packed is None
        return
    sampling = unpack_sampling(packed)
    assert np.asarray(sampling.suppress_ids)[0, :3].tolist() == [3, 7, -1]


def test_numbers_that_float32_does_not_hold_are_finite_and_no_zero_on_the_device() -> None:
    built = inputs(extend=(row(2, 0, 10, temperature=1e300, repetition_penalty=1e-300),))
    assert np.isfinite(np.asarray(unpack_sampling(built.sampling).temperature)).all()
    assert built.penalties is not None
    assert np.asarray(Penalties.unpack(built.penalties.packed).repetition)[3] > 0


def test_the_device_unpacks_what_the_host_packed() -> None:
    params: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "frequency_penalty": 1.5, "repetition_penalty": 1.1}
    processor: dict[str, Any] = {"custom_logit_processor": jax.nn.relu, "custom_params": [0.5, -2.0]}
    built = inputs(row(1, 11, 1, outputs=2, **params), row(2, 12, 1, outputs=2, **processor))
    assert built.penalties is not None
    for unpack, packed in (
        (unpack_sampling, built.sampling),
        (Penalties.unpack, built.penalties.packed),
        (ProcessedRows.unpack, built.processors[0][1]),
    ):
        on_host, on_device = unpack(packed), jax.jit(unpack)(packed)
        jax.tree.map(np.testing.assert_array_equal, on_device, on_host)
        assert jax.tree.map(lambda leaf: leaf.dtype, on_device) == jax.tree.map(lambda leaf: leaf.dtype, on_host)


@pytest.mark.parametrize(
    ("start", "num_tokens", "num_counted", "by_host", "case"),
    [
        (0, 10, 0, True, "a fresh prompt"),
        (9, 1, 0, True, "a prompt of which all but one token is cached, as a decode row"),
        (10, 1, 0, False, "the first token after it"),
        (14, 1, 0, False, "a token much later"),
        (0, 13, 3, True, "retracted after three outputs, all computed again"),
        (8, 5, 3, True, "the same, partly cached"),
        (12, 1, 3, True, "the same, all but one token cached, as a decode row"),
        (13, 1, 3, False, "the first token after it"),
        (0, 10, 3, True, "impossible: it would sample what it has, but nothing would be counted twice"),
    ],
)
def test_every_token_is_counted_once(start: int, num_tokens: int, num_counted: int, by_host: bool, case: str) -> None:
    assert host_counts_last(start + num_tokens, 10, num_counted) == by_host, case


def test_penalties_of_a_row_that_starts_bring_what_the_host_counts() -> None:
    asks: dict[str, Any] = {"frequency_penalty": 0.5, "presence_penalty": -1.0, "repetition_penalty": 1.25}
    fresh, running = row(2, 0, 10, **asks), row(1, 12, 1, outputs=2, presence_penalty=2.0)
    resumed = row(0, 5, 7, outputs=4, num_counted=2, repetition_penalty=0.5)
    built = inputs(running, row(3, 12, 1, outputs=2), extend=(fresh, resumed)).penalties
    assert built is not None
    fresh_ids, resumed_ids = fresh.request.prompt_ids, resumed.request.prompt_ids
    assert built.counted == [CountedTokens(2, fresh_ids, []), CountedTokens(0, resumed_ids, [1000, 1001])]
    penalties = jax.tree.map(np.ndarray.tolist, Penalties.unpack(built.packed))
    assert penalties.slot == [1, UNSET, UNSET, 2, 0, UNSET]
    assert penalties.count_last == [1, 0, 0, 0, 0, 0]
    assert penalties.frequency == [0, 0, 0, 0.5, 0, 0]
    assert penalties.presence == [2, 0, 0, -1, 0, 0]
    assert penalties.repetition == [1, 1, 1, 1.25, 0.5, 1]


def test_biases_are_padded_with_ids_past_any_vocabulary() -> None:
    built = inputs(row(1, 11, 1, outputs=2), row(2, 11, 1, outputs=2, logit_bias={"7": -1.5, 2: 30}))
    assert built.bias is not None
    assert built == SamplingInputs(bias=built.bias), "one feature brought another"
    ids, values = built.bias[0], built.bias[1].view(np.float32)
    assert sorted(zip(ids[1, :2].tolist(), values[1, :2].tolist(), strict=True)) == [(2, 30), (7, -1.5)]
    assert (ids[1, 2:] == UNSET).all()
    assert (ids[[0, 2, 3, 4, 5]] == UNSET).all()


def test_rows_of_one_processor_come_together() -> None:
    def first(logits: Any, row: Any) -> Any:
        return logits

    def second(logits: Any, row: Any) -> Any:
        return logits

    built = inputs(
        row(1, 12, 1, outputs=2, custom_logit_processor=first),  # its last token is on the device
        row(2, 11, 1, outputs=2, custom_logit_processor=second, custom_params=[1.0, 2.5]),
        extend=(row(3, 0, 10, custom_logit_processor=first),),
    )
    assert [processor for processor, _ in built.processors] == [first, second]
    rows = ProcessedRows.unpack(built.processors[0][1])
    assert np.asarray(rows.wanted).tolist() == [1, 0, 0, 1, 0, 0]
    assert np.asarray(rows.row.position)[[0, 3]].tolist() == [13, 10]
    assert np.asarray(rows.row.num_output)[[0, 3]].tolist() == [3, 0]
    assert np.asarray(rows.row.last_token)[[0, 3]].tolist() == [-2, 309]
    rows = ProcessedRows.unpack(built.processors[1][1])
    assert np.asarray(rows.wanted).tolist() == [0, 1, 0, 0, 0, 0]
    assert np.asarray(rows.row.last_token)[1] == 1001
    assert np.asarray(rows.row.params)[1].tolist() == [1.0, 2.5, *[0.0] * 6]


def test_the_width_of_log_probabilities_holds_the_most_that_a_row_asks_for() -> None:
    plain = inputs(row(1, 11, 1, outputs=2, report={})).given_ids
    assert plain is not None
    assert plain.shape == (6, 0)
    wide = {"num_top": 33, "given_ids": (5, 6)}
    ids = inputs(row(1, 11, 1, outputs=2), row(2, 11, 1, outputs=2, report=wide)).given_ids
    assert ids is not None
    assert ids.shape == (6, 128)
    assert ids[1, :3].tolist() == [5, 6, -1]
    assert (np.delete(ids, 1, 0) == -1).all()


def test_prompt_tokens_follow_those_that_the_step_computes() -> None:
    """Two chunks that end and begin inside their prompts, and the last token of another."""
    first = row(0, 3, 4, samples=False, report={"start": 0, "given_ids": (8,)})
    second = row(2, 4, 6, report={"start": 8})
    silent = row(1, 9, 1)
    last = row(3, 9, 1, report={"start": 0})
    built = inputs(last, silent, extend=(first, second)).prompt_logprobs
    assert built is not None
    assert built.spans == [PromptSpan(2, 4, 0, 4), PromptSpan(3, 8, 4, 2)]
    assert built.tokens.shape == (2, MAX_PROMPT_LOGPROBS)
    assert built.tokens[:, :6].tolist() == [[3, 4, 5, 6, 10, 11], [4, 5, 6, 7, 208, 209]]
    assert (built.tokens[1, 6:] == -1).all()
    assert built.given_ids.shape == (MAX_PROMPT_LOGPROBS, 32)
    assert built.given_ids[:, 0].tolist() == [8] * 4 + [-1] * 12


def test_a_retracted_request_reports_no_output_as_prompt() -> None:
    resumed = row(0, 8, 4, outputs=2, report={"start": 2})
    built = inputs(extend=(resumed,)).prompt_logprobs
    assert built is not None
    assert built.spans == [PromptSpan(0, 9, 0, 1)]
    assert inputs(extend=(row(0, 9, 3, outputs=2, report={"start": 2}),)).prompt_logprobs is None


def test_one_row_is_enough_to_report_hidden_states() -> None:
    asks = row(1, 0, 6, samples=False, hidden_states=True)
    assert inputs(row(2, 11, 1, outputs=2), extend=(asks,)).hidden_states
    assert not inputs(row(2, 11, 1, outputs=2)).hidden_states
