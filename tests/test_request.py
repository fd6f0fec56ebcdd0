"""A request's counts and the states it may pass through."""

import itertools

import numpy as np
import pytest

from jradix.request import LEGAL_CHANGES, FinishReason, Request, RequestState
from jradix.sampling_params import SamplingParams


def make_request() -> Request:
    return Request(
        id="r",
        prompt_ids=np.array([5, 6, 7], np.int32),
        params=SamplingParams(max_new_tokens=2),
        stop_ids=frozenset(),
        max_new_tokens=2,
    )


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RequestState, RequestState)))
def test_only_legal_changes_of_state_are_possible(before: RequestState, after: RequestState) -> None:
    request = make_request()
    request.state = before
    if after in LEGAL_CHANGES[before]:
        request.change_state(after)
        assert request.state is after
    else:
        with pytest.raises(AssertionError, match=f"{before.value} cannot become {after.value}"):
            request.change_state(after)
        assert request.state is before


def test_nothing_follows_the_end_and_every_state_reaches_it() -> None:
    assert not LEGAL_CHANGES[RequestState.FINISHED]
    assert all(RequestState.FINISHED in LEGAL_CHANGES[state] for state in RequestState if LEGAL_CHANGES[state])


def test_token_ids_are_prompt_then_output_as_far_as_the_host_has_them() -> None:
    request = make_request()
    request.output_ids, request.num_sampled = [8], 2
    assert request.seq_len == 5
    assert [request.token_ids(end).tolist() for end in (0, 2, 3, 4)] == [[], [5, 6], [5, 6, 7], [5, 6, 7, 8]]
    with pytest.raises(AssertionError, match="still on the device"):
        request.token_ids(5)


def test_a_request_wants_no_step_once_its_tokens_are_sampled_or_it_ended() -> None:
    request = make_request()
    assert request.wants_step
    request.num_sampled = 2
    assert not request.wants_step
    request.num_sampled = 0
    request.state = RequestState.FINISHED
    assert not request.wants_step


def test_a_finish_reason_shows_only_what_it_has() -> None:
    assert FinishReason("length", length=0).as_dict() == {"type": "length", "length": 0}
    assert FinishReason("stop", matched="\n").as_dict() == {"type": "stop", "matched": "\n"}
    assert FinishReason("abort", message="why").as_dict() == {"type": "abort", "message": "why"}
