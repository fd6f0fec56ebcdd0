"""The tree's structure: walking, splitting, trimming, all in whole pages, compared token by token."""

import sys
from typing import Any

import numpy as np
import pytest

from jradix.cache.radix import RadixTree


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def tree_with(page_size: int, *tokens: int) -> RadixTree:
    """One leaf holding `tokens`, on pages 1, 2, 3 and so on."""
    tree = RadixTree(page_size)
    num_pages = len(tokens) // page_size
    tree.add_leaf(tree.root(None), ints(*tokens), ints(*range(1, num_pages + 1)), now=1)
    return tree


def matched(tree: RadixTree, *tokens: int) -> tuple[int, list[int]]:
    _, num_tokens, passed = tree.walk(tree.roots[None], ints(*tokens))
    return num_tokens, np.frombuffer(b"".join(passed), np.int32).tolist()


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_page_without_tokens_is_refused(page_size: int) -> None:
    with pytest.raises(ValueError, match="page_size"):
        RadixTree(page_size)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((), (0, [])),
        ((1,), (0, [])),
        ((1, 2), (0, [])),  # an edge of one and a half pages must not become a node of length 2
        ((1, 2, 3), (3, [1])),
        ((1, 2, 3, 4, 5), (3, [1])),
        ((1, 2, 3, 4, 5, 7), (3, [1])),
        ((1, 2, 3, 4, 5, 6), (6, [1, 2])),
        ((1, 2, 3, 4, 5, 6, 7, 8), (6, [1, 2])),
        ((1, 2, 9, 4, 5, 6), (0, [])),
        ((9, 2, 3, 4, 5, 6), (0, [])),
    ],
)
def test_a_walk_ends_at_the_last_whole_page_that_agrees(tokens: tuple[int, ...], expected: tuple[int, list]) -> None:
    tree = tree_with(3, 1, 2, 3, 4, 5, 6)
    assert matched(tree, *tokens) == expected
    assert len(list(tree.subtree(tree.roots[None]))) == 2, "a walk changes nothing"


def test_a_lookup_one_token_short_of_a_page_misses() -> None:
    tree = tree_with(64, *range(64))
    assert matched(tree, *range(63)) == (0, [])
    assert matched(tree, *range(64)) == (64, [1])


def test_split_keeps_the_lower_part_in_place_and_files_both_under_their_first_page() -> None:
    tree = tree_with(2, 1, 2, 3, 4, 5, 6)
    root = tree.roots[None]
    leaf = next(iter((root.children or {}).values()))
    leaf.ref_count, leaf.uses = 2, 5
    upper = tree.split(leaf, 2)
    assert (upper.tokens, upper.pages, upper.end) == (ints(1, 2), ints(1), 2)
    assert (leaf.tokens, leaf.pages, leaf.end) == (ints(3, 4, 5, 6), ints(2, 3), 6)
    assert (upper.ref_count, upper.uses, upper.last_access) == (2, 5, leaf.last_access)
    assert root.children == {ints(1, 2): upper}
    assert upper.children == {ints(3, 4): leaf}
    assert (upper.parent, leaf.parent) == (root, upper)
    assert matched(tree, 1, 2, 3, 4, 5, 6) == (6, [1, 2, 3])


@pytest.mark.parametrize("end", [0, 1, 3, 6, 8])
def test_a_split_off_the_edge_of_a_page_or_outside_the_node_is_refused(end: int) -> None:
    tree = tree_with(2, 1, 2, 3, 4, 5, 6)
    leaf = next(iter((tree.roots[None].children or {}).values()))
    with pytest.raises(AssertionError):
        tree.split(leaf, end)
    assert leaf.tokens == ints(1, 2, 3, 4, 5, 6)


def test_trim_cuts_pages_off_the_tail() -> None:
    tree = tree_with(2, 1, 2, 3, 4, 5, 6)
    leaf = next(iter((tree.roots[None].children or {}).values()))
    assert tree.trim(leaf, 2) == ints(2, 3)
    assert matched(tree, 1, 2, 3, 4, 5, 6) == (2, [1])
    assert leaf.end == 2
    with pytest.raises(AssertionError):
        tree.trim(leaf, 1)


class Colliding(bytes):
    """Bytes that all have one hash, as do their slices."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return bytes.__eq__(self, other)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        return Colliding(bytes.__getitem__(self, index))


def test_pages_whose_hashes_collide_are_kept_apart() -> None:
    tree = RadixTree(2)
    root = tree.root(None)
    prompts = [(a, b, c, d) for a in (1, 2) for b in (1, 2) for c in (1, 2) for d in (1, 2)]
    for page, prompt in enumerate(prompts):
        tokens = Colliding(ints(*prompt))
        node, num_tokens, _ = tree.walk(root, tokens)
        if num_tokens < node.end:
            node = tree.split(node, num_tokens)
        tree.add_leaf(
            node, tokens[num_tokens * 4 :], ints(*[100 * page + i for i in range(2 - num_tokens // 2)]), now=1
        )
    for prompt in prompts:
        node, num_tokens, _ = tree.walk(root, Colliding(ints(*prompt)))
        path = b""
        while node.parent is not None:
            path, node = node.tokens + path, node.parent
        assert (num_tokens, path) == (4, ints(*prompt))


def test_splits_leave_no_views_of_big_arrays_behind() -> None:
    """A 100k-token leaf split 1,000 times and cut down to 100 tokens holds bytes for 100 tokens."""
    tree = tree_with(1, *range(100_000))
    leaf = next(iter((tree.roots[None].children or {}).values()))
    for end in range(100, 100_000, 100):
        tree.split(leaf, end)
    nodes = list(tree.subtree(tree.roots[None]))
    held = sum(sys.getsizeof(node.tokens) + sys.getsizeof(node.pages) for node in nodes)
    assert held < 100_000 * 8 + len(nodes) * 80
    for node in reversed(nodes[2:]):
        tree.detach(node)
    rest = list(tree.subtree(tree.roots[None]))
    assert sum(sys.getsizeof(node.tokens) + sys.getsizeof(node.pages) for node in rest) < 100 * 8 + len(rest) * 80
