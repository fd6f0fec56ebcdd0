"""Two servers behind the router that SGLang's project ships (the package smg), which knows nothing of us."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.server.conftest import API_KEY, MODEL, ServerProcess
from tests.server.test_native import GREEDY, events
from tests.test_readme import commands

pytestmark = pytest.mark.skipif(find_spec("smg") is None, reason="the package smg is for Linux on x86-64 alone")

HEADERS = {"Authorization": f"Bearer {API_KEY}"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def second(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    return start_server()


@pytest.fixture(scope="module")
def workers(second: ServerProcess, url: str) -> list[str]:
    return [url, second.wait_until_ready()]


@pytest.fixture(scope="module")
def router_url(workers: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command of docs/scale_out.md, with the addresses of the tests, and quick to see a death."""
    port = free_port()
    ours = dict(zip(("http://localhost:30001", "http://localhost:30002"), workers, strict=True))
    ours |= {"smg": str(Path(sys.executable).with_name("smg")), "30000": str(port), "$JRADIX_API_KEY": API_KEY}
    [documented] = [words for words in commands() if words[0] == "smg"]
    command = [ours.get(word, word) for word in documented]
    command += ["--prometheus-port", str(free_port()), "--health-check-interval-secs", "1"]
    command += ["--health-failure-threshold", "2"]
    log_path = tmp_path_factory.mktemp("router") / "log"
    with log_path.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as router:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: num_healthy(url) == 2, log_path)
            yield url
        finally:
            router.send_signal(signal.SIGKILL)


def wait_until(condition: Callable[[], bool], log_path: Path | None = None, seconds: float = 60) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, log_path.read_text("utf-8")[-3000:] if log_path else "too late"
        time.sleep(0.1)


def num_healthy(url: str) -> int:
    try:
        found = httpx2.get(f"{url}/workers", headers=HEADERS, timeout=10).json()
    except (httpx2.TransportError, ValueError):
        return 0
    return sum(worker["is_healthy"] for worker in found["workers"])


@pytest.fixture
def router(router_url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=router_url, headers=HEADERS, timeout=90) as client:
        yield client


def generate(router: httpx2.Client, **body: Any) -> dict[str, Any]:
    response = router.post("/generate", json={"sampling_params": GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_requests_go_where_their_prefix_is_cached(router: httpx2.Client, workers: list[str]) -> None:
    prefixes = [f"{name} " * 20 for name in ("apples and pears", "bread and butter", "salt and pepper")]
    for prefix in prefixes:
        first = generate(router, text=f"{prefix}question 0")
        assert first["meta_info"]["cached_tokens"] < 8
    for question in range(1, 4):
        for prefix in prefixes:
            meta = generate(router, text=f"{prefix}question {question}")["meta_info"]
            assert meta["cached_tokens"] >= len(prefix), "it went to the worker that has not seen the prefix"
    loads = [httpx2.get(f"{url}/get_load", headers=HEADERS).json()[0]["num_reqs"] for url in workers]
    assert loads == [0, 0]


def test_answers_and_streams_pass_through(router: httpx2.Client, router_url: str, url: str) -> None:
    direct = httpx2.post(f"{url}/generate", headers=HEADERS, json={"text": "pass", "sampling_params": GREEDY}).json()
    assert generate(router, text="pass")["text"] == direct["text"]
    *data, last = events(router.post("/generate", json={"text": "pass", "stream": True, "sampling_params": GREEDY}))
    assert (json.loads(data[-1])["text"], last) == (direct["text"], "[DONE]")
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}
    with openai.OpenAI(base_url=f"{router_url}/v1", api_key=API_KEY, max_retries=0, timeout=90) as client:
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True))
        completion = client.completions.create(model=MODEL, prompt="pass", max_tokens=16, temperature=0)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert completion.choices[0].text == direct["text"][: len(completion.choices[0].text)]


def test_salts_pass_through(router: httpx2.Client) -> None:
    prompt = "a prompt with salt, which has its own cache " * 3
    for name in ("cache_salt", "extra_key"):
        salts = [f"{name} of {tenant}" for tenant in ("a", "b")]
        cached = [generate(router, text=prompt, **{name: salt})["meta_info"]["cached_tokens"] for salt in salts]
        assert cached == [0, 0], name


def test_refusals_and_operators_questions_pass_through(router: httpx2.Client) -> None:
    refused = router.post("/generate", json={"text": "a", "sampling_params": {"temperature": -1}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    assert router.get("/get_model_info").json()["served_model_name"] == MODEL
    assert [model["id"] for model in router.get("/v1/models").json()["data"]] == [MODEL]
    assert router.post("/flush_cache").status_code == 200


def test_a_worker_that_dies_is_left_out(router: httpx2.Client, router_url: str, second: ServerProcess) -> None:
    second.process.kill()
    wait_until(lambda: num_healthy(router_url) == 1)
    with ThreadPoolExecutor(3) as pool:
        prompts = [f"after the death, question {question}" for question in range(3)]
        answers = list(pool.map(lambda text: generate(router, text=text)["meta_info"]["completion_tokens"], prompts))
    assert answers == [16] * 3
