"""What a caller may say of each request beside its prompt and sampling: names, types and limits."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

import numpy as np

from jradix import validation
from jradix.logprobs import MAX_TOP_LOGPROBS
from jradix.validation import is_sequence


class RequestOptions(TypedDict, total=False):
    """Keywords of `Engine.generate`: each one for all prompts, or a list with one for each.

    rid: the requests' ids, unique among those alive; made up if None. One for several prompts makes rid-0, rid-1 and so
        on of it, and stands for them all.
    cache_salt: requests share KV only with those of equal salt.
    priority: what the "priority" schedule and eviction policies go by; higher goes first and stays longer.
    routing_key: what the "routing-key" schedule policy groups requests by.
    timeout: seconds after which a request is ended, waiting or running, with what it has produced by then.
    return_logprob: give log-probabilities under the model itself, before temperature, penalties and masks.
    logprob_start_len: position of the first prompt token to give the log-probability of; -1 for none of them.
    top_logprobs_num: how many of the likeliest tokens to give at each position.
    token_ids_logprob: ids to give at each position.
    return_text_in_logprobs: give the tokens' texts with their log-probabilities.
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
    return_text_in_logprobs: bool | Sequence[bool] | None
    return_hidden_states: bool | Sequence[bool] | None


PRIORITY_LIMIT = 2**31
"""Priorities lie in [-PRIORITY_LIMIT, PRIORITY_LIMIT]."""


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {value!r}")
    return _without_surrogates(name, value)


def _without_surrogates(name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} must not hold lone surrogates, halves of a character, got {value!r}") from None
    return value


def _salt(name: str, value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int | np.integer):
        raise ValueError(f"{name} must be a string, an integer or None, got {value!r}")
    return _without_surrogates(name, value) if isinstance(value, str) else int(value)


def _positive(name: str, value: Any) -> float:
    return validation.number(name, value, low=0.0, low_allowed=False)


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "rid": _text,
    "cache_salt": _salt,
    "priority": partial(validation.integer, low=-PRIORITY_LIMIT, high=PRIORITY_LIMIT),
    "routing_key": _text,
    "timeout": _positive,
    "return_logprob": validation.boolean,
    "logprob_start_len": partial(validation.integer, low=-1),
    "top_logprobs_num": partial(validation.integer, low=0, high=MAX_TOP_LOGPROBS),
    "token_ids_logprob": validation.token_ids,
    "return_text_in_logprobs": validation.boolean,
    "return_hidden_states": validation.boolean,
}


def options_of_each(options: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The options of each of `count` requests: only those that were given and are not None.

    Raises:
        ValueError: an option is unknown, of a wrong type, out of its limits, or a list of a wrong length.
    """
    each: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, given in options.items():
        check = _CHECKS.get(name)
        if check is None:
            raise ValueError(f"unknown argument {name!r}; beside prompt and sampling_params: {', '.join(_CHECKS)}")
        for fields, value in zip(each, _one_each(name, given, count), strict=True):
            if value is not None:
                fields[name] = check(name, value)
    return each


def _one_each(name: str, given: Any, count: int) -> Sequence[Any]:
    one_list = name == "token_ids_logprob" and is_sequence(given) and not any(is_sequence(item) for item in given)
    if one_list or not is_sequence(given):
        if name == "rid" and isinstance(given, str) and count > 1:
            return [f"{given}-{index}" for index in range(count)]
        return [given] * count
    if len(given) != count:
        raise ValueError(
            f"{name} must be one for all or a list with one for each of the {count} prompts, got {len(given)}"
        )
    return given
