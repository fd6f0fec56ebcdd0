"""What the routes share: the engine, its tokenizer, the names, and how a client's requests are submitted."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from jradix.sampling_params import SamplingParams
from jradix.server.client import EngineClient
from jradix.server.config import ServerConfig
from jradix.server.disconnect import unless_gone
from jradix.server.generation import Generation
from jradix.server.metrics import Metrics
from jradix.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Service:
    """One server's parts."""

    engine: EngineClient
    config: ServerConfig
    metrics: Metrics
    model_name: str

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names under which clients may ask for the model."""
        return self.model_name, str(self.engine.info["model_path"])

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ValueError if the engine works on token ids alone."""
        if self.engine.tokenizer is None:
            raise ValueError("text needs a tokenizer, and skip_tokenizer_init is set: pass input_ids to /generate")
        return self.engine.tokenizer

    async def token_ids(self, text: str) -> list[int]:
        """The ids of a text, on another thread: a long one takes its time."""
        return await asyncio.to_thread(self.tokenizer.encode, text)

    async def submit(
        self,
        request: Request,
        input_ids: Sequence[Any],
        params: Sequence[SamplingParams],
        options: Mapping[str, Any],
        *,
        stream: bool,
    ) -> Generation:
        """Queue requests, unless the client goes before they are. Raises like `EngineClient.submit`."""
        submitted = self.engine.submit(input_ids, params, options, each_token=stream, tell_end=self.metrics.ended)
        generation = await unless_gone(request.receive, submitted)
        request.state.generation = generation  # for the log
        return generation


async def finished(request: Request, generation: Generation) -> None:
    """Wait until all outputs have ended; if the client goes before, they are aborted.

    Raises:
        ClientGoneError: it has.
        StepFailedError, EngineDeadError: the rest is not coming.
    """
    try:
        await unless_gone(request.receive, generation.finished())
    finally:
        generation.close()


def namespace(cache_salt: str | int | None, extra_key: str | int | None = None) -> str | None:
    """The salt that a client gave under one of two names. A number is the text of its digits, as it is in a URL."""
    if cache_salt is not None and extra_key is not None:
        raise ValueError("extra_key is another name for cache_salt: give one of them")
    name, salt = ("extra_key", extra_key) if cache_salt is None else ("cache_salt", cache_salt)
    if salt == "":
        raise ValueError(f"{name} must not be empty, which looks like a secret that was never set: leave it out")
    return None if salt is None else str(salt)
