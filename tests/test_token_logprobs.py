"""One request's log-probabilities, as far as they are known, in the form of results."""

from typing import NamedTuple

import numpy as np
import pytest

from jradix.token_logprobs import TokenLogprobs

PROMPT = np.array([5, 6, 7, 8], np.int32)


class Rows(NamedTuple):
    chosen: np.ndarray
    top: np.ndarray
    top_ids: np.ndarray
    given: np.ndarray


def rows(*chosen: float) -> Rows:
    """The two likeliest of each are 1 and 2, and a third that the vocabulary does not have; one id is given."""
    count = len(chosen)
    return Rows(
        np.array(chosen, np.float32),
        np.tile(np.array([-0.5, -1.5, -np.inf], np.float32), (count, 1)),
        np.tile(np.array([1, 2, -1], np.int32), (count, 1)),
        np.full((count, 3), -2.5, np.float32),
    )


def test_a_prompt_from_its_beginning_has_no_first_value() -> None:
    logprobs = TokenLogprobs(PROMPT, 0, 0, ())
    assert logprobs.first_unknown == 1
    logprobs.take_prompt(1, rows(-1.0, -2.0))
    logprobs.take_prompt(3, rows(-3.0))
    meta = logprobs.as_meta([], None)
    assert meta["input_token_logprobs"] == [(None, 5, None), (-1.0, 6, None), (-2.0, 7, None), (-3.0, 8, None)]
    assert meta.keys() == {"input_token_logprobs", "output_token_logprobs"}


@pytest.mark.parametrize("start", [1, 3, 4])
def test_only_positions_from_the_start_on_are_given(start: int) -> None:
    logprobs = TokenLogprobs(PROMPT, start, 0, ())
    if start < 4:
        logprobs.take_prompt(start, rows(*range(start, 4)))
    assert logprobs.as_meta([], None)["input_token_logprobs"] == [(float(p), 5 + p, None) for p in range(start, 4)]


def test_kept_values_are_taken_up_to_the_first_unknown_one() -> None:
    logprobs = TokenLogprobs(PROMPT, 0, 0, ())
    logprobs.take_kept(np.array([-1, np.nan, -3], np.float32))
    assert logprobs.first_unknown == 2
    logprobs.take_kept(np.array([-2, -3], np.float32))
    assert logprobs.first_unknown == 4
    assert [value for value, _, _ in logprobs.as_meta([], None)["input_token_logprobs"]] == [None, -1, -2, -3]


def test_likeliest_and_given_tokens_come_at_each_position_with_their_texts() -> None:
    logprobs = TokenLogprobs(PROMPT, 2, 5, (9,), with_texts=True)
    assert logprobs.wants_more_than_the_token
    logprobs.take_prompt(2, rows(-1.0, -2.0))
    logprobs.take_output(rows(-3.0, -4.0), 1)
    meta = logprobs.as_meta([7], lambda token_id: f"<{token_id}>")
    likeliest = [(-0.5, 1, "<1>"), (-1.5, 2, "<2>")]
    assert meta["input_top_logprobs"] == [likeliest, likeliest]
    assert meta["output_top_logprobs"] == [likeliest]
    assert meta["output_token_ids_logprobs"] == [[(-2.5, 9, "<9>")]]
    assert meta["output_token_logprobs"] == [(-4.0, 7, "<7>")]


def test_a_token_that_is_not_certain_yet_is_not_given() -> None:
    logprobs = TokenLogprobs(PROMPT, 4, 1, ())
    for value in (-1.0, -2.0):
        logprobs.take_output(rows(value), 0)
    meta = logprobs.as_meta([3], None)
    assert (len(meta["output_token_logprobs"]), len(meta["output_top_logprobs"])) == (1, 1)
