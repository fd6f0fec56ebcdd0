"""Sampling parameters: what is accepted, what is refused, and that the message names field, limit and value."""

import dataclasses
import math
import pickle

import numpy as np
import pytest

from jradix.sampling_params import SamplingParams


def test_defaults_follow_sglang_and_sample_from_the_whole_distribution():
    params = SamplingParams()
    assert (params.max_new_tokens, params.min_new_tokens) == (128, 0)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, -1, 0.0)
    assert (params.seed, params.stop, params.stop_token_ids) == (None, (), ())
    assert (params.ignore_eos, params.skip_special_tokens) == (False, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", bad) for bad in (math.nan, math.inf, -math.inf, -1e-9, True, "1", None)],
        *[("top_p", bad) for bad in (0, 0.0, -0.1, 1.0000001, 1.5, math.nan, True, "0.5")],
        *[("min_p", bad) for bad in (-0.1, 1.1, math.nan, math.inf, False)],
        *[("top_k", bad) for bad in (-2, 1.5, 40.0, True, "40", None, math.nan)],
        *[("seed", bad) for bad in (-1, 2**32, 2**63, 0.5, True, "7")],
        *[("max_new_tokens", bad) for bad in (-1, 1.0, True, "3", math.inf)],
        *[("min_new_tokens", bad) for bad in (-1, 0.0, None, True)],
        *[("stop", bad) for bad in ("", ["a", ""], [1], 5, {"a": 1}, [None], b"a")],
        *[("stop_token_ids", bad) for bad in ([-1], [1.5], ["a"], [True], "12", 7, [2**63, -2])],
        *[("ignore_eos", bad) for bad in (0, 1, None, "true")],
        *[("skip_special_tokens", bad) for bad in (0, 1, None, "true")],
    ],
)
def test_bad_values_are_refused_with_the_name_of_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams.from_dict({field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1e-6},
        {"temperature": 1e30},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 10**9},
        {"min_p": 0},
        {"min_p": 1},
        {"seed": 0},
        {"seed": 2**32 - 1},
        {"max_new_tokens": 0},
        {"max_new_tokens": None, "min_new_tokens": 10**6},
        {"max_new_tokens": 5, "min_new_tokens": 5},
    ],
)
def test_values_at_the_limits_are_accepted(fields):
    params = SamplingParams.from_dict(fields)
    for name, value in fields.items():
        assert getattr(params, name) == value


def test_min_new_tokens_above_max_new_tokens_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"min_new_tokens .*\(4\), got 5"):
        SamplingParams(max_new_tokens=4, min_new_tokens=5)


def test_a_message_states_the_limit_and_what_was_given():
    with pytest.raises(ValueError, match=r"top_p must be a finite number in \(0, 1\], got 1.5"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match=r"seed must be an integer in \[0, 4294967295\], got -3"):
        SamplingParams(seed=-3)


def test_unknown_fields_are_named_together_with_the_valid_ones():
    with pytest.raises(ValueError, match=r"unknown sampling parameter 'max_tokens'.*max_new_tokens.*skip_special"):
        SamplingParams.from_dict({"max_tokens": 3})


def test_sampling_seed_is_read_as_seed_but_not_beside_it():
    assert SamplingParams.from_dict({"sampling_seed": 9}).seed == 9
    with pytest.raises(ValueError, match="seed"):
        SamplingParams.from_dict({"sampling_seed": 9, "seed": 9})


def test_stop_is_kept_as_tuples_without_duplicates():
    params = SamplingParams(stop="END", stop_token_ids=[7, 2, 7])
    assert (params.stop, params.stop_token_ids) == (("END",), (2, 7))
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a")
    assert SamplingParams(stop=[], stop_token_ids=[]).stop == ()


def test_numpy_scalars_become_plain_python_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5),  # pyright: ignore[reportArgumentType]
        top_k=np.int64(4),  # pyright: ignore[reportArgumentType]
        stop_token_ids=np.array([3, 1]),  # pyright: ignore[reportArgumentType]
    )
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert params.stop_token_ids == (1, 3)


def test_stop_token_ids_outside_the_vocabulary_are_refused():
    SamplingParams(stop_token_ids=[0, 319]).validate_for_vocab(320)
    SamplingParams().validate_for_vocab(320)
    with pytest.raises(ValueError, match=r"stop_token_ids must lie in \[0, 320\).*got 320"):
        SamplingParams(stop_token_ids=[5, 320]).validate_for_vocab(320)


def test_parameters_are_immutable_hashable_and_survive_replace_and_pickle():
    params = SamplingParams(stop=["x"], stop_token_ids=[2], seed=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 2  # pyright: ignore[reportAttributeAccessIssue]
    assert dataclasses.replace(params, seed=1) == params
    assert hash(pickle.loads(pickle.dumps(params))) == hash(params)
