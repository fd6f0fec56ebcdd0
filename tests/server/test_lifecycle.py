"""How servers end: told to, by the death of one of their two processes, or before they have begun."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jradix import EngineConfig
from jradix.server.client import EngineClient
from jradix.server.config import ServerConfig
from tests.server.conftest import API_KEY, MAX_QUEUED, SMALL_POOL, ServerProcess, wait_until_running
from tests.server.test_native import events

HEADERS = {"Authorization": f"Bearer {API_KEY}"}
WITHOUT_TEXT = "--skip-tokenizer-init"  # starts sooner


def body_of(max_new_tokens: int, *, n: int = 1, **more: Any) -> dict[str, Any]:
    params = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "n": n}
    return {"input_ids": [1, 2], "sampling_params": params, **more}


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_when_the_engine_dies_everybody_is_told_and_the_server_ends(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server(WITHOUT_TEXT)
    url = server.wait_until_ready()
    with ThreadPoolExecutor() as pool, httpx2.Client(base_url=url, headers=HEADERS, timeout=300) as http:
        whole = pool.submit(http.post, "/generate", json=body_of(500))
        stream = pool.submit(http.post, "/generate", json=body_of(500, stream=True))
        wait_until_running(http, 1, 1)
        os.kill(server.engine_pid, signal.SIGKILL)
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "engine_dead"
        assert '"code":"engine_dead"' in stream.result().text
        assert "[DONE]" not in stream.result().text
    assert server.process.wait(120) == 1


def test_sigterm_lets_requests_end_and_takes_no_more_until_a_second_aborts_the_rest(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server(WITHOUT_TEXT)
    url = server.wait_until_ready()
    engine = server.engine_pid
    with ThreadPoolExecutor() as pool, httpx2.Client(base_url=url, headers=HEADERS, timeout=300) as http:
        running = pool.submit(http.post, "/generate", json=body_of(40))
        wait_until_running(http, 1)
        waiting = pool.submit(http.post, "/generate", json=body_of(500, n=MAX_QUEUED))
        wait_until_running(http, 1, MAX_QUEUED)
        server.process.terminate()
        assert len(running.result().json()["output_ids"]) == 40
        server.process.terminate()
        assert_shut_down([result["meta_info"] for result in waiting.result().json()], MAX_QUEUED * 500)
        assert server.process.wait(120) == 0
    assert not is_alive(engine)
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/health")


def test_what_still_runs_after_the_drain_is_aborted_and_told_so(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server(*SMALL_POOL, "--drain-seconds", "0", module="tests.server.checked_server")
    url = server.wait_until_ready()
    with ThreadPoolExecutor() as pool, httpx2.Client(base_url=url, headers=HEADERS, timeout=300) as http:
        whole = pool.submit(http.post, "/generate", json=body_of(200, n=20))
        stream = pool.submit(http.post, "/generate", json=body_of(200, n=20, stream=True))
        while not http.get("/get_metric_info").json()["num_waiting_requests"] > 20:
            assert not whole.done()
        server.process.terminate()
        assert server.process.wait(120) == 0
    assert_shut_down([result["meta_info"] for result in whole.result().json()], 20 * 200)
    *states, done = events(stream.result())
    assert done == "[DONE]"
    metas = [json.loads(state)["meta_info"] for state in states]
    assert_shut_down([meta for meta in metas if meta["finish_reason"] is not None], 20 * 200)


def assert_shut_down(metas: list[dict[str, Any]], num_tokens: int) -> None:
    """Some of the outputs were ended by the server's end, before they had all these tokens."""
    reasons = [meta["finish_reason"] for meta in metas]
    assert {"type": "abort", "message": "the server is shutting down"} in reasons
    assert sum(meta["completion_tokens"] for meta in metas) < num_tokens


