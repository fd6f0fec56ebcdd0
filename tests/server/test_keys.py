"""Who may come in, on every route that the application has, so that a new one is covered when it is added."""

import base64
from collections.abc import Callable, Iterator
from multiprocessing import Pipe, current_process
from typing import Any

import httpx2
import pytest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from jradix.server.app import make_app
from jradix.server.client import EngineClient
from jradix.server.config import ServerConfig
from jradix.server.keys import Keys
from jradix.server.messages import Ready
from jradix.server.metrics import Metrics
from jradix.server.service import Service
from tests.server.conftest import API_KEY, ServerProcess

ADMIN_KEY = "a key for operators"
FOR_OPERATORS = ("/flush_cache", "/get_server_info", "/get_metric_info", "/metrics")


def basic(key: str, name: str = "anybody") -> str:
    return "Basic " + base64.b64encode(f"{name}:{key}".encode()).decode()


def application_paths() -> list[str]:
    """The paths of an application whose engine is never asked. FastAPI keeps routers as they are, one in another."""
    client = EngineClient(current_process(), Pipe()[0], Ready({}, None))  # pyright: ignore[reportArgumentType]
    pending: list[Any] = [*make_app(Service(client, ServerConfig(), Metrics(""), "")).routes]
    paths: set[str] = set()
    while pending:
        route = pending.pop()
        if hasattr(route, "path"):
            paths.add(route.path)
        else:
            pending += route.original_router.routes
    assert {"/health", "/generate", "/v1/models", "/cache", "/openapi.json"} <= paths
    return sorted(paths - {"/health"})


@pytest.fixture(scope="module")
def guarded(start_server: Callable[..., ServerProcess]) -> Iterator[str]:
    """A server with a key for operators, which no list of processes shows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JRADIX_ADMIN_API_KEY", ADMIN_KEY)
        server = start_server("--skip-tokenizer-init")
    yield server.wait_until_ready()
    assert ADMIN_KEY not in server.log
    server.process.kill()


def call(url: str, key: str | None, method: str, path: str, **more: Any) -> httpx2.Response:
    headers = {} if key is None else {"Authorization": key}
    return httpx2.request(method, url + path, headers=headers, timeout=60, **more)


@pytest.mark.parametrize("path", [*application_paths(), "/docs", "/redoc", "/", "/nothing", "/health/", "//health"])
def test_a_stranger_is_refused_whatever_the_method(url: str, path: str) -> None:
    for method in ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"):
        refused = call(url, None, method, path)
        assert refused.status_code == 401, method
        if method != "HEAD":
            assert refused.json()["error"]["type"] == "authentication_error"
        wanted = "Basic" if path in ("/cache", "/cache/explain") else "Bearer"
        assert refused.headers["www-authenticate"].startswith(wanted)


def test_health_alone_is_open(url: str) -> None:
    assert call(url, None, "GET", "/health").status_code == 200
    assert call(url, None, "GET", "/health?x").status_code == 200
    assert call(url, "Bearer wrong", "GET", "/health").status_code == 200


def test_browsers_may_send_the_key_as_a_password_where_nothing_can_be_changed(url: str) -> None:
    for path in application_paths():
        status = call(url, basic(API_KEY), "GET", path).status_code
        assert (status != 401) == (path in ("/cache", "/cache/explain")), path
    for wrong in (basic("wrong"), basic(API_KEY + "x"), basic(""), f"Basic {API_KEY}", "Basic", basic(API_KEY)[:-1]):
        assert call(url, wrong, "GET", "/cache").status_code == 401


def test_operators_routes_need_their_key(guarded: str) -> None:
    client, operator = f"Bearer {API_KEY}", f"Bearer {ADMIN_KEY}"
    for path in FOR_OPERATORS:
        assert call(guarded, client, "GET", path).status_code == 401
        assert call(guarded, operator, "GET", path).status_code == 200
    for key, expected in ((client, 401), (operator, 200)):
        assert call(guarded, key, "POST", "/abort_request", json={"abort_all": True}).status_code == expected
        assert call(guarded, key, "GET", "/cache?all=true").status_code == expected
        assert call(guarded, key, "POST", "/abort_request", json={"rid": "nobody's"}).status_code == 200
        assert call(guarded, key, "GET", "/v1/models").status_code == 200
    shown = call(guarded, operator, "GET", "/get_server_info").json()
    assert shown["api_key"] is shown["admin_api_key"] is None


def test_all_trees_are_for_operators_and_the_pool_too(guarded: str) -> None:
    params = {"max_new_tokens": 1, "temperature": 0}
    for salt in ("one", "two"):
        body = {"input_ids": [5, 6, 7, 8, 9], "sampling_params": params, "cache_salt": salt}
        assert call(guarded, f"Bearer {API_KEY}", "POST", "/generate", json=body).status_code == 200
    everything = call(guarded, basic(ADMIN_KEY), "GET", "/cache?all=true").text
    assert "Namespace &#x27;one&#x27;" in everything
    assert "Namespace &#x27;two&#x27;" in everything
    assert "evictable" in everything
    mine = call(guarded, basic(API_KEY), "GET", "/cache?cache_salt=one").text
    assert "Namespace &#x27;one&#x27;" in mine
    assert "two" not in mine
    assert "Pool" not in mine


def test_without_a_key_for_operators_nobody_sees_all_trees(http: httpx2.Client) -> None:
    refused = http.get("/cache?all=true")
    assert refused.status_code == 403
    assert "admin_api_key" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("api_key", "admin_key", "given", "expected"),
    [
        (None, None, "", True),
        (None, None, "Bearer anything", True),
        ("c", None, "Bearer c", True),
        ("c", None, "bearer c", True),
        ("c", None, "Bearer a", None),
        (None, "a", "", False),
        (None, "a", "Bearer wrong", False),
        (None, "a", "Bearer a", True),
        ("c", "a", "", None),
        ("c", "a", "Bearer ", None),
        ("c", "a", "Bearer wrong", None),
        ("c", "a", "Bearer c", False),
        ("c", "a", "Bearer a", True),
        ("é", None, "Bearer é", True),
    ],
)
def test_either_key_may_be_missing(
    api_key: str | None, admin_key: str | None, given: str, expected: bool | None
) -> None:
    """expected: is an operator; None: may not come in."""
    keys, headers = Keys(api_key, admin_key), Headers(raw=[(b"authorization", given.encode())])
    if expected is None:
        with pytest.raises(HTTPException):
            keys.check("/generate", headers)
    else:
        assert keys.check("/generate", headers) is expected
