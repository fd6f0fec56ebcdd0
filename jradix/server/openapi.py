"""What /openapi.json says that FastAPI cannot read off the routes: errors, streams, the key, types of some fields."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypedDict

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import ConfigDict, WithJsonSchema, create_model

from jradix.sampling_params import SamplingParams

_TITLE = "jradix"
_LOCAL_ONLY = ("custom_logit_processor", "custom_params")  # functions do not travel as JSON
_STATUSES: Mapping[int, str] = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong, or that of clients where operators' is needed.",
    403: "Nobody may see that here.",
    404: "Another model than the one that is served.",
    409: "Requests run or wait.",
    413: "The body is larger than `max_body_mb` allows.",
    500: "The device failed (`step_failed`), or the server did.",
    503: "Too many requests wait (`queue_full`, with the header Retry-After), or the engine has ended (`engine_dead`).",
}


class ErrorFields(TypedDict):
    """What went wrong. `param`: the field, if one is wrong. `code`: a word for programs, if there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """The body of every error."""

    error: ErrorFields


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: these errors, and those that any route may give."""
    return {status: {"model": ErrorAnswer, "description": _STATUSES[status]} for status in (*statuses, 401, 500, 503)}


def streamed(answer: Any) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: `answer` as JSON, or with `stream` an event stream."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    stream = {"schema": {**event, "description": "Of each event: `data` is JSON, of the last `[DONE]`."}}
    return {200: {"model": answer, "description": "The answer.", "content": {"text/event-stream": stream}}}


def each(kind: str) -> WithJsonSchema:
    """A field of this JSON type, or a list of such, one for each prompt; checked where the engine checks it."""
    return WithJsonSchema({"anyOf": [{"type": kind}, _list_of({"type": kind}), {"type": "null"}]})


def lists_of(kind: str) -> WithJsonSchema:
    """A field that is a list of values of a JSON type, or a list of such lists, one for each prompt."""
    one = _list_of({"type": kind})
    return WithJsonSchema({"anyOf": [one, _list_of(one), {"type": "null"}]})


def texts_or_ids() -> WithJsonSchema:
    """A field that is a text, token ids, or a list of either."""
    text, ids = {"type": "string"}, _list_of({"type": "integer"})
    return WithJsonSchema({"anyOf": [text, ids, _list_of(text), _list_of(ids)]})


def sampling_params_schema() -> WithJsonSchema:
    """An object with the fields of `SamplingParams` that travel as JSON, or a list of such objects."""
    known: dict[str, Any] = {
        field.name: (field.type, field.default) for field in fields(SamplingParams) if field.name not in _LOCAL_ONLY
    }
    known["sampling_seed"] = known["seed"]
    one = create_model("SamplingParams", __config__=ConfigDict(extra="forbid"), **known).model_json_schema()
    return WithJsonSchema({"anyOf": [one, _list_of(one), {"type": "null"}]})


def describe(app: FastAPI, *, with_key: bool) -> None:
    """Make the app's schema, once somebody asks for it, say what its routes do. with_key: they need the API key."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _corrected(get_openapi(title=_TITLE, version="1", routes=app.routes), with_key)
        return app.openapi_schema

    app.openapi = schema


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _corrected(schema: dict[str, Any], with_key: bool) -> dict[str, Any]:
    """Bodies that do not validate are answered with 400, not FastAPI's 422; errors are JSON, also of a page."""
    components = schema["components"]
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    for operations in schema["paths"].values():
        for operation in operations.values():
            answers = operation["responses"]
            answers.pop("422", None)
            if not with_key:
                answers.pop("401", None)
            for status, answer in answers.items():
                if status >= "400" and "content" in answer:
                    answer["content"] = {"application/json": next(iter(answer["content"].values()))}
    if with_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        schema["paths"]["/health"]["get"]["security"] = []
    return schema
