"""The server's routes before an engine of two replicas: requests go to their prefix, numbers are sums."""

import asyncio
import multiprocessing
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import httpx2

from jradix import Engine
from jradix.server.app import make_app
from jradix.server.client import EngineClient
from jradix.server.config import ServerConfig
from jradix.server.engine_service import EngineService
from jradix.server.messages import Ready
from jradix.server.metrics import Metrics
from jradix.server.service import Service
from tests.tiny_engine import start

PARAMS = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[httpx2.AsyncClient]:
    """The application, and the engine's side of the pipe on a thread instead of in a process."""
    ours, theirs = Pipe()
    serving = threading.Thread(target=EngineService(engine, theirs).run)
    serving.start()
    [ready] = ours.recv()
    assert isinstance(ready, Ready)
    client = EngineClient(multiprocessing.get_context("spawn").Process(), ours, ready)
    client.listen(lambda: None)
    app = make_app(Service(client, ServerConfig(), Metrics("tiny"), "tiny"))
    try:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://here") as http:
            yield http
    finally:
        client._stopping = True
        client._outbox.put(None)
        await asyncio.to_thread(serving.join)


async def generate(http: httpx2.AsyncClient, ids: Any, **more: Any) -> Any:
    response = await http.post("/generate", json={"input_ids": ids, "sampling_params": PARAMS, **more})
    assert response.status_code == 200, response.text
    return response.json()


async def check_prefixes(http: httpx2.AsyncClient) -> None:
    prompts = [[*range(60 * index, 60 * index + 24)] for index in range(1, 5)]
    first = await asyncio.gather(*(generate(http, prompt) for prompt in prompts))
    homes = [answer["meta_info"]["dp_rank"] for answer in first]
    assert sorted(homes) == [0, 0, 1, 1]
    for prompt, home in zip(prompts, homes, strict=True):
        meta = (await generate(http, [*prompt, 7, 8]))["meta_info"]
        assert (meta["dp_rank"], meta["cached_tokens"]) == (home, 24)
        explained = (await http.post("/cache/explain", json={"input_ids": [*prompt, 9]})).json()
        assert (explained["dp_rank"], explained["cached_tokens"]) == (home, 24)
        other = (await generate(http, [*prompt, 7, 8], cache_salt="another"))["meta_info"]
        assert other["cached_tokens"] == 0
        pages = [(await http.get("/cache", params={"replica": replica})).text for replica in (0, 1)]
        assert [f"{prompt[0]} {prompt[1]}" in page.replace(",", "") for page in pages] == [home == 0, home == 1]
        assert ["replica 1 of 2" in page for page in pages] == [False, True]
    assert (await http.get("/cache?replica=2")).status_code == 400


async def check_numbers(http: httpx2.AsyncClient) -> None:
    info = (await http.get("/get_server_info")).json()
    assert (info["dp_size"], len(info["replicas"])) == (2, 2)
    loads = (await http.get("/get_load")).json()
    assert [(load["dp_rank"], load["num_reqs"]) for load in loads] == [(0, 0), (1, 0)]
    numbers = (await http.get("/get_metric_info")).json()
    assert numbers["max_total_num_tokens"] == 2 * 1024
    assert numbers["available_size"] + numbers["evictable_size"] == 2 * 1024
    assert (await http.get("/health_generate")).status_code == 200
    freed = (await http.post("/flush_cache")).json()["num_flushed_pages"]
    assert freed == numbers["evictable_size"] // 4


async def check_aborts(http: httpx2.AsyncClient) -> None:
    long = {"sampling_params": {**PARAMS, "max_new_tokens": 60}}
    prompts = [[5 + index] * 20 for index in range(4)]
    running = asyncio.create_task(generate(http, prompts, rid="many", **long))
    while sum(load["num_reqs"] for load in (await http.get("/get_load")).json()) < 4 and not running.done():
        await asyncio.sleep(0.001)
    assert (await http.post("/flush_cache")).status_code == 409
    aborted = (await http.post("/abort_request", json={"rid": "many"})).json()
    answers = await running
    assert {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert reasons.count("abort") == 4, (aborted, reasons)


def test_a_server_of_two_replicas(tiny_path: Callable[[str], Path]) -> None:
    async def run() -> None:
        async with served(engine) as http:
            await check_prefixes(http)
            await check_numbers(http)
            await check_aborts(http)

    engine = start(tiny_path("llama"), dp_size=2)
    asyncio.run(run())


def test_a_counter_grows_by_what_each_replica_counts_also_after_one_began_anew() -> None:
    cache = dict.fromkeys(
        ("protected_pages", "private_pages", "free_pages", "evictable_pages", "hit_tokens", "asked_tokens"), 0
    )
    cache |= {"page_size": 4, "num_pages": 8, "window_hit_rate": 0.0}

    def info(evicted: list[int]) -> dict[str, Any]:
        same = {"num_running_requests": 0, "num_waiting_requests": 0, "num_compiled_programs": 0, "num_retractions": 0}
        each = [same | {"cache": cache | {"evicted_tokens": count}} for count in evicted]
        return same | {"cache": cache | {"evicted_tokens": sum(evicted)}, "replicas": each}

    ours = Metrics("tiny")
    for evicted, total in (([5, 7], 12), ([6, 7], 13), ([6, 2], 15)):
        text = ours.exposition(info(evicted)).decode()
        assert f'sglang:evicted_tokens_total{{model_name="tiny"}} {total}.0' in text
