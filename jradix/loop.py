"""The thread on which an engine's core runs; other threads send it calls, which it makes between two steps."""

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from jradix.core import Core

LOG = logging.getLogger(__name__)

type Call = tuple[Callable[[], Any], Future[Any] | None]
"""A function, and where its result goes; None if nobody waits for it."""


class ShutDownError(RuntimeError):
    """The engine has been shut down, or its loop has broken down."""


class Loop:
    """Owns the one thread that may touch the core, so that nothing in the core needs a lock.

    The thread makes the calls that were sent, then steps as long as there is work, and otherwise sleeps. It ends with
    `close`, when the loop is garbage, and before the interpreter exits.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._over = threading.Event()  # nobody makes the calls any more
        self._sending = threading.Lock()
        thread = threading.Thread(target=_run, args=(core, self._calls, self._over), name="jradix", daemon=True)
        self._end = weakref.finalize(self, _end, self._calls, thread)
        atexit.register(self._end)  # before jax's own end: a finalizer's turn may come after it
        thread.start()

    def call[T](self, function: Callable[[], T]) -> T:
        """Run `function` on the loop's thread, between two steps; return its result or raise its exception."""
        return self.send(function).result()

    def send[T](self, function: Callable[[], T]) -> Future[T]:
        """As `call`, without waiting for the result."""
        future: Future[T] = Future()
        with self._sending:
            if not self._end.alive:
                raise ShutDownError("the engine has been shut down: make another one")
            self._calls.put((function, future))
        if self._over.is_set():  # looked at after the put: either the thread has seen the call, or we see this
            _refuse_rest(self._calls)
        return future

    def post(self, function: Callable[[], Any]) -> None:
        """Run `function` soon. May be called by a finalizer, which runs in any thread and at any moment."""
        self._calls.put((function, None))

    @contextmanager
    def hold(self) -> Iterator[Core]:
        """Keep the loop between two steps and lend its core to this thread, which must not call or send meanwhile.

        Raises:
            ShutDownError: there is no loop any more.
        """
        held, released = threading.Event(), threading.Event()

        def wait() -> None:
            held.set()
            released.wait()

        future = self.send(wait)
        future.add_done_callback(lambda _: held.set())  # also if the call is never made
        try:
            held.wait()
            if future.done():
                future.result()
            yield self._core
        finally:
            released.set()

    def close(self) -> None:
        """End every live request as aborted, then the thread. Does nothing the second time."""
        with self._sending:
            self._end()


def _end(calls: SimpleQueue[Call | None], thread: threading.Thread) -> None:
    calls.put(None)
    if thread is not threading.current_thread():
        thread.join()


def _run(core: Core, calls: SimpleQueue[Call | None], over: threading.Event) -> None:
    """Make calls and steps until the call None. A function, not a method: the thread must not keep the loop alive."""
    try:
        while True:
            try:
                call = calls.get(block=not core.can_step, timeout=core.seconds_to_deadline())
            except Empty:
                core.turn()
                continue
            if call is None:
                break
            _make(*call)
            del call  # it may hold the last reference to what the caller has thrown away
    except BaseException:
        LOG.exception("the engine's loop has broken down")
    finally:
        try:
            core.close()
        except BaseException:
            LOG.exception("the engine could not end its requests")
        over.set()
        _refuse_rest(calls)


def _make(function: Callable[[], Any], future: Future[Any] | None) -> None:
    if future is not None and not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        if future is None:
            LOG.exception("a call to the engine's loop has failed")
        else:
            future.set_exception(error)
    else:
        if future is not None:
            future.set_result(result)


def _refuse_rest(calls: SimpleQueue[Call | None]) -> None:
    while True:
        try:
            call = calls.get_nowait()
        except Empty:
            return
        if call is not None and call[1] is not None and call[1].set_running_or_notify_cancel():
            call[1].set_exception(ShutDownError("the engine has been shut down: make another one"))
