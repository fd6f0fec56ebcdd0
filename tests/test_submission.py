"""Arguments of `generate` become requests; wrong ones are the subject of test_engine_limits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jradix.request import Request
from jradix.sampling_params import SamplingParams
from jradix.submission import Submission
from jradix.tokenizer import load_tokenizer


def submission(random_seed: int = 0, pool_tokens: int = 1000, context_length: int = 32) -> Submission:
    return Submission(
        None,
        vocab_size=100,
        context_length=context_length,
        eos_ids=frozenset({2}),
        pool_tokens=pool_tokens,
        random_seed=random_seed,
    )


def requests_of(input_ids: Any, params: Any = None, rid: Any = None, random_seed: int = 0) -> list[Request]:
    requests, _ = submission(random_seed).requests(None, input_ids, params, rid=rid, cache_salt="salt")
    return requests


@pytest.mark.parametrize(
    ("input_ids", "single", "expected"),
    [
        ([3, 4], True, [[3, 4]]),
        ((3, 4), True, [[3, 4]]),
        (np.array([3, 4], np.uint8), True, [[3, 4]]),
        ([np.int64(3), 4], True, [[3, 4]]),
        ([[3, 4]], False, [[3, 4]]),
        ([[3], (4, 5), np.array([6])], False, [[3], [4, 5], [6]]),
        (np.array([[3, 4], [5, 6]]), False, [[3, 4], [5, 6]]),
    ],
)
def test_token_ids_come_as_lists_tuples_or_arrays(input_ids: Any, single: bool, expected: list[list[int]]) -> None:
    requests, was_single = submission().requests(None, input_ids, {"max_new_tokens": 4})
    assert was_single == single
    assert [request.prompt_ids.tolist() for request in requests] == expected
    assert {request.prompt_ids.dtype for request in requests} == {np.dtype(np.int32)}


def test_a_prompt_is_copied() -> None:
    ids = np.array([3, 4], np.int32)
    request = requests_of(ids)[0]
    ids[0] = 9
    assert request.prompt_ids.tolist() == [3, 4]


def test_params_are_one_for_all_or_one_each() -> None:
    both = requests_of([[3], [4]], SamplingParams(max_new_tokens=5))
    assert [request.params.max_new_tokens for request in both] == [5, 5]
    each = requests_of([[3], [4]], [SamplingParams(max_new_tokens=5), {"max_new_tokens": 6}])
    assert [request.params.max_new_tokens for request in each] == [5, 6]


def test_max_new_tokens_none_is_what_the_context_has_room_for() -> None:
    assert requests_of([3] * 20, {"max_new_tokens": None})[0].max_new_tokens == 12


def test_who_sets_no_max_new_tokens_is_never_told_that_it_does_not_fit() -> None:
    assert requests_of([3] * 20, None)[0].max_new_tokens == 12
    assert requests_of([3] * 20, SamplingParams(temperature=0))[0].max_new_tokens == 12
    [request], _ = submission(context_length=512, pool_tokens=24).requests(None, [1, 2, 3], None)
    assert request.max_new_tokens == 24 + 1 - 3
    [request], _ = submission(context_length=512, pool_tokens=512).requests(None, [1, 2, 3], None)
    assert request.max_new_tokens == 128


def test_eos_and_stop_ids_end_a_request() -> None:
    assert requests_of([3], {"stop_token_ids": [7], "max_new_tokens": 4})[0].stop_ids == {2, 7}
    ignoring = {"stop_token_ids": [7], "ignore_eos": True, "max_new_tokens": 4}
    assert requests_of([3], ignoring)[0].stop_ids == {7}


def test_ids_are_the_callers_or_made_up_and_different() -> None:
    assert [request.id for request in requests_of([[3], [4]], rid=["x", "y"])] == ["x", "y"]
    one = submission()
    made = [one.requests(None, [[3], [4]], {"max_new_tokens": 1})[0] for _ in range(3)]
    assert len({request.id for requests in made for request in requests}) == 6


def test_seeds_are_the_callers_or_follow_from_the_engines() -> None:
    assert requests_of([3], {"seed": 11, "max_new_tokens": 4})[0].seed == 11
    first, again, other = ([request.seed for request in requests_of([[3]] * 4, random_seed=seed)] for seed in (0, 0, 1))
    assert first == again
    assert len({*first, *other}) == 8


@pytest.mark.parametrize("field", ["stop", "stop_regex", "json_schema", "regex", "ebnf"])
def test_what_is_about_text_needs_a_tokenizer(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}.* need a tokenizer, and skip_tokenizer_init is set"):
        requests_of([3], {field: "{}", "max_new_tokens": 4})


def test_a_grammar_is_compiled_when_it_is_submitted_for_each_request(tiny_text_path: Path) -> None:
    with_text = Submission(
        load_tokenizer(tiny_text_path),
        vocab_size=320,
        context_length=32,
        eos_ids=frozenset({2}),
        pool_tokens=1000,
        random_seed=0,
    )
    params = [{"regex": "ab"}, {"regex": "ab"}, {}]
    first, second, free = with_text.requests(None, [[3], [4], [5]], params)[0]
    assert first.constraint is not None
    assert second.constraint is not None
    assert first.constraint is not second.constraint
    assert free.constraint is None
    with pytest.raises(ValueError, match="regex is refused"):
        with_text.requests(None, [3], {"regex": "(a"})


def test_every_request_is_in_the_callers_namespace() -> None:
    assert {request.namespace for request in requests_of([[3], [4]])} == {"salt"}


@pytest.mark.parametrize("salt", [float("nan"), {}, True, np.array(1.5)], ids=str)
def test_a_salt_that_is_no_string_or_integer_is_refused_by_name(salt: object) -> None:
    with pytest.raises(ValueError, match="cache_salt must be a string, an integer or None"):
        submission().requests(None, [1, 2], None, cache_salt=salt)  # type: ignore[arg-type]


def test_as_many_tokens_as_fit_stops_at_the_pool_as_well_as_at_the_context() -> None:
    [request], _ = submission(pool_tokens=24).requests(None, [1, 2, 3], {"max_new_tokens": None})
    assert request.max_new_tokens == 24 + 1 - 3


def test_the_ids_of_samples_are_no_others_ids() -> None:
    with pytest.raises(ValueError, match="rid must name each request differently, samples too, got 'a-1' twice"):
        requests_of([[3], [4]], [{"n": 2}, {}], rid=["a", "a-1"])
    assert [request.id for request in requests_of([[3], [4]], [{"n": 2}, {}], rid=["a", "a-2"])] == [
        "a-0",
        "a-1",
        "a-2",
    ]
