"""What a caller may say of each request beside its prompt and sampling: names, types and limits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, TypeGuard

import numpy as np


class RequestOptions(TypedDict, total=False):
    """Keywords of `Engine.generate`: each one for all prompts, or a list with one for each.

    rid: the requests' ids, unique among those alive; made up if None.
    cache_salt: requests share KV only with those of equal salt.
    priority: what the "priority" schedule and eviction policies go by; higher goes first and stays longer.
    routing_key: what the "routing-key" schedule policy groups requests by.
    timeout: seconds after which a request is ended, waiting or running, with what it has produced by then.
    return_logprob: give log-probabilities under the model itself, before temperature, penalties and masks.
    logprob_start_len: position of the first prompt token to give the log-probability of; -1 for none of them.
    top_logprobs_num: how many of the likeliest tokens to give at each position.
    token_ids_logprob: ids to give at each position.
    return_hidden_states: give the last hidden states, before the final norm, of the tokens that were computed.
    """

    rid: str | Sequence[str] | None
    cache_salt: str | int | Sequence[str | int | None] | None
    priority: int | Sequence[int] | None
    routing_key: str | Sequence[str | None] | None
    timeout: float | Sequence[float | None] | None
    return_logprob: bool | Sequence[bool] | None
    logprob_start_len: int | Sequence[int] | None
    top_logprobs_num: int | Sequence[int] | None
    token_ids_logprob: Sequence[int] | Sequence[Sequence[int] | None] | None
    return_hidden_states: bool | Sequence[bool] | None


class _Kind(NamedTuple):
    """The types of an option's value, what they are called, and its limits."""

    types: tuple[type, ...]
    words: str
    low: float = -math.inf
    high: float = math.inf


PRIORITY_LIMIT = 2**31
_KINDS: Mapping[str, _Kind] = {
    "rid": _Kind((str,), "a string"),
    "cache_salt": _Kind((str, int), "a string, an integer or None"),
    "priority": _Kind((int,), f"an integer in [{-PRIORITY_LIMIT}, {PRIORITY_LIMIT}]", -PRIORITY_LIMIT, PRIORITY_LIMIT),
    "routing_key": _Kind((str,), "a string or None"),
    "timeout": _Kind((int, float), "a positive number of seconds or None", math.ulp(0.0)),
    "return_logprob": _Kind((bool,), "True or False"),
    "logprob_start_len": _Kind((int,), "a position in the prompt, or -1 for none", -1),
    "top_logprobs_num": _Kind((int,), "an integer of at least 0", 0),
    "token_ids_logprob": _Kind((Sequence, np.ndarray), "a list of token ids or None"),
    "return_hidden_states": _Kind((bool,), "True or False"),
}


def options_of_each(options: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The options of each of `count` requests: only those that were given and are not None.

    Raises:
        ValueError: an option is unknown, of a wrong type, out of its limits, or a list of a wrong length.
    """
    each: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, given in options.items():
        kind = _KINDS.get(name)
        if kind is None:
            raise ValueError(f"unknown argument {name!r}; beside prompt and sampling_params: {', '.join(_KINDS)}")
        for fields, value in zip(each, _one_each(name, given, count), strict=True):
            if value is not None:
                fields[name] = _checked(name, kind, value)
    rids = [fields["rid"] for fields in each if "rid" in fields]
    if len(set(rids)) < len(rids):
        raise ValueError(f"rid must name each request differently, got {rids}")
    return each


def _one_each(name: str, given: Any, count: int) -> Sequence[Any]:
    if name == "token_ids_logprob" and given is not None and not any(is_sequence(item) for item in given):
        return [given] * count
    if not is_sequence(given):
        if name == "rid" and given is not None and count != 1:
            raise ValueError(f"rid must be a list of {count} ids for {count} prompts, got {given!r}")
        return [given] * count
    if len(given) != count:
        raise ValueError(
            f"{name} must be one for all or a list with one for each of the {count} prompts, got {len(given)}"
        )
    return given


def _checked(name: str, kind: _Kind, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    fits = isinstance(value, kind.types) and (not isinstance(value, bool) or bool in kind.types)
    if not fits or (isinstance(value, int | float) and not kind.low <= value <= kind.high):
        raise ValueError(f"{name} must be {kind.words}, got {value!r}")
    return value


def is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether the value is a list, tuple or array, and not text."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
