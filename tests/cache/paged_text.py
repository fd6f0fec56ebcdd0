"""Plays requests on a cache, and knows what each page holds: the tokens of a prefix up to the page's end."""

import random
from collections.abc import Hashable

import numpy as np

from jradix.cache import Lock, PrefixCache
from jradix.cache.radix import as_page_ids
from jradix.cache.snapshot import Restoration, Snapshot, take

Prefix = tuple[Hashable, tuple[int, ...]]


class PagedText:
    """A cache and the content of its pages, which requests write, copy and read."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.content: dict[int, Prefix] = {}

    def start(self, tokens: list[int], namespace: Hashable = None, priority: int = 0) -> tuple[Lock, np.ndarray] | None:
        """Match, check what was found, and compute the rest; None if there is no room."""
        cache, size = self.cache, self.cache.page_size
        match = cache.match(tokens, namespace)
        for index, page in enumerate(match.pages.tolist()):
            assert self.content[page] == (namespace, tuple(tokens[: (index + 1) * size]))
        if match.head_len:
            known = match.num_tokens + match.head_len
            space, prefix = self.content[match.head_page]
            assert (space, prefix[:known]) == (namespace, tuple(tokens[:known]))
        lock = cache.lock(match, priority=priority)
        new = cache.allocate(-(-len(tokens) // size) - len(match.pages))
        if new is None:
            cache.unlock(lock)
            return None
        table = np.concatenate([match.pages, new])
        for index in range(len(match.pages), len(table)):
            self.content[int(table[index])] = namespace, tuple(tokens[: (index + 1) * size])
        return lock, cache.insert(tokens, table, lock, namespace).pages

    def serve(self, tokens: list[int], namespace: Hashable = None, priority: int = 0) -> None:
        started = self.start(tokens, namespace, priority)
        if started is not None:
            lock, table = started
            self.cache.finish(tokens, table, lock, namespace)

    def restore(self, restoration: Restoration, content: list[Prefix], start: int, stop: int) -> None:
        """Enter a range, and write what its pages held."""
        taken, pages = restoration.enter(start, stop)
        assert len(taken) == len(pages)
        assert all(0 <= offset < stop - start for offset in taken)
        for offset, page in zip(taken, pages.tolist(), strict=True):
            self.content[page] = content[start + offset]

    def saved(self) -> tuple[Snapshot, list[Prefix]]:
        """A snapshot, and the content of its pages in their order."""
        snapshot = take(self.cache.tree, self.cache.clock)
        return snapshot, [self.content[page] for page in snapshot.pages.tolist()]


def known_pages(cache: PrefixCache) -> dict[Prefix, tuple[int, int, int, int]]:
    """When each page was last used and entered, how often it was used, and its priority; by the prefix it ends."""
    found: dict[Prefix, tuple[int, int, int, int]] = {}
    for namespace, root in cache.tree.roots.items():
        prefixes: dict[object, tuple[int, ...]] = {root: ()}
        for node in cache.tree.subtree(root):
            if node is root:
                continue
            above = prefixes[node.parent]
            tokens = tuple(as_page_ids(node.tokens).tolist())
            prefixes[node] = above + tokens
            for end in range(cache.page_size, len(tokens) + cache.page_size, cache.page_size):
                past = (node.last_access, node.created, node.uses, node.priority)
                found[namespace, above + tokens[:end]] = past
    return found


def random_tokens(rng: random.Random, longest: int = 30) -> list[int]:
    """Few kinds of tokens, so that prefixes are shared."""
    kinds = 2 if rng.random() < 0.8 else 5
    return [rng.randrange(kinds) for _ in range(rng.randint(1, longest))]


def evict_all(cache: PrefixCache) -> list[Prefix]:
    """Empties the cache page by page; returns which went, in that order."""
    order: list[Prefix] = []
    before = set(known_pages(cache))
    while before:
        pages = cache.allocate(cache.num_free + 1)
        assert pages is not None
        cache.free(pages)
        after = set(known_pages(cache))
        order += before - after
        before = after
    return order
