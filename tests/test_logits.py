"""Penalties, biases and masks against numpy in float64, over histories that are cut, retracted and resumed."""

from typing import Any

import jax
import numpy as np
import pytest

from jradix.logits import (
    add_bias,
    apply_mask,
    mask_words,
    penalize,
    set_counts,
    token_counts,
)
from jradix.request import Request, RequestState
from jradix.sampling import GREEDY_BELOW
from jradix.sampling_batch import CountedTokens, allow_all, build_penalties
from jradix.sampling_params import MAX_BIASES, SamplingParams
from jradix.schedule_plan import PlannedRow

VOCAB, SLOTS = 60, 3
PENALTIES = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.5},
    {"repetition_penalty": 1.8},
    {"frequency_penalty": -0.4, "presence_penalty": 1.1, "repetition_penalty": 0.6},
]


def expected(logits: np.ndarray, prompt: list[int], output: list[int], params: dict[str, float]) -> np.ndarray:
    """The oracle, one token of the vocabulary after the other."""
    found = logits.astype(np.float64).copy()
    for token in range(len(found)):
        count = output.count(token)
        if token in prompt or count:
            repetition = params.get("repetition_penalty", 1.0)
            found[token] = found[token] / repetition if found[token] > 0 else found[token] * repetition
        found[token] -= params.get("frequency_penalty", 0.0) * count
        found[token] -= params.get("presence_penalty", 0.0) * (count > 0)
    return found


class CountingDevice:
    """Counts and next tokens as the runner keeps them, under the pure functions."""

    def __init__(self) -> None:
        self.counts: Any = np.full((SLOTS + 1, VOCAB), 99, np.int32)  # what earlier requests left there
        self.next_tokens = np.full(SLOTS + 1, 7, np.int32)
        self._penalize = jax.jit(penalize)
        self._set_counts = jax.jit(set_counts)

    def step(self, rows: list[tuple[int, PlannedRow]], logits: np.ndarray) -> np.ndarray:
        """The adjusted logits `[rows, VOCAB]`."""
        inputs = build_penalties(rows, len(logits))
        if inputs is None:
            return logits
        for counted in inputs.counted:
            self.set_counts(counted)
        found, self.counts = self._penalize(logits, self.counts, self.next_tokens, inputs.packed)
        return np.asarray(found)

    def set_counts(self, tokens: CountedTokens) -> None:
        counts = token_counts(tokens.prompt_ids, tokens.output_ids, VOCAB)
        self.counts = self._set_counts(self.counts, tokens.slot, counts)


def request_with(params: dict[str, float], prompt: list[int], slot: int) -> Request:
    request = Request(
        id=str(slot),
        prompt_ids=np.asarray(prompt, np.int32),
        params=SamplingParams.from_dict(params),
        stop_ids=frozenset(),
        max_new_tokens=100,
        slot=slot,
    )
    request.change_state(RequestState.RUNNING)
    return request


def next_row(request: Request, num_cached: int) -> PlannedRow:
    """The row that samples the request's next token, when `num_cached` tokens need not be computed."""
    return PlannedRow(request, num_cached, request.seq_len - num_cached, True, num_cached)


@pytest.mark.parametrize("seed", range(4))
def test_penalties_follow_the_whole_history_through_retractions(seed: int) -> None:
    """Three requests, one step ahead of what the host has seen, each retracted now and then to any slot.

    A request that starts again reads all its tokens or, if the rest is cached, only the last.
    """
    rng = np.random.default_rng(seed)
    device = CountingDevice()
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 20)).tolist() for _ in range(SLOTS)]
    params = [PENALTIES[index] for index in rng.permutation(len(PENALTIES))[:SLOTS]]
    requests = [request_with(*pair, slot) for slot, pair in enumerate(zip(params, prompts, strict=True))]
    history: list[list[int]] = [[] for _ in requests]
    starting = [True] * SLOTS
    num_restarts = 0
    for _ in range(40):
        if rng.random() < 0.3:
            for request, known in zip(requests, history, strict=True):
                request.output_ids[:] = known  # nothing is retracted before all is collected
            slots, moved = rng.permutation(SLOTS), rng.integers(SLOTS)
            for index, request in enumerate(requests):
                if index == moved or request.slot != slots[index]:
                    request.change_state(RequestState.WAITING)
                    request.slot = int(slots[index])
                    request.change_state(RequestState.RUNNING)
                    starting[index] = True
                    num_restarts += 1
        places = rng.permutation(5)[:SLOTS].tolist()  # of five rows
        logits = (rng.normal(size=(5, VOCAB)) * 3).astype(np.float32)
        rows = []
        for index, (place, request) in enumerate(zip(places, requests, strict=True)):
            shortest = request.seq_len - 1
            cached = int(rng.integers(0, request.seq_len)) if starting[index] else shortest
            rows.append((place, next_row(request, shortest if rng.random() < 0.3 else cached)))
            starting[index] = False
        found = device.step(rows, logits)
        for index, (place, request) in enumerate(zip(places, requests, strict=True)):
            want = expected(logits[place], prompts[index], history[index], params[index])
            np.testing.assert_allclose(found[place], want, rtol=1e-5, atol=1e-5)
            request.output_ids[:] = history[index]  # the host sees the step before
            token = int(rng.integers(0, 12))  # few, so that they repeat
            history[index].append(token)
            request.num_sampled += 1
            device.next_tokens[request.slot] = token
        others = [place for place in range(5) if place not in places]
        assert (found[others] == logits[others]).all(), "a row without penalties changed"
    assert num_restarts > 5


