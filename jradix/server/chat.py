"""OpenAI's /v1/chat/completions."""

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from jradix.server.event_stream import EventStream
from jradix.server.generation import Generation, Sample
from jradix.server.openai_answer import OpenAIAnswer, OpenAIObject
from jradix.server.openai_logprobs import of_chat
from jradix.server.openai_protocol import OpenAIRequest, finish_reason, names_of_openai
from jradix.server.openapi import errors, streamed
from jradix.server.service import Service, finished
from jradix.server.tool_calls import OPEN, Part, ToolCall, ToolUse
from jradix.tokenizer import Tokenizer

_NOT_VARIABLES = frozenset(
    ("self", "messages", "conversation", "tools", "chat_template", "tokenize", "padding", "truncation", "max_length")
) | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs"}
"""What means something else where templates are rendered; a client's own template would run in this process."""


class ChatRequest(OpenAIRequest):
    """The body of /v1/chat/completions. `chat_template_kwargs` are more variables for the model's template."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # SGLang's router sends these with every request. Thoughts are not told from content here, whatever is asked.
    continue_final_message: Literal[False] | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None


def chat_routes(service: Service) -> APIRouter:
    """/v1/chat/completions."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=streamed(OpenAIObject) | errors(400, 404, 413))
    async def chat_completions(body: ChatRequest, request: Request) -> Any:
        body.check_model(service.served_names)
        with names_of_openai(body):
            if body.max_tokens is not None and body.max_completion_tokens is not None:
                raise ValueError("max_tokens is the old name of max_completion_tokens: give one of them")
            if body.top_logprobs is not None and not body.logprobs:
                raise ValueError("top_logprobs needs logprobs=true")
            use = ToolUse.of(body.tools, body.tool_choice, parallel=body.parallel_tool_calls is not False)
            ids = await asyncio.to_thread(_prompt_ids, service.tokenizer, body, use)
            name = f"chatcmpl-{uuid.uuid4().hex}"
            options = body.options(name)
            if body.logprobs:
                options |= {"return_logprob": True, "top_logprobs_num": body.top_logprobs or 0}
            params = body.sampling_params(**_defaults(service.tokenizer, body, use))
            generation = await service.submit(request, [ids], [params], options, stream=bool(body.stream))
        answer = _Answer(service, body, name, generation, use)
        if body.stream:
            return EventStream(generation, answer.chunks())
        await finished(request, generation)
        return JSONResponse(answer.whole())

    return router


class _Choice:
    """One answer of the assistant, as it is read from an output.

    Attributes:
        calls: those read so far.
        num_tokens: whose log-probabilities were sent.
    """

    def __init__(self, use: ToolUse) -> None:
        self._reader = use.reader()
        self._num_characters = 0
        self.begun = False
        self.num_tokens = 0
        self.calls: list[ToolCall] = []

    def read(self, sample: Sample) -> list[Part]:
        """What is new of the output."""
        parts = self._reader.add(sample.text[self._num_characters :])
        self._num_characters = len(sample.text)
        if sample.finish_reason is not None:
            parts += self._reader.finish()
        self.calls += [part for part in parts if isinstance(part, ToolCall)]
        return parts

    def finish_reason(self, sample: Sample) -> str | None:
        """As OpenAI has it: that a tool was called is a reason to stop."""
        reason = finish_reason(sample)
        return "tool_calls" if reason == "stop" and self.calls else reason


