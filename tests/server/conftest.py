"""A server process on a tiny model, one for all tests of a worker, and clients for it.

Which processes live, and in how much memory, is read from /proc: these tests need Linux.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.checked_server import FAULT
from tests.tiny_engine import write_byte_model

API_KEY = "a key for tests"
MODEL = "tiny"
CONTEXT_LENGTH = 512
MAX_RUNNING, MAX_QUEUED = 1, 6  # one at a time has few shapes to compile
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
OPTIONS = {
    "dtype": "float32",
    "layer-loop": "scan",
    "page-size": 4,
    "max-total-tokens": 4096,
    "context-length": CONTEXT_LENGTH,
    "max-running-requests": MAX_RUNNING,
    "max-queued-requests": MAX_QUEUED,
    "chunked-prefill-size": 64,
    "served-model-name": MODEL,
    "api-key": API_KEY,
    "max-body-mb": 1,
    "port": 0,
}
SMALL_POOL = (
    *("--context-length", "256", "--max-total-tokens", "224"),
    *("--max-running-requests", "8", "--max-queued-requests", "40"),
)


@dataclass(frozen=True)
class ServerProcess:
    """`jradix serve` in a process of its own."""

    process: "subprocess.Popen[bytes]"
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text("utf-8")

    @property
    def fault(self) -> Path:
        """The file that breaks the device of a checked server while it exists."""
        return self.log_path.with_suffix(".fault")

    @property
    def engine_pid(self) -> int:
        """Multiprocessing's tracker of resources is a child too; the engine is the one with the pipe."""
        return next(pid for pid in self.child_pids() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def wait_until_ready(self, seconds: float = 300) -> str:
        """The server's URL, once it answers."""
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            assert self.process.poll() is None, f"the server has ended:\n{self.log}"
            found = re.search(r"serving \S+ at (http://\S+)", self.log)
            if found:
                try:
                    httpx2.get(f"{found[1]}/health", timeout=10).raise_for_status()
                    return found[1]
                except httpx2.ConnectError:
                    pass
            time.sleep(0.05)
        raise AssertionError(f"the server does not answer:\n{self.log}")

    def open_files(self) -> list[str]:
        """Those of the HTTP process, sockets among them."""
        return os.listdir(f"/proc/{self.process.pid}/fd")

    def child_pids(self) -> list[int]:
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]


@pytest.fixture(scope="session")
def byte_model_path(tmp_path_factory: pytest.TempPathFactory, tiny_path: Callable[[str], Path]) -> Path:
    path = tmp_path_factory.mktemp("byte_model")
    write_byte_model(tiny_path("llama"), path, TEMPLATE)
    return path


@pytest.fixture(scope="session")
def start_server(byte_model_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers, with more options or without, and kills those that are still alive at the end.

    They share what they have compiled, so that only the first of a kind takes its time for it.
    """
    started: list[ServerProcess] = []
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:

        def start(*options: str, module: str = "jradix") -> ServerProcess:
            words = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
            command = [sys.executable, "-m", module, "serve", "--model-path", str(byte_model_path), *words, *options]
            log_path = Path(folder) / f"{len(started)}.log"
            with log_path.open("wb") as log:
                process = subprocess.Popen(
                    [*command, "--compilation-cache-dir", folder],
                    stdout=log,
                    stderr=log,
                    env={
                        **os.environ,
                        "PYTHONPATH": str(root),
                        "JAX_PLATFORMS": "cpu",
                        "XLA_FLAGS": "--xla_backend_optimization_level=0",
                        FAULT: str(log_path.with_suffix(".fault")),
                    },
                )
            started.append(ServerProcess(process, log_path))
            return started[-1]

        yield start
        for server in started:
            if server.process.poll() is None:
                server.process.kill()
            server.process.wait()


@pytest.fixture(scope="session")
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    return start_server()


@pytest.fixture(scope="session")
def url(server: ServerProcess) -> str:
    return server.wait_until_ready()


@pytest.fixture(scope="session")
def crowded(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    """A checked server with a pool of 56 pages; eight requests run at once, of which one may need them all."""
    return start_server(*SMALL_POOL, module="tests.server.checked_server")


@pytest.fixture
def crowded_http(crowded: ServerProcess) -> Iterator[httpx2.Client]:
    """Sends the API key."""
    headers = {"Authorization": f"Bearer {API_KEY}"}
    with httpx2.Client(base_url=crowded.wait_until_ready(), headers=headers, timeout=300) as client:
        yield client
        wait_until_idle(client)


@pytest.fixture
def http(url: str) -> Iterator[httpx2.Client]:
    """Sends the API key. After each test the engine must be at rest."""
    with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=300) as client:
        yield client
        wait_until_idle(client)


@pytest.fixture
def client(url: str, http: httpx2.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0, timeout=300) as client:
        yield client


def wait_until_idle(client: httpx2.Client, seconds: float = 30) -> dict[str, float]:
    """The engine's numbers once nothing runs, nothing waits and no page is held."""
    give_up = time.monotonic() + seconds
    while True:
        info = client.get("/get_metric_info").json()
        if not (info["num_running_requests"] or info["num_waiting_requests"] or info["num_used_tokens"]):
            assert info["available_size"] + info["evictable_size"] == info["max_total_num_tokens"]
            return info
        assert time.monotonic() < give_up, info
        time.sleep(0.05)


def wait_until_running(client: httpx2.Client, num_running: int, num_waiting: int = 0, seconds: float = 300) -> None:
    """Until exactly so many requests run and wait."""
    give_up = time.monotonic() + seconds
    while True:
        info = client.get("/get_metric_info").json()
        if (info["num_running_requests"], info["num_waiting_requests"]) == (num_running, num_waiting):
            return
        assert time.monotonic() < give_up, info
        time.sleep(0.01)


def rss_mib(pid: int) -> float:
    """MiB of memory that a process has resident."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def metrics(http: httpx2.Client) -> dict[str, float]:
    """The values of Prometheus' metrics, without buckets."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples if "le" not in sample.labels}
