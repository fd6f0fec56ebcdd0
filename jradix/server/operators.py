"""What operators ask: is it alive, what is it, how does it do."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from jradix.server.errors import RequestError
from jradix.server.health import Health
from jradix.server.keys import operators_only
from jradix.server.metrics import cache_numbers, replica_infos
from jradix.server.openapi import errors
from jradix.server.service import Service


def operator_routes(service: Service) -> APIRouter:
    """What operators ask."""
    router = APIRouter()
    for_operators = [Depends(operators_only)]
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

    @router.get("/server_info", responses=errors(), dependencies=for_operators)
    @router.get("/get_server_info", responses=errors(), dependencies=for_operators)
    async def server_info() -> dict[str, Any]:
        shown = asdict(replace(service.config, api_key=None, admin_api_key=None))
        return {**service.engine.info, **shown, **await service.engine.call("info")}

    @router.get("/get_metric_info", responses=errors(), dependencies=for_operators)
    async def metric_info() -> dict[str, Any]:
        info = await service.engine.call("info")
        return {
            **{name: value for name, value in info.items() if name not in ("cache", "replicas")},
            **cache_numbers(info),
        }

    @router.get("/get_load", responses=errors(), dependencies=for_operators)
    async def load() -> list[dict[str, int]]:
        """What SGLang's router balances by: an entry for each replica."""
        info = await service.engine.call("info")
        return [_load(rank, each) for rank, each in enumerate(replica_infos(info))]

    @router.get("/metrics", response_class=PlainTextResponse, responses=errors(), dependencies=for_operators)
    async def metrics() -> Response:
        exposition = service.metrics.exposition(await service.engine.call("info"))
        return Response(exposition, media_type=CONTENT_TYPE_LATEST)

    @router.get("/flush_cache", responses=errors(409), dependencies=for_operators)
    @router.post("/flush_cache", responses=errors(409), dependencies=for_operators)
    async def flush_cache() -> dict[str, int]:
        num_pages = await service.engine.call("flush_cache")
        if num_pages is None:
            message = "the cache is not flushed where requests are running or waiting: try again when they have ended"
            raise RequestError(409, message, code="requests_running")
        return {"num_flushed_pages": num_pages}

    return router


def _load(rank: int, info: Mapping[str, Any]) -> dict[str, int]:
    waiting = info["num_waiting_requests"]
    return {
        "dp_rank": rank,
        "num_reqs": info["num_running_requests"] + waiting,
        "num_waiting_reqs": waiting,
        "num_tokens": cache_numbers(info)["num_used_tokens"],
    }


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
