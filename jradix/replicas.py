"""The replicas of an engine, each a core with its loop; sends requests to one of them, and everything else to all."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jradix.cache_keeping import Restorer, save
from jradix.config import EngineConfig
from jradix.core import Core
from jradix.loop import Loop
from jradix.output import Output
from jradix.routing import Router
from jradix.startup import Parts


class Replicas:
    """One or more cores, each with devices, weights, KV pool, prefix tree, scheduler and thread of its own.

    A request lives on one of them, and a step that fails there is none of the others' business. With one replica there
    is no router, and nothing here costs more than a call.

    Attributes:
        cores: to be touched on their loops' threads, or under `Loop.hold`.
        loops: one for each core.
    """

    def __init__(self, config: EngineConfig, parts: Sequence[Parts]) -> None:
        """The cores. `start` makes their loops; until then the caller may touch them."""
        self.config, self._model_config = config, parts[0].model_config
        self.cores = [Core(config, part) for part in parts]
        self.loops: list[Loop] = []
        self._router = None
        if len(self.cores) > 1:
            self._router = Router(len(self.cores), config.page_size, parts[0].layout.num_pages - 1)
        self._restorers: list[Restorer] = []
        self._saving = threading.Lock()  # one save follows the other

    def __len__(self) -> int:
        return len(self.cores)

    def open_caches(self, directory: Path) -> None:
        """Read the trees that were saved there; `start` begins to restore their pages. Before any request."""
        for number, core in enumerate(self.cores):
            restorer = Restorer(core, self._model_config, directory_of(directory, number))
            self._restorers.append(restorer)
            if self._router is not None and restorer.snapshot is not None:
                for namespace, token_ids in restorer.snapshot.prefixes():
                    self._router.remember(number, token_ids, namespace)

    def start(self) -> None:
        """Begin to serve."""
        self.loops = [Loop(core) for core in self.cores]
        for core, loop, restorer in zip(self.cores, self.loops, self._restorers, strict=False):
            restorer.start(core, loop)

    def warm_up(self) -> float:
        """Compile every bucket, for all replicas at once, with progress bars; returns the seconds it took."""

        def compile_all(core: Core, number: int) -> float:
            name = "compiling" if len(self) == 1 else f"compiling for replica {number}"
            return core.runner.warm_up(lambda shapes: tqdm(shapes, desc=name, unit="program", position=number))

        with ThreadPoolExecutor(len(self)) as threads:
            return max(threads.map(compile_all, self.cores, range(len(self))))

    def submit(self, outputs: Sequence[Output]) -> Future[None]:
        """Queue requests, all of them or none, each on the replica that suits it best.

        The future fails as `Core.submit` does: then those that another replica has taken are aborted.

        Raises:
            ValueError: an id is taken by a live request, or these are more requests than may ever wait.
            ShutDownError: there is no replica any more.
        """
        limit = self.config.max_queued_requests
        if limit is not None and len(outputs) > limit * len(self):
            raise ValueError(
                f"prompts times n must be at most {limit * len(self)}, as so many requests may wait "
                f"(max_queued_requests), got {len(outputs)}: submit fewer at once, or raise the limit"
            )
        if self._router is None:
            return self.loops[0].send(partial(self.cores[0].submit, outputs))
        parts: dict[int, list[Output]] = {}
        for output, replica in zip(outputs, self._router.place([output.request for output in outputs]), strict=True):
            output.request.dp_rank = replica
            output.at_end = self._router.end  # which does not keep the loops alive, as a method of this would
            parts.setdefault(replica, []).append(output)
        try:
            futures = [self.loops[n].send(partial(self.cores[n].submit, part)) for n, part in parts.items()]
        except BaseException:
            self._undo(outputs)
            raise
        return gather(futures, lambda _: None, partial(self._undo, outputs))

    def _undo(self, outputs: Sequence[Output]) -> None:
        assert self._router is not None
        self.abandoning(outputs)()  # before their ids are free, so that whoever takes one comes behind
        for output in outputs:
            self._router.end(output.request)

    def abandoning(self, outputs: Sequence[Output]) -> Callable[[], None]:
        """What a caller who stops waiting calls, from any thread or finalizer: it aborts those that are still alive.

        Made before: at the exit of the interpreter names are gone.
        """
        pairs = zip(self.loops, self.cores, strict=True)
        posts = [partial(loop.post, partial(core.abandon, outputs)) for loop, core in pairs]

        def abandon() -> None:
            for post in posts:
                post()

        return abandon

    def send_each[T, R](self, function: Callable[[Core], T], combine: Callable[[list[T]], R]) -> Future[R]:
        """Run `function` on the thread of each core, between two steps; the future has their results combined.

        Raises:
            ShutDownError: there are no such threads any more.
        """
        return gather(
            [loop.send(partial(function, core)) for loop, core in zip(self.loops, self.cores, strict=True)], combine
        )

    def call_each[T](self, function: Callable[[Core], T]) -> list[T]:
        """As `send_each`, and wait for the results."""
        return self.send_each(function, list).result()

    @contextmanager
    def hold_all(self) -> Iterator[list[Core]]:
        """Keep all loops between two steps: taken in this order by everybody, so that nobody waits for ever."""
        with ExitStack() as held:
            yield [held.enter_context(loop.hold()) for loop in self.loops]

    def flush_cache(self) -> int:
        """See `Engine.flush_cache`."""
        self.forget()
        return sum(self.call_each(Core.flush_cache))

    def forget(self) -> None:
        """Send no request anywhere for a prefix that was cached until now."""
        if self._router is not None:
            self._router.forget()

    def save_caches(self, directory: Path) -> list[dict[str, Any]]:
        """Save what each replica has cached, one after the other, see `cache_keeping.save`."""
        for restorer in self._restorers:
            restorer.wait()  # else what it has not restored yet would be lost
        with self._saving:
            return [
                save(core, loop, self._model_config, directory_of(directory, number))
                for number, (core, loop) in enumerate(zip(self.cores, self.loops, strict=True))
            ]

    @property
    def stalled_seconds(self) -> float:
        """See `Core.stalled_seconds`: of the replica that has been so for longest."""
        return max(core.stalled_seconds for core in self.cores)

    def close(self) -> None:
        """End every live request as aborted, then the threads."""
        for loop in self.loops:
            loop.close()


def directory_of(directory: Path, replica: int) -> Path:
    """Where a replica's cache is kept. The first has the place of an engine with only one, and so its snapshot."""
    return directory if not replica else directory / f"replica-{replica}"


def gather[T, R](
    futures: Sequence[Future[T]], combine: Callable[[list[T]], R], undo: Callable[[], None] | None = None
) -> Future[R]:
    """The combined results of all, once all are done; or the first error among them, after `undo`."""
    gathered: Future[R] = Future()
    gathered.set_running_or_notify_cancel()  # it cannot be cancelled, as little as what runs already
    num_left, counting = len(futures), threading.Lock()

    def count(_: Future[T]) -> None:
        nonlocal num_left
        with counting:
            num_left -= 1
            if num_left:
                return
        try:
            gathered.set_result(combine([future.result() for future in futures]))
        except BaseException as error:
            if undo is not None:
                undo()
            gathered.set_exception(error)

    for future in futures:
        future.add_done_callback(count)
    return gathered
