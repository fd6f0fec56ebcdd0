"""Which pages of a snapshot have been handed out again before anybody has read them."""

import numpy as np
import numpy.typing as npt

from jradix.cache.pages import PageIds


class UnreadPages:
    """The pages of a snapshot that is being read while its cache goes on.

    A page of the tree never changes. One that has left the tree and been handed out again is about to be written to:
    the cache tells of it here, and whoever launches steps has it read first.
    """

    def __init__(self, pages: PageIds, num_total: int) -> None:
        """`pages` of a cache of `num_total`."""
        self._places = np.full(num_total + 1, -1, np.int64)  # by page id; -1 for pages that nobody waits for
        self._places[pages] = np.arange(len(pages))
        self._endangered: list[int] = []

    def hand_out(self, pages: PageIds) -> None:
        """Note that these will be written to."""
        places = self._places[pages]
        self._endangered += places[places >= 0].tolist()
        self._places[pages] = -1

    def forget(self, pages: PageIds) -> None:
        """These have been read."""
        self._places[pages] = -1

    def take_endangered(self) -> npt.NDArray[np.int64]:
        """Places in the snapshot, each once, of pages that were handed out before they were read."""
        places, self._endangered = self._endangered, []
        return np.array(places, np.int64)
