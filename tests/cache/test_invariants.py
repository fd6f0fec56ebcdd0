"""The checker itself: every kind of corruption is named."""

from collections.abc import Callable

import pytest

from jradix.cache import CacheInvariantError, PrefixCache
from jradix.cache.radix import Node


def healthy() -> tuple[PrefixCache, Node, Node, Node]:
    """[1, 2] -> [3, 4] and [5, 6], page 1 to 6, unlocked; pages 7 and 8 are free."""
    cache = PrefixCache(8, 1)
    for tokens in ([1, 2, 3, 4], [1, 2, 5, 6]):
        match = cache.match(tokens)
        lock = cache.lock(match)
        new = cache.allocate(4 - match.num_tokens)
        assert new is not None
        cache.finish(tokens, [*match.pages, *new], lock)
    cache.check()
    root = cache._tree.roots[None]
    (top,) = (root.children or {}).values()
    left, right = (top.children or {}).values()
    return cache, top, left, right


def set_pages(node: Node, pages: list[int]) -> None:
    node.pages = b"".join(page.to_bytes(4, "little") for page in pages)


def refile(parent: Node, child: Node, key: bytes) -> None:
    assert parent.children is not None
    parent.children = {key if node is child else old: node for old, node in parent.children.items()}


def bump(owner: object, name: str, by: int = 1) -> None:
    setattr(owner, name, getattr(owner, name) + by)


