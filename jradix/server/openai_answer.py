"""What answers of both OpenAI routes have in common: whole, or in chunks with one usage at the end."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypedDict

from jradix.server.generation import Generation, Sample
from jradix.server.openai_protocol import OpenAIRequest, usage
from jradix.server.service import Service


class Usage(TypedDict):
    """Tokens, as OpenAI counts them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class OpenAIObject(TypedDict):
    """What both routes answer that do not stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage


class OpenAIAnswer(ABC):
    """One request's answer. Routes say what a choice looks like, and what of it is new in a stream."""

    def __init__(
        self, service: Service, body: OpenAIRequest, name: str, generation: Generation, *, object_name: str
    ) -> None:
        """name: the answer's `id`. object_name: its `object`."""
        self._service, self._generation, self._includes_usage = service, generation, body.includes_usage
        self._head = {
            "id": name,
            "object": object_name,
            "created": int(time.time()),
            "model": body.model or service.model_name,
        }

    def whole(self) -> dict[str, Any]:
        """All of it, once all outputs have ended."""
        samples = self._generation.samples
        return {**self._head, "choices": [self._choice(sample) for sample in samples], "usage": usage(samples)}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """What is new, as it comes."""
        usage_field = {"usage": None} if self._includes_usage else {}
        async for samples in self._generation.changes():
            for sample in samples:
                for piece in self._pieces(sample):
                    yield {**self._head, "choices": [piece], **usage_field}
        if self._includes_usage:
            yield {**self._head, "choices": [], "usage": usage(self._generation.samples)}

    @abstractmethod
    def _choice(self, sample: Sample) -> dict[str, Any]:
        """The choice of an output that has ended."""

    @abstractmethod
    def _pieces(self, sample: Sample) -> Iterable[dict[str, Any]]:
        """What is new of a choice, each piece a chunk of its own."""
