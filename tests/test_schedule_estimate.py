"""What is reserved for outputs: what is learned, what retractions add, and how soon that is forgotten."""

import numpy as np
import pytest

from jradix.request import Request
from jradix.sampling_params import SamplingParams
from jradix.schedule_estimate import CAUTION_STEPS, PRIOR, RESERVED, WINDOW, OutputEstimate


def request_after(num_sampled: int, max_new_tokens: int, prompt_len: int = 10) -> Request:
    request = Request("", np.zeros(prompt_len, np.int32), SamplingParams(), frozenset(), max_new_tokens)
    request.num_sampled = num_sampled
    return request


@pytest.mark.parametrize(("used", "allowed"), [(256, 256), (13, 256), (1, 2048)])
def test_the_share_becomes_what_requests_use(used: int, allowed: int) -> None:
    estimate = OutputEstimate()
    assert estimate.share == PRIOR
    for _ in range(20 * WINDOW):
        estimate.finished(used, allowed)
    assert estimate.share == pytest.approx(used / allowed, rel=0.01)
    assert estimate.reserved == pytest.approx(RESERVED * used / allowed, rel=0.01)


def test_requests_for_one_token_say_nothing() -> None:
    estimate = OutputEstimate()
    for count in (1, 100, 1):
        estimate.finished(1, count)
    assert estimate.share == pytest.approx(PRIOR + (0.01 - PRIOR) / WINDOW)


def test_one_request_moves_the_share_by_its_part_of_the_window() -> None:
    estimate = OutputEstimate()
    estimate.finished(1, 100)
    assert estimate.share == pytest.approx(PRIOR + (0.01 - PRIOR) / WINDOW)


def test_requests_count_by_their_tokens() -> None:
    """Short ones that use all they may say little about long ones, for which room is reserved."""
    estimate = OutputEstimate()
    for _ in range(20 * WINDOW):
        estimate.finished(8, 8)
        estimate.finished(100, 2000)
    assert estimate.share == pytest.approx(108 / 2008, rel=0.1)


def test_each_retraction_reserves_more_and_never_more_than_all() -> None:
    estimate = OutputEstimate()
    before = estimate.reserved
    for _ in range(50):
        estimate.retracted()
        assert before < estimate.reserved <= 1.0
        before = estimate.reserved
    for _ in range(10 * WINDOW):
        estimate.finished(5, 5)
    assert estimate.reserved == 1.0


@pytest.mark.parametrize("num_retractions", [1, 3, 100])
def test_caution_is_forgotten_within_its_steps_and_evenly(num_retractions: int) -> None:
    estimate = OutputEstimate()
    before = estimate.reserved
    for _ in range(num_retractions):
        estimate.retracted()
    reserved = []
    for _ in range(CAUTION_STEPS):
        reserved.append(estimate.reserved)
        estimate.step()
    assert estimate.reserved == before
    assert reserved == sorted(reserved, reverse=True)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 50])
def test_room_for_the_next_token_at_least_and_for_all_at_most(max_new_tokens: int) -> None:
    careless, careful = OutputEstimate(), OutputEstimate()
    for _ in range(30 * WINDOW):
        careless.finished(1, 100_000)
    for _ in range(1000):
        careful.retracted()
    for num_sampled in range(max_new_tokens + 1):
        request = request_after(num_sampled, max_new_tokens)
        last = request.prompt_len + max_new_tokens - 1  # the last token's KV is never written
        assert careful.reserved_len(request) == last
        assert careless.reserved_len(request) == min(last, request.seq_len + (num_sampled < max_new_tokens - 1))
