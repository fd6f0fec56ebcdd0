"""Many clients at once, on a pool that is much too small: everybody gets one answer, the right one, and nothing leaks.

JRADIX_LOAD_REQUESTS sets how many requests there are in each of three rounds, and makes the test look at the memory of
both processes after each; 2000 is a thorough run.
"""

import asyncio
import os
import random
import time
from pathlib import Path

import httpx2
import pytest

from tests.server.conftest import API_KEY, ServerProcess, metrics, rss_mib, wait_until_idle
from tests.server.load import Client, Job, crowd, draw_clients, draw_jobs
from tests.tiny_engine import start

NUM_REQUESTS = int(os.environ.get("JRADIX_LOAD_REQUESTS", "100"))
IS_LONG = NUM_REQUESTS >= 1000
NUM_ROUNDS = 3 if IS_LONG else 1
MOST_GROWTH_MIB = 8
PAGE_SIZE = 4


@pytest.fixture(scope="module")
def jobs(byte_model_path: Path) -> list[Job]:
    with start(
        byte_model_path,
        skip_tokenizer_init=False,
        disable_radix_cache=True,
        max_running_requests=1,
        context_length=256,
    ) as alone:
        return draw_jobs(300 if IS_LONG else 40, alone, random.Random(0))


def run_round(crowded: ServerProcess, http: httpx2.Client, clients: list[Client]) -> dict[str, float]:
    """By how much the server's counters have grown when all clients were there, and nothing was left of them."""
    before = metrics(http)
    hits = wait_until_idle(http)["hit_tokens"]
    began = time.monotonic()
    asyncio.run(crowd(str(http.base_url), API_KEY, clients))
    seconds = time.monotonic() - began
    for client in clients:
        try:
            client.check()
        except AssertionError as error:
            error.add_note(str(client))
            raise
    info = wait_until_idle(http)
    grown = {name: value - before[name] for name, value in metrics(http).items() if name.endswith("_total")}
    grown["hit_tokens"] = info["hit_tokens"] - hits
    assert http.post("/flush_cache").json()["num_flushed_pages"] * PAGE_SIZE == info["evictable_size"]
    info = wait_until_idle(http)
    assert info["available_size"] == info["max_total_num_tokens"]
    memory = [rss_mib(pid) for pid in (crowded.process.pid, crowded.engine_pid)]
    print(
        f"{len(clients) / seconds:.0f} requests/s, {sum(client.num_refusals for client in clients)} refused, "
        f"{grown['sglang:num_retracted_requests_total']:.0f} retracted, {grown['sglang:evicted_tokens_total']:.0f} "
        f"tokens evicted, {grown['sglang:num_aborted_requests_total']:.0f} aborted, RSS {memory[0]:.1f} and "
        f"{memory[1]:.1f} MiB"
    )
    return {**grown, "http": memory[0], "engine": memory[1]}


def test_every_client_of_a_crowd_gets_its_own_answer_and_nothing_is_left(
    crowded: ServerProcess, crowded_http: httpx2.Client, jobs: list[Job]
) -> None:
    rng = random.Random(1)
    calm = list(draw_clients(jobs, NUM_REQUESTS // 2, rng, wild=False))
    grown = run_round(crowded, crowded_http, calm)
    assert grown["sglang:num_requests_total"] == sum(client.n for client in calm)
    for name in ("prompt_tokens", "cached_tokens"):
        assert grown[f"sglang:{name}_total"] == sum(getattr(client, name) for client in calm)
    assert grown["sglang:generation_tokens_total"] == sum(client.completion_tokens for client in calm)
    assert grown["hit_tokens"] == grown["sglang:cached_tokens_total"]
    assert grown["sglang:num_aborted_requests_total"] == 0

    rounds: list[dict[str, float]] = []
    for _ in range(NUM_ROUNDS):
        clients = list(draw_clients(jobs, NUM_REQUESTS, rng, wild=True))
        rounds.append(run_round(crowded, crowded_http, clients))
        num_told = sum(len(client.samples) for client in clients if not client.has_left)
        num_gone = sum(client.n for client in clients if client.has_left)
        assert num_told <= rounds[-1]["sglang:num_requests_total"] <= num_told + num_gone
        assert num_gone, "nobody left"
        assert sum(client.num_aborted for client in clients), "nobody was aborted"
        assert any(client.num_refusals for client in clients), "the queue was never full"
        assert rounds[-1]["sglang:num_retracted_requests_total"] > NUM_REQUESTS // 50, "hardly anybody was retracted"
        assert rounds[-1]["sglang:evicted_tokens_total"] > 10 * NUM_REQUESTS, "hardly anything was evicted"
    for process in ("http", "engine"):
        assert rounds[-1][process] <= rounds[0][process] + MOST_GROWTH_MIB, f"the {process} process has grown"
