"""Reads a snapshot of the prefix cache piece by piece, while steps between the pieces overwrite what they need to."""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from jradix.cache.prefix_cache import PrefixCache
from jradix.cache.snapshot import take
from jradix.cache.unread import UnreadPages
from jradix.runner import Runner


class InterruptedSaveError(RuntimeError):
    """The content of a snapshot cannot be read to the end, or is wanted no more."""


class SnapshotReader:
    """What a cache held when this was made. It belongs to the core's thread, and there is one for a cache at a time.

    Nothing is locked: requests take what room they need, and pages that they take are read before, out of turn.

    Attributes:
        snapshot: the tree, and where its pages were.
    """

    def __init__(self, cache: PrefixCache, runner: Runner, is_wanted: Callable[[Hashable], bool]) -> None:
        self.snapshot = take(cache.tree, cache.clock, is_wanted)
        self._cache, self._runner = cache, runner
        self._unread = cache.unread = UnreadPages(self.snapshot.pages, cache.num_total)
        self._kept: dict[int, npt.NDArray[Any]] = {}  # what was read out of turn, by its place in the snapshot
        self._ended_by = ""

    def keep_endangered(self) -> None:
        """Read the pages that steps to be launched from now on may write to."""
        places = self._unread.take_endangered()
        for start in range(0, len(places), self._runner.transfer_pages):
            part = places[start : start + self._runner.transfer_pages]
            content = self._runner.read_pages(self.snapshot.pages[part])
            self._kept |= zip(part.tolist(), map(np.copy, content), strict=True)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The content of pages `[start, stop)` of the snapshot, at most `Runner.transfer_pages`, each to be read once.

        Raises:
            InterruptedSaveError: `end` was called.
        """
        if self._ended_by:
            raise InterruptedSaveError(f"the cache was not saved, because meanwhile {self._ended_by}: save it again")
        pages = self.snapshot.pages[start:stop]
        content = self._runner.read_pages(pages)
        self._unread.forget(pages)
        kept = [place for place in range(start, stop) if place in self._kept]
        if kept:
            content = content.copy()
            for place in kept:
                content[place - start] = self._kept.pop(place)
        return content

    def end(self, reason: str) -> None:
        """Let go of the cache; nothing more can be read."""
        self._ended_by = reason
        self._kept.clear()
        self._cache.unread = None
