"""HTTP/1.1 as uvicorn has it with httptools, a parser in C, and the limit that it lacks on all that is no body."""

from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of a request's line, headers, framing and trailers, as with uvicorn's other parser; the body has its own limit."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. A client whose request has more than MAX_HEAD_BYTES beside its body gets 400 and is left.

    What comes in one read is counted when all of it was parsed, so a head may be longer by at most that.
    """

    _num_bytes = 0  # of the request that is being received, without those of its body

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request has more than {MAX_HEAD_BYTES} bytes beside its body.")

    def on_body(self, body: bytes) -> None:
        self._num_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        super().on_message_complete()
