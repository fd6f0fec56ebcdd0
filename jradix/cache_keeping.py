"""Keeps an engine's prefix cache on disk between its lives: saves it, and restores it while requests run already."""

import logging
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jradix.cache.snapshot import Snapshot
from jradix.cache_files import Fingerprint, SavedCache, UnusableSnapshotError, is_storable, open_newest, write
from jradix.core import Core
from jradix.loop import Loop, ShutDownError
from jradix.model.config import ModelConfig
from jradix.snapshot_reader import SnapshotReader

LOG = logging.getLogger(__name__)


def save(core: Core, loop: Loop, model_config: ModelConfig, directory: Path) -> dict[str, Any]:
    """Write what the cache holds now; not to be called on the engine's thread. Returns the numbers of the report.

    The engine's thread reads a chunk of pages between two steps, and this one writes it before it asks for the next.

    Raises:
        RuntimeError: the weights are of two kinds, after an update that failed; or `SnapshotReader.end` says why.
        ShutDownError: the engine is shut down.
        OSError: the directory cannot be written. After any error the snapshot that it held is still there.
    """
    started = time.perf_counter()
    reader, about = loop.call(partial(_begin, core, model_config))
    snapshot = reader.snapshot

    def read(start: int, stop: int) -> npt.NDArray[Any]:
        return loop.call(partial(reader.read, start, stop))

    try:
        num_bytes, num_files = write(directory, about, snapshot, read, core.runner.transfer_pages)
    finally:
        loop.post(partial(core.end_reading, reader))
    return {
        "pages": len(snapshot.pages),
        "tokens": len(snapshot.tokens),
        "bytes": num_bytes,
        "files": num_files,
        "seconds": time.perf_counter() - started,
    }


def _begin(core: Core, model_config: ModelConfig) -> tuple[SnapshotReader, Fingerprint]:
    if not core.weights_are_whole:
        raise RuntimeError("the cache cannot be saved after an update of the weights that failed: update them again")
    return core.begin_reading(is_storable), fingerprint(core, model_config)


def fingerprint(core: Core, model_config: ModelConfig) -> Fingerprint:
    """Everything beside the tokens that the content of a page depends on, whatever the devices.

    That is the model's configuration field by field, some numbers of every parameter, and the type, scales and size
    of a page.
    """
    model = {f"model {name}": repr(value) for name, value in asdict(model_config).items()}
    return model | {
        "weights": core.runner.fingerprint(),
        "dtype": core.runner.pool.dtype.name,
        "KV scales": core.runner.scales_fingerprint(),
        "page_size": core.layout.page_size,
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

    @property
    def snapshot(self) -> Snapshot | None:
        """What will be restored; None if that is nothing, and after `start`."""
        return None if self._saved is None else self._saved.snapshot

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
