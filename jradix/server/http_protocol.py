"""HTTP/1.1 as uvicorn has it with httptools, a parser in C, and the limit that it lacks on all that is no body."""

from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of a request's line, headers, framing and trailers, as with uvicorn's other parser; the body has its own limit."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. A client whose request has more than MAX_HEAD_BYTES beside its body gets 400 and is left.

    What comes in one read is counted when all of it was parsed, so a head may be longer by at most that.

    A client who wants another protocol gets HTTP/1.1, unless its request has a body: httptools takes it for the other
    protocol, and the part of it that comes in a read of its own for the next request.
    """

    _num_bytes = 0  # of the request that is being received, without those of its body

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request has more than {MAX_HEAD_BYTES} bytes beside its body.")

    def on_headers_complete(self) -> None:
        assert self.parser is not None, "it calls this"
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        if has_body and self.parser.should_upgrade():
            self.send_400_response("A request with a body must not ask for another protocol (Upgrade): use HTTP/1.1.")
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        if not self.transport.is_closing():  # else it was refused above, and nothing waits for it
            super().on_message_complete()
