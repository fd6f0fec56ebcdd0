"""The page: well-formed, escaped, bounded, and silent about other namespaces."""

import re
from html.parser import HTMLParser

from jradix.cache import PrefixCache
from jradix.cache.page import View, to_html

from .test_journal import cache_prompt
from .test_render import small

VOID = ("meta", "link", "input", "br")


class Checked(HTMLParser):
    """Every element is closed by its own end, but for those that need none; collects texts and the deepest nesting."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.deepest = 0
        self.feed(page)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "li" and self.stack[-1] == "li":
            self.stack.pop()
        assert tag != "li" or self.stack[-1] == "ul"
        self.tags.append(tag)
        if tag not in VOID:
            self.stack.append(tag)
        self.deepest = max(self.deepest, len(self.stack))

    def handle_endtag(self, tag: str) -> None:
        if tag == "ul" and self.stack[-1] == "li":
            self.stack.pop()
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def chat(num_turns: int) -> PrefixCache:
    """One that goes on turn by turn, and nothing beside it."""
    cache = PrefixCache(3_000, 1)
    for end in range(2, 2 * num_turns + 2, 2):
        cache_prompt(cache, list(range(end)))
    return cache


def test_texts_are_escaped_wherever_they_stand() -> None:
    page = Checked(to_html(View.of(small()), lambda ids: "</pre><script>&amp;" * len(ids), subtitle="<u>"))
    assert not {"script", "u"} & set(page.tags)
    assert "</pre><script>&amp;" in page.text
    assert "Namespace '<b>'" in page.text


def test_every_node_and_the_states_of_all_pages_are_shown() -> None:
    page = Checked(to_html(View.of(small())))
    assert page.text.count("in use ×1") == 1
    for part in ("2 in use by requests 10%", "4 cached, evictable 20%", "0 private", "14 free 70%", "2 continuations"):
        assert part in page.text
    assert re.findall(r"reused ×\d+|not reused", page.text)[::2] == ["reused ×2", *["not reused"] * 3]


def test_a_view_of_one_namespace_says_nothing_of_others() -> None:
    def page(others: int) -> str:
        cache = PrefixCache(60, 1)
        cache_prompt(cache, [7, 8], namespace="mine")
        for number in range(others):
            cache_prompt(cache, [7, 8, number], namespace=f"other {number}")
            cache_prompt(cache, [7, 8, number])
        cache_prompt(cache, [7, 9], namespace="mine")
        return to_html(View.of(cache, namespaces=("mine",), with_pool=False))

    assert page(0) == page(7)
    assert "Namespace 'mine'" in Checked(page(0)).text
    assert "Nothing is cached" in to_html(View.of(PrefixCache(9, 1), namespaces=("mine",), with_pool=False))


def test_a_chat_of_many_turns_is_not_indented() -> None:
    shallow, deep = (Checked(to_html(View.of(chat(turns)))) for turns in (3, 200))
    assert deep.deepest == shallow.deepest


def test_what_merely_goes_on_is_one_entry_if_it_was_used_alike() -> None:
    cache = PrefixCache(50, 1)
    lock, pages = cache.lock(cache.match([])), cache.allocate(9)
    assert pages is not None
    for end in (3, 6, 9):
        cache.insert(list(range(end)), pages, lock)
    assert len(View.of(cache).rows) == 3
    page = Checked(to_html(View.of(cache)))
    assert page.text.count("9 tokens") == 1
    assert "0 1 2 3 4 5 6 7 8" in page.text


def test_pages_of_deep_and_wide_trees_are_bounded() -> None:
    comb = PrefixCache(5_000, 1)  # at each of its teeth prompts part
    for depth in range(70):
        for tooth in range(2):
            cache_prompt(comb, [*range(depth), 1_000 + tooth])
    wide = PrefixCache(5_000, 1)
    for number in range(2_000):
        cache_prompt(wide, [1, 2, 10 + number])
    for cache in (comb, wide, chat(300)):
        page = to_html(View.of(cache))
        assert Checked(page).deepest < 200
        assert len(page) < 300_000
    assert "2,000 continuations, 1970 not shown" in to_html(View.of(wide))
    assert "More is cached than these 20 nodes" in to_html(View.of(chat(300), max_nodes=20))
