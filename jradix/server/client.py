"""The engine process as the HTTP process sees it: started, called, listened to, and missed when it dies."""

import asyncio
import itertools
import logging
import multiprocessing
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

from jradix.config import EngineConfig
from jradix.sampling_params import SamplingParams
from jradix.server.engine_process import main
from jradix.server.generation import Generation, Sample
from jradix.server.messages import Abandon, Answer, Call, Change, Follows, NotReady, Ready, Submit
from jradix.tokenizer import Tokenizer, load_tokenizer

LOG = logging.getLogger(__name__)
_SECONDS_TO_END = 10
_SECONDS_TO_SAVE = 600
"""How long the engine process may take to end where it saves its cache. One that hangs does not begin to."""

type EngineMain = Callable[[EngineConfig, Connection, str], None]
"""What an engine process runs, given the configuration, its end of the pipe, and the level of its log."""


class EngineDeadError(RuntimeError):
    """The engine process has ended, and with it all requests."""


class EngineClient:
    """One engine process, and what this process waits for from it.

    All methods but `start` and `stop` belong to the event loop's thread. Two threads more do the reading and writing,
    so that neither a full pipe nor an empty one stops the loop.

    Attributes:
        info: what `Engine.get_server_info` said when the engine had started.
        tokenizer: the same as the engine's; text is made here, so that the engine's process has its time for steps.
        dead: the process has ended by itself.
    """

    def __init__(self, process: BaseProcess, connection: Connection, ready: Ready) -> None:
        self._process, self._connection = process, connection
        self.info = ready.info
        self.tokenizer: Tokenizer | None = None
        if ready.tokenizer_path is not None:
            self.tokenizer = load_tokenizer(ready.tokenizer_path)
        self.dead = self._stopping = self._listening = False
        self._keys = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._generations: dict[int, Generation] = {}
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._tell_death: Callable[[], None] = lambda: None

    @classmethod
    def start(cls, config: EngineConfig, log_level: str = "info", engine_main: EngineMain = main) -> "EngineClient":
        """Start an engine process, and wait until its model is loaded, or, if it follows another, until it has ended.

        Raises:
            SystemExit: it has followed another; status 0 if that was shut down.
            ValueError: the configuration or the model's files are wrong.
            EngineDeadError: the process ended before it was ready.
        """
        context = multiprocessing.get_context("spawn")  # a fork would share locks of threads that it does not have
        ours, theirs = context.Pipe()
        process = context.Process(
            target=engine_main, args=(config, theirs, log_level), name="jradix-engine", daemon=True
        )
        process.start()
        theirs.close()  # so that its end shows here
        try:
            [first] = ours.recv()
            if isinstance(first, NotReady):
                raise ValueError(first.message)
            if isinstance(first, Follows):
                _wait_for(process)
                sys.exit(1 if process.exitcode else 0)
            return cls(process, ours, first)
        except EOFError:
            process.join(_SECONDS_TO_END)
            raise EngineDeadError(f"the engine process ended before it was ready, status {process.exitcode}") from None
        except BaseException:
            process.kill()
            raise

    def listen(self, tell_death: Callable[[], None]) -> None:
        """Begin to work, in the event loop that runs, and tell if the process dies."""
        self._tell_death, self._listening = tell_death, True
        loop = asyncio.get_running_loop()
        for target, arguments in ((self._read, (loop,)), (self._write, ())):
            threading.Thread(target=target, args=arguments, name=f"jradix{target.__name__}", daemon=True).start()

    @property
    def num_generations(self) -> int:
        """How many submissions have outputs that have not ended."""
        return len(self._generations)

    async def submit(
        self,
        input_ids: Sequence[Any],
        params: Sequence[SamplingParams],
        options: Mapping[str, Any],
        *,
        each_token: bool,
        tell_end: Callable[[Sample], None] | None = None,
    ) -> Generation:
        """Queue requests, and wait until the engine has taken them. `tell_end` is called with each that has ended.

        Raises:
            ValueError: it refuses one of them, and so all.
            QueueFullError: too many wait already.
            EngineDeadError: there is no engine any more.
        """
        key = next(self._keys)
        generation = Generation(params, self.tokenizer, lambda: self._outbox.put(Abandon(key)), tell_end)
        try:
            answer = self._answer_to(Submit(key, input_ids, params, options, each_token))
            self._generations[key] = generation  # until all of it has ended, whether somebody waits for that or not
            await answer
        except asyncio.CancelledError:
            generation.close()
            raise
        return generation

    async def call(self, name: str, *arguments: Any) -> Any:
        """Run a function of the engine process, see there.

        Raises:
            EngineDeadError: there is no engine any more.
        """
        return await self._answer_to(Call(next(self._keys), name, arguments))

    def stop(self) -> None:
        """End the process: requests that are alive are aborted. Blocks for seconds at most, or to save the cache."""
        self._stopping = True
        if self._listening:
            self._outbox.put(None)
        else:
            self._connection.send(None)
        self._process.join(_SECONDS_TO_END if self.info["cache_dir"] is None else _SECONDS_TO_SAVE)
        if self._process.is_alive():
            LOG.warning("the engine process does not end, and is killed")
            self._process.kill()
            self._process.join()

    def _answer_to(self, message: Submit | Call) -> asyncio.Future[Any]:
        if self.dead:
            raise EngineDeadError(self._epitaph())
        answer = asyncio.get_running_loop().create_future()
        self._answers[message.key] = answer
        self._outbox.put(message)
        return answer

    def _take(self, messages: Sequence[Answer | Change]) -> None:
        for message in messages:
            if isinstance(message, Answer):
                self._take_answer(message)
            elif (generation := self._generations.get(message.key)) is not None:
                generation.take(message)
                if not generation.num_unfinished:
                    del self._generations[message.key]

    def _take_answer(self, answer: Answer) -> None:
        if answer.error is not None:
            self._generations.pop(answer.key, None)
        future = self._answers.pop(answer.key, None)
        if future is None or future.done():
            return  # who asked has gone
        if answer.error is None:
            future.set_result(answer.value)
        else:
            future.set_exception(answer.error)

    def _die(self) -> None:
        """Tell everybody who waits that nothing will come."""
        self.dead = True
        error = EngineDeadError(self._epitaph())
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)
        for generation in self._generations.values():
            generation.fail(error)
        self._generations.clear()
        self._tell_death()

    def _epitaph(self) -> str:
        return f"the engine process has ended, status {self._process.exitcode}: the server has to be started again"

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                loop.call_soon_threadsafe(self._take, self._connection.recv())
        except (EOFError, OSError):
            if not self._stopping:
                self._process.join(_SECONDS_TO_END)
                loop.call_soon_threadsafe(self._die)
        except RuntimeError:
            LOG.debug("the event loop is closed, and nobody waits any more")

    def _write(self) -> None:
        try:
            while True:
                message = self._outbox.get()
                self._connection.send(message)
                if message is None:
                    return
        except OSError:
            LOG.debug("the engine process reads no more")


def _wait_for(follower: BaseProcess) -> None:
    """Until it ends. The first signal is passed over: it may have been sent to all processes, and the first of them
    needs this one for the requests that it lets end."""
    try:
        follower.join()
    except (KeyboardInterrupt, SystemExit):
        LOG.warning("this process ends when process 0 does; the next signal ends it, and all others, at once")
        follower.join()
