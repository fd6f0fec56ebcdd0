"""Processes that meet before they start: all go on, or all are told why not. Here each is a thread with its sockets."""

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from jradix.rendezvous import meet
from tests.process_group import free_port

SECONDS = 20
"""To come; none of those that wait for somebody needs so long."""
SOON = 0.5
"""For those that wait in vain."""


def outcomes(address: str, *processes: tuple[int, int], seconds: float = SECONDS) -> list[str]:
    """What becomes of processes of these ranks and numbers of processes that start at once: nothing, or an error."""

    def start(process: tuple[int, int]) -> str:
        try:
            meet(address, *process, seconds)
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(processes)) as threads:
        return list(threads.map(start, processes))


@pytest.fixture
def address() -> str:
    return f"localhost:{free_port()}"


def stranger(address: str) -> socket.socket:
    """A connection with process 0, which is about to listen."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            continue


def told(found: Sequence[str], *parts: str) -> bool:
    """Whether all have the same message, and it says this."""
    return len(set(found)) == 1 and all(part in found[0] for part in parts)


def test_processes_that_all_come_go_on_and_leave_the_port_free(address: str) -> None:
    for _ in range(2):
        assert outcomes(address, (2, 3), (0, 3), (1, 3)) == [""] * 3
    with socket.create_server(("localhost", int(address.rpartition(":")[2]))):
        pass


def test_all_are_told_that_two_have_the_same_rank(address: str) -> None:
    found = outcomes(address, (0, 4), (1, 4), (1, 4))
    assert told(found, "node_rank 1 was given to two processes", f"{socket.gethostname()} (pid", "from 0 to 3")


def test_all_are_told_that_one_has_another_number_of_processes(address: str) -> None:
    found = outcomes(address, (0, 2), (1, 3))
    assert told(found, "nnodes must be the same in all processes: process 0 has 2, process 1 on", "has 3")


def test_all_are_told_of_a_rank_that_there_cannot_be(address: str) -> None:
    found = outcomes(address, (0, 2), (7, 2))
    assert told(found, "node_rank must be one of 0 to 1, each of them once: ", "has 7")


def test_who_sends_a_greeting_byte_by_byte_does_not_hold_up_the_others(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jradix.rendezvous._SECONDS_TO_SPEAK", 0.3)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(outcomes, address, (0, 2))
        connected = stranger(address)
        second = threading.Thread(target=outcomes, args=(address, (1, 2)))
        with connected:
            second.start()
            while not first.done():
                try:
                    connected.sendall(b"j")
                except OSError:
                    break  # it was sent away
                time.sleep(0.05)
        second.join()
        assert first.result() == [""]


def test_what_cannot_be_a_host_is_not_reached(address: str) -> None:
    [found] = outcomes(f"{'a' * 70}:5000", (1, 2), seconds=SOON)
    assert "process 0 was not reached within 0.5 s" in found


def test_all_are_told_who_did_not_come(address: str) -> None:
    found = outcomes(address, (0, 4), (2, 4), seconds=SOON)
    assert told(found, "those with node_rank 1, 3 did not come within 0.5 s, those with 0, 2 did", address)


def test_process_0_that_does_not_come_is_missed(address: str) -> None:
    [found] = outcomes(address, (1, 2), seconds=SOON)
    assert f"dist_init_addr {address}: process 0 was not reached within 0.5 s: " in found
    assert "refused" in found


def test_a_port_that_is_taken_is_named(address: str) -> None:
    port = int(address.rpartition(":")[2])
    with socket.create_server(("localhost", port)):
        [found] = outcomes(address, (0, 2))
    assert f"process 0 cannot listen on port {port} of this host: Address already in use" in found


def test_somebody_else_at_the_address_is_not_taken_for_process_0(address: str) -> None:
    with socket.create_server(("localhost", int(address.rpartition(":")[2]))) as server:

        def answer() -> None:
            with server.accept()[0] as connected:
                connected.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        threading.Thread(target=answer).start()
        [found] = outcomes(address, (1, 2))
    assert "something else than process 0 answers there" in found


def test_strangers_and_processes_that_were_started_again_keep_nobody_out(address: str) -> None:
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(outcomes, address, (0, 3))
        for greeting in (
            b"GET / HTTP/1.1\r\n",
            b"jradix 2 " + b"1" * 4000 + b" somewhere (pid 1)\n",
            b"jradix 3 1 somewhere (pid 1)\n",
            b"jradix 3 1 somewhere (pid 1)\n",
            b"",
        ):
            with stranger(address) as connected:
                connected.sendall(greeting)
        assert outcomes(address, (1, 3), (2, 3)) == [""] * 2
        assert first.result() == [""]