def test_a_killed_server_takes_its_engine_along_and_gives_its_port_free(
    start_server: Callable[..., ServerProcess],
) -> None:
    """Killed while the engine steps; the next one on that port is killed with its engine."""
    server = start_server(WITHOUT_TEXT)
    url = server.wait_until_ready()
    engine = server.engine_pid
    with (
        httpx2.Client(base_url=url, headers=HEADERS, timeout=300) as http,
        http.stream("POST", "/generate", json=body_of(500, n=MAX_QUEUED, stream=True)) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.process.kill()
        server.process.wait()
        with pytest.raises(httpx2.TransportError):
            list(lines)
    wait_until_gone(engine)
    port = url.rpartition(":")[2]
    again = start_server(WITHOUT_TEXT, "--port", port)
    assert again.wait_until_ready() == url
    engine = again.engine_pid
    os.kill(engine, signal.SIGKILL)
    again.process.kill()
    again.process.wait()
    wait_until_gone(engine)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", int(port)))
        taken.listen()


def test_the_engine_ends_when_the_server_is_killed_before_it_is_ready(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    give_up = time.monotonic() + 120
    while not any(is_importing(pid) for pid in server.child_pids()):
        assert time.monotonic() < give_up
        time.sleep(0.01)
    engine = server.engine_pid
    assert "serving" not in server.log
    server.process.kill()
    server.process.wait()
    wait_until_gone(engine)


def is_importing(pid: int) -> bool:
    return (
        b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes() and "numpy" in Path(f"/proc/{pid}/maps").read_text()
    )


def wait_until_gone(pid: int, seconds: float = 120) -> None:
    give_up = time.monotonic() + seconds
    while is_alive(pid):
        assert time.monotonic() < give_up, "the engine process goes on without its server"
        time.sleep(0.01)


def serve(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "jradix", "serve", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_port_that_is_taken_is_the_users_mistake(byte_model_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = serve("--model-path", str(byte_model_path), "--port", str(port))
    assert ended.returncode == 2
    assert f"127.0.0.1:{port}" in ended.stderr.splitlines()[-1]


def test_of_two_servers_that_start_on_one_port_the_second_says_so_and_ends(
    start_server: Callable[..., ServerProcess],
) -> None:
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))  # as a server does that is still loading
        second = start_server(WITHOUT_TEXT, "--port", str(first.getsockname()[1]))
        give_up = time.monotonic() + 60
        while "loading" not in second.log:
            assert time.monotonic() < give_up, second.log
            time.sleep(0.01)
        first.listen()
        assert second.process.wait(60) == 2
    assert "host and port must be an address that is free" in second.log


def test_an_engine_that_nobody_has_listened_to_ends_when_told(
    byte_model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(model_path=str(byte_model_path), dtype="float32", max_total_tokens=64, context_length=32)
    EngineClient.start(config).stop()
    assert not caplog.records, "it had to be killed"


def test_a_model_that_is_missing_is_the_users_mistake(tmp_path: Path) -> None:
    ended = serve("--model-path", str(tmp_path), "--port", "0")
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(f"jradix: error: {tmp_path}: expected config.json")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"port": -1}, "port must be an integer in"),
        ({"port": 65536}, "port must be"),
        ({"api_key": ""}, "api_key must be a string, not empty"),
        ({"api_key": "same", "admin_api_key": "same"}, "admin_api_key must differ from api_key"),
        ({"log_level": "loud"}, "log_level must be one of debug, info, warning, error, got 'loud'"),
        ({"max_body_mb": 0}, "max_body_mb must be"),
        ({"drain_seconds": 1.5}, "drain_seconds must be"),
    ],
    ids=str,
)
def test_settings_are_checked(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerConfig(**fields)  # pyright: ignore[reportArgumentType]


def test_the_http_process_loads_no_jax() -> None:
    code = "import sys, jradix.server.serve; print([name for name in ('jax', 'flax', 'jaxlib') if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.strip() == "[]"


def test_the_configuration_crosses_the_pipe(byte_model_path: Path) -> None:
    import pickle

    config = EngineConfig(model_path=str(byte_model_path))
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_server_that_is_told_to_end_saves_its_cache_for_the_next(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    body = {"input_ids": list(range(40)), "sampling_params": {"max_new_tokens": 1}, "cache_salt": "salt"}
    for cached_tokens in (0, 39):
        server = start_server(WITHOUT_TEXT, "--cache-dir", str(tmp_path))
        with httpx2.Client(base_url=server.wait_until_ready(), headers=HEADERS, timeout=300) as http:
            while cached_tokens and not http.get("/get_server_info").json()["cache"]["evictable_pages"]:
                assert server.process.poll() is None  # it restores while it serves
            meta = http.post("/generate", json=body).json()["meta_info"]
            assert meta["cached_tokens"] == cached_tokens
        server.process.terminate()
        assert server.process.wait(120) == 0
