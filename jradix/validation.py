"""Checks of single values that a caller gave: each returns the value in one plain form, or says what was expected.

`name` is the field of the value, for the message of the `ValueError` that all of them raise.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
MAX_PATTERN_LEN = 10_000  # compiles in a tenth of a second
_PATTERN_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<low>\d{0,18})(?:,(?P<high>\d{0,18}))?\}|.", re.DOTALL)
"""An escape, a set of characters, a counted repeat, or any other character."""


def integer(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    """Returns `value` as an int within [low, high]; bool and float are refused, numpy integers are not."""
    limits = f"an integer of at least {low}" if high is None else f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    try:
        given = value.__index__()
    except TypeError:
        raise ValueError(f"{name} must be {limits}, got {value!r}") from None
    if given < low or (high is not None and given > high):
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    return given


def number(name: str, value: Any, *, low: float = -math.inf, high: float = math.inf, low_allowed: bool = True) -> float:
    """Returns `value` as a finite float within [low, high], or (low, high] where `low` itself is not allowed."""
    start = f"{'[' if low_allowed else '('}{low:g}" if low > -math.inf else "(-inf"
    limits = f"a finite number in {start}, {f'{high:g}]' if high < math.inf else 'inf)'}"
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    try:
        given = float(value)
    except (OverflowError, TypeError):
        raise ValueError(f"{name} must be {limits}, got {type(value).__name__}") from None
    if not math.isfinite(given) or not low <= given <= high or (given == low and not low_allowed):
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    return given


def boolean(name: str, value: Any) -> bool:
    """Returns `value` if it is True or False; 0 and 1 are refused."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def directory(name: str, value: Any) -> Path:
    """Absolute, whatever becomes of the working directory; a tilde is the home."""
    if not isinstance(value, str | os.PathLike) or os.fspath(value) == "":
        raise ValueError(f"{name} must be a path that is not empty, got {value!r}")
    return Path(value).expanduser().absolute()


def strings(name: str, value: Any) -> tuple[str, ...]:
    """Returns one string or several as a tuple without duplicates, None as (); an empty string is refused."""
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence | set | frozenset) or not all(isinstance(text, str) for text in items):
        raise ValueError(f"{name} must be a string or a list of strings, got {value!r}")
    if "" in items:
        raise ValueError(f"{name} must not hold an empty string: it would end every request at once; leave it out")
    return tuple(dict.fromkeys(items))


def patterns(name: str, value: Any) -> tuple[str, ...]:
    """Returns regular expressions as `strings` does; those that do not compile or that match "" are refused.

    They are written as for Python's `re`, but are matched by the package `regex`, which can say that a text may become
    a match. So both must take them, which leaves out what only one of them knows. And `regex` writes counted repeats
    out when it compiles: nested ones would take minutes.
    """
    expressions = strings(name, value)
    if not expressions:
        return ()
    import regex  # its 20 ms are for those who need it

    for expression in expressions:
        if (length := _written_out_len(expression)) > MAX_PATTERN_LEN:
            raise ValueError(
                f"{name} must have at most {MAX_PATTERN_LEN} parts when counted repeats like {{60}} are written out, "
                f"{expression!r:.80} has {length}"
            )
        try:
            matches_nothing = re.compile(expression).search("") or regex.compile(expression).search("")
        except (re.error, regex.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{name} {expression!r} is not a regular expression: {error}") from None
        if matches_nothing:
            raise ValueError(f"{name} {expression!r} matches the empty text: it would end every request at once")
    return expressions


def _written_out_len(expression: str) -> int:
    """Parts of a regular expression, each as often as the counts behind it and around it say."""
    open_groups, last = [0], 0
    for part in _PATTERN_PART.finditer(expression):
        if part[0] == "(":
            open_groups.append(0)
            continue
        if part[0] == ")" and len(open_groups) > 1:
            last = open_groups.pop() + 1
        elif part["low"] is not None:
            count = max(int(part["low"] or 0), int(part["high"] or 0))
            last *= max(0, count - 1)  # it has been counted once
        else:
            last = 1
        open_groups[-1] += last
    return sum(open_groups)


def text(name: str, value: Any) -> str:
    """Returns a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a string, not empty, got {value!r}")
    return value


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Returns token ids sorted and without duplicates, None as (). That they are in the vocabulary is not checked."""
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__") or getattr(value, "ndim", 1) != 1:
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(sorted({integer(name, token_id, low=0) for token_id in value}))


def numbers(name: str, value: Any, *, most: int) -> tuple[float, ...]:
    """Returns at most `most` numbers that float32 holds, None as ()."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__") or getattr(value, "ndim", 1) != 1:
        raise ValueError(f"{name} must be a list of numbers, got {value!r}")
    items = list(value)
    if len(items) > most:
        raise ValueError(f"{name} must be at most {most} numbers, got {len(items)}")
    return tuple(number(name, item, low=-FLOAT32_MAX, high=FLOAT32_MAX) for item in items)


def biases(name: str, value: Any, *, most: int, limit: float) -> dict[int, float] | None:
    """Returns token id -> bias in [-limit, limit], sorted by id; nothing to add is None.

    Ids may be strings of digits, as the keys of JSON are. That they are in the vocabulary is not checked.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict from token ids to numbers, got {value!r}")
    if len(value) > most:
        raise ValueError(f"{name} must have at most {most} entries, got {len(value)}")
    found: dict[int, float] = {}
    for key, bias in value.items():
        is_digits = isinstance(key, str) and re.fullmatch(r"[0-9]{1,18}", key)
        token_id = integer(f"{name}'s token id", int(key) if is_digits else key, low=0)
        if token_id in found:
            raise ValueError(f"{name} has token id {token_id} twice, as a number and as a string; keep one")
        found[token_id] = number(name, bias, low=-limit, high=limit)
    return dict(sorted(found.items())) or None


def json_schema(name: str, value: Any) -> str:
    """Returns a JSON schema as text. What it says is not checked here, only that it is JSON and could be a schema."""
    try:
        if isinstance(value, Mapping):
            return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_as_dict)
        if isinstance(value, str) and isinstance(json.loads(value, parse_constant=_refuse_constant), dict | bool):
            return value
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} must be a JSON schema: {error}") from None
    raise ValueError(f"{name} must be a JSON schema, as text of an object or as a dict, got {value!r}")


def _as_dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether the value is a list, tuple or array, and not text."""
    return getattr(value, "ndim", 0) > 0 or (isinstance(value, Sequence) and not isinstance(value, str | bytes))