class _Answer(OpenAIAnswer):
    """In a stream each choice has its role first, then deltas, then the finish reason."""

    def __init__(self, service: Service, body: ChatRequest, name: str, generation: Generation, use: ToolUse) -> None:
        object_name = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service, body, name, generation, object_name=object_name)
        self._with_logprobs = bool(body.logprobs)
        self._choices = [_Choice(use) for _ in generation.samples]

    def _choice(self, sample: Sample) -> dict[str, Any]:
        choice = self._choices[sample.index]
        content = "".join(part for part in choice.read(sample) if isinstance(part, str))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.calls:
            message["content"] = content if content.strip() else None
            message["tool_calls"] = [call.as_dict() for call in choice.calls]
        return {
            "index": sample.index,
            "message": message,
            "logprobs": self._logprobs(sample, choice),
            "finish_reason": choice.finish_reason(sample),
        }

    def _pieces(self, sample: Sample) -> list[dict[str, Any]]:
        choice = self._choices[sample.index]
        deltas: list[dict[str, Any]] = []
        if not choice.begun:
            deltas.append({"role": "assistant", "content": ""})
            choice.begun = True
        num_calls = len(choice.calls)
        for part in choice.read(sample):
            if isinstance(part, str):
                deltas.append({"content": part})
            else:
                deltas.append({"tool_calls": [{"index": num_calls, **part.as_dict()}]})
                num_calls += 1
        logprobs = self._logprobs(sample, choice)
        if logprobs is not None and logprobs["content"] and not deltas:
            deltas = [{"content": ""}]
        pieces = [_piece(sample, delta) for delta in deltas]
        if pieces:
            pieces[-1]["logprobs"] = logprobs
        if sample.finish_reason is not None:
            pieces.append(_piece(sample, {}, choice.finish_reason(sample)))
        return pieces

    def _logprobs(self, sample: Sample, choice: _Choice) -> dict[str, Any] | None:
        """Of the tokens whose log-probabilities were not given before."""
        if not self._with_logprobs:
            return None
        first, choice.num_tokens = choice.num_tokens, len(sample.output_ids)
        return of_chat(self._service.tokenizer, sample, first)


def _piece(sample: Sample, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": sample.index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _defaults(tokenizer: Tokenizer, body: ChatRequest, use: ToolUse) -> dict[str, Any]:
    """Sampling parameters that differ from ours if the body does not set them, or that follow from the tools."""
    fields: dict[str, Any] = {}
    if body.max_tokens is None and body.max_completion_tokens is None:
        fields["max_new_tokens"] = None  # as many as fit
    if use.json_schema is not None:
        if body.response_format is not None and body.response_format.type != "text":
            raise ValueError("response_format is for the text of an answer, and tool_choice asks for a call instead")
        fields["json_schema"] = use.json_schema
    elif use.tools is not None and set(tokenizer.encode(OPEN, add_special_tokens=False)) & tokenizer.special_ids:
        fields["skip_special_tokens"] = False  # the tags are such tokens
    return fields


def _prompt_ids(tokenizer: Tokenizer, body: ChatRequest, use: ToolUse) -> list[int]:
    messages = [for_template(message, index) for index, message in enumerate(body.messages)]
    variables = dict(body.chat_template_kwargs or {})
    if taken := sorted(_NOT_VARIABLES & variables.keys()):
        raise ValueError(f"chat_template_kwargs must be variables of the model's template, which {taken[0]!r} is not")
    text = tokenizer.render_chat(messages, **variables)
    if use.tools is not None:
        without, text = text, tokenizer.render_chat(messages, **variables, tools=use.tools)
        if text == without:
            raise ValueError("tools have no place in this model's chat template: it was not taught to use any")
    return tokenizer.encode(text, add_special_tokens=False)


def for_template(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The message as templates expect it: its content one text, the arguments of its calls objects."""
    if not isinstance(message.get("role"), str):
        raise ValueError(f"messages must each have a role, a string: message {index} has {message.get('role')!r}")
    found = {**message, "content": _text_of(message.get("content"), index)}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise ValueError(f"messages must have lists of objects as tool_calls: message {index} has not")
        found["tool_calls"] = [_with_object(call) for call in calls]
    return found


def _text_of(content: Any, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"messages must have text as content, a string or a list of parts of type text: message {index} has "
                f"{part!r:.80}"
            )
    return "\n".join(part["text"] for part in parts)


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        try:
            return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
        except ValueError:
            pass  # a template may write it as it stands
    return dict(call)
