"""Server-sent events: a generation's results as lines `data: {...}`, until all have ended or the client has gone."""

import logging
from collections.abc import AsyncIterator
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jradix.server import errors
from jradix.server.disconnect import ClientGoneError, unless_gone
from jradix.server.generation import Generation

LOG = logging.getLogger(__name__)
_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends each of `events` as JSON, then `[DONE]`. An error after the first byte becomes an event, and no [DONE].

    However it ends, the generation is closed: what nobody reads is not generated.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, events: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation, self._events = generation, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except ClientGoneError:
            LOG.debug("the client of a stream has gone")
        finally:
            self._generation.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await _send_body(send, event_bytes(event))
            await _send_body(send, _DONE)
        except Exception as error:
            status, content = errors.described(error)
            if status >= 500:
                LOG.error("a stream has ended early: %r", error)
            await _send_body(send, event_bytes(content))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event_bytes(event: dict[str, Any]) -> bytes:
    """One event. JSON has no line breaks outside of its strings, and escapes those inside."""
    return b"data: " + to_json(event) + b"\n\n"


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
