"""Finds, in a text that comes piece by piece, the stop string or regular expression that ends it."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_BURST_SECONDS, _SECONDS_PER_PIECE = 0.5, 2e-4
"""What the search for regular expressions may cost one text: this much at once, and so much a piece in the long run. A
usual one takes some 10 µs a piece; one that backtracks without end must not hold up everybody else's tokens."""


class _Found(NamedTuple):
    """A match of `source` at characters [start, end), which shows once the text has `length` characters."""

    length: int
    start: int
    end: int
    source: str


class StopFinder:
    """Passes a text on until a stop appears in it, and no character that may belong to one before that is clear.

    A string appears with its last character. A regular expression appears in the shortest beginning of the text in
    which `search` finds it, with all characters before it in view, and none behind: an anchor or a lookahead at its end
    sees the end of the text so far. Whatever appears first ends the text. So the outcome depends on the text alone, not
    on the pieces. Of stops that appear together the one that begins first counts.

    Attributes:
        stopped: The string or the regular expression that was found, else None.
        error: Why the search was given up, else None. From then on there are no stops.
    """

    def __init__(self, strings: Sequence[str] = (), expressions: Sequence[str] = (), *, keep: bool = False) -> None:
        """`keep` leaves the match in the text instead of cutting before it."""
        assert all(strings), "an empty stop string ends every text"
        self._strings = tuple(strings)
        self._patterns = _compiled(expressions)
        self._keep = keep
        self._text = ""
        self._num_passed = 0  # characters of it that have been passed on
        self._seconds_left = _BURST_SECONDS
        self.stopped: str | None = None
        self.error: str | None = None

    def add(self, piece: str) -> str:
        """Takes the next piece; returns what no stop can begin in any more, or what precedes the stop found."""
        if not piece or not (self._strings or self._patterns):
            return piece
        assert self.stopped is None, "the text has ended"
        old_length = len(self._text)
        self._text += piece
        self._seconds_left = min(_BURST_SECONDS, self._seconds_left + _SECONDS_PER_PIECE)
        try:
            found = [*self._found_strings(), *self._found_expressions(old_length)]
            if found:
                _, start, end, self.stopped = min(found)
                return self._pass_on(end if self._keep else start)
            return self._pass_on(min(self._possible_starts()))
        except TimeoutError:
            self.error = (
                f"looking for stop_regex {[p.pattern for p in self._patterns]} takes too long: it may cost "
                f"{_BURST_SECONDS} s of a request; use expressions that backtrack less"
            )
            self._strings = self._patterns = ()
            return self._pass_on(len(self._text))

    def finish(self) -> str:
        """Returns what was held back."""
        return "" if self.stopped is not None else self._pass_on(len(self._text))

    def _pass_on(self, end: int) -> str:
        piece = self._text[self._num_passed : end]
        self._num_passed = end
        return piece

    def _found_strings(self) -> Iterator[_Found]:
        for stop in self._strings:
            start = self._text.find(stop, self._num_passed)
            if start >= 0:
                yield _Found(start + len(stop), start, start + len(stop), stop)

    def _found_expressions(self, old_length: int) -> Iterator[_Found]:
        for pattern in self._patterns:
            for length in range(old_length + 1, len(self._text) + 1):
                match = self._search(pattern, length)
                if match is not None:
                    yield _Found(length, match.start(), match.end(), pattern.pattern)
                    break

    def _possible_starts(self) -> Iterator[int]:
        """The first character of what may become a stop, for each, and the end of the text."""
        end = len(self._text)
        yield end
        for stop in self._strings:
            yield end - _overlap(self._text, stop, end - self._num_passed)
        for pattern in self._patterns:
            match = self._search(pattern, end, partial=True)
            if match is not None:
                yield match.start()

    def _search(self, pattern: Any, length: int, *, partial: bool = False) -> Any:
        """Searches the first `length` characters; raises `TimeoutError` when the time is spent."""
        began = time.perf_counter()
        match = pattern.search(self._text, self._num_passed, length, partial=partial, timeout=self._seconds_left)
        self._seconds_left -= time.perf_counter() - began
        if self._seconds_left <= 0:
            raise TimeoutError
        return match


def _compiled(expressions: Sequence[str]) -> tuple[Any, ...]:
    if not expressions:
        return ()
    import regex  # its 20 ms are for those who need it

    return tuple(regex.compile(expression) for expression in expressions)


def _overlap(text: str, stop: str, most: int) -> int:
    """How many characters at the end of the text, of the last `most`, begin the stop string."""
    longest = min(most, len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
