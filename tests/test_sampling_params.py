"""Sampling parameters: what is accepted, what is refused, and that the message names field, limit and value."""

import dataclasses
import itertools
import math
import pickle
import types

import numpy as np
import pytest

from jradix.sampling_params import SamplingParams


def test_defaults_follow_sglang_and_sample_from_the_whole_distribution():
    params = SamplingParams()
    assert (params.max_new_tokens, params.min_new_tokens) == (128, 0)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, -1, 0.0)
    assert (params.seed, params.stop, params.stop_token_ids) == (None, (), ())
    assert (params.ignore_eos, params.skip_special_tokens) == (False, True)
    assert (params.n, params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (1, 0, 0, 1)
    assert (params.logit_bias, params.stop_regex, params.no_stop_trim) == (None, (), False)
    assert (params.json_schema, params.regex, params.ebnf) == (None, None, None)
    assert (params.custom_logit_processor, params.custom_params) == (None, ())


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
        *[("no_stop_trim", bad) for bad in (0, 1, None, "true")],
        *[("n", bad) for bad in (0, -1, 129, 2**31, 2**63, 1.5, "a", True, None, math.nan, math.inf)],
        *[("frequency_penalty", bad) for bad in (-2.01, 2.01, math.nan, math.inf, -math.inf, "a", True, None, [1])],
        *[("presence_penalty", bad) for bad in (-2.01, 2.01, 10**400, math.nan, math.inf, "a", True, None)],
        *[("repetition_penalty", bad) for bad in (0, -1, 2.01, math.nan, math.inf, "1", True, None)],
        *[("logit_bias", {bad: 1.0}) for bad in (-1, 1.5, "a", "-1", "1.5", "", " 5", "٥", "9" * 400, True, None)],
        *[("logit_bias", {5: bad}) for bad in (100.1, -100.1, math.nan, math.inf, "1", True, None, 10**400)],
        *[("logit_bias", bad) for bad in ([1], "5", 5, {5: 1, "5": 1}, dict.fromkeys(range(301), 1.0))],
        *[("stop_regex", bad) for bad in ("", ["a", ""], [1], 5, {"a": 1}, [None], b"a", "(a", "a**", "[", r"\2")],
        *[("stop_regex", bad) for bad in ("a*", "|a", "^", "(?=)", ["ok", "x?"])],
        *[("stop_regex", bad) for bad in (r"a\Kb", r"\p{L}", "(?r)ab")],  # re does not know them
        *[
            ("stop_regex", bad)
            for bad in (r"((\w{99}x){9}[a]}]){99}", "(?:(?:(?:(?:a?){60}){60}){60}){60}b", "a{10001}")
        ],
        *[("json_schema", bad) for bad in ("", "{", "5", "[]", "null", "nope", '{"a": NaN}', 5, True, [], b"{}")],
        *[("json_schema", bad) for bad in ({"a": math.nan}, {"a": {1, 2}}, {("a",): 1}, "[" * 10**5)],
        *[("regex", bad) for bad in ("", 5, ["a"], b"a", True)],
        *[("ebnf", bad) for bad in ("", 5, ["a"], b"a", True)],
        *[("custom_logit_processor", bad) for bad in ("f", 5, True, [len])],
        *[("custom_params", bad) for bad in ([math.nan], [math.inf], ["1"], [True], [None], [1e39], 5, "12", {1: 2})],
        *[("custom_params", bad) for bad in ([1.0] * 9, np.ones((2, 2)), [1.0])],
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
        {"n": 1},
        {"n": 128},
        {"frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 2},
        {"frequency_penalty": 2, "presence_penalty": -2, "repetition_penalty": 1e-6},
        {"logit_bias": {0: -100, 2**40: 100}},
        {"logit_bias": dict.fromkeys(range(300), 0.5)},
        {"json_schema": '{"type": "object"}'},
        {"json_schema": "true"},
        {"regex": " "},
        {"custom_logit_processor": len, "custom_params": (1.0,) * 8},
        {"custom_logit_processor": len},
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


def test_numpy_numbers_are_accepted_by_the_new_fields_too():
    params = SamplingParams.from_dict(
        {
            "n": np.int8(2),
            "frequency_penalty": np.float16(0.5),
            "repetition_penalty": np.int64(1),
            "logit_bias": {np.int32(7): np.float32(-3)},
            "custom_logit_processor": len,
            "custom_params": np.array([1, 2]),
        }
    )
    assert (params.n, params.frequency_penalty, params.repetition_penalty) == (2, 0.5, 1.0)
    assert repr(params.logit_bias) == "{7: -3.0}"
    assert params.custom_params == (1.0, 2.0)


def test_a_bias_is_kept_by_id_in_order_and_an_empty_one_is_none():
    bias = SamplingParams(logit_bias={"10": 1, 9: -1}).logit_bias
    assert bias is not None
    assert list(bias.items()) == [(9, -1.0), (10, 1.0)]
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_a_schema_is_kept_as_text_in_the_order_it_was_given():
    schema = {"properties": {"é": {}, "a": {}}, "type": "object"}
    params = SamplingParams(json_schema=schema)
    assert params.json_schema == '{"properties": {"é": {}, "a": {}}, "type": "object"}'
    schema["type"] = "array"
    assert '"object"' in params.json_schema
    assert SamplingParams(json_schema=types.MappingProxyType({"a": types.MappingProxyType({})})).json_schema == (
        '{"a": {}}'
    )


def test_one_grammar_at_most():
    for pair in itertools.combinations(("json_schema", "regex", "ebnf"), 2):
        with pytest.raises(ValueError, match=f"at most one of json_schema, regex, ebnf, got {pair[0]} and {pair[1]}"):
            SamplingParams.from_dict(dict.fromkeys(pair, "{}"))


def test_a_bad_expression_is_named_among_good_ones():
    with pytest.raises(ValueError, match=r"stop_regex '\(b' is not a regular expression: .*unterminated"):
        SamplingParams(stop_regex=["a", "(b", "c"])


def test_ids_of_a_bias_outside_the_vocabulary_are_refused():
    SamplingParams(logit_bias={"319": 1}).validate_for_vocab(320)
    for token_id in (320, 2**31, 2**63):
        with pytest.raises(ValueError, match=rf"logit_bias must lie in \[0, 320\).*got {token_id}"):
            SamplingParams(logit_bias={5: 1, token_id: 1}).validate_for_vocab(320)


def test_stop_token_ids_outside_the_vocabulary_are_refused():
    SamplingParams(stop_token_ids=[0, 319]).validate_for_vocab(320)
    SamplingParams().validate_for_vocab(320)
    with pytest.raises(ValueError, match=r"stop_token_ids must lie in \[0, 320\).*got 320"):
        SamplingParams(stop_token_ids=[5, 320]).validate_for_vocab(320)


def test_parameters_are_immutable_hashable_and_survive_replace_and_pickle():
    params = SamplingParams(
        stop=["x"],
        stop_regex="a+",
        stop_token_ids=[2],
        seed=1,
        logit_bias={3: 1},
        json_schema={"type": "object"},
        custom_logit_processor=len,
        custom_params=[1],
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 2  # pyright: ignore[reportAttributeAccessIssue]
    assert dataclasses.replace(params, seed=1) == params
    assert hash(pickle.loads(pickle.dumps(params))) == hash(params)
