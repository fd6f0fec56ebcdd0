"""Several processes as one engine: the tokens of one, what they must agree on, and that none outlives another."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jradix import Engine
from jradix.config import EngineConfig
from jradix.processes import EXIT_STATUS
from tests.model.test_weights_sample import add_noise
from tests.process_group import ProcessGroup
from tests.process_questions import check

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


def test_two_processes_answer_like_one_until_the_second_is_killed(
    tmp_path: Path, tiny_text_path: Path, tiny_engine: Engine
) -> None:
    """Cold, cached, retracted, with all that a request may ask for, under other weights, without a cache."""
    (tmp_path / "model").symlink_to(tiny_text_path)
    with ProcessGroup(tmp_path, "-m", "tests.process_questions", "2", "4") as pair:
        check(pair.found(), tiny_engine)
        pair.kill(1)
        assert pair.status(0) == EXIT_STATUS
        assert "jradix: process 0 ends: process 1 of 2 has ended: it was killed" in pair.log(0)


def test_a_process_that_waits_for_a_device_ends_when_process_0_is_killed(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path, "-c", WAIT) as pair:
        pair.found()
        pair.kill(0)
        assert pair.status(1) not in (0, -signal.SIGKILL)
        told = (
            "jradix: process 1 ends: process 0 of 2 has ended: it was killed",
            "Failed to send RPC to coordination service",
        )
        assert any(message in pair.log(1) for message in told), "jax ends it too, and may be the first"


def test_processes_agree_on_numbers_and_end_if_they_are_configured_differently(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path, "-c", DISAGREE) as pair:
        assert [pair.status(rank) for rank in range(2)] == [EXIT_STATUS] * 2
        for rank in range(2):
            assert "agreed on 6" in pair.log(rank)
            assert "page_size must be the same in all processes: process 0 has 16, process 1 17" in pair.log(rank)
        assert "ValueError: page_size" in pair.log(0)
        assert "jradix: process 1 ends: process 0 of 2 has failed: ValueError: page_size" in pair.log(1)


def test_processes_with_other_weights_of_the_same_model_end(tiny_path: Callable[[str], Path], tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copytree(tiny_path("llama"), tmp_path / str(rank))
    add_noise(next((tmp_path / "1").glob("*.safetensors")))
    with ProcessGroup(tmp_path, "-c", START) as pair:
        assert [pair.status(rank) for rank in range(2)] == [EXIT_STATUS] * 2
        for rank in range(2):
            assert "the content of the weights' files must be the same in all processes" in pair.log(rank)


def test_only_process_0_has_an_engine(tiny_path: Callable[[str], Path]) -> None:
    options: dict[str, Any] = {"model_path": str(tiny_path("llama")), "tp_size": 2, "nnodes": 2, "node_rank": 1}
    with pytest.raises(ValueError, match=r"node_rank must be 0 for an Engine, got 1: call jradix\.follow"):
        Engine(EngineConfig(**options, dist_init_addr="localhost:1"))
