"""The log-probabilities that one request has asked for: which are known, and how a result gives them."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

type Entry = tuple[float | None, int, str | None]
"""Log-probability, token id, and the token's text if asked for. A prompt's first token has no log-probability."""


class LogprobRows(Protocol):
    """Log-probabilities of `n` tokens, see `logprobs.Logprobs`."""

    @property
    def chosen(self) -> npt.NDArray[np.float32]: ...  # [n]

    @property
    def top(self) -> npt.NDArray[np.float32]: ...  # [n, width]

    @property
    def top_ids(self) -> npt.NDArray[np.int32]: ...  # [n, width]

    @property
    def given(self) -> npt.NDArray[np.float32]: ...  # [n, width]


class TokenLogprobs:
    """One request's, from prompt position `start` on, and of its output.

    Attributes:
        start: `prompt_len` if only those of the output are wanted.
        num_top, given_ids: how many of the likeliest tokens, and which other ids, to give at each position.
        with_texts: give the tokens' texts too.
        first_unknown: all wanted prompt positions before it are known, or will be when the planned steps are collected.
    """

    def __init__(
        self,
        prompt_ids: npt.NDArray[np.int32],
        start: int,
        num_top: int,
        given_ids: Sequence[int],
        *,
        with_texts: bool = False,
    ) -> None:
        self.start, self.num_top, self.given_ids, self.with_texts = start, num_top, given_ids, with_texts
        self._prompt_ids = prompt_ids
        self.first_unknown = max(start, 1)
        count = len(prompt_ids) - start
        self._prompt = np.full(count, np.nan, np.float32)
        self._prompt_top: list[list[tuple[float, int]] | None] = [None] * count
        self._prompt_given: list[list[tuple[float, int]] | None] = [None] * count
        self._output: list[float] = []
        self._output_top: list[list[tuple[float, int]]] = []
        self._output_given: list[list[tuple[float, int]]] = []

    def fresh(self) -> "TokenLogprobs":
        """The same wishes of another request with this prompt."""
        return TokenLogprobs(self._prompt_ids, self.start, self.num_top, self.given_ids, with_texts=self.with_texts)

    @property
    def wants_more_than_the_token(self) -> bool:
        """Whether other tokens' log-probabilities are wanted too, which nobody keeps."""
        return bool(self.num_top or self.given_ids)

    def planned(self, end: int) -> None:
        """A step that computes the tokens before `end` is on its way."""
        self.first_unknown = max(self.first_unknown, end + 1)

    def take_kept(self, values: npt.NDArray[np.float32]) -> None:
        """Take what is kept of the prompt from `first_unknown` on, as far as it is known (not NaN)."""
        unknown = np.isnan(values)
        count = int(unknown.argmax()) if unknown.any() else len(values)
        first = self.first_unknown - self.start
        self._prompt[first : first + count] = values[:count]
        self.first_unknown += count

    def take_prompt(self, position: int, rows: LogprobRows) -> None:
        """Take those of the prompt's tokens from `position` on."""
        first = position - self.start
        self._prompt[first : first + len(rows.chosen)] = rows.chosen
        for index in range(len(rows.chosen)):
            self._prompt_top[first + index] = self._top_of(rows, index)
            self._prompt_given[first + index] = self._given_of(rows, index)

    def take_output(self, rows: LogprobRows, index: int) -> None:
        """Take those of the next output token, which are `rows[index]`."""
        self._output.append(float(rows.chosen[index]))
        self._output_top.append(self._top_of(rows, index))
        self._output_given.append(self._given_of(rows, index))

    def as_meta(self, output_ids: Sequence[int], decode: Callable[[int], str] | None, first: int = 0) -> dict[str, Any]:
        """The entries of `meta_info`, named as SGLang does: those of the prompt, and of `output_ids` from `first` on.

        decode: gives a token's text.
        """

        def entry(value: float | None, token_id: int) -> Entry:
            return value, token_id, decode(token_id) if self.with_texts and decode is not None else None

        def entries(found: Sequence[list[tuple[float, int]] | None]) -> list[list[Entry] | None]:
            return [None if row is None else [entry(*pair) for pair in row] for row in found]

        new = slice(first, len(output_ids))
        ids = self._prompt_ids[self.start :].tolist()
        values = [None if np.isnan(value) else float(value) for value in self._prompt]
        meta: dict[str, Any] = {
            "input_token_logprobs": [entry(*pair) for pair in zip(values, ids, strict=True)],
            "output_token_logprobs": [entry(*pair) for pair in zip(self._output[new], output_ids[new], strict=True)],
        }
        if self.num_top:
            meta["input_top_logprobs"] = entries(self._prompt_top)
            meta["output_top_logprobs"] = entries(self._output_top[new])
        if self.given_ids:
            meta["input_token_ids_logprobs"] = entries(self._prompt_given)
            meta["output_token_ids_logprobs"] = entries(self._output_given[new])
        return meta

    def _top_of(self, rows: LogprobRows, index: int) -> list[tuple[float, int]]:
        pairs = zip(rows.top[index, : self.num_top].tolist(), rows.top_ids[index].tolist(), strict=False)
        return [pair for pair in pairs if pair[1] >= 0]

    def _given_of(self, rows: LogprobRows, index: int) -> list[tuple[float, int]]:
        return list(zip(rows.given[index].tolist(), self.given_ids, strict=False))
