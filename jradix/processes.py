"""The processes that run one engine together: how they find each other, agree, talk, and end if one of them does.

jax.distributed makes one computer of their devices. Beside it each process has a connection with process 0, over which
it is told what to run (see `mirror`), and on which the end of a process shows at once: jax would notice it after
minutes, and until then a program waits for its other half.
"""

import atexit
import logging
import os
import pickle
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from typing import Any, Final, NoReturn

import jax
from jax._src.distributed import global_state  # knows the address of process 0, and a store that all processes reach

from jradix import mesh
from jradix.config import FOUND_BY_JAX, EngineConfig
from jradix.rendezvous import host_and_port, listen, meet

LOG = logging.getLogger(__name__)

EXIT_STATUS: Final = 1
"""Of a process that ends because another one has, or because of a failure that it has told the others."""
MAY_DIFFER: Final = frozenset({"node_rank", "dist_init_addr", "model_path", "compilation_cache_dir", "cache_dir"})
"""Fields of the configuration of which each process may have its own value."""
_SECONDS_TO_CONNECT = 300
_SECONDS_TO_LEAVE = 5
"""How long process 0 waits for the others after a failure: they need it to end in peace."""
_SECONDS_TO_SHOW = 0.5
"""After which the end of a process has shown on its connections."""
_A_DAY = 24 * 60 * 60
_STORE_KEY, _ENDED = "jradix/process 0", "ended"
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 14_000}
"""A machine that is gone closes no connection: after 5 seconds of silence the kernel asks it, three times."""


def join(config: EngineConfig) -> EngineConfig:
    """Make this process one of those of `dist_init_addr`; jax must not have been used for anything else.

    Does nothing if there are no others, or if jax.distributed has been initialized before, here or by the caller.
    Returns the configuration with `nnodes` and `node_rank` as they are.

    Raises:
        ValueError: jax has been used, the processes do not meet (see `rendezvous`), or jax was initialized with other
            numbers.
    """
    address = config.dist_init_addr
    if address is None or (config.nnodes == 1 and address != FOUND_BY_JAX):
        return config
    if not jax.distributed.is_initialized():
        given: dict[str, Any] = {}
        if address != FOUND_BY_JAX:
            meet(address, config.node_rank, config.nnodes)
            given = {"coordinator_address": address, "num_processes": config.nnodes, "process_id": config.node_rank}
        try:
            # At their exit all processes wait for each other, and process 0 may have other things to do before.
            jax.distributed.initialize(**given, shutdown_timeout_seconds=_A_DAY)
            atexit.register(_tell_end)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"dist_init_addr {address}: the processes could not be joined: {error}") from error
    found = replace(config, nnodes=jax.process_count(), node_rank=jax.process_index())
    if address != FOUND_BY_JAX and found != config:
        raise ValueError(
            f"nnodes and node_rank must be those that jax.distributed was initialized with, {found.nnodes} and "
            f"{found.node_rank}, got {config.nnodes} and {config.node_rank}"
        )
    return found


def connect(config: EngineConfig) -> "Processes | None":
    """Connect the processes, which have joined; None if there is one only.

    Raises:
        ValueError: on process 0, whose message names what differs between the processes; the others end.
    """
    if config.nnodes == 1:
        return None
    processes = Processes(config.node_rank, config.nnodes)
    facts = {name: value for name, value in asdict(config).items() if name not in MAY_DIFFER}
    versions = {f"the version of {name}": metadata.version(name) for name in ("jradix", "jax", "jaxlib")}
    processes.require_same(versions | {"the kind of device": mesh.device_description()} | facts)
    return processes


@dataclass(frozen=True, slots=True)
class _Failed:
    """The sender ends, and so must who reads this."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Done:
    """Process 0 has no more to say."""


class Processes:
    """The connections of this process: of process 0 one with each other, of each of these one with process 0.

    A process that fails says why, and one that is killed loses its connections. All others end then, by themselves,
    with a message and EXIT_STATUS: a thread that waits for a device cannot be told.

    Attributes:
        rank: of this process.
        num_processes: of all.
    """

    def __init__(self, rank: int, num_processes: int) -> None:
        self.rank, self.num_processes = rank, num_processes
        self._over = self._has_failed = False
        self._others: list[_Other] = []
        connections = _accept_others(num_processes) if rank == 0 else {0: _connect_to_first(rank)}
        self._others = [_Other(connection, other, self._lose) for other, connection in sorted(connections.items())]
        atexit.register(self._exit)  # after jax has registered what it does then, and so before that

    def agree[T](self, value: T, choose: Callable[[Sequence[T]], Any]) -> Any:
        """What `choose`, called on process 0, makes of the values of all processes, in their order."""
        if self.rank:
            self.tell(value)
            return self._others[0].receive()
        try:
            chosen = choose([value, *(other.receive() for other in self._others)])
        except ValueError as error:
            self.fail(error)
            raise
        self.tell(chosen)
        return chosen

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Raises ValueError, on process 0, if one of the facts differs between the processes; the others end."""
        self.agree(facts, _require_same)

    def tell(self, message: Any) -> None:
        """Send to all that this process is connected with, without waiting for them."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for other in self._others:
            other.send(data)

    def receive(self) -> Any:
        """What process 0 sends next to this one; None when it is done, and this one may end."""
        message = self._others[0].receive()
        if not isinstance(message, _Done):
            return message
        self._end_in_peace()
        return None

    def close(self) -> None:
        """Let the others end, who are waiting for what process 0 sends next."""
        if not self._over:
            self._end_in_peace()
            self.tell(_Done())

    def _end_in_peace(self) -> None:
        self._over = True
        atexit.unregister(self._exit)

    def fail(self, error: BaseException) -> None:
        """End the others, and tell them why. This process ends with EXIT_STATUS when its interpreter exits."""
        self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        if not self._over:
            self._wait_for_ends(_SECONDS_TO_SHOW)  # if another has ended, that was the reason, and this one ends here
            self._tell_failure(reason)

    def _tell_failure(self, reason: str) -> None:
        self._over = self._has_failed = True
        data = pickle.dumps(_Failed(reason))
        for other in self._others:
            other.send_last(data)

    def _lose(self, rank: int, reason: str) -> None:
        """End this process at once, because another one has ended. For any thread."""
        if not self._over:
            message = f"process {rank} of {self.num_processes} {reason}"
            print(f"jradix: process {self.rank} ends: {message}", file=sys.stderr)
            self._tell_failure(message)
            self._end()

    def _exit(self) -> None:
        """At the exit of the interpreter; after a failure without waiting for the others in jax's manner."""
        self._fail("it has ended without shutting its engine down")
        if self._has_failed:
            self._end()

    def _end(self) -> NoReturn:
        if self.rank == 0:
            self._wait_for_ends(_SECONDS_TO_LEAVE)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_STATUS)

    def _wait_for_ends(self, seconds: float) -> None:
        give_up = time.monotonic() + seconds
        for other in self._others:
            other.wait_for_end(max(0.0, give_up - time.monotonic()))


