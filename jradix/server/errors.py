"""Exceptions to answers: one JSON object for all routes, in OpenAI's format."""

import re
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from jradix.delivery import StepFailedError
from jradix.schedule_queue import QueueFullError
from jradix.server.client import EngineDeadError

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    503: "service_unavailable",
}
CLIENT_GONE = 499
"""For the log: nobody reads that answer."""


class RequestError(Exception):
    """A request that is refused.

    Attributes:
        param: the field that is wrong.
        code: a word for programs, where OpenAI has one.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """What every error answer holds."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def described(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and the body that an exception becomes."""
    match error:
        case RequestError():
            return error.status, body(error.status, str(error), error.param, error.code)
        case HTTPException():
            return error.status_code, body(error.status_code, str(error.detail))
        case RequestValidationError():
            return 400, _of_validation(error)
        case QueueFullError():
            return 503, body(503, str(error), code="queue_full")
        case EngineDeadError():
            return 503, body(503, str(error), code="engine_dead")
        case StepFailedError():
            return 500, body(500, str(error), code="step_failed")
        case ValueError():
            return 400, body(400, str(error), _first_word(str(error)))
    return 500, body(500, "an error of the server, which its log describes")


def response(error: Exception) -> JSONResponse:
    """The answer that an exception becomes."""
    status, content = described(error)
    headers = {"Retry-After": "1"} if isinstance(error, QueueFullError) else {}
    if isinstance(error, HTTPException):
        headers.update(error.headers or {})  # such as Allow
    return JSONResponse(content, status, headers)


def _of_validation(error: RequestValidationError) -> dict[str, Any]:
    """Names the first field that is wrong, and what was expected and given."""
    # A field that may have several types is wrong for each of them; the longest path comes nearest to what was meant.
    found = [(_path(each, error.body), each) for each in error.errors()]
    path = max((path for path, _ in found if path[:1] == found[0][0][:1]), key=len)
    same = [each for other, each in found if other == path]
    first, param = same[0], ".".join(path) or None
    if first["type"] == "json_invalid":
        return body(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] == "extra_forbidden":
        return body(400, f"{param} is not a field that this server knows: leave it out", param, "unknown_parameter")
    if first["type"] == "missing":
        return body(400, f"{param or 'the body'} is missing", param, "missing_required_parameter")
    if isinstance(first.get("input"), bytes):
        return body(400, "the body is not taken for JSON: send the header Content-Type: application/json")
    given = repr(first.get("input"))
    shown = given if len(given) <= 80 else f"{given[:77]}..."
    expected = "; or ".join(dict.fromkeys(each["msg"] for each in same))
    return body(400, f"{param or 'the body'}: {expected}, got {shown}", param)


def _path(error: Mapping[str, Any], sent: Any) -> list[str]:
    """To the field that is wrong, without the types that pydantic names where a field may have several."""
    where, *path = error["loc"]
    if where != "body":
        return [str(part) for part in error["loc"]]
    names = []
    for part in path:
        holds = part in sent if isinstance(sent, dict) else isinstance(sent, list) and isinstance(part, int)
        if holds:
            sent = sent[part]
        if holds or error["type"] == "missing":
            names.append(str(part))
    return names


def _first_word(message: str) -> str | None:
    """Our messages begin with the field's name, if one field is wrong."""
    found = re.match(r"(\w+)\b", message)
    return found[1] if found and ("_" in found[1] or found[1] in _FIELDS) else None


_FIELDS = frozenset(
    ("ebnf", "messages", "n", "priority", "prompt", "regex", "rid", "seed", "stop", "temperature", "text", "timeout")
)
"""Those without an underscore."""
