"""The live tree as an HTML page: self-contained, in light and dark, for wide and narrow windows, usable by keyboard.

A `View` is taken where the cache is, which is quick, and may be sent to another process, where `to_html` makes text of
its tokens. The tree indents where prompts part, and not where one merely goes on, so that long chats stay flat; and
nodes that merely go on and have been used alike are drawn as one.
"""

import html
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace

from jradix.cache.page_style import STYLE
from jradix.cache.prefix_cache import PrefixCache
from jradix.cache.render import SHOWN_IDS, Decode, Row, rows

__all__ = ["View", "to_html"]

_STATES: Mapping[str, str] = {
    "protected": "in use by requests",
    "evictable": "cached, evictable",
    "private": "private to requests",
    "free": "free",
}
_MAX_LEVEL = 40
"""Parsers of HTML do not take lists of any depth."""
_OPEN_LEVELS, _FEW_BRANCHES = 1, 8
_LABEL_LEN = 200


@dataclass(frozen=True, slots=True)
class View:
    """A copy of what a page shows.

    Attributes:
        page_size: tokens in a page.
        pages: the pool's pages by their state; empty for those who may not know of other namespaces.
        rows: see `render.rows`.
        complete: no row is missing for the lack of room.
    """

    page_size: int
    pages: Mapping[str, int]
    rows: list[Row]
    complete: bool

    @classmethod
    def of(
        cls,
        cache: PrefixCache,
        *,
        namespaces: Collection[Hashable] | None = None,
        with_pool: bool = True,
        max_nodes: int = 500,
        max_children: int = 30,
    ) -> "View":
        """namespaces: None are all. max_children: the latest of each node."""
        found = rows(cache, max_nodes + 1, max_children=max_children, namespaces=namespaces)
        pages = {state: getattr(cache, f"num_{state}") for state in _STATES} if with_pool else {}
        return cls(cache.page_size, pages, found[:max_nodes], len(found) <= max_nodes)


def to_html(view: View, decode: Decode | None = None, *, subtitle: str = "", controls: str = "") -> str:
    """The page. controls: HTML that stands before the tree, such as forms."""
    return _PAGE.format(
        style=STYLE,
        subtitle=html.escape(subtitle),
        pool=_pool(view) if view.pages else "",
        controls=controls,
        tree="\n".join(_Tree(view, decode).lines()),
    )


def _pool(view: View) -> str:
    total = sum(view.pages.values())
    parts = [(state, count, f"{count / total:.0%}") for state, count in view.pages.items()]
    bar = "".join(f'<i class="{state}" style="flex-grow:{count}"></i>' for state, count, _ in parts if count)
    items = "".join(
        f'<li><i class="{state}"></i> <b>{count:,}</b> {_STATES[state]} <small>{share}</small></li>'
        for state, count, share in parts
    )
    return (
        f'<section class="card"><h2>Pool <small>{total:,} pages of {_count(view.page_size, "token")}</small></h2>'
        f'<div class="pool" aria-hidden="true">{bar}</div><ul class="legend">{items}</ul></section>'
    )


