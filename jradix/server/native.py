"""SGLang's own way to generate: /generate and /abort_request."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal, TypedDict

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from jradix.sampling_params import params_of_each
from jradix.server.event_stream import EventStream
from jradix.server.generation import Generation, Sample
from jradix.server.keys import operators_only
from jradix.server.openapi import each, errors, lists_of, sampling_params_schema, streamed
from jradix.server.service import Service, finished, namespace
from jradix.validation import is_sequence

_OPTIONS = (
    "rid",
    "priority",
    "routing_key",
    "timeout",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_hidden_states",
)
_HIDDEN = ("hidden_states", "hidden_state_positions")


class GenerateRequest(BaseModel):
    """The body of /generate. What stands behind each field is checked where `Engine.generate` checks it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | list[str] | None = None
    input_ids: Annotated[Any, lists_of("integer")] = None
    sampling_params: Annotated[dict[str, Any] | list[dict[str, Any]] | None, sampling_params_schema()] = None
    stream: bool = False
    rid: Annotated[Any, each("string")] = None
    cache_salt: str | int | None = None
    extra_key: str | int | None = None
    priority: Annotated[Any, each("integer")] = None
    routing_key: Annotated[Any, each("string")] = None
    timeout: Annotated[Any, each("number")] = None
    return_logprob: Annotated[Any, each("boolean")] = None
    logprob_start_len: Annotated[Any, each("integer")] = None
    top_logprobs_num: Annotated[Any, each("integer")] = None
    token_ids_logprob: Annotated[Any, lists_of("integer")] = None
    return_text_in_logprobs: bool = False
    return_hidden_states: Annotated[Any, each("boolean")] = None

    # SGLang's routers send these with every request: names that have no effect, and wishes that are not there yet.
    model: str | None = None
    log_metrics: bool | None = None
    no_logs: bool | None = None
    background: Literal[False] | None = None
    return_bytes: Literal[False] | None = None
    return_entropy: Literal[False] | None = None


class GenerateAnswer(TypedDict):
    """What /generate answers for one output."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


class AbortRequest(BaseModel):
    """The body of /abort_request: one id, or all."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rid: str | None = None
    abort_all: bool = False


def generate_routes(service: Service) -> APIRouter:
    """/generate and /abort_request."""
    router = APIRouter()

    described: Any = {"responses": streamed(GenerateAnswer | list[GenerateAnswer]) | errors(400, 413)}

    @router.put("/generate", **described)
    @router.post("/generate", **described)
    async def generate(body: GenerateRequest, request: Request) -> Any:
        prompts, single = await _prompts(service, body)
        params = params_of_each(body.sampling_params, len(prompts))
        single = single and params[0].n == 1
        options = {name: value for name in _OPTIONS if (value := getattr(body, name)) is not None}
        options["cache_salt"] = namespace(body.cache_salt, body.extra_key)
        with_texts = body.return_text_in_logprobs
        if with_texts and not body.return_logprob:
            raise ValueError("return_text_in_logprobs needs return_logprob=True")
        generation = await service.submit(request, prompts, params, options, stream=body.stream)
        if body.stream:
            return EventStream(generation, _events(service, generation, single, with_texts))
        await finished(request, generation)
        results = [_result(service, sample, with_texts) for sample in generation.samples]
        # Hidden states are megabytes of digits: others have their turns while they are written.
        return await asyncio.to_thread(JSONResponse, results[0] if single else results)

    @router.post("/abort_request", responses=errors(400, 413))
    async def abort_request(body: AbortRequest, request: Request) -> dict[str, int]:
        if (body.rid is None) != body.abort_all:
            raise ValueError("rid must be the id of a request, or abort_all true: give exactly one of them")
        if body.abort_all:
            operators_only(request)
        name, argument = ("abort_all", "aborted by the caller") if body.rid is None else ("abort_request", body.rid)
        return {"num_aborted": await service.engine.call(name, argument)}

    return router


async def _prompts(service: Service, body: GenerateRequest) -> tuple[Sequence[Any], bool]:
    """The ids of each prompt, and whether a single one was given."""
    if (body.text is None) == (body.input_ids is None):
        raise ValueError("text or input_ids must be given, and not both")
    if body.text is None:
        if not is_sequence(body.input_ids) or not len(body.input_ids):
            raise ValueError(
                f"input_ids must be a list of token ids or of such lists, not empty, got {body.input_ids!r:.80}"
            )
        single = not is_sequence(body.input_ids[0])
        return [body.input_ids] if single else body.input_ids, single
    if isinstance(body.text, str):
        return [await service.token_ids(body.text)], True
    if not body.text:
        raise ValueError("text must be a string or a list of strings, not empty, got []")
    return [await service.token_ids(text) for text in body.text], False


async def _events(
    service: Service, generation: Generation, single: bool, with_texts: bool
) -> AsyncIterator[dict[str, Any]]:
    async for samples in generation.changes():
        for sample in samples:
            result = _result(service, sample, with_texts)
            yield result if single else {**result, "index": sample.index}


def _result(service: Service, sample: Sample, with_texts: bool) -> dict[str, Any]:
    meta = sample.meta
    if with_texts:
        meta = {name: _with_texts(service, value) if "logprobs" in name else value for name, value in meta.items()}
    if "hidden_states" in meta:
        meta = meta | {name: meta[name].tolist() for name in _HIDDEN}
    return {"text": sample.text, "output_ids": sample.output_ids, "meta_info": meta}


def _with_texts(service: Service, value: Any) -> Any:
    """Entries (log-probability, id, None) with the token's text in place of None, in lists of any depth."""
    if isinstance(value, tuple):
        return value[0], value[1], service.tokenizer.decode([value[1]], skip_special_tokens=False)
    return value and [_with_texts(service, item) for item in value]
