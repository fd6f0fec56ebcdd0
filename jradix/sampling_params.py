"""What a caller may ask of the sampling of one request: names, defaults and limits, checked when they are set."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jradix import validation

SEED_LIMIT = 2**32
"""Seeds lie in [0, SEED_LIMIT): they travel to the device as uint32."""

DEFAULT_MAX_NEW_TOKENS = 128
"""What a caller who gives no limit gets, or fewer where context or pool have no room for so many."""

MAX_SAMPLES = 128
"""The most answers to one prompt, as OpenAI's API has it."""

MAX_BIASES, BIAS_LIMIT = 300, 100.0
"""How many tokens a request may favour or disfavour, and by how much."""

MAX_CUSTOM_PARAMS = 8
"""Numbers that travel to the device for a request's logit processor."""

_GRAMMARS = ("json_schema", "regex", "ebnf")
_ALIASES = {"sampling_seed": "seed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it stops. Names and defaults follow SGLang.

    In this order: penalties and ``logit_bias``, ``custom_logit_processor``, the grammar's mask, temperature, ``top_k``,
    ``top_p`` (of what top-k left, renormalised), ``min_p`` (relative to the most likely token). Every field is
    validated here; a wrong one raises ``ValueError``. That a grammar parses is checked at submission.

    Attributes:
        n: Answers to each prompt, from 1 to 128.
        max_new_tokens: The most tokens to generate; 0 generates none, ``None`` as many as the context has room for.
            The default, 128, is cut to what there is room for; another number that does not fit is refused.
        min_new_tokens: EOS and ``stop_token_ids`` cannot be sampled before this many tokens. Stop strings still end it,
            and so does a grammar that nothing may follow.
        temperature: Logits are divided by it. 0 (in fact anything below 1e-6) is greedy: the most likely token.
        top_p: Keep the fewest most likely tokens whose probabilities sum to at least this, in (0, 1].
        top_k: Keep this many most likely tokens. -1 and 0 keep all; above the vocabulary size keeps all.
        min_p: Keep tokens at least this fraction as likely as the most likely one, in [0, 1].
        frequency_penalty: Subtracted from a token's logit for each time that it is in the output; from -2 to 2.
        presence_penalty: Subtracted once from the logit of a token that is in the output; from -2 to 2.
        repetition_penalty: Divides the logit of a token that is in prompt or output, or multiplies it if negative;
            above 0, at most 2. 1 changes nothing.
        logit_bias: Token id to a number added to its logit, from -100 to 100, for at most 300 ids. Ids may be strings.
        seed: Makes the tokens a function of prompt and seed, whatever else runs. ``None``: the engine picks one.
        stop: Text that ends the request when it appears in the output; it is not part of the output.
            A single string is accepted; kept as a tuple.
        stop_regex: Regular expressions, written as for Python's ``re``, that end the request like ``stop`` does.
        no_stop_trim: Leave what ended the request in the text: the stop string, the match, the text of a stop token.
        stop_token_ids: Ids that end the request like EOS does. Kept as a sorted tuple without duplicates.
        ignore_eos: Go on after EOS (``stop_token_ids`` still end the request).
        json_schema: The output is JSON that this schema accepts; text or a dict. ``{}`` is any JSON.
        regex: The whole output matches this regular expression.
        ebnf: The output is of this grammar: GBNF, as llama.cpp has it, or Lark. At most one of these three.
        custom_logit_processor: A function of logits and row, traceable by jax, that returns other logits.
        custom_params: At most 8 numbers for it.
        skip_special_tokens: Leave special tokens out of the output text.
    """

    n: int = 1
    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int | str, float] | None = field(default=None, hash=False)
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_regex: str | Sequence[str] | None = None
    no_stop_trim: bool = False
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    custom_logit_processor: Callable[..., Any] | None = field(default=None, hash=False)
    custom_params: Sequence[float] | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._check(validation.integer, "n", low=1, high=MAX_SAMPLES)
        self._check(validation.integer, "max_new_tokens", low=0, none_allowed=True)
        self._check(validation.integer, "min_new_tokens", low=0)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be at most max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}"
            )
        self._check(validation.number, "temperature", low=0.0)
        self._check(validation.number, "top_p", low=0.0, high=1.0, low_allowed=False)
        self._check(validation.integer, "top_k", low=-1)
        self._check(validation.number, "min_p", low=0.0, high=1.0)
        self._check(validation.number, "frequency_penalty", low=-2.0, high=2.0)
        self._check(validation.number, "presence_penalty", low=-2.0, high=2.0)
        self._check(validation.number, "repetition_penalty", low=0.0, high=2.0, low_allowed=False)
        self._check(validation.biases, "logit_bias", most=MAX_BIASES, limit=BIAS_LIMIT)
        self._check(validation.integer, "seed", low=0, high=SEED_LIMIT - 1, none_allowed=True)
        self._check(validation.strings, "stop")
        self._check(validation.patterns, "stop_regex")
        self._check(validation.token_ids, "stop_token_ids")
        self._check_grammar()
        self._check(validation.numbers, "custom_params", most=MAX_CUSTOM_PARAMS)
        if self.custom_logit_processor is not None and not callable(self.custom_logit_processor):
            raise ValueError(f"custom_logit_processor must be a function, got {self.custom_logit_processor!r}")
        if self.custom_params and self.custom_logit_processor is None:
            raise ValueError("custom_params are for a custom_logit_processor, and there is none: give both or neither")
        for name in ("no_stop_trim", "ignore_eos", "skip_special_tokens"):
            self._check(validation.boolean, name)

    def _check(self, check: Callable[..., Any], name: str, *, none_allowed: bool = False, **limits: Any) -> None:
        """Puts what `check` returns in place of the field's value."""
        value = getattr(self, name)
        if value is not None or not none_allowed:
            object.__setattr__(self, name, check(name, value, **limits))  # it is frozen for everybody else

    def _check_grammar(self) -> None:
        self._check(validation.json_schema, "json_schema", none_allowed=True)
        self._check(validation.text, "regex", none_allowed=True)
        self._check(validation.text, "ebnf", none_allowed=True)
        given = [name for name in _GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give at most one of {', '.join(_GRAMMARS)}, got {' and '.join(given)}")

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

    @property
    def has_text_stop(self) -> bool:
        """Whether the output has to become text to know where it ends."""
        return bool(self.stop or self.stop_regex)

    def validate_for_vocab(self, vocab_size: int) -> None:
        """Raises ``ValueError`` when a token id of any field is not one of a vocabulary of this size."""
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                if token_id >= vocab_size:
                    raise ValueError(f"{name} must lie in [0, {vocab_size}) for this model, got {token_id}")


type Params = SamplingParams | Mapping[str, Any]
"""Sampling parameters, or a dict of their fields."""


def params_of_each(given: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    """The sampling parameters of each of `count` prompts, of which a caller gave none, one for all, or a list.

    Raises:
        ValueError: a list of another length, something else, or a wrong field.
    """
    if not validation.is_sequence(given):
        return [_as_params(given)] * count
    if len(given) != count:
        raise ValueError(
            f"sampling_params must be one for all or a list with one for each of the {count} prompts, got {len(given)}"
        )
    return [_as_params(params) for params in given]


def _as_params(params: Any) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    if isinstance(params, Mapping):
        return SamplingParams.from_dict(params)
    raise ValueError(f"sampling_params must be SamplingParams or a dict of its fields, got {params!r}")
