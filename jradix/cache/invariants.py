"""The integrity check of the cache: recounts everything by a walk and names what does not agree."""

from bisect import bisect_right
from collections.abc import Hashable, Iterable

import numpy as np

from jradix.cache.eviction import EvictionQueue
from jradix.cache.pages import FREE, PRIVATE, STATE_NAMES, TREE, PageAllocator
from jradix.cache.radix import TOKEN_BYTES, Node, RadixTree


class CacheInvariantError(AssertionError):
    """Raised by `PrefixCache.check`; `violations` holds one sentence for each broken invariant."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__("; ".join(violations))
        self.violations = violations


def find_violations(
    pages: PageAllocator,
    tree: RadixTree,
    queue: EvictionQueue,
    *,
    num_protected: int,
    num_locks: int,
    private_pages: Iterable[int],
) -> list[str]:
    """One sentence for each broken invariant, none if all hold. O(pages + nodes); no recursion."""
    found: list[str] = []
    tree_pages: list[bytes] = []
    protected = locks = candidates = 0
    for namespace, root in tree.roots.items():
        locks += root.ref_count
        if root.tokens or root.pages or root.end or root.parent is not None:
            found.append(f"the root of namespace {namespace!r} is not empty")
        if root.children is None and not root.ref_count:
            found.append(f"namespace {namespace!r} has a root but neither nodes nor locks")
        for node in tree.subtree(root):
            tree_pages.append(node.pages)
            protected += node.num_pages if node.ref_count else 0
            candidate = node is not root and node.children is None and not node.ref_count
            candidates += candidate
            if bool(node.ticket) != candidate:
                found.append(f"{_name(node, namespace)} {'misses its' if candidate else 'has a'} place in the queue")
            found.extend(_node_violations(node, namespace, tree))
    for what, counter, recount in (
        ("protected pages", num_protected, protected),
        ("locks", num_locks, locks),
        ("eviction candidates", len(queue), candidates),
        ("pages in the tree", pages.num_tree, sum(map(len, tree_pages)) // TOKEN_BYTES),
    ):
        if counter != recount:
            found.append(f"the counter of {what} says {counter}, a recount {recount}")
    found.extend(queue.violations())
    found.extend(_ownership_violations(pages, b"".join(tree_pages), private_pages))
    return found


def _node_violations(node: Node, namespace: Hashable, tree: RadixTree) -> list[str]:
    found: list[str] = []
    name = _name(node, namespace)
    if node.ref_count < 0:
        found.append(f"{name} has the negative lock count {node.ref_count}")
    if node.children is None:
        return found
    if not node.children:
        found.append(f"{name} keeps an empty dictionary of children")
    locks_below = sum(child.ref_count for child in node.children.values())
    if node.ref_count < locks_below:
        found.append(f"{name} has {node.ref_count} locks, its children {locks_below}")
    keys = sorted(node.children)
    if node.order is not None and node.order != keys:
        found.append(f"{name} has its children in another order than that of their keys")
    for key, child in node.children.items():
        child_name = _name(child, namespace)
        if key != child.tokens[: tree.page_bytes]:
            found.append(f"{child_name} is filed under another page of tokens than its first")
        if child.parent is not node:
            found.append(f"{child_name} does not point back to its parent")
        if child.end != node.end + child.num_tokens:
            found.append(f"{child_name} does not start where its parent ends, at {node.end}")
        # Under a lock the path's recency is brought up to date only when the lock ends.
        if not node.ref_count and node.parent is not None and child.last_access > node.last_access:
            found.append(f"{child_name} was used after its parent")
        found.extend(_edge_violations(child, child_name, keys, tree))
    return found


def _edge_violations(node: Node, name: str, keys: list[bytes], tree: RadixTree) -> list[str]:
    """keys: those of the node and its siblings, sorted."""
    found: list[str] = []
    if node.num_pages != -(-node.num_tokens // tree.page_size):
        found.append(f"{name} holds {node.num_pages} pages for {node.num_tokens} tokens")
    if not node.tokens or (len(node.tokens) % tree.page_bytes and not tree.is_tail(node)):
        found.append(f"{name} holds {node.num_tokens} tokens, not whole pages of {tree.page_size}")
    if tree.is_tail(node):
        if node.children is not None or node.ref_count:
            found.append(f"{name} is a tail, and has children or locks")
        after = bisect_right(keys, node.tokens)  # a page that begins with the tail would come directly after it
        if keys[after : after + 1] and keys[after].startswith(node.tokens):
            found.append(f"{name} is a tail, and another page beside it begins with the same tokens")
    return found


def _ownership_violations(pages: PageAllocator, tree_pages: bytes, private_pages: Iterable[int]) -> list[str]:
    """Every page has exactly one owner, and the allocator's record agrees."""
    found: list[str] = []
    owners = {
        FREE: pages.free_ids,
        PRIVATE: np.fromiter(private_pages, np.int32),
        TREE: np.frombuffer(tree_pages, np.int32),
    }
    num_owners = np.zeros(pages.num_total + 1, np.int64)
    for state, ids in owners.items():
        name = STATE_NAMES[state]
        inside = (ids >= 1) & (ids <= pages.num_total)
        found += [f"page {page}, {name}, is not one of 1..{pages.num_total}" for page in ids[~inside].tolist()]
        real = ids[inside]
        np.add.at(num_owners, real, 1)
        recorded = pages.states[real]
        found += [
            f"page {page} is {name}, its record says {STATE_NAMES[record]}"
            for page, record in sorted(set(zip(real.tolist(), recorded.tolist(), strict=True)))
            if record != state
        ]
    lost = np.flatnonzero(num_owners[1:] == 0) + 1
    shared = np.flatnonzero(num_owners[1:] > 1) + 1
    found += [f"page {page} is lost: neither free, nor in the tree, nor listed as private" for page in lost.tolist()]
    found += [f"page {page} has {num_owners[page]} owners" for page in shared.tolist()]
    if pages.num_private != len(owners[PRIVATE]):
        found.append(f"the counter of private pages says {pages.num_private}, the list holds {len(owners[PRIVATE])}")
    return found


def _name(node: Node, namespace: Hashable) -> str:
    return f"node [{node.start}, {node.end}) in namespace {namespace!r}"
