"""Pages of a snapshot that were handed out before they were read: each is told once, and no others are."""

import random

import numpy as np

from jradix.cache import PrefixCache
from jradix.cache.snapshot import take
from jradix.cache.unread import UnreadPages
from tests.cache.paged_text import PagedText, random_tokens


def test_pages_are_told_once_and_not_after_they_were_read() -> None:
    unread = UnreadPages(np.array([9, 3, 5, 7], np.int32), 10)
    unread.hand_out(np.array([1, 5, 2, 9], np.int32))
    unread.forget(np.array([3], np.int32))
    unread.hand_out(np.array([3, 5], np.int32))
    assert unread.take_endangered().tolist() == [2, 0]
    assert unread.take_endangered().tolist() == []
    unread.hand_out(np.array([7, 10], np.int32))
    assert unread.take_endangered().tolist() == [3]


def test_a_cache_in_use_tells_of_every_page_before_its_content_changes() -> None:
    """Random requests in a small cache; what is read when it is told, or at the end, is what there was at the start."""
    rng = random.Random(4)
    text = PagedText(PrefixCache(24, 4))
    told = 0
    for _ in range(30):
        for _ in range(6):
            text.serve(random_tokens(rng), rng.choice([None, "a"]))
        snapshot, expected = text.saved()
        found, before = dict[int, object](), dict(text.content)
        text.cache.unread = unread = UnreadPages(snapshot.pages, text.cache.num_total)
        for _ in range(rng.randint(0, 5)):
            text.serve(random_tokens(rng), rng.choice([None, "a"]))
            for place in unread.take_endangered().tolist():
                assert place not in found
                found[place] = before[int(snapshot.pages[place])]
        told += len(found)
        for place, page in enumerate(snapshot.pages.tolist()):
            found.setdefault(place, text.content[page])
        assert [found[place] for place in range(len(expected))] == expected
        text.cache.unread = None
        text.cache.check()
    assert told > 50
    assert take(text.cache.tree, text.cache.clock).pages.size
