"""What is cached and why: a page with the live tree, and an answer to why a prompt would hit.

Both show one namespace, that of the salt that is given. Who holds the operators' key may see all.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from jradix.cache.explain import SHOWN, Explanation
from jradix.cache.page import to_html
from jradix.server.cache_forms import HEADERS, forms
from jradix.server.chat import for_template
from jradix.server.keys import Keys, operators_only
from jradix.server.openapi import errors
from jradix.server.service import Service, namespace

_SHARED_SHOWN = 64
"""Tokens before the place where a prompt stops to hit."""


class ExplainRequest(BaseModel):
    """The body of /cache/explain: a prompt, as /generate or /v1/chat/completions would have it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    cache_salt: str | int | None = None


def cache_routes(service: Service, keys: Keys) -> APIRouter:
    """/cache and /cache/explain."""
    router = APIRouter()

    @router.get("/cache", response_class=HTMLResponse, responses=errors(400, 403))
    async def cache_page(
        request: Request,
        cache_salt: str = "",
        everything: Annotated[bool, Query(alias="all")] = False,
        replica: int = 0,
    ) -> HTMLResponse:
        count = service.engine.info["dp_size"]
        if not 0 <= replica < count:
            raise HTTPException(400, f"replica must lie in [0, {count}), got {replica}")
        if everything and not keys.has_admin:
            raise HTTPException(403, "all=true shows the trees of all tenants, and needs a server with admin_api_key")
        if everything:
            operators_only(request)
        is_operator = request.state.is_operator
        shown = None if everything else (cache_salt or None,)  # a form sends an empty field for none
        view = await service.engine.call("cache_view", replica, shown, is_operator)
        controls = forms(
            cache_salt,
            everything=everything,
            may_see_all=keys.has_admin and is_operator,
            replica=replica if count > 1 else None,
        )
        title = service.model_name if count == 1 else f"{service.model_name}, replica {replica} of {count}"
        page = await asyncio.to_thread(to_html, view, _decode(service), subtitle=title, controls=controls)
        return HTMLResponse(page, headers=HEADERS)

    @router.post("/cache/explain", responses=errors(400, 413))
    async def explain(body: ExplainRequest) -> dict[str, Any]:
        ids = await _explained_ids(service, body)
        replica, found = await service.engine.call("explain", ids[:-1], namespace(body.cache_salt))
        answer = await asyncio.to_thread(_answer, service, ids, found)
        return answer if service.engine.info["dp_size"] == 1 else {**answer, "dp_rank": replica}

    return router


async def _explained_ids(service: Service, body: ExplainRequest) -> list[int]:
    given = [name for name in ("text", "input_ids", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise ValueError(f"text, input_ids or messages must be given, one of them, got {' and '.join(given) or 'none'}")
    if body.messages is not None:
        messages = [for_template(message, index) for index, message in enumerate(body.messages)]
        return await asyncio.to_thread(service.tokenizer.apply_chat_template, messages)
    ids = await service.token_ids(body.text) if body.text is not None else body.input_ids or []
    if not ids:
        raise ValueError("the prompt is empty: at least one token is needed")
    if min(ids) < 0 or max(ids) >= service.engine.info["vocab_size"]:
        raise ValueError(f"input_ids must lie in [0, {service.engine.info['vocab_size']}) for this model")
    return ids


def _answer(service: Service, ids: list[int], found: Explanation) -> dict[str, Any]:
    """The end of what is shared and what follows there; as text, or as ids where there is no tokenizer."""
    place = found.num_tokens if found.diverged_at is None else found.diverged_at
    decode = _decode(service) or str
    return {
        "prompt_tokens": len(ids),
        "cached_tokens": found.num_tokens,
        "reason": found.reason,
        "explanation": str(found),
        "diverged_at": found.diverged_at,
        "shared_end": decode(ids[max(0, place - _SHARED_SHOWN) : place]),
        "asked_next": decode(ids[place : place + SHOWN]),
        "cached_next": decode(list(found.cached)) if found.cached else None,
    }


def _decode(service: Service) -> Callable[[list[int]], str] | None:
    tokenizer = service.engine.tokenizer
    return None if tokenizer is None else lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
