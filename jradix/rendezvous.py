"""The processes of an engine meet at process 0 before jax joins them, and are told why if that cannot be.

jax waits for minutes for one that never comes, and then aborts the others, as it does at once where two have the same
rank: that cannot be caught, and does not say who is missing. So they meet at the port that jax is about to use, and
leave it free.
"""

import logging
import os
import re
import socket
import time
from dataclasses import dataclass
from typing import Final

LOG = logging.getLogger(__name__)

SECONDS_TO_COME: Final = 300
"""How long processes wait for each other."""
_SECONDS_TO_SPEAK = 5
_SECONDS_BETWEEN_TRIES = 0.2
_GREETING = re.compile(r"jradix (\d{1,9}) (\d{1,9}) (.+)\n")
"""Of a process that has come: the number of processes, its rank, its name."""
_ANSWER, _GO = "jradix: ", "go"


def meet(address: str, rank: int, num_processes: int, seconds: float = SECONDS_TO_COME) -> None:
    """Return in all processes once each of them is here; process 0 is at `address`, "host:port".

    Raises:
        ValueError: two processes have the same rank, they differ in their number, some have not come within `seconds`,
            or the port is taken. All that are here by then get the same message.
    """
    try:
        if rank == 0:
            _await_others(address, num_processes, seconds)
        else:
            _go_to_first(address, rank, num_processes, seconds)
    except _CannotMeetError as error:
        raise ValueError(f"dist_init_addr {address}: {error}") from None


def listen(port: int) -> socket.socket:
    """On all of this host's addresses. OSError if the port is taken; 0 finds a free one."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


class _CannotMeetError(Exception):
    """Why, for the users of all processes."""


@dataclass(frozen=True, slots=True)
class _Guest:
    """A process that has come to process 0, and waits for an answer."""

    connected: socket.socket
    num_processes: int
    rank: int
    name: str

    def has_left(self) -> bool:
        """Whether it has ended: it says nothing more."""
        try:
            return not self.connected.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def answer(self, text: str) -> None:
        try:
            with self.connected:
                self.connected.sendall(f"{_ANSWER}{text}\n".encode())
        except OSError:
            LOG.debug("process %d, %s, has ended", self.rank, self.name)


def _await_others(address: str, num_processes: int, seconds: float) -> None:
    port = host_and_port(address)[1]
    try:
        server = listen(port)
    except OSError as error:
        raise _CannotMeetError(
            f"process 0 cannot listen on port {port} of this host: {error.strerror}. Another process 0 may be running "
            "here: each process needs a node_rank of its own. Otherwise choose a port that is free"
        ) from None
    here: list[_Guest] = []
    try:
        with server:
            give_up = time.monotonic() + seconds
            while len(here) < num_processes - 1:
                guest = _next_guest(server, give_up)
                here = _still_here(here)
                if guest is not None:
                    here.append(guest)
                    _check(here, num_processes)
                elif time.monotonic() > give_up:
                    raise _CannotMeetError(_missing({other.rank for other in here}, num_processes, seconds))
    except _CannotMeetError as error:
        for guest in here:
            guest.answer(str(error))
        raise
    for guest in here:
        guest.answer(_GO)


def _still_here(guests: list[_Guest]) -> list[_Guest]:
    """Without those that have ended, and may have been started again."""
    here: list[_Guest] = []
    for guest in guests:
        if guest.has_left():
            guest.connected.close()
        else:
            here.append(guest)
    return here


def _next_guest(server: socket.socket, give_up: float) -> _Guest | None:
    """None if nobody comes in time, or somebody else."""
    server.settimeout(max(0.01, give_up - time.monotonic()))
    try:
        connected, _ = server.accept()
    except TimeoutError:
        return None
    if (found := _GREETING.fullmatch(_read_line(connected, _SECONDS_TO_SPEAK))) is None:
        LOG.warning("somebody else has connected to the port of process 0")
        connected.close()
        return None
    connected.setblocking(False)
    return _Guest(connected, int(found[1]), int(found[2]), found[3])


def _check(here: list[_Guest], num_processes: int) -> None:
    """The last one against those before it."""
    *others, guest = here
    if guest.num_processes != num_processes:
        raise _CannotMeetError(
            f"nnodes must be the same in all processes: process 0 has {num_processes}, process {guest.rank} on "
            f"{guest.name} has {guest.num_processes}"
        )
    if not 0 < guest.rank < num_processes:
        raise _CannotMeetError(
            f"node_rank must be one of 0 to {num_processes - 1}, each of them once: {guest.name} has {guest.rank}"
        )
    for other in others:
        if other.rank == guest.rank:
            raise _CannotMeetError(
                f"node_rank {guest.rank} was given to two processes, on {other.name} and on {guest.name}: each of the "
                f"{num_processes} needs its own, from 0 to {num_processes - 1}"
            )


def _missing(ranks: set[int], num_processes: int, seconds: float) -> str:
    came, missing = sorted({0, *ranks}), sorted(set(range(1, num_processes)) - ranks)
    return (
        f"of {num_processes} processes those with node_rank {_listed(missing)} did not come within {seconds:g} s, "
        f"those with {_listed(came)} did. Start them as well, each with its own node_rank, and check that their hosts "
        "reach this address and its port"
    )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _go_to_first(address: str, rank: int, num_processes: int, seconds: float) -> None:
    greeting = f"jradix {num_processes} {rank} {socket.gethostname()} (pid {os.getpid()})\n".encode()
    give_up = time.monotonic() + seconds
    while True:
        answer, reason = "", "it does not answer"
        try:
            with socket.create_connection(host_and_port(address), max(0.01, give_up - time.monotonic())) as connected:
                connected.sendall(greeting)
                # It waits as long for the others, and says so then.
                answer = _read_line(connected, seconds + _SECONDS_TO_SPEAK)
        except (OSError, UnicodeError) as error:  # the latter of what cannot be a host's name
            reason = str(error)
        if answer == f"{_ANSWER}{_GO}\n":
            return
        if answer.startswith(_ANSWER):
            raise _CannotMeetError(answer.removeprefix(_ANSWER).strip())
        if answer:
            raise _CannotMeetError("something else than process 0 answers there: choose a port that is free")
        if time.monotonic() > give_up:
            raise _CannotMeetError(
                f"process 0 was not reached within {seconds:g} s: {reason}. Check that it runs, with the same "
                "dist_init_addr and nnodes, and that this host reaches that address and its port"
            )
        time.sleep(_SECONDS_BETWEEN_TRIES)


def host_and_port(address: str) -> tuple[str, int]:
    """Of "host:port"; an IPv6 address may stand in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _read_line(connected: socket.socket, seconds: float) -> str:
    """Up to its end, or what there is of it after these seconds, or when the other end is gone."""
    line, give_up = b"", time.monotonic() + seconds
    try:
        while not line.endswith(b"\n") and len(line) < 4096:
            connected.settimeout(max(0.01, give_up - time.monotonic()))
            more = connected.recv(4096)
            if not more:
                break
            line += more
    except OSError:
        pass
    return line.decode(errors="replace")
