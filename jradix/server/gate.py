"""What every request passes: its key, the limit of its body, and one line in the log when it has ended."""

import logging
import time

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jradix.server import errors
from jradix.server.keys import Keys

LOG = logging.getLogger("jradix.requests")


class Gate:
    """ASGI middleware. The log has method, path, status, seconds and numbers of tokens, and no text of anybody's."""

    def __init__(self, app: ASGIApp, *, keys: Keys, max_body_bytes: int) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = errors.CLIENT_GONE

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        state = scope.setdefault("state", {})
        try:
            await self._pass(scope, receive, send_and_note)
        except Exception:
            status = 500
            raise
        finally:
            generation = state.get("generation")
            facts = {} if generation is None else generation.facts()
            words = [f"{name}={value!r}" for name, value in facts.items()]
            path = ascii(scope["path"])[1:-1]  # a line break in it must not look like the end of the line
            LOG.info("%s %s %d %.3fs %s", scope["method"], path, status, time.perf_counter() - started, " ".join(words))

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            scope["state"]["is_operator"] = self._keys.check(scope["path"], headers)
        except HTTPException as refusal:
            await errors.response(refusal)(scope, receive, send)
            return
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            await errors.response(self._too_large())(scope, receive, send)
            return
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            return message

        await self._app(scope, receive_limited, send)

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body has more than the {self._max_body_bytes} bytes that max_body_mb allows")
