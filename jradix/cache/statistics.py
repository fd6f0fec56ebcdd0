"""Counters of the cache: they only grow, so that rates over any interval follow from two readings."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Since the cache was made. Tokens unless named otherwise; asked and hit count each request once."""

    num_requests: int = 0
    asked_tokens: int = 0  # looked up, which leaves out the one token of each prompt that is always computed
    hit_tokens: int = 0
    inserted_tokens: int = 0
    evicted_tokens: int = 0
    flushed_tokens: int = 0


class CacheStatistics:
    """Counters by namespace, and the hit rate of the latest requests."""

    def __init__(self, *, window: int = 1_000, max_namespaces: int = 1_000) -> None:
        """window: how many requests `window_hit_rate` looks back. max_namespaces: rows kept, then one for the rest."""
        self.by_namespace: dict[Hashable, Counters] = {}
        self.other_namespaces = Counters()  # those beyond max_namespaces: salts made up per user must not fill memory
        self._max_namespaces = max_namespaces
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)
        self._recent_asked = self._recent_hit = 0

    def of(self, namespace: Hashable) -> Counters:
        """The row that `namespace` is counted in."""
        row = self.by_namespace.get(namespace)
        if row is None:
            if len(self.by_namespace) >= self._max_namespaces:
                return self.other_namespaces
            row = self.by_namespace[namespace] = Counters()
        return row

    def count_request(self, namespace: Hashable, asked_tokens: int, hit_tokens: int) -> None:
        row = self.of(namespace)
        row.num_requests += 1
        row.asked_tokens += asked_tokens
        row.hit_tokens += hit_tokens
        if len(self._recent) == self._recent.maxlen:
            old_asked, old_hit = self._recent[0]
            self._recent_asked -= old_asked
            self._recent_hit -= old_hit
        self._recent.append((asked_tokens, hit_tokens))
        self._recent_asked += asked_tokens
        self._recent_hit += hit_tokens

    def count_late_hit(self, namespace: Hashable, hit_tokens: int) -> None:
        """A request that was counted has hit so many tokens more: another has computed them meanwhile."""
        self.of(namespace).hit_tokens += hit_tokens
        asked, hit = self._recent.pop()  # it may have been a request before the latest: their sum counts
        self._recent.append((asked, hit + hit_tokens))
        self._recent_hit += hit_tokens

    @property
    def total(self) -> Counters:
        """The sum over all namespaces, a copy."""
        rows = [*self.by_namespace.values(), self.other_namespaces]
        return Counters(*(sum(getattr(row, field.name) for row in rows) for field in fields(Counters)))

    @property
    def window(self) -> tuple[int, int]:
        """Asked and hit tokens of the latest requests."""
        return self._recent_asked, self._recent_hit

    @property
    def window_hit_rate(self) -> float:
        """Hit over asked tokens of the latest requests; 0 before the first."""
        return self._recent_hit / self._recent_asked if self._recent_asked else 0.0
