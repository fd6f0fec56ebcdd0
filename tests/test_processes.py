"""Several processes as one engine: the tokens of one, what they must agree on, and that none outlives another."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jradix import Engine
from jradix.config import EngineConfig
from jradix.processes import EXIT_STATUS
from tests.model.test_weights_sample import add_noise
from tests.process_pair import DEVICES_OF_EACH, NUM_PROCESSES, PROMPTS, everything
from tests.tiny_engine import output_ids

ROOT = Path(__file__).parents[1]
SECONDS_TO_ANSWER, SECONDS_TO_END = 300, 60
"""After which a test gives up; none needs so long."""

DISAGREE = """
import sys
from jradix.config import EngineConfig
from jradix.processes import Processes, connect, join
rank, address = int(sys.argv[1]), sys.argv[2]
options = dict(model_path=str(rank), tp_size=4, nnodes=2, node_rank=rank, dist_init_addr=address)
processes = connect(join(EngineConfig(**options)))
smallest = processes.agree(7 - rank, min)
processes.close() if rank == 0 else processes.receive()
print("agreed on", smallest, flush=True)
connect(EngineConfig(**options, page_size=16 + rank))
"""

WAIT = """
import sys
import jax
from jradix.config import EngineConfig
from jradix.mesh import tensor_mesh
from jradix.processes import connect, join
rank, address = int(sys.argv[1]), sys.argv[2]
processes = connect(join(EngineConfig(model_path="", tp_size=4, nnodes=2, node_rank=rank, dist_init_addr=address)))
devices = jax.devices()
mesh = tensor_mesh(4, devices[::2] + devices[1::2])
assert [device.process_index for device in mesh.devices] == [0, 0, 1, 1], "no two of a process are apart"
try:
    tensor_mesh(6, devices)
    raise AssertionError("there are four")
except ValueError as error:
    assert "tp_size must be at most 4, as 2 processes have at least 2 devices each, got 6" in str(error)
spec = jax.sharding.PartitionSpec
sums = jax.jit(jax.numpy.sum, out_shardings=jax.sharding.NamedSharding(mesh, spec()))
numbers = jax.numpy.ones(8, device=jax.sharding.NamedSharding(mesh, spec("tensor")))
if rank == 0:
    assert float(sums(numbers)) == 8
    open(sys.argv[3] + "/found.json", "w").write("{}")
    processes.receive()
float(sums(numbers))
float(sums(numbers))
"""


START = """
import sys
from jradix import Engine, follow
rank, address, folder = sys.argv[1:]
options = dict(tp_size=4, nnodes=2, node_rank=int(rank), dist_init_addr=address, skip_tokenizer_init=True)
if not follow(model_path=f"{folder}/{rank}", **options):
    Engine(model_path=f"{folder}/{rank}", **options)
