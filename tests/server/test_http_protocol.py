"""What of a request is no body is limited: its line, its headers, what frames its pieces, its trailers.

And what is body is never taken for a request.
"""

import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from jradix.server.http_protocol import MAX_HEAD_BYTES
from tests.server.conftest import API_KEY

HEAD = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + "Transfer-Encoding: chunked\r\n\r\n"
ENDLESS_BYTES = 2**26  # far more than the sockets between hold
BODY = b'{"text": "a", "sampling_params": {"max_new_tokens": 1}}'


@pytest.fixture
def connection(url: str) -> Iterator[socket.socket]:
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        yield connection


def send_without_end(connection: socket.socket, start: bytes, piece: bytes) -> bytes:
    """What the server says before it closes the connection on one who sends and sends."""
    connection.sendall(start)
    answer = b""
    try:
        for _ in range(ENDLESS_BYTES // len(piece)):
            connection.sendall(piece)
        raise AssertionError("the server takes in whatever comes")
    except OSError:
        pass
    try:
        while data := connection.recv(2**16):
            answer += data
    except OSError:
        pass  # it closed while more was on its way, which resets the connection
    return answer


def receive(connection: socket.socket) -> bytes:
    """One answer, whose body is JSON."""
    answer = b""
    while not answer.rstrip().endswith(b"}"):
        data = connection.recv(2**16)
        assert data, answer
        answer += data
    return answer


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET /", b"a" * 1000),
        (b"GET /health HTTP/1.1\r\nX-Long: ", b"a" * 1000),
        (b"GET /health HTTP/1.1\r\n", b"".join(b"X-%d: %d\r\n" % (i, i) for i in range(100))),
        (CHUNKED.encode(), b"1;" + b"e" * 1000 + b"\r\n \r\n"),
        (CHUNKED.encode() + b"0\r\n", b"".join(b"X-%d: %d\r\n" % (i, i) for i in range(100))),
    ],
    ids=["line", "header", "headers", "chunk extensions", "trailers"],
)
def test_nothing_beside_a_body_may_grow_without_end(connection: socket.socket, start: bytes, piece: bytes) -> None:
    answer = send_without_end(connection, start, piece)
    assert not answer or answer.startswith(b"HTTP/1.1 400 ")


def test_a_long_head_is_told_its_limit(connection: socket.socket) -> None:
    connection.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * MAX_HEAD_BYTES)
    assert f"more than {MAX_HEAD_BYTES} bytes".encode() in connection.recv(2**16)


def test_bodies_in_pieces_and_one_request_after_another_are_not_counted(connection: socket.socket) -> None:
    """Together far above the limit, each far below."""
    padded = BODY[:-1] + b" " * (MAX_HEAD_BYTES // 2) + b"}"
    whole = (HEAD + f"X-Long: {'a' * (MAX_HEAD_BYTES // 2)}\r\nContent-Length: {len(padded)}\r\n\r\n").encode() + padded
    pieces = [padded[start : start + 1000] for start in range(0, len(padded), 1000)]
    chunks = CHUNKED.encode() + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    for request in (whole, chunks, whole, whole, chunks):
        connection.sendall(request)
        assert receive(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_a_body_behind_an_offer_of_another_protocol_is_read_as_a_body(connection: socket.socket, protocol: str) -> None:
    """In the same read as its head, in one of its own, and where it looks like a request."""
    offer = (
        f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    )
    inner = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for body, status in ((BODY, b"200"), (BODY, b"200"), (inner, b"400")):
        head = (HEAD + offer + f"Content-Length: {len(body)}\r\n\r\n").encode()
        for pieces in ([head + body], [head, body]):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.05)
            answer = receive(connection)
            assert answer.startswith(b"HTTP/1.1 " + status)
            assert answer.count(b"HTTP/1.1") == 1


def test_an_offer_is_taken_on_no_terms_that_others_are_not(connection: socket.socket) -> None:
    """Without a body, behind other requests, behind one that is still to be answered, and with a head too long."""
    request = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    for _ in range(2):
        connection.sendall(request + b"\r\n")
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200 ")
    connection.sendall(request + b"X-Long: " + b"a" * 2 * MAX_HEAD_BYTES)
    assert connection.recv(2**16).startswith(b"HTTP/1.1 4")


def test_an_offer_before_the_last_answer_is_refused(connection: socket.socket) -> None:
    first = (HEAD + f"Content-Length: {len(BODY)}\r\n\r\n").encode() + BODY
    connection.sendall(first + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
    assert connection.recv(2**16).startswith(b"HTTP/1.1 400 ")