def test_rows_without_penalties_keep_their_logits_bit_for_bit() -> None:
    device = CountingDevice()
    logits = np.array([[-0.0, 0.0, np.inf, -np.inf, np.nan, 2e-38] * 10, [1.0] * VOCAB], np.float32)
    plain = request_with({"temperature": 0.0}, [1, 2, 3], slot=0)
    assert device.step([(0, next_row(plain, 0))], logits) is logits, "nothing was asked"
    punished = request_with({"presence_penalty": 1.0}, [1, 2, 3], slot=1)
    found = device.step([(0, next_row(plain, 0)), (1, next_row(punished, 0))], logits)
    assert found[0].tobytes() == logits[0].tobytes()


def test_infinite_logits_stay_infinite_under_penalties() -> None:
    device = CountingDevice()
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, 5] = 2.0
    request = request_with(PENALTIES[3], [4, 5, 6], slot=2)
    found = device.step([(0, next_row(request, 0))], logits)[0]
    assert np.isneginf(np.delete(found, 5)).all()
    assert found[5] == pytest.approx(2.0 / 0.6)


def test_counts_hold_twice_the_output_and_one_for_the_prompt() -> None:
    assert token_counts([3, 3, 1], [1, 1, 4], 6).tolist() == [0, 5, 0, 1, 2, 0]
    assert token_counts([], [], 3).tolist() == [0, 0, 0]


def test_a_bias_is_added_to_the_ids_of_its_row_only() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 400)).astype(np.float32)
    packed = np.full((2, 3, MAX_BIASES), 2**31 - 1, np.int32)
    ids, values = packed[0], packed[1].view(np.float32)
    chosen = rng.permutation(400)[:MAX_BIASES]
    ids[0], values[0] = chosen, rng.normal(size=MAX_BIASES) * 50
    ids[2, :2], values[2, :2] = (0, 399), (-100, 100)
    want = logits.copy()
    want[0, chosen] += values[0]
    want[2, [0, 399]] += [-100, 100]
    np.testing.assert_array_equal(jax.jit(add_bias)(logits, packed), want)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 320])
def test_a_mask_leaves_the_allowed_tokens_and_nothing_else(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    allowed = rng.random((4, vocab)) < [[0.5], [0.0], [1.0], [0.1]]
    mask = allow_all(4, vocab)
    assert mask.shape == (4, mask_words(vocab))
    for row, token in zip(*np.nonzero(~allowed), strict=True):
        mask[row, token // 32] &= ~np.uint32(1 << (token % 32))
    logits = rng.normal(size=(4, vocab)).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(apply_mask)(logits, mask), np.where(allowed, logits, -np.inf))
    np.testing.assert_array_equal(jax.jit(apply_mask)(logits, allow_all(4, vocab)), logits)


def test_of_the_allowed_tokens_one_can_be_sampled_whatever_their_logits() -> None:
    """Of those that are -inf or NaN alone; beside a finite one they still have no probability."""
    mask = allow_all(4, 40)
    mask[:3] = [[0b11000, 0], [0b11000, 0], [0b111000, 0]]
    logits = np.zeros((4, 40), np.float32)
    logits[0], logits[1, 3:5], logits[2, 3:5], logits[3, :3] = -np.inf, np.nan, -np.inf, [-np.inf, np.nan, 1.0]
    found = np.asarray(jax.jit(apply_mask)(logits, mask))
    np.testing.assert_array_equal(
        np.isfinite(found[:3]), [np.isin(np.arange(40), ids) for ids in ([3, 4], [3, 4], [3, 4, 5])]
    )
    for temperature in (GREEDY_BELOW, 1.0):
        weights = np.exp((found[2] - found[2].max()) / np.float32(temperature))
        assert np.isfinite(found[:3, 3:5] / np.float32(temperature)).all()
        assert weights.tolist() == [float(i == 5) for i in range(40)]
    np.testing.assert_array_equal(found[3], logits[3])
