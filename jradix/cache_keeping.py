"""Keeps an engine's prefix cache on disk between its lives: saves it, and restores it while requests run already."""

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jradix.cache.snapshot import Snapshot, take
from jradix.cache_files import Fingerprint, SavedCache, UnusableSnapshotError, is_storable, open_newest, write
from jradix.core import Core
from jradix.loop import Loop, ShutDownError
from jradix.model.config import ModelConfig
from jradix.runner import Runner

LOG = logging.getLogger(__name__)


def save(core: Core, model_config: ModelConfig, directory: Path) -> dict[str, Any]:
    """Write what the cache holds now; to be called on the engine's thread. Returns the numbers of the report.

    Raises:
        RuntimeError: the weights are of two kinds, after an update that failed.
        OSError: the directory cannot be written; then the snapshot that it held is still there.
    """
    if not core.weights_are_whole:
        raise RuntimeError("the cache cannot be saved after an update of the weights that failed: update them again")
    started = time.perf_counter()
    snapshot = take(core.cache.tree, core.cache.clock, is_storable)
    num_bytes, num_files = write(directory, fingerprint(core, model_config), snapshot, _contents(core.runner, snapshot))
    return {
        "pages": len(snapshot.pages),
        "tokens": len(snapshot.tokens),
        "bytes": num_bytes,
        "files": num_files,
        "seconds": time.perf_counter() - started,
    }


def _contents(runner: Runner, snapshot: Snapshot) -> Iterator[npt.NDArray[Any]]:
    for start in range(0, len(snapshot.pages), runner.transfer_pages):
        yield runner.read_pages(snapshot.pages[start : start + runner.transfer_pages])


def fingerprint(core: Core, model_config: ModelConfig) -> Fingerprint:
    """Everything beside the tokens that the content of a page depends on.

    The model's configuration field by field, some numbers of every parameter, and how a page is laid out.
    """
    layout = core.layout
    model = {f"model {name}": repr(value) for name, value in asdict(model_config).items()}
    return model | {
        "weights": core.runner.fingerprint(),
        "dtype": core.runner.pool.dtype.name,
        "page_size": layout.page_size,
        "layers": layout.layers,
        "kv_heads": layout.kv_heads,
        "head_dim": layout.head_dim,
        "joined pages": layout.joined,
    }


class Restorer:
    """A thread that reads a snapshot chunk by chunk, and has the engine's thread enter each between two steps.

    Until its chunk is there, a prefix is simply not cached, so that nothing waits for the disk.
    """

    def __init__(self, core: Core, model_config: ModelConfig, directory: Path) -> None:
        """Read the tree, before the core's first request. What cannot be used is logged, and nothing is restored."""
        self._thread: threading.Thread | None = None
        self._saved: SavedCache | None = None
        try:
            self._saved = open_newest(directory, fingerprint(core, model_config))
        except UnusableSnapshotError as error:
            LOG.warning("the prefix cache starts empty: %s", error)
        if self._saved is not None:
            core.begin_restoration(self._saved.snapshot)

    def start(self, core: Core, loop: Loop) -> None:
        """Begin to read pages."""
        if self._saved is not None:
            # A thread that is not waited for: at the exit of the interpreter what it reads is of no use.
            args = (core, loop, self._saved)
            self._thread = threading.Thread(target=_restore, args=args, name="jradix-restore", daemon=True)
            self._thread.start()
            self._saved = None  # it may be large

    def wait(self) -> None:
        """Return when everything is restored that will be."""
        if self._thread is not None:
            self._thread.join()


def _restore(core: Core, loop: Loop, saved: SavedCache) -> None:
    started, start, num_pages = time.perf_counter(), 0, 0
    try:
        for index in range(len(saved.chunks)):
            content = saved.read_chunk(index)
            taken = loop.call(partial(core.restore_pages, start, content))
            if taken is None:
                break
            num_pages += taken
            start += len(content)
    except ShutDownError:
        return
    except UnusableSnapshotError as error:
        LOG.warning("the rest of the saved prefix cache is left out: %s", error)
    except Exception:
        LOG.exception("the rest of the saved prefix cache is left out")
    seconds = time.perf_counter() - started
    total = int(np.sum(saved.snapshot.page_counts))
    LOG.info("restored %d of %d pages of the prefix cache in %.1f s", num_pages, total, seconds)
