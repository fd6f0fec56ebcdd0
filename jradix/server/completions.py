"""OpenAI's /v1/completions and /v1/models."""

import time
import uuid
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from jradix.server.errors import RequestError
from jradix.server.event_stream import EventStream
from jradix.server.generation import Generation, Sample
from jradix.server.openai_answer import OpenAIAnswer, OpenAIObject
from jradix.server.openai_logprobs import of_completion
from jradix.server.openai_protocol import OpenAIRequest, finish_reason, names_of_openai
from jradix.server.openapi import errors, streamed, texts_or_ids
from jradix.server.service import Service, finished
from jradix.validation import is_sequence

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


class CompletionRequest(OpenAIRequest):
    """The body of /v1/completions. `prompt` is a text, token ids, or a list of either."""

    prompt: Annotated[Any, texts_or_ids()]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


@dataclass(slots=True)
class _Choice:
    """What a stream has sent of one choice."""

    prompt_text: str
    begun: bool = False
    num_characters: int = 0
    num_tokens: int = 0
    offset: int = 0


def completion_routes(service: Service) -> APIRouter:
    """/v1/models and /v1/completions."""
    router = APIRouter()
    started = int(time.time())

    @router.get("/v1/models", responses=errors())
    async def models() -> dict[str, Any]:
        card = {
            "id": service.model_name,
            "object": "model",
            "created": started,
            "owned_by": "jradix",
            "root": service.engine.info["model_path"],
            "max_model_len": service.engine.info["max_context_length"],
        }
        return {"object": "list", "data": [card]}

    @router.post("/v1/completions", responses=streamed(OpenAIObject) | errors(400, 404, 413))
    async def completions(body: CompletionRequest, request: Request) -> Any:
        body.check_model(service.served_names)
        _check_supported(body)
        with names_of_openai(body):
            prompts = await _prompts(service, body.prompt)
            params = body.sampling_params(
                **{} if body.max_tokens is not None else {"max_new_tokens": _DEFAULT_MAX_TOKENS}
            )
            name = f"cmpl-{uuid.uuid4().hex}"
            options = body.options(name)
            if body.logprobs is not None:
                options |= {"return_logprob": True, "top_logprobs_num": body.logprobs}
                options["logprob_start_len"] = 0 if body.echo else -1
            generation = await service.submit(
                request, prompts, [params] * len(prompts), options, stream=bool(body.stream)
            )
        texts = await _prompt_texts(service, body, prompts)
        answer = _Answer(service, body, name, generation, [_Choice(text) for text in texts for _ in range(params.n)])
        if body.stream:
            return EventStream(generation, answer.chunks())
        await finished(request, generation)
        return JSONResponse(answer.whole())

    return router


class _Answer(OpenAIAnswer):
    """In a stream each piece is a choice with what was not sent of it; the last has the finish reason."""

    def __init__(
        self, service: Service, body: CompletionRequest, name: str, generation: Generation, choices: list[_Choice]
    ) -> None:
        super().__init__(service, body, name, generation, object_name="text_completion")
        self._body, self._choices = body, choices

    def _pieces(self, sample: Sample) -> list[dict[str, Any]]:
        piece = self._choice(sample)
        return [piece] if piece["text"] or piece["logprobs"] or piece["finish_reason"] is not None else []

    def _choice(self, sample: Sample) -> dict[str, Any]:
        """What was not sent of a choice; the finish reason with the last of it."""
        choice = self._choices[sample.index]
        text = sample.text[choice.num_characters :]
        with_prompt = bool(self._body.echo) and not choice.begun
        logprobs = None
        if self._body.logprobs is not None and (with_prompt or len(sample.output_ids) > choice.num_tokens):
            logprobs, choice.offset = of_completion(
                self._service.tokenizer,
                sample,
                choice.num_tokens,
                choice.offset,
                with_prompt=with_prompt,
                with_tops=self._body.logprobs > 0,
            )
        choice.num_characters, choice.num_tokens, choice.begun = len(sample.text), len(sample.output_ids), True
        return {
            "index": sample.index,
            "text": choice.prompt_text + text if with_prompt else text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(sample),
        }


def _check_supported(body: CompletionRequest) -> None:
    if body.suffix:
        raise RequestError(400, "suffix is not supported: leave it out", param="suffix", code="unsupported_parameter")
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"best_of must equal n, {body.n or 1}: this server returns all that it generates, got {body.best_of}"
        raise RequestError(400, message, param="best_of", code="unsupported_parameter")


async def _prompts(service: Service, prompt: Any) -> list[Any]:
    """The ids of each prompt."""
    if isinstance(prompt, str):
        return [await service.token_ids(prompt)]
    if not is_sequence(prompt) or not len(prompt):
        raise ValueError("prompt must be a text, token ids, or a list of either, not empty")
    if all(isinstance(text, str) for text in prompt):
        return [await service.token_ids(text) for text in prompt]
    return list(prompt) if all(is_sequence(ids) for ids in prompt) else [prompt]


async def _prompt_texts(service: Service, body: CompletionRequest, prompts: list[Any]) -> list[str]:
    """What `echo` repeats of each prompt."""
    if not body.echo:
        return [""] * len(prompts)
    if isinstance(body.prompt, str):
        return [body.prompt]
    return [
        given if isinstance(given, str) else service.tokenizer.decode(ids)
        for given, ids in zip(body.prompt if len(prompts) == len(body.prompt) else [None], prompts, strict=True)
    ]
