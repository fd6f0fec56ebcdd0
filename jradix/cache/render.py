"""The live tree as text, JSON and a DOT graph. Loops only: trees may be thousands of nodes deep."""

import json
from collections.abc import Callable, Collection, Hashable
from dataclasses import asdict, dataclass
from heapq import nlargest

import numpy as np

from jradix.cache.prefix_cache import PrefixCache
from jradix.cache.radix import TOKEN_BYTES, Node

__all__ = ["Row", "rows", "to_dot", "to_json", "to_text"]

Decode = Callable[[list[int]], str]
SHOWN_IDS = 64
"""Of each node, from its beginning."""


@dataclass(frozen=True, slots=True)
class Row:
    """One node, as all the pictures show it."""

    id: int
    parent: int | None
    depth: int  # nodes above
    namespace: str
    start: int  # tokens [start, end) of the path
    end: int
    pages: tuple[int, ...]
    ref_count: int
    uses: int
    last_access: int
    num_children: int  # in the tree, whether they are among the rows or not
    token_ids: tuple[int, ...]  # the first `SHOWN_IDS`

    def text(self, decode: Decode | None) -> str:
        """What its first tokens say."""
        return decode(list(self.token_ids)) if decode is not None else " ".join(map(str, self.token_ids))


def rows(
    cache: PrefixCache,
    max_nodes: int = 2_000,
    *,
    max_children: int | None = None,
    namespaces: Collection[Hashable] | None = None,
) -> list[Row]:
    """The nodes, each directly after its parent's earlier subtrees, most recently used children first.

    max_children: of each node, and of each namespace. namespaces: None are all.
    """
    found: list[Row] = []
    roots = cache.tree.roots
    if namespaces is not None:
        roots = {namespace: roots[namespace] for namespace in namespaces if namespace in roots}
    for namespace, root in roots.items():
        pending = [(child, None, 0) for child in _latest(root.children, max_children)]
        while pending and len(found) < max_nodes:
            node, parent, depth = pending.pop()
            found.append(
                Row(
                    id=len(found),
                    parent=parent,
                    depth=depth,
                    namespace=name_of(namespace),
                    start=node.start,
                    end=node.end,
                    pages=tuple(np.frombuffer(node.pages, np.int32).tolist()),
                    ref_count=node.ref_count,
                    uses=node.uses,
                    last_access=node.last_access,
                    num_children=len(node.children or ()),
                    token_ids=tuple(np.frombuffer(node.tokens[: SHOWN_IDS * TOKEN_BYTES], np.int32).tolist()),
                )
            )
            pending += [(child, found[-1].id, depth + 1) for child in _latest(node.children, max_children)]
    return found


def to_text(cache: PrefixCache, decode: Decode | None = None, max_nodes: int = 200) -> str:
    """An indented listing under a line of totals."""
    lines = [_totals(cache)]
    namespace = None
    for row in rows(cache, max_nodes):
        if row.namespace != namespace:
            namespace = row.namespace
            lines.append(f"namespace {namespace}")
        lock = f" locked x{row.ref_count}" if row.ref_count else ""
        indent = "  " * min(row.depth + 1, 40)
        lines.append(
            f"{indent}[{row.start}, {row.end}) {len(row.pages)} pages, used x{row.uses}{lock}: {_label(row, decode)}"
        )
    return "\n".join(lines)


def to_json(cache: PrefixCache, decode: Decode | None = None, max_nodes: int = 100_000) -> str:
    """An object with the page counts and a list of nodes; `parent` refers to `id`."""
    counts = {name: getattr(cache, f"num_{name}") for name in ("total", "free", "evictable", "protected", "private")}
    nodes = [{**asdict(row), "label": _label(row, decode)} for row in rows(cache, max_nodes)]
    return json.dumps({"page_size": cache.page_size, "pages": counts, "nodes": nodes})


def to_dot(cache: PrefixCache, decode: Decode | None = None, max_nodes: int = 500) -> str:
    """A Graphviz digraph; protected nodes are filled."""
    lines = ["digraph cache {", '  node [shape=box, style="rounded,filled", fontname=monospace];']
    namespaces: dict[str, str] = {}
    for row in rows(cache, max_nodes):
        if row.namespace not in namespaces:
            namespaces[row.namespace] = f"namespace{len(namespaces)}"
            lines.append(f"  {namespaces[row.namespace]} [label={json.dumps(row.namespace)}, fillcolor=white];")
        label = json.dumps(f"{_label(row, decode)}\n[{row.start}, {row.end}) · used ×{row.uses}", ensure_ascii=False)
        color = "gold" if row.ref_count else "lightblue"
        parent = f"node{row.parent}" if row.parent is not None else namespaces[row.namespace]
        lines += [f"  node{row.id} [label={label}, fillcolor={color}];", f"  {parent} -> node{row.id};"]
    return "\n".join([*lines, "}"])


def _totals(cache: PrefixCache) -> str:
    return (
        f"{cache.num_total} pages of {cache.page_size} tokens: {cache.num_protected} protected, "
        f"{cache.num_evictable} evictable, {cache.num_private} private, {cache.num_free} free"
    )


def _latest(children: dict[bytes, Node] | None, count: int | None) -> list[Node]:
    """Those that are in use or were used last, the latest at the end: they are taken from there."""
    nodes = (children or {}).values()
    latest = nlargest(
        len(nodes) if count is None else count, nodes, key=lambda node: (node.ref_count > 0, node.last_access)
    )
    return latest[::-1]


def name_of(namespace: Hashable) -> str:
    return "default" if namespace is None else repr(namespace)


def _label(row: Row, decode: Decode | None) -> str:
    """A line of its text."""
    text, num_tokens = " ".join(row.text(decode).split()), row.end - row.start
    return text if len(text) <= 72 and num_tokens <= 12 else f"{text[:72]}… ({num_tokens} tokens)"
