"""Work that ends when its client goes: what nobody will read is not computed."""

import asyncio
from collections.abc import Awaitable

from starlette.types import Receive

from jradix.server import errors
from jradix.server.errors import RequestError


class ClientGoneError(RequestError):
    """The client has closed its connection: nobody reads the answer."""

    def __init__(self) -> None:
        super().__init__(errors.CLIENT_GONE, "the client has closed the connection")


async def unless_gone[T](receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client closes its connection.

    receive: of a request whose body has been read.

    Raises:
        ClientGoneError: it has.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
