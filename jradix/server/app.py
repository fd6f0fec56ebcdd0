"""The application: all routes, behind the gate, with one format for all errors."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from jradix.server import errors
from jradix.server.cache_routes import cache_routes
from jradix.server.chat import chat_routes
from jradix.server.completions import completion_routes
from jradix.server.docs_page import docs_page
from jradix.server.gate import Gate
from jradix.server.keys import Keys
from jradix.server.native import generate_routes
from jradix.server.openapi import describe
from jradix.server.operators import operator_routes
from jradix.server.service import Service

LOG = logging.getLogger(__name__)


def make_app(service: Service) -> FastAPI:
    """The ASGI application that serves one engine."""
    app = FastAPI(docs_url=None, redoc_url=None)
    keys = Keys(service.config.api_key, service.config.admin_api_key)
    for router in (
        completion_routes(service),
        chat_routes(service),
        generate_routes(service),
        operator_routes(service),
        cache_routes(service, keys),
    ):
        app.include_router(router)

    describe(app, with_key=keys.exist)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))

    async def refuse(_: Request, error: Exception) -> JSONResponse:
        answer = errors.response(error)
        if answer.status_code == 500:
            LOG.error("a request has failed", exc_info=error)
        return answer

    for kind in (Exception, HTTPException, RequestValidationError, ValueError, RuntimeError, errors.RequestError):
        app.add_exception_handler(kind, refuse)
    max_body_bytes = service.config.max_body_mb * 2**20
    app.add_middleware(Gate, keys=keys, max_body_bytes=max_body_bytes)
    return app
