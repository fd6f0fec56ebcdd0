"""Why a prompt hit as much of the cache as it did, and no more."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jradix.cache.journal import Removal
from jradix.cache.prefix_cache import PrefixCache
from jradix.cache.radix import TOKEN_BYTES, Node, TokenIds, as_token_bytes

__all__ = ["Explanation", "explain"]

Reason = Literal["complete", "short", "evicted", "flushed", "other namespace", "diverged", "unseen"]
Decode = Callable[[list[int]], str]
SHOWN = 8  # token ids shown from a divergence on


@dataclass(frozen=True, slots=True)
class Explanation:
    """The cached prefix of a prompt, and why it ends there."""

    num_tokens: int  # matched, the head of a page that would be copied included
    num_asked: int
    reason: Reason
    sentence: str
    diverged_at: int | None = None  # the first token that differs from what is cached
    cached: tuple[int, ...] = ()  # then the ids that are cached from there on, at most `SHOWN`
    removal: Removal | None = None  # when the next page had been there
    namespace: Hashable = None  # where more of the prompt is cached, if the reason says so

    def __str__(self) -> str:
        return f"{self.num_tokens} of {self.num_asked} tokens are cached: {self.sentence}"


def explain(
    cache: PrefixCache,
    token_ids: TokenIds,
    namespace: Hashable | None = None,
    decode: Decode | None = None,
    *,
    discreet: bool = False,
) -> Explanation:
    """Where the match of a prompt ends and why. Changes nothing; not for hot paths.

    Removals are known only to a cache made with ``journal=True``, and only those of full pages. `decode` turns ids to
    text for the sentence. `discreet`: nothing is told that follows from requests of other namespaces.
    """
    num_asked = len(token_ids)
    match = cache.match(token_ids, namespace)
    hit = match.num_tokens + match.head_len

    def answer(reason: Reason, sentence: str, **facts: object) -> Explanation:
        return Explanation(hit, num_asked, reason, sentence, **facts)  # pyright: ignore[reportArgumentType]

    if num_asked < cache.granularity:
        return answer("short", f"fewer than {cache.granularity} tokens are not matched")
    if hit == num_asked:
        return answer("complete", "all of it")
    if cache.granularity == cache.page_size and num_asked - match.num_tokens < cache.page_size:
        return answer("complete", "all that whole pages hold")
    removal = _removal_of_next_page(cache, token_ids, namespace, match.num_tokens)
    if removal is not None and discreet:
        return answer(removal.kind, f"the next page was {removal.kind}")
    if removal is not None:
        by = f" by the need of {removal.owner!r} for {removal.num_pages} pages" if removal.owner is not None else ""
        return answer(removal.kind, f"the next page was {removal.kind} at time {removal.time}{by}", removal=removal)
    for other in () if discreet else cache.tree.roots:
        there = cache.match(token_ids, other)
        if there.num_tokens + there.head_len > hit:
            return answer("other namespace", f"more of it is cached, but in namespace {other!r}", namespace=other)
    place, cached = _closest(cache, token_ids, namespace, match.node, match.num_tokens)
    if not cached or place == 0:
        removed = "no full page that did is known to have gone" if cache.journal else "what has gone is not recorded"
        return answer("unseen", f"nothing in the cache continues it, and {removed}")
    if place == num_asked:
        return answer("short", f"more follows, but fewer than {cache.granularity} tokens are not copied")
    own = [int(token) for token in token_ids[place : place + SHOWN]]
    texts = (decode(cached), decode(own)) if decode is not None else (str(cached), str(own))
    return answer(
        "diverged",
        f"it differs from token {place} on: cached is {texts[0]}, asked is {texts[1]}",
        diverged_at=place,
        cached=tuple(cached),
    )


def _removal_of_next_page(
    cache: PrefixCache, token_ids: TokenIds, namespace: Hashable | None, hit: int
) -> Removal | None:
    """Of the page after the `hit` tokens that whole pages hold."""
    if cache.journal is None or len(token_ids) < hit + cache.page_size:
        return None
    hashes = cache.journal.hashes(namespace, as_token_bytes(token_ids[: hit + cache.page_size]))
    return cache.journal.removal(hashes[-1])


def _closest(
    cache: PrefixCache, token_ids: TokenIds, namespace: Hashable | None, node: Node | None, hit: int
) -> tuple[int, list[int]]:
    """The first token at which all that is cached differs from the prompt, and the cached ids from there on."""
    end = node or cache.tree.roots.get(namespace)
    if end is None:
        return hit, []
    inside = end.end > hit
    edges = [end.tokens] if inside else [child.tokens for child in (end.children or {}).values()]
    skip = hit - end.start if inside else 0
    own = np.frombuffer(as_token_bytes(token_ids[hit:]), np.int32)
    place, cached = hit, []
    for edge in edges:
        theirs = np.frombuffer(edge, np.int32, offset=skip * TOKEN_BYTES)
        count = min(len(own), len(theirs))
        same = int(np.logical_and.accumulate(own[:count] == theirs[:count]).sum())
        if not cached or hit + same > place:
            place, cached = hit + same, theirs[same : same + SHOWN].tolist()
    return place, cached
