"""The live tree as text, JSON, a DOT graph, and an HTML page. Loops only: trees may be thousands of nodes deep."""

import html
import json
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass

import numpy as np

from jradix.cache.prefix_cache import PrefixCache

__all__ = ["Row", "rows", "to_dot", "to_html", "to_json", "to_text"]

Decode = Callable[[list[int]], str]


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
    label: str

    @property
    def state(self) -> str:
        return "protected" if self.ref_count else "evictable"


def rows(cache: PrefixCache, decode: Decode | None = None, max_nodes: int = 2_000) -> list[Row]:
    """The nodes, each directly after its parent's earlier subtrees, most recently used children first."""
    found: list[Row] = []
    for namespace, root in cache.tree.roots.items():
        pending = [(child, None, 0) for child in _by_recency(root.children)]
        while pending and len(found) < max_nodes:
            node, parent, depth = pending.pop()
            ids = np.frombuffer(node.tokens, np.int32).tolist()
            found.append(
                Row(
                    id=len(found),
                    parent=parent,
                    depth=depth,
                    namespace=_name(namespace),
                    start=node.start,
                    end=node.end,
                    pages=tuple(np.frombuffer(node.pages, np.int32).tolist()),
                    ref_count=node.ref_count,
                    uses=node.uses,
                    last_access=node.last_access,
                    label=_shorten(decode(ids) if decode is not None else " ".join(map(str, ids[:12])), len(ids)),
                )
            )
            pending += [(child, found[-1].id, depth + 1) for child in _by_recency(node.children)]
    return found


def to_text(cache: PrefixCache, decode: Decode | None = None, max_nodes: int = 200) -> str:
    """An indented listing under a line of totals."""
    lines = [_totals(cache)]
    namespace = None
    for row in rows(cache, decode, max_nodes):
        if row.namespace != namespace:
            namespace = row.namespace
            lines.append(f"namespace {namespace}")
        lock = f" locked x{row.ref_count}" if row.ref_count else ""
        indent = "  " * min(row.depth + 1, 40)
        lines.append(f"{indent}[{row.start}, {row.end}) {len(row.pages)} pages, used x{row.uses}{lock}: {row.label}")
    return "\n".join(lines)


def to_json(cache: PrefixCache, decode: Decode | None = None, max_nodes: int = 100_000) -> str:
    """An object with the page counts and a list of nodes; `parent` refers to `id`."""
    counts = {name: getattr(cache, f"num_{name}") for name in ("total", "free", "evictable", "protected", "private")}
    nodes = [asdict(row) for row in rows(cache, decode, max_nodes)]
    return json.dumps({"page_size": cache.page_size, "pages": counts, "nodes": nodes})


def to_dot(cache: PrefixCache, decode: Decode | None = None, max_nodes: int = 500) -> str:
    """A Graphviz digraph; protected nodes are filled."""
    lines = ["digraph cache {", '  node [shape=box, style="rounded,filled", fontname=monospace];']
    namespaces: dict[str, str] = {}
    for row in rows(cache, decode, max_nodes):
        if row.namespace not in namespaces:
            namespaces[row.namespace] = f"namespace{len(namespaces)}"
            lines.append(f"  {namespaces[row.namespace]} [label={json.dumps(row.namespace)}, fillcolor=white];")
        label = json.dumps(f"{row.label}\n[{row.start}, {row.end}) · used ×{row.uses}", ensure_ascii=False)
        color = "gold" if row.ref_count else "lightblue"
        parent = f"node{row.parent}" if row.parent is not None else namespaces[row.namespace]
        lines += [f"  node{row.id} [label={label}, fillcolor={color}];", f"  {parent} -> node{row.id};"]
    return "\n".join([*lines, "}"])


def to_html(cache: PrefixCache, decode: Decode | None = None, max_nodes: int = 2_000) -> str:
    """One self-contained page: the pool as a bar, and the tree as rows with bars for their numbers of pages."""
    shown = rows(cache, decode, max_nodes)
    newest = max((row.last_access for row in shown), default=1) or 1
    largest = max((len(row.pages) for row in shown), default=1)
    bar = "".join(
        f'<i class="{name}" style="flex:{num_pages}" title="{num_pages} pages"></i>'
        for name, num_pages in (
            ("protected", cache.num_protected),
            ("evictable", cache.num_evictable),
            ("private", cache.num_private),
            ("free", cache.num_free),
        )
    )
    body: list[str] = []
    namespace = None
    for row in shown:
        if row.namespace != namespace:
            namespace = row.namespace
            body.append(f"<h2>{html.escape(namespace)}</h2>")
        width = max(2.0, 100 * len(row.pages) / largest)
        lock = f" · locked ×{row.ref_count}" if row.ref_count else ""
        opacity = 0.35 + 0.65 * row.last_access / newest
        facts = f"[{row.start}, {row.end}) · {len(row.pages)} pages · used ×{row.uses}{lock}"
        body.append(
            f'<div class="row" style="margin-left:{min(row.depth, 40) * 1.4}em">'
            f'<i class="{row.state}" style="width:{width:.1f}px;opacity:{opacity:.2f}"></i>'
            f"<code>{html.escape(row.label)}</code><small>{facts}</small></div>"
        )
    return _PAGE.format(bar=bar, totals=html.escape(_totals(cache)), body="\n".join(body))


def _totals(cache: PrefixCache) -> str:
    return (
        f"{cache.num_total} pages of {cache.page_size} tokens: {cache.num_protected} protected, "
        f"{cache.num_evictable} evictable, {cache.num_private} private, {cache.num_free} free"
    )


def _by_recency(children: dict | None) -> list:
    """Least recent first: they are taken from the end."""
    return sorted((children or {}).values(), key=lambda node: node.last_access)


def _name(namespace: Hashable) -> str:
    return "default" if namespace is None else repr(namespace)


def _shorten(text: str, num_tokens: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 72 and num_tokens <= 12 else f"{text[:72]}… ({num_tokens} tokens)"


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Prefix cache</title>
<style>
  :root {{ color-scheme: light dark; font: 14px/1.5 system-ui, sans-serif; }}
  body {{ max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }}
  .bar {{ display: flex; height: 1.4rem; border-radius: .4rem; overflow: hidden; gap: 1px; }}
  .row {{ display: flex; align-items: center; gap: .6rem; border-left: 1px solid #8884; padding-left: .5rem; }}
  .row i {{ flex: none; height: .7rem; border-radius: .2rem; }}
  .protected {{ background: #e0a030; }} .evictable {{ background: #4a90d9; }}
  .private {{ background: #9b6fc4; }} .free {{ background: #8883; }}
  code {{ overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }}
  small {{ margin-left: auto; opacity: .7; white-space: nowrap; }}
</style>
<h1>Prefix cache</h1>
<div class="bar">{bar}</div>
<p>{totals}. <b class="key">Gold</b> is protected by running requests, blue can be evicted, violet is private to
requests; pale was used long ago.</p>
{body}
</html>
"""
