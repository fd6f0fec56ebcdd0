"""How servers end: told to, by the death of one of their two processes, or before they have begun."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from jradix import EngineConfig
from jradix.server.config import ServerConfig
from tests.server.conftest import API_KEY, ServerProcess

HEADERS = {"Authorization": f"Bearer {API_KEY}"}
WITHOUT_TEXT = "--skip-tokenizer-init"  # starts sooner


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def engine_pid(server: ServerProcess) -> int:
    """Multiprocessing's tracker of resources is a child too; the engine is the one with the pipe."""
    return next(pid for pid in server.child_pids() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_when_the_engine_dies_everybody_is_told_and_the_server_ends(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server(WITHOUT_TEXT)
    url = server.wait_until_ready()
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    with ThreadPoolExecutor() as pool, httpx2.Client(base_url=url, headers=HEADERS, timeout=60) as http:
        whole = pool.submit(http.post, "/generate", json=body)
        stream = pool.submit(http.post, "/generate", json={**body, "stream": True})
        time.sleep(0.5)  # both are there, and the first compiles
        os.kill(engine_pid(server), signal.SIGKILL)
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "engine_dead"
        assert '"code":"engine_dead"' in stream.result().text
        assert "[DONE]" not in stream.result().text
    assert server.process.wait(30) == 1


def test_sigterm_lets_requests_end_and_takes_no_more(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server(WITHOUT_TEXT)
    url = server.wait_until_ready()
    engine = engine_pid(server)
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
    with ThreadPoolExecutor() as pool, httpx2.Client(base_url=url, headers=HEADERS, timeout=60) as http:
        running = pool.submit(http.post, "/generate", json=body)
        time.sleep(0.5)  # it is there, and compiles
        server.process.terminate()
        assert len(running.result().json()["output_ids"]) == 40
        assert server.process.wait(30) == 0
    assert not is_alive(engine)
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/health")


def test_the_engine_ends_when_the_server_is_killed(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server()
    give_up = time.monotonic() + 60
    while not any(b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.child_pids()):
        assert time.monotonic() < give_up
        time.sleep(0.01)
    engine = engine_pid(server)
    time.sleep(1)  # it imports by then
    server.process.kill()
    server.process.wait()
    while is_alive(engine):
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
