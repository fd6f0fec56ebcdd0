"""The progress bar of a large batch, and the line about the prefix cache that ends it."""

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from tqdm.auto import tqdm

from jradix.offline import BatchPlan

SHOWN_FROM = 32
"""Requests from which on a batch shows a bar without being asked: fewer are done while one looks."""


class BatchProgress:
    """Shows how many requests of a batch have ended, tokens a second, and the share of prompt tokens that was cached.

    A context manager. On leaving it, the bar stays, and if all requests have ended, a line says what the cache saved.
    Everything goes to stderr, or in a notebook to a widget and stderr.
    """

    def __init__(
        self,
        num_requests: int,
        plan: BatchPlan | None = None,
        *,
        show: bool | None = None,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """plan: what was expected of the cache, for the last line.

        show: None shows a bar for at least `SHOWN_FROM` requests, on a terminal or in a notebook.
        file: instead of stderr. clock: seconds.
        """
        self._file = file if file is not None else sys.stderr
        if show is None:
            show = num_requests >= SHOWN_FROM and (self._file.isatty() or _in_notebook())
        self.shown = show
        self._plan, self._clock, self._start = plan, clock, clock()
        self._num_requests, self._num_ended = num_requests, 0
        self._prompt_tokens = self._output_tokens = self._cached_tokens = 0
        self._bar = tqdm(
            total=num_requests, desc="prompts", unit="prompt", file=self._file, disable=not show, dynamic_ncols=True
        )

    def add(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> None:
        """A request has ended. `cached_tokens`, which it did not compute, are part of `prompt_tokens`."""
        self._num_ended += 1
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens
        self._cached_tokens += cached_tokens
        if self.shown:
            self._bar.set_postfix_str(self.rates(), refresh=False)
            self._bar.update()

    def rates(self) -> str:
        """Of the requests that have ended; prompt tokens count whether computed or cached."""
        seconds = max(self._clock() - self._start, 1e-9)
        return (
            f"in {self._prompt_tokens / seconds:,.0f} tok/s, out {self._output_tokens / seconds:,.0f} tok/s, "
            f"cached {_percent(self._cached_tokens, self._prompt_tokens)}"
        )

    def summary(self) -> str:
        """What the cache saved, beside what was predicted and what would have been possible."""
        achieved = f"achieved {_percent(self._cached_tokens, self._prompt_tokens)}"
        if self._plan is None:
            return f"prefix cache: {achieved} of prompt tokens"
        predicted, bound = (_percent(hit, self._plan.prompt_tokens) for hit in (self._plan.predicted, self._plan.bound))
        return f"prefix cache: predicted {predicted}, {achieved}, bound {bound} of prompt tokens"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        if self.shown and self._num_ended == self._num_requests:
            print(self.summary(), file=self._file)


def _percent(part: int, whole: int) -> str:
    return f"{part / max(1, whole):.1%}"


def _in_notebook() -> bool:
    """There stderr is no terminal, but a bar is shown well."""
    return "ipykernel" in sys.modules