class _Other:
    """A process at the other end of a connection. What it sends is read as it comes, so that its end is noticed."""

    def __init__(self, connection: Connection, rank: int, lose: Callable[[int, str], None]) -> None:
        """lose: called, with the rank and the reason, when the process has ended before it was done."""
        self._connection, self._rank, self._lose = connection, rank, lose
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._read, name=f"jradix-process-{rank}", daemon=True)
        self._thread.start()

    def send(self, data: bytes) -> None:
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError:
            LOG.debug("process %d reads no more: whoever reads its messages sees its end", self._rank)

    def send_last(self, data: bytes) -> None:
        """As `send`, if it does not mean to wait: the process may be stuck, and then nobody reads on."""
        if not self._sending.acquire(timeout=_SECONDS_TO_SHOW):
            return
        try:
            if select.select([], [self._connection], [], _SECONDS_TO_SHOW)[1]:
                self._connection.send_bytes(data)
        except OSError:
            LOG.debug("process %d has ended", self._rank)
        finally:
            self._sending.release()

    def receive(self) -> Any:
        return self._inbox.get()

    def wait_for_end(self, seconds: float) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _read(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, _Failed):
                    self._lose(self._rank, f"has failed: {message.reason}")
                    return
                self._inbox.put(message)
                if isinstance(message, _Done):
                    return
        except (EOFError, OSError):
            self._lose(self._rank, "has ended: it was killed, or its machine is gone")
        except Exception as error:
            self._lose(self._rank, f"sent what cannot be read here: {error!r}")


def _accept_others(num_processes: int) -> dict[int, Connection]:
    """By rank. Whoever else connects does not know the key, and is sent away."""
    key = secrets.token_bytes(32)
    connections: dict[int, Connection] = {}
    with listen(0) as server:
        server.settimeout(_SECONDS_TO_CONNECT)
        _store().key_value_set(_STORE_KEY, f"{server.getsockname()[1]} {key.hex()}")
        while len(connections) < num_processes - 1:
            try:
                accepted = _connection(server.accept()[0])
            except TimeoutError:
                missing = sorted(set(range(1, num_processes)) - connections.keys())
                raise ValueError(f"processes {missing} did not connect for {_SECONDS_TO_CONNECT} s") from None
            try:
                deliver_challenge(accepted, key)
                answer_challenge(accepted, key)
                connections[accepted.recv()] = accepted
            except (AuthenticationError, EOFError, OSError) as error:
                LOG.warning("somebody else has connected, or in vain: %r", error)
                accepted.close()
    _store().key_value_delete(_STORE_KEY)  # for the next engine of these processes
    return connections


def _connect_to_first(rank: int) -> Connection:
    found = _store().blocking_key_value_get(_STORE_KEY, _SECONDS_TO_CONNECT * 1000)
    if found == _ENDED:
        raise RuntimeError("process 0 has ended, and has no engine to be followed any more")
    port, key = found.split()
    assert global_state.coordinator_address is not None
    host, _ = host_and_port(global_state.coordinator_address)
    connection = _connection(socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT))
    answer_challenge(connection, bytes.fromhex(key))
    deliver_challenge(connection, bytes.fromhex(key))
    connection.send(rank)
    return connection


def _tell_end() -> None:
    """At the exit of process 0, to others that wait for its next engine."""
    if jax.process_index() == 0:
        _store().key_value_set(_STORE_KEY, _ENDED, allow_overwrite=True)


def _store() -> Any:
    """Of strings, in process 0, for all processes."""
    assert global_state.client is not None, "jax.distributed is not initialized"
    return global_state.client


def _connection(connected: socket.socket) -> Connection:
    """With what multiprocessing leaves out: small messages go at once, and a machine that is gone is noticed."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(connected.detach())


def _require_same(all_facts: Sequence[Mapping[str, Any]]) -> None:
    first = all_facts[0]
    for rank, facts in enumerate(all_facts[1:], 1):
        for name in sorted(first.keys() | facts.keys()):
            ours, theirs = first.get(name), facts.get(name)
            if ours != theirs:
                raise ValueError(
                    f"{name} must be the same in all processes: process 0 has {ours!r}, process {rank} {theirs!r}"
                )
