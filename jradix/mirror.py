"""Calls that all processes of an engine make: each is told to the other processes before it is made here."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, NamedTuple, Protocol


class MirroredCall(NamedTuple):
    """A call of a method of the runner, whose arguments are the host's: they can be pickled."""

    name: str
    arguments: tuple[Any, ...]


class Mirror:
    """Tells the calls, and knows whether one is being made.

    Attributes:
        has_others: whether there is anybody to be told.
        depth: of the mirrored calls that are being made, one within the other; of these the outermost alone is told,
            since it makes the others wherever it is made.
    """

    def __init__(self, tell: Callable[[MirroredCall], None] | None = None) -> None:
        """tell: sends a call to all other processes and does not wait for them; None if there are none to be told."""
        self._tell = tell
        self.has_others = tell is not None
        self.depth = 0
        self._lock = threading.RLock()  # calls are told in the order in which they are made, whatever the thread

    def __enter__(self) -> None:
        self._lock.acquire()
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self._lock.release()

    def tell(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Send a call, within `with mirror`, unless it is a part of another."""
        if self._tell is not None and self.depth == 1:
            self._tell(MirroredCall(name, arguments))


class Mirrored(Protocol):
    """An object whose calls are told."""

    mirror: Mirror


def mirrored[M: Mirrored, **P, R](method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """For a method that launches or compiles programs, or changes what they work on: all processes have to make it.

    Its arguments are given by place, and where there are other processes they must be what pickle can send.
    """

    @wraps(method)
    def told(self: M, *args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "arguments of a mirrored call are told by place"
        with self.mirror:
            self.mirror.tell(method.__name__, args)
            return method(self, *args, **kwargs)

    return told
