"""What a caller may ask of the sampling of one request: names, defaults and limits, checked when they are set."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SEED_LIMIT = 2**32
"""Seeds lie in [0, SEED_LIMIT): they travel to the device as uint32."""

DEFAULT_MAX_NEW_TOKENS = 128
"""What a caller who gives no limit gets, or fewer where context or pool have no room for so many."""

_ALIASES = {"sampling_seed": "seed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it stops. Names and defaults follow SGLang.

    The filters apply in this order: temperature, ``top_k``, ``top_p`` (of what top-k left, renormalised), ``min_p``
    (relative to the most likely token). Every field is validated here; a wrong one raises ``ValueError``.

    Attributes:
        max_new_tokens: The most tokens to generate; 0 generates none, ``None`` as many as the context has room for.
            The default, 128, is cut to what there is room for; another number that does not fit is refused.
        min_new_tokens: EOS and ``stop_token_ids`` cannot be sampled before this many tokens. Stop strings still end it.
        temperature: Logits are divided by it. 0 (in fact anything below 1e-6) is greedy: the most likely token.
        top_p: Keep the fewest most likely tokens whose probabilities sum to at least this, in (0, 1].
        top_k: Keep this many most likely tokens. -1 and 0 keep all; above the vocabulary size keeps all.
        min_p: Keep tokens at least this fraction as likely as the most likely one, in [0, 1].
        seed: Makes the tokens a function of prompt and seed, whatever else runs. ``None``: the engine picks one.
        stop: Text that ends the request when it appears in the output; it is not part of the output.
            A single string is accepted; kept as a tuple.
        stop_token_ids: Ids that end the request like EOS does. Kept as a sorted tuple without duplicates.
        ignore_eos: Go on after EOS (``stop_token_ids`` still end the request).
        skip_special_tokens: Leave special tokens out of the output text.
    """

    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the dataclass is frozen for everybody else
        if self.max_new_tokens is not None:
            set_field(self, "max_new_tokens", _integer("max_new_tokens", self.max_new_tokens, low=0))
        set_field(self, "min_new_tokens", _integer("min_new_tokens", self.min_new_tokens, low=0))
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be at most max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}"
            )
        set_field(self, "temperature", _number("temperature", self.temperature, low=0.0))
        set_field(self, "top_p", _number("top_p", self.top_p, low=0.0, high=1.0, low_allowed=False))
        set_field(self, "top_k", _integer("top_k", self.top_k, low=-1))
        set_field(self, "min_p", _number("min_p", self.min_p, low=0.0, high=1.0))
        if self.seed is not None:
            set_field(self, "seed", _integer("seed", self.seed, low=0, high=SEED_LIMIT - 1))
        set_field(self, "stop", _stop_strings(self.stop))
        set_field(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "SamplingParams":
        """Builds the parameters from a dict such as a request body holds; ``sampling_seed`` is read as ``seed``.

        Raises:
            ValueError: a field is unknown, given under two names, or out of its limits.
        """
        valid = [field.name for field in dataclasses.fields(cls)]
        values: dict[str, Any] = {}
        for given, value in fields.items():
            name = _ALIASES.get(given, given)
            if name not in valid:
                raise ValueError(f"unknown sampling parameter {given!r}; valid ones are {', '.join(valid)}")
            if name in values:
                raise ValueError(f"sampling parameter {name!r} is given twice (also as {given!r}); keep one")
            values[name] = value
        return cls(**values)

    def validate_for_vocab(self, vocab_size: int) -> None:
        """Raises ``ValueError`` when a stop token id is not an id of a vocabulary of this size."""
        for token_id in self.stop_token_ids or ():
            if token_id >= vocab_size:
                raise ValueError(f"stop_token_ids must lie in [0, {vocab_size}) for this model, got {token_id}")


def _integer(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    """Returns `value` as an int within [low, high]; bool and float are refused, numpy integers are not."""
    limits = f"an integer of at least {low}" if high is None else f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    try:
        number = value.__index__()
    except TypeError:
        raise ValueError(f"{name} must be {limits}, got {value!r}") from None
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    return number


def _number(name: str, value: Any, *, low: float, high: float = math.inf, low_allowed: bool = True) -> float:
    """Returns `value` as a finite float within [low, high], or (low, high] where `low` itself is not allowed."""
    end = f"{high:g}]" if high < math.inf else "inf)"
    limits = f"a finite number in {'[' if low_allowed else '('}{low:g}, {end}"
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    try:
        number = float(value)
    except (OverflowError, TypeError):
        raise ValueError(f"{name} must be {limits}, got {type(value).__name__}") from None
    if not math.isfinite(number) or not low <= number <= high or (number == low and not low_allowed):
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    return number


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence | set | frozenset) or not all(isinstance(text, str) for text in strings):
        raise ValueError(f"stop must be a string or a list of strings, got {stop!r}")
    if "" in strings:
        raise ValueError("stop must not hold an empty string: it would end every request at once; leave it out")
    return tuple(dict.fromkeys(strings))


def _token_ids(token_ids: Any) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    if isinstance(token_ids, str | bytes) or not hasattr(token_ids, "__iter__") or getattr(token_ids, "ndim", 1) != 1:
        raise ValueError(f"stop_token_ids must be a list of token ids, got {token_ids!r}")
    return tuple(sorted({_integer("stop_token_ids", token_id, low=0) for token_id in token_ids}))
