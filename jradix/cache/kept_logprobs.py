"""Log-probabilities of cached tokens, kept beside their pages, so that prompts that hit need not compute them again."""

import numpy as np
import numpy.typing as npt


class KeptLogprobs:
    """For each slot the log-probability of its token, given all tokens before it; NaN where nobody has asked.

    A page of the tree stands for one sequence of tokens, so its values hold for whoever hits it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """4 bytes a token of the pool."""
        self._page_size = page_size
        self._values = np.full((num_pages + 1, page_size), np.nan, np.float32)

    def forget(self, pages: npt.NDArray[np.int32]) -> None:
        """These pages get other tokens."""
        self._values[pages] = np.nan

    def copy_head(self, source: int, target: int, num_tokens: int) -> None:
        """The first `num_tokens` tokens of page `source` have been copied to page `target`."""
        self._values[target, :num_tokens] = self._values[source, :num_tokens]

    def read(self, page_table: npt.NDArray[np.int32], start: int, stop: int) -> npt.NDArray[np.float32]:
        """Of positions `[start, stop)` of a request, `[stop - start]`."""
        positions = np.arange(start, stop)
        return self._values[page_table[positions // self._page_size], positions % self._page_size]

    def record(self, page_table: npt.NDArray[np.int32], start: int, values: npt.NDArray[np.float32]) -> None:
        """Keep those of the positions from `start` on."""
        positions = np.arange(start, start + len(values))
        self._values[page_table[positions // self._page_size], positions % self._page_size] = values
