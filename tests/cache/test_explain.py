"""Each way to miss is told from the others."""

import pytest

from jradix.cache import PrefixCache
from jradix.cache.explain import explain

from .test_journal import cache_prompt


def warm(journal: bool = True, min_copied_tokens: int | None = 1) -> PrefixCache:
    cache = PrefixCache(12, 2, journal=journal, min_copied_tokens=min_copied_tokens)
    cache_prompt(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    cache_prompt(cache, [1, 2, 3, 9, 9, 9])
    cache_prompt(cache, [40, 41], namespace="tenant")
    return cache


@pytest.mark.parametrize(
    ("tokens", "num_tokens", "reason", "diverged_at"),
    [
        ([1, 2, 3, 4], 4, "complete", None),
        ([1, 2, 3, 4, 5], 5, "complete", None),
        ([1, 2, 3, 4, 5, 0, 7], 5, "diverged", 5),  # inside an edge
        ([1, 2, 3, 0], 3, "diverged", 3),  # between two children
        ([1, 2, 0, 0], 2, "diverged", 2),
        ([1, 0], 1, "diverged", 1),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], 8, "unseen", None),
        ([77, 78], 0, "unseen", None),
        ([40, 41, 1], 0, "other namespace", None),
    ],
)
def test_the_end_of_a_match_is_explained(
    tokens: list[int], num_tokens: int, reason: str, diverged_at: int | None
) -> None:
    found = explain(warm(), tokens)
    assert (found.num_tokens, found.reason, found.diverged_at) == (num_tokens, reason, diverged_at)
    assert str(found).startswith(f"{num_tokens} of {len(tokens)} tokens are cached: ")


@pytest.mark.parametrize(
    ("tokens", "num_tokens", "reason", "diverged_at"),
    [([1], 0, "short", None), ([1, 2, 3], 2, "complete", None), ([1, 2, 3, 0], 2, "diverged", 3)],
)
def test_without_copies_pages_are_matched_whole(
    tokens: list[int], num_tokens: int, reason: str, diverged_at: int | None
) -> None:
    found = explain(warm(min_copied_tokens=None), tokens)
    assert (found.num_tokens, found.reason, found.diverged_at) == (num_tokens, reason, diverged_at)


@pytest.mark.parametrize(
    ("tokens", "num_tokens", "reason", "diverged_at"),
    [
        ([1, 2, 3, 4], 4, "complete", None),
        ([1, 2, 3, 4, 9, 9, 9, 9], 4, "diverged", 4),
        ([1, 2, 3, 4, 5, 6, 7, 0], 7, "diverged", 7),
        ([1, 2, 3, 4, 5, 6], 4, "short", None),
    ],
)
def test_what_is_too_short_to_copy_is_told_from_what_differs(
    tokens: list[int], num_tokens: int, reason: str, diverged_at: int | None
) -> None:
    cache = PrefixCache(12, 4, min_copied_tokens=3)
    cache_prompt(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    found = explain(cache, tokens)
    assert (found.num_tokens, found.reason, found.diverged_at) == (num_tokens, reason, diverged_at)


def test_a_divergence_shows_both_sides_as_text() -> None:
    sentence = explain(warm(), [1, 2, 3, 0], decode=lambda ids: "-".join(map(str, ids))).sentence
    assert sentence == "it differs from token 3 on: cached is 4-5-6-7-8, asked is 0"


def test_an_eviction_is_named_with_the_request_that_needed_room() -> None:
    cache = warm()
    assert cache.allocate(10, owner="request 7") is not None
    found = explain(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert found.reason == "evicted"
    assert found.removal is not None
    assert found.removal.owner == "request 7"
    assert "by the need of 'request 7' for" in found.sentence


def test_a_flush_is_named() -> None:
    cache = warm()
    cache.flush_prefix([1, 2, 3, 4, 5, 6])
    assert explain(cache, [1, 2, 3, 4, 5, 6]).reason == "flushed"


@pytest.mark.parametrize(("journal", "said"), [(True, "no full page that did is known"), (False, "is not recorded")])
def test_what_may_have_been_there_is_not_denied(journal: bool, said: str) -> None:
    """Nobody remembers an evicted tail, and without a journal not even an evicted page."""
    cache = warm(journal=journal)
    cache_prompt(cache, [60, 61, 62])
    assert cache.flush_prefix([60, 61] if not journal else [60, 61, 62]) > 0
    found = explain(cache, [60, 61, 62])
    assert found.reason == "unseen"
    assert said in found.sentence


def test_a_discreet_answer_tells_nothing_of_others() -> None:
    cache = warm()
    elsewhere = explain(cache, [40, 41, 1], discreet=True)
    assert (elsewhere.reason, elsewhere.namespace) == ("unseen", None)
    assert elsewhere == explain(cache, [50, 51, 1], discreet=True), "a prompt that nobody has asked"
    assert cache.allocate(10, owner="request 7") is not None
    evicted = explain(cache, [1, 2, 3, 4, 5, 6, 7, 8], discreet=True)
    assert (evicted.reason, evicted.sentence, evicted.removal) == ("evicted", "the next page was evicted", None)