class _Tree:
    """Draws the rows. Loops only."""

    def __init__(self, view: View, decode: Decode | None) -> None:
        self._view, self._decode = view, decode
        self._children: dict[int | None, list[Row]] = {}
        self._pages_to_end = [len(row.pages) for row in view.rows]  # of a row and all that is drawn below it
        for row in reversed(view.rows):  # children before parents
            if row.parent is not None:
                self._pages_to_end[row.parent] += self._pages_to_end[row.id]
        for row in view.rows:
            self._children.setdefault(row.parent, []).append(row)
        latest = sorted(view.rows, key=lambda row: (not row.ref_count, -row.last_access, row.id))
        self._rank = {
            row.id: rank for rank, row in enumerate(latest)
        }  # the clock itself would tell of other namespaces

    def lines(self) -> list[str]:
        """The lists of all namespaces, each under its heading."""
        if not self._view.rows:
            return ['<p class="card">Nothing is cached here yet.</p>']
        by_namespace: dict[str, list[Row]] = {}
        for row in self._children[None]:
            by_namespace.setdefault(row.namespace, []).append(row)
        lines = [_KEY]
        for name, tops in by_namespace.items():
            size = _count(sum(self._pages_to_end[row.id] for row in tops), "page")
            lines.append(f'<section class="card"><h2>Namespace {html.escape(name)} <small>{size}</small></h2>')
            lines += self._list(tops)
            lines.append("</section>")
        if not self._view.complete:
            lines.append(f'<p class="card">More is cached than these {len(self._view.rows)} nodes.</p>')
        return lines

    def _list(self, tops: list[Row]) -> list[str]:
        lines: list[str] = []
        pending = _items(tops, 0)
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                lines.append(item)
                continue
            top, level = item
            row, run = top, top
            lines.append("<li>")
            while row.num_children == 1 and (only := self._children.get(row.id)):
                [row] = only
                if (row.uses, row.ref_count) == (run.uses, run.ref_count):
                    run = _joined(run, row)
                else:
                    lines.append(self._node(run))
                    run = row
            lines.append(self._node(run))
            if row.num_children:
                below = self._children.get(row.id, [])
                lines.append(self._branches(row, below, level))
                pending.append("</details>")
                if level < _MAX_LEVEL:
                    pending += _items(below, level + 1)
        return lines

    def _node(self, row: Row) -> str:
        num_tokens, text = row.end - row.start, row.text(self._decode)
        label = " ".join(text.split())[:_LABEL_LEN]
        more = "…" if len(row.token_ids) < num_tokens else ""
        in_use = f'<b class="tag">in use ×{row.ref_count}</b>' if row.ref_count else ""
        reused = f"reused ×{row.uses - 1:,}" if row.uses > 1 else "not reused"
        facts = (
            f"Tokens {row.start} to {row.end - 1}, {_count(len(row.pages), 'page')}, {reused}, "
            f"{_ordinal(self._rank[row.id] + 1)} most recently used here. "
            + (f"The first {len(row.token_ids)} tokens:" if more else "The text:")
        )
        age = min(3, 4 * self._rank[row.id] // len(self._rank))
        return (
            f'<details class="node {"protected" if row.ref_count else "evictable"} age{age}"><summary>'
            f"<code>{html.escape(label) or '<i>white space</i>'}{more}</code>"
            f'<span class="facts">{in_use}<span>{_count(num_tokens, "token")}</span>'
            f"<span{' class=reused' if row.uses > 1 else ''}>{reused}</span></span>"
            f"</summary><p>{facts}</p><pre>{html.escape(text)}{more}</pre></details>"
        )

    def _branches(self, row: Row, below: list[Row], level: int) -> str:
        """The beginning of the list of what continues `row`."""
        few = len(below) <= _FEW_BRANCHES
        is_open = " open" if level < _OPEN_LEVELS or (few and level < 3 * _OPEN_LEVELS) else ""
        if level >= _MAX_LEVEL:
            below = []
        hidden = row.num_children - len(below)
        left_out = f", {hidden} not shown" if hidden else ""
        size = _count(sum(self._pages_to_end[child.id] for child in below), "page")
        count = _count(row.num_children, "continuation")
        return f'<details class="branches"{is_open}><summary>{count}{left_out} <small>{size}</small></summary>'


def _joined(row: Row, below: Row) -> Row:
    """A row and what goes on below it as one; the upper row was used at least as lately."""
    token_ids = row.token_ids
    if row.end - row.start == len(token_ids):
        token_ids = (token_ids + below.token_ids)[:SHOWN_IDS]
    return replace(row, end=below.end, pages=row.pages + below.pages, token_ids=token_ids)


def _items(siblings: list[Row], level: int) -> list[str | tuple[Row, int]]:
    """A list, for a stack."""
    return ["</ul>", *((row, level) for row in reversed(siblings)), "<ul>"]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


_KEY = (
    '<p class="key">Under each text are those that continue it, the latest first. They part where pages begin; a '
    "request copies what it shares inside of a page. An edge is "
    '<b class="tag">orange</b> while requests use the text; the paler the blue, the longer it was not used.</p>'
)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Prefix cache</title>
<style>{style}</style>
</head>
<body>
<header><h1>Prefix cache</h1><p>{subtitle}</p></header>
<main>
{pool}
{controls}
{tree}
</main>
</body>
</html>
"""
