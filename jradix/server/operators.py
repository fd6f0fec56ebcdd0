"""What operators ask: is it alive, what is it, how does it do, what is cached and why."""

import asyncio
from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict

from jradix.server.errors import RequestError
from jradix.server.health import Health
from jradix.server.metrics import cache_numbers
from jradix.server.openapi import errors
from jradix.server.service import Service


class ExplainRequest(BaseModel):
    """The body of /cache/explain: a prompt, as /generate or /v1/chat/completions would have it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    cache_salt: str | int | None = None


def operator_routes(service: Service) -> APIRouter:
    """What operators ask."""
    router = APIRouter()
    health = Health(service)

    @router.get("/health", response_class=Response, responses={503: {"description": "The engine process has ended."}})
    async def is_alive() -> Response:
        return Response(status_code=503 if service.engine.dead else 200)

    @router.get("/health_generate", responses=errors() | {503: {"description": "What is wrong, as `status`."}})
    async def can_generate() -> JSONResponse:
        trouble = await health.trouble()
        return JSONResponse({"status": trouble or "ok"}, 200 if trouble is None else 503)

    @router.get("/model_info", responses=errors())
    @router.get("/get_model_info", responses=errors())
    async def model_info() -> dict[str, Any]:
        return _model_info(service)

    @router.get("/server_info", responses=errors())
    @router.get("/get_server_info", responses=errors())
    async def server_info() -> dict[str, Any]:
        shown = asdict(replace(service.config, api_key=None))
        return {**service.engine.info, **shown, **await service.engine.call("info")}

    @router.get("/get_metric_info", responses=errors())
    async def metric_info() -> dict[str, Any]:
        info = await service.engine.call("info")
        return {**{name: value for name, value in info.items() if name != "cache"}, **cache_numbers(info)}

    @router.get("/get_load", responses=errors())
    async def load() -> list[dict[str, int]]:
        """What SGLang's router balances by: one entry, since there is one engine."""
        info = await service.engine.call("info")
        waiting = info["num_waiting_requests"]
        return [
            {
                "dp_rank": 0,
                "num_reqs": info["num_running_requests"] + waiting,
                "num_waiting_reqs": waiting,
                "num_tokens": cache_numbers(info)["num_used_tokens"],
            }
        ]

    @router.get("/metrics", response_class=PlainTextResponse, responses=errors())
    async def metrics() -> Response:
        exposition = service.metrics.exposition(await service.engine.call("info"))
        return Response(exposition, media_type=CONTENT_TYPE_LATEST)

    @router.get("/flush_cache", responses=errors(409))
    @router.post("/flush_cache", responses=errors(409))
    async def flush_cache() -> dict[str, int]:
        num_pages = await service.engine.call("flush_cache")
        if num_pages is None:
            message = "the cache is not flushed: requests are running or waiting; try again when they have ended"
            raise RequestError(409, message, code="requests_running")
        return {"num_flushed_pages": num_pages}

    @router.get("/cache", response_class=HTMLResponse, responses=errors())
    async def cache_page() -> str:
        return await service.engine.call("cache_page")

    @router.post("/cache/explain", responses=errors(400, 413))
    async def explain(body: ExplainRequest) -> dict[str, Any]:
        return await service.engine.call("explain", await _explained_ids(service, body), body.cache_salt)

    return router


async def _explained_ids(service: Service, body: ExplainRequest) -> list[int]:
    given = [name for name in ("text", "input_ids", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise ValueError(f"text, input_ids or messages must be given, one of them, got {' and '.join(given) or 'none'}")
    if body.messages is not None:
        return await asyncio.to_thread(service.tokenizer.apply_chat_template, body.messages)
    ids = await service.token_ids(body.text) if body.text is not None else body.input_ids or []
    if not ids or min(ids) < 0 or max(ids) >= 2**31:
        raise ValueError("input_ids must be token ids, at least one")
    return ids


def _model_info(service: Service) -> dict[str, Any]:
    info = service.engine.info
    return {
        "model_path": info["model_path"],
        "tokenizer_path": None if service.engine.tokenizer is None else info["model_path"],
        "served_model_name": service.model_name,
        "is_generation": True,
        "architecture": info["architecture"],
        "max_context_length": info["max_context_length"],
    }
