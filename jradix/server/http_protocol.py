"""HTTP/1.1 as uvicorn has it with httptools, a parser in C; here are the limit and the care for bodies it lacks."""

from typing import Final

import httptools
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of a request's line, headers, framing and trailers, as with uvicorn's other parser; the body has its own limit."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. A client whose request has more than MAX_HEAD_BYTES beside its body gets 400 and is left.

    What comes in one read is counted when all of it was parsed, so a head may be longer by at most that.

    A request may offer to go on in another protocol (`Upgrade`), as Java's client does with its first. httptools would
    take its body for that protocol, or for the next request, so the connection goes on with h11, which reads it as it
    is meant. Nobody's offer is accepted.
    """

    _num_bytes = 0  # of the request that is being received, without those of its body

    def data_received(self, data: bytes) -> None:
        assert self.parser is not None, "it is there until the connection is lost"
        self._num_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._go_on_with_h11(data[offer.args[0] :])
            return
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._num_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request has more than {MAX_HEAD_BYTES} bytes beside its body.")

    def on_body(self, body: bytes) -> None:
        self._num_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        super().on_message_complete()

    def _should_upgrade(self) -> bool:
        """Asked about each request with an offer: whether it is to be left alone here."""
        return True

    def _go_on_with_h11(self, rest: bytes) -> None:
        """With the request of which the head was just read, and what came behind it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.send_400_response("A request with an Upgrade header must wait for the answer to the one before.")
            return
        assert self.parser is not None, "it has just read the head"
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", self.parser.get_http_version().encode(), b"\r\n"]
        for name, value in self.headers:
            head += [name, b": ", value, b"\r\n"]
        protocol = H11Protocol(self.config, self.server_state, self.app_state)
        self.connections.discard(self)
        protocol.connection_made(self.transport)
        self.transport.set_protocol(protocol)
        protocol.data_received(b"".join([*head, b"\r\n", rest]))
