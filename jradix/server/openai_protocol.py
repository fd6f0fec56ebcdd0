"""OpenAI's request bodies, and what both of its routes make of them: sampling parameters, usage, finish reasons."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from jradix.sampling_params import SamplingParams
from jradix.server.errors import RequestError
from jradix.server.generation import Sample
from jradix.server.service import namespace

_SAMPLING: Final[Mapping[str, str]] = {
    **{name: name for name in ("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_regex")},
    **{name: name for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")},
    **{name: name for name in ("stop_token_ids", "ignore_eos", "no_stop_trim", "skip_special_tokens")},
    **{name: name for name in ("regex", "ebnf")},
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
"""Fields of a body, and the sampling parameters that they are."""

_OPTIONS = ("priority", "routing_key", "timeout")


class StreamOptions(BaseModel):
    """How to stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False  # padding against observers of packet sizes, which this server does not send


class ResponseFormat(BaseModel):
    """What the whole output must be."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class OpenAIRequest(BaseModel):
    """The fields that both routes have. One that is unknown is refused, since leaving it out might change the result.

    The last block is not OpenAI's: names of `SamplingParams` and `RequestOptions`. `user`, `metadata`, `store`,
    `service_tier`, `safety_identifier` and `prompt_cache_key` have no effect on a result, and none here.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    return_hidden_states: Literal[False] | None = None  # SGLang's router sends it with every request

    rid: str | None = None
    cache_salt: str | int | None = None
    extra_key: str | int | None = None
    priority: int | None = None
    routing_key: str | None = None
    timeout: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    ebnf: str | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check_model(self, served: Iterable[str]) -> None:
        """Raises RequestError if the body names another model than the one that is served."""
        if self.model is not None and self.model not in served:
            message = f"there is no model {self.model!r} here, but {' = '.join(dict.fromkeys(served))}"
            raise RequestError(404, message, param="model", code="model_not_found")

    def sampling_params(self, **more: Any) -> SamplingParams:
        """The sampling parameters. `more`: those that do not follow from a field of the same meaning, or defaults."""
        fields = dict(more)
        for name, ours in _SAMPLING.items():
            value = getattr(self, name, None)
            if value is not None:
                fields[ours] = value
        if self.response_format is not None:
            schema = _schema_of(self.response_format)
            if schema is not None:
                fields["json_schema"] = schema
        return SamplingParams.from_dict(fields)

    def options(self, rid: str) -> dict[str, Any]:
        """The options of the request. `rid`: its id, if the body has none."""
        options = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        return {**options, "rid": self.rid or rid, "cache_salt": namespace(self.cache_salt, self.extra_key)}


def _schema_of(given: ResponseFormat) -> Mapping[str, Any] | None:
    if given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "object"}
    schema = (given.json_schema or {}).get("schema")
    if not isinstance(schema, Mapping):
        raise ValueError(f"response_format.json_schema.schema must be a JSON schema, got {schema!r}")
    return schema


@contextmanager
def names_of_openai(body: OpenAIRequest) -> Iterator[None]:
    """Inside, a ValueError that names one of our fields becomes one that names the field of the body."""
    try:
        yield
    except ValueError as error:
        found = re.match(r"\w*", str(error))
        name = found[0] if found else ""
        given = [field for field in _THEIR_NAMES.get(name, (name,)) if field in body.model_fields_set]
        if not given:
            raise RequestError(400, str(error)) from error
        raise RequestError(400, given[0] + str(error).removeprefix(name), param=given[0]) from error


_THEIR_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "max_new_tokens": ("max_completion_tokens", "max_tokens"),
    "min_new_tokens": ("min_tokens",),
    "json_schema": ("response_format", "tool_choice", "tools"),
    "top_logprobs_num": ("top_logprobs", "logprobs"),
    "input_ids": ("prompt",),
}
"""Where our name is not theirs: the fields of a body that it may come from."""


def finish_reason(sample: Sample) -> str | None:
    """`stop` or `length`; `abort` for what timed out or was aborted, which OpenAI's API has no word for."""
    reason = sample.finish_reason
    return None if reason is None else reason["type"]


def usage(samples: list[Sample]) -> dict[str, Any]:
    """Tokens of prompts, each counted once whatever its `n`, and of all outputs."""
    firsts: list[Sample] = []
    index = 0
    while index < len(samples):
        firsts.append(samples[index])
        index += samples[index].params.n
    num_prompt = sum(sample.meta.get("prompt_tokens", 0) for sample in firsts)
    num_output = sum(sample.meta.get("completion_tokens", 0) for sample in samples)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(sample.meta.get("cached_tokens", 0) for sample in firsts)},
    }