CORRUPTIONS: dict[str, tuple[Callable[[PrefixCache, Node, Node, Node], object], str]] = {
    "a page in two nodes": (lambda cache, top, left, right: set_pages(left, [5, 4]), "page 5 has 2 owners"),
    "a page that no node holds": (lambda cache, top, left, right: set_pages(left, [5, 4]), "page 3 is lost"),
    "a free page in a node": (lambda cache, top, left, right: set_pages(left, [7, 4]), "page 7 has 2 owners"),
    "the null page in a node": (lambda cache, top, left, right: set_pages(left, [0, 4]), "page 0, in the tree, is not"),
    "a wrong record": (
        lambda cache, top, left, right: cache._pages.states.__setitem__(3, 1),
        "its record says private",
    ),
    "a wrong protected count": (
        lambda cache, top, left, right: bump(cache, "_num_protected"),
        "counter of protected pages says 1, a recount 0",
    ),
    "a wrong lock count": (lambda cache, top, left, right: bump(cache, "_num_locks"), "counter of locks says 1"),
    "a wrong tree count": (lambda cache, top, left, right: bump(cache._pages, "num_tree"), "pages in the tree says 7"),
    "a negative lock count": (lambda cache, top, left, right: bump(left, "ref_count", -1), "negative lock count"),
    "a child with more locks": (lambda cache, top, left, right: bump(left, "ref_count"), "has 0 locks, its children 1"),
    "a child filed under another key": (
        lambda cache, top, left, right: refile(top, left, b"1234"),
        "node [2, 4) in namespace None is filed under another page",
    ),
    "half a page": (lambda cache, top, left, right: setattr(left, "tokens", left.tokens[:-1]), "not whole pages"),
    "fewer pages than tokens": (lambda cache, top, left, right: set_pages(left, [3]), "1 pages for 2 tokens"),
    "a wrong depth": (lambda cache, top, left, right: bump(left, "end"), "does not start where its parent ends"),
    "a wrong parent": (lambda cache, top, left, right: setattr(left, "parent", right), "does not point back"),
    "an empty dictionary": (lambda cache, top, left, right: setattr(left, "children", {}), "empty dictionary"),
    "a child used after its parent": (
        lambda cache, top, left, right: bump(left, "last_access", 9),
        "used after its parent",
    ),
    "a leaf missing from the queue": (
        lambda cache, top, left, right: cache._contents.queue.discard(left),
        "misses its place",
    ),
    "a parent in the queue": (
        lambda cache, top, left, right: cache._contents.queue.add(top),
        "has a place in the queue",
    ),
    "a stale key in the queue": (lambda cache, top, left, right: bump(left, "last_access", -1), "is queued under"),
    "an abandoned root": (lambda cache, top, left, right: cache._tree.root("x"), "neither nodes nor locks"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_corruption_is_named(name: str) -> None:
    corrupt, sentence = CORRUPTIONS[name]
    cache, *nodes = healthy()
    corrupt(cache, *nodes)
    with pytest.raises(CacheInvariantError) as caught:
        cache.check()
    assert any(sentence in violation for violation in caught.value.violations), caught.value.violations


def with_tail() -> tuple[PrefixCache, Node, Node, Node]:
    """[1, 2] -> the page [3, 4] and the tail [5]; the children are sorted, unlocked, on pages 1 to 3 of 4."""
    cache = PrefixCache(4, 2)
    for tokens in ([1, 2, 3, 4], [1, 2, 5]):
        match = cache.match(tokens)
        lock = cache.lock(match)
        new = cache.allocate(2 - len(match.pages))
        assert new is not None
        cache.finish(tokens, [*match.pages, *new], lock)
    (top,) = (cache.tree.roots[None].children or {}).values()
    page, tail = (top.children or {}).values()
    top.order = sorted(top.children or {})
    cache.check()
    return cache, top, page, tail


TAIL_CORRUPTIONS: dict[str, tuple[Callable[[PrefixCache, Node, Node, Node], object], str]] = {
    "a locked tail": (lambda cache, top, page, tail: bump(tail, "ref_count"), "is a tail, and has children or locks"),
    "a tail with children": (
        lambda cache, top, page, tail: cache.tree.add_leaf(tail, page.tokens, b"\4\0\0\0", 1),
        "is a tail, and has children or locks",
    ),
    "a page that begins with the tail": (
        lambda cache, top, page, tail: setattr(tail, "tokens", page.tokens[:4]),
        "another page beside it begins with the same tokens",
    ),
    "children out of order": (lambda cache, top, page, tail: (top.order or []).reverse(), "in another order"),
    "a tail without a page": (lambda cache, top, page, tail: set_pages(tail, []), "0 pages for 1 tokens"),
}


@pytest.mark.parametrize("name", TAIL_CORRUPTIONS)
def test_every_corruption_of_a_tail_is_named(name: str) -> None:
    corrupt, sentence = TAIL_CORRUPTIONS[name]
    cache, *nodes = with_tail()
    corrupt(cache, *nodes)
    with pytest.raises(CacheInvariantError) as caught:
        cache.check()
    assert any(sentence in violation for violation in caught.value.violations), caught.value.violations


def test_private_pages_must_be_listed_exactly() -> None:
    cache, *_ = healthy()
    pages = cache.allocate(2)
    assert pages is not None
    cache.check(pages)
    cache.check(iter(pages.tolist()))
    with pytest.raises(CacheInvariantError, match="page 7 is lost"):
        cache.check([8])
    with pytest.raises(CacheInvariantError, match="page 7 has 2 owners"):
        cache.check([7, 7, 8])
    with pytest.raises(CacheInvariantError, match="page 1 has 2 owners"):
        cache.check([1, 7, 8])


def test_several_faults_are_all_named() -> None:
    cache, _, left, _ = healthy()
    left.ref_count = -1
    bump(cache, "_num_protected")
    with pytest.raises(CacheInvariantError) as caught:
        cache.check()
    assert len(caught.value.violations) >= 2


def test_without_strict_a_broken_cache_is_logged_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    cache = PrefixCache(8, 2)
    assert cache.check(strict=False) == []
    cache._num_protected = 3
    for _ in range(2):
        [sentence] = cache.check(strict=False)
        assert "protected pages says 3, a recount 0" in sentence
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "protected pages" in caplog.text
    assert cache.allocate(2) is not None