"""


class Pair:
    """Processes that have joined, and what each of them writes."""

    def __init__(self, folder: Path, *command: str) -> None:
        """command: what each runs, followed by its rank, the address of process 0, and the folder."""
        self.folder, self._address = folder, f"localhost:{free_port()}"
        self.processes = [self._start(rank, *command) for rank in range(NUM_PROCESSES)]

    def _start(self, rank: int, *command: str) -> "subprocess.Popen[bytes]":
        flags = f"--xla_force_host_platform_device_count={DEVICES_OF_EACH} --xla_backend_optimization_level=0"
        with (self.folder / f"{rank}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *command, str(rank), self._address, str(self.folder)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
            )

    def log(self, rank: int) -> str:
        return (self.folder / f"{rank}.log").read_text("utf-8")

    def found(self) -> dict[str, Any]:
        """What process 0 has written, once it has."""
        give_up = time.monotonic() + SECONDS_TO_ANSWER
        while not (self.folder / "found.json").is_file():
            ended = [rank for rank, process in enumerate(self.processes) if process.poll() is not None]
            assert not ended, f"process {ended[0]} has ended:\n{self.log(ended[0])}"
            assert time.monotonic() < give_up, self.log(0)
            time.sleep(0.02)
        return json.loads((self.folder / "found.json").read_text())

    def status(self, rank: int) -> int:
        """Of the process's end, which must come."""
        return self.processes[rank].wait(SECONDS_TO_END)

    def kill(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGKILL)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def free_port() -> int:
    """Below those that connections get by themselves, so that none takes it before process 0 does."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)):
                return port


@pytest.fixture
def start_pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    started: list[Pair] = []

    def start(*command: str) -> Pair:
        started.append(Pair(tmp_path, *command))
        return started[-1]

    yield start
    for pair in started:
        pair.end()


def test_two_processes_answer_like_one_until_the_second_is_killed(
    start_pair: Callable[..., Pair], tmp_path: Path, tiny_text_path: Path, tiny_engine: Engine
) -> None:
    """Cold, cached, retracted, with all that a request may ask for, under other weights, without a cache."""
    (tmp_path / "model").symlink_to(tiny_text_path)
    pair = start_pair("-m", "tests.process_pair")
    expected, wanted = output_ids(tiny_engine, PROMPTS), everything(tiny_engine)
    found = pair.found()
    cached, disabled = found["cached"], found["disabled"]
    assert cached["cold"] == cached["cached"] == cached["of old weights"] == expected
    assert cached["retractions"] > 0
    assert cached["everything"]["ids"] == wanted["ids"]
    for name in ("logprobs", "hidden"):
        np.testing.assert_allclose(cached["everything"][name], np.array(wanted[name], np.float64), atol=1e-4)
    assert cached["of zeros"] == [[0] * 16]
    assert cached["saved pages"] > 0
    assert cached["moved pages"], "a page is another after it was read and written"
    [not_sent, not_known] = cached["refused"]
    assert "must be what pickle can send to the other processes" in not_sent
    assert "must equal its pickled copy" in not_known
    assert disabled["once"] == disabled["again"] == expected
    assert disabled["hit_tokens"] == 0

    pair.kill(1)
    assert pair.status(0) == EXIT_STATUS
    assert "jradix: process 0 ends: process 1 of 2 has ended: it was killed" in pair.log(0)


def test_a_process_that_waits_for_a_device_ends_when_process_0_is_killed(start_pair: Callable[..., Pair]) -> None:
    pair = start_pair("-c", WAIT)
    pair.found()
    pair.kill(0)
    assert pair.status(1) not in (0, -signal.SIGKILL)
    told = (
        "jradix: process 1 ends: process 0 of 2 has ended: it was killed",
        "Failed to send RPC to coordination service",
    )
    assert any(message in pair.log(1) for message in told), "jax ends it too, and may be the first"


def test_processes_agree_on_numbers_and_end_if_they_are_configured_differently(
    start_pair: Callable[..., Pair],
) -> None:
    pair = start_pair("-c", DISAGREE)
    assert [pair.status(rank) for rank in range(2)] == [EXIT_STATUS] * 2
    for rank in range(2):
        assert "agreed on 6" in pair.log(rank)
        assert "page_size must be the same in all processes: process 0 has 16, process 1 17" in pair.log(rank)
    assert "ValueError: page_size" in pair.log(0)
    assert "jradix: process 1 ends: process 0 of 2 has failed: ValueError: page_size" in pair.log(1)


def test_processes_with_other_weights_of_the_same_model_end(
    start_pair: Callable[..., Pair], tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    for rank in range(2):
        shutil.copytree(tiny_path("llama"), tmp_path / str(rank))
    add_noise(next((tmp_path / "1").glob("*.safetensors")))
    pair = start_pair("-c", START)
    assert [pair.status(rank) for rank in range(2)] == [EXIT_STATUS] * 2
    for rank in range(2):
        assert "the content of the weights' files must be the same in all processes" in pair.log(rank)


def test_only_process_0_has_an_engine(tiny_path: Callable[[str], Path]) -> None:
    options: dict[str, Any] = {"model_path": str(tiny_path("llama")), "tp_size": 2, "nnodes": 2, "node_rank": 1}
    with pytest.raises(ValueError, match=r"node_rank must be 0 for an Engine, got 1: call jradix\.follow"):
        Engine(EngineConfig(**options, dist_init_addr="localhost:1"))
