"""Pictures of the tree: complete, bounded, and without recursion."""

import json

from jradix.cache import PrefixCache
from jradix.cache.render import rows, to_dot, to_json, to_text

from .test_journal import cache_prompt


def small() -> PrefixCache:
    cache = PrefixCache(20, 1)
    cache_prompt(cache, [1, 2, 3])
    cache_prompt(cache, [1, 2, 4, 5])
    cache_prompt(cache, [7], namespace="<b>")
    cache.lock(cache.match([1, 2]))
    return cache


def test_the_text_is_an_indented_listing() -> None:
    assert to_text(small()).splitlines() == [
        "20 pages of 1 tokens: 2 protected, 4 evictable, 0 private, 14 free",
        "namespace default",
        "  [0, 2) 2 pages, used x3 locked x1: 1 2",
        "    [2, 4) 2 pages, used x1: 4 5",
        "    [2, 3) 1 pages, used x1: 3",
        "namespace '<b>'",
        "  [0, 1) 1 pages, used x1: 7",
    ]


def test_json_holds_every_node_and_page() -> None:
    tree = json.loads(to_json(small()))
    assert tree["pages"] == {"total": 20, "free": 14, "evictable": 4, "protected": 2, "private": 0}
    assert sorted(page for node in tree["nodes"] for page in node["pages"]) == [1, 2, 3, 4, 5, 6]
    assert [node["parent"] for node in tree["nodes"]] == [None, 0, 0, None]


def test_dot_links_every_node_to_its_parent() -> None:
    dot = to_dot(small())
    assert dot.count("->") == 4
    assert dot.startswith("digraph")
    assert dot.endswith("}")
    assert "\"'<b>'\"" in dot


def test_pictures_of_deep_and_wide_trees_are_bounded() -> None:
    cache = PrefixCache(3_000, 1)
    lock = cache.lock(cache.match([]))
    pages = cache.allocate(3_000)
    assert pages is not None
    for length in range(1, 3_001):
        pages = cache.insert(list(range(length)), pages, lock).pages
    assert len(rows(cache, max_nodes=5_000)) == 3_000
    assert len(rows(cache, max_nodes=10)) == 10
    for picture in (to_text, to_json, to_dot):
        assert len(picture(cache, max_nodes=50)) < 30_000


def test_one_namespace_and_the_latest_children_can_be_asked_for() -> None:
    cache = small()
    assert [row.namespace for row in rows(cache, namespaces=("<b>", "nobody's"))] == ["'<b>'"]
    assert rows(cache, namespaces=()) == []
    top, child = rows(cache, namespaces=(None,), max_children=1)
    assert (top.num_children, child.token_ids) == (2, (4, 5))
    cache.lock(cache.match([1, 2, 3]))
    cache.lock(cache.match([1, 2, 4, 5]))
    cache_prompt(cache, [9])
    assert [row.token_ids for row in rows(cache, namespaces=(None,), max_children=1)] == [(1, 2), (4, 5)], "in use"
