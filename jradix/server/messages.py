"""What the HTTP process and the engine process tell each other: pickled, over one pipe, in order.

The HTTP process gives every call a `key`, and the answers carry it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jradix.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue requests, all or none: answered by `Answer`, then by `Change` until each has ended.

    Attributes:
        input_ids: of each prompt; as the client gave them, if it gave ids.
        params: of each prompt.
        options: see `RequestOptions`.
        each_token: tell of each token, not only of the end.
    """

    key: int
    input_ids: Sequence[Any]
    params: Sequence[SamplingParams]
    options: Mapping[str, Any]
    each_token: bool


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nobody waits any more for what was submitted under this key. No answer."""

    key: int


@dataclass(frozen=True, slots=True)
class Call:
    """Run one of the engine process's functions, by name."""

    key: int
    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Follows:
    """The only message of an engine process that follows that of another server, and serves nothing itself."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The first message of an engine process: the model is loaded.

    Attributes:
        info: what `Engine.get_server_info` says.
        tokenizer_path: where `load_tokenizer` finds the tokenizer; None if the engine has none.
    """

    info: Mapping[str, Any]
    tokenizer_path: Path | None


@dataclass(frozen=True, slots=True)
class NotReady:
    """Instead of `Ready`: what of the user's configuration is wrong. Then the process ends."""

    message: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call or a submission gave, or the error that it raised."""

    key: int
    value: Any = None
    error: Exception | None = None


class Change(NamedTuple):
    """What is new of one output. There is one for each token of a stream, and tuples are pickled soonest.

    Attributes:
        sample_index: of the output among those of its submission: prompt after prompt, and for each its samples.
        text: new text, where the engine makes it, because stops have to be found in it; else None.
        output_ids: new tokens.
        meta: `meta_info` so far; of output tokens' log-probabilities only the new ones. None if nothing of it is new
            but the number of tokens.
        error: what broke the step that it was in. Then it has ended.
    """

    key: int
    sample_index: int
    text: str | None
    output_ids: Sequence[int]
    meta: Mapping[str, Any] | None
    error: Exception | None = None
