"""What the HTTP process makes of an engine's changes: text, log-probabilities, order, and an end."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jradix.delivery import StepFailedError
from jradix.sampling_params import SamplingParams
from jradix.server.generation import Generation, Sample
from jradix.server.messages import Change
from jradix.tokenizer import Tokenizer, load_tokenizer

EOS = 2
LENGTH, STOPPED = {"type": "length", "length": 1}, {"type": "stop", "matched": EOS}


@pytest.fixture(scope="module")
def tokenizer(byte_model_path: Path) -> Tokenizer:
    return load_tokenizer(byte_model_path)


def change(ids: list[int], reason: Any = None, *, index: int = 0, text: str | None = None, **meta: Any) -> Change:
    return Change(0, index, text, ids, {"finish_reason": reason, **meta})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(max_size=12), cuts=st.sets(st.integers(0, 40)))
def test_the_text_is_that_of_all_tokens_however_they_come(tokenizer: Tokenizer, text: str, cuts: set[int]) -> None:
    ids = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    places = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    sample = Sample(0, SamplingParams(), tokenizer)
    for start, end in pairwise(places):
        sample.take(change(ids[start:end], STOPPED if end == len(ids) else None))
        assert text.startswith(sample.text)
    assert (sample.text, sample.output_ids) == (text, ids)


def test_text_that_the_engine_makes_is_taken_as_it_is(tokenizer: Tokenizer) -> None:
    sample = Sample(0, SamplingParams(stop="x"), tokenizer)
    for piece in ("a", "", "b"):
        sample.take(change([70], text=piece))
    assert sample.text == "ab"


def test_only_a_stop_token_is_left_out_and_only_if_it_is_trimmed(tokenizer: Tokenizer) -> None:
    [letter] = tokenizer.encode("a", add_special_tokens=False)
    for params, reason, text in (
        (SamplingParams(), LENGTH, "aa"),
        (SamplingParams(stop_token_ids=[letter]), {"type": "stop", "matched": letter}, "a"),
        (SamplingParams(stop_token_ids=[letter], no_stop_trim=True), {"type": "stop", "matched": letter}, "aa"),
        (SamplingParams(regex="aa"), {"type": "stop"}, "aa"),
    ):
        sample = Sample(0, params, tokenizer)
        sample.take(change([letter]))
        sample.take(change([letter], reason))
        assert sample.text == text


def test_output_logprobs_add_up_and_those_of_the_prompt_do_not() -> None:
    sample = Sample(0, SamplingParams(), None)
    prompt = [(None, 1, None), (-1.0, 2, None)]
    for token_id in (5, 6, 7):
        sample.take(change([token_id], input_token_logprobs=prompt, output_token_logprobs=[(-0.5, token_id, None)]))
    assert sample.meta["input_token_logprobs"] == prompt
    assert [entry[1] for entry in sample.meta["output_token_logprobs"]] == [5, 6, 7]


def test_tokens_are_counted_where_nothing_else_of_meta_info_is_new() -> None:
    sample = Sample(0, SamplingParams(), None)
    sample.take(change([5], completion_tokens=1, cached_tokens=3))
    for ids in ([6], [7, 8]):
        sample.take(Change(0, 0, None, ids, None))
    assert sample.meta == {"finish_reason": None, "completion_tokens": 4, "cached_tokens": 3}
    assert sample.output_ids == [5, 6, 7, 8]


def test_who_comes_late_finds_all_that_came_meanwhile() -> None:
    async def run() -> None:
        generation = Generation([SamplingParams(n=2), SamplingParams()], None, abandon=lambda: None)
        changes = generation.changes()
        for index in (2, 0):
            generation.take(change([index], index=index))
        first = await anext(changes)
        assert [(sample.index, sample.output_ids) for sample in first] == [(2, [2]), (0, [0])]
        for index in (0, 1, 2):
            generation.take(change([9], LENGTH, index=index))
        assert [sample.index for sample in await anext(changes)] == [0, 1, 2]
        with pytest.raises(StopAsyncIteration):
            await anext(changes)
        assert [sample.output_ids for sample in generation.samples] == [[0, 9], [9], [2, 9]]

    asyncio.run(run())


def test_closing_aborts_what_has_not_ended_and_only_that() -> None:
    async def run() -> None:
        num_abandoned = 0

        def abandon() -> None:
            nonlocal num_abandoned
            num_abandoned += 1

        ended: list[Sample] = []
        for reason in (None, LENGTH):
            generation = Generation([SamplingParams()], None, abandon, ended.append)
            generation.take(change([1], reason))
            generation.close()
            generation.close()
        assert num_abandoned == 1
        assert len(ended) == 1

    asyncio.run(run())


def test_a_failed_step_is_raised_where_results_are_awaited() -> None:
    async def run() -> None:
        generation = Generation([SamplingParams()], None, abandon=lambda: None)
        generation.take(
            Change(0, 0, None, [], {"finish_reason": {"type": "abort"}}, StepFailedError("the step failed"))
        )
        with pytest.raises(StepFailedError, match="the step failed"):
            await generation.finished()

    asyncio.run(run())
