"""Processes that run one engine together, started by a test, and what each of them writes."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
SECONDS_TO_ANSWER, SECONDS_TO_END = 300, 60
"""After which a test gives up; none needs so long."""


class ProcessGroup:
    """Processes with pretended devices that have the same address of process 0."""

    def __init__(
        self,
        folder: Path,
        *command: str,
        ranks: tuple[int, ...] = (0, 1),
        devices: int = 2,
        optimized: bool = False,
    ) -> None:
        """
        Args:
            folder: where they read and write.
            command: what each runs, followed by its rank, the address of process 0, and the folder.
            ranks: of the processes.
            devices: of each.
            optimized: see `tiny_engine.start`.
        """
        self._flags = f"--xla_force_host_platform_device_count={devices}"
        if not optimized:
            self._flags += " --xla_backend_optimization_level=0"
        self.folder, self._address = folder, f"localhost:{free_port()}"
        self.processes = [self._start(place, rank, *command) for place, rank in enumerate(ranks)]

    def _start(self, place: int, rank: int, *command: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{place}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *command, str(rank), self._address, str(self.folder)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": self._flags},
            )

    def log(self, place: int) -> str:
        return (self.folder / f"{place}.log").read_text("utf-8")

    def found(self, name: str = "found") -> dict[str, Any]:
        """What process 0 has written by `write_found`, once it has."""
        give_up = time.monotonic() + SECONDS_TO_ANSWER
        while not (self.folder / f"{name}.json").is_file():
            ended = [place for place, process in enumerate(self.processes) if process.poll() is not None]
            assert not ended, f"process {ended[0]} has ended:\n{self.log(ended[0])}"
            assert time.monotonic() < give_up, self.log(0)
            time.sleep(0.1)
        return json.loads((self.folder / f"{name}.json").read_text())

    def status(self, place: int) -> int:
        """Of the process's end, which must come."""
        return self.processes[place].wait(SECONDS_TO_END)

    def kill(self, place: int) -> None:
        os.kill(self.processes[place].pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """None of them is left."""
        for process in self.processes:
            process.kill()
            process.wait()


def write_found(folder: Path, found: dict[str, Any], name: str = "found") -> None:
    """Whole or not at all, as somebody waits for it."""
    (folder / f"{name}.tmp").write_text(json.dumps(found))
    (folder / f"{name}.tmp").rename(folder / f"{name}.json")


def free_port() -> int:
    """Below those that connections get by themselves, so that none takes it before process 0 does."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)):
                return port
