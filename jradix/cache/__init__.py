"""The prefix cache: a radix tree over the pages of one KV pool. Host only: standard library and numpy."""

from jradix.cache.handles import Insert, Lock, Match, StaleMatchError
from jradix.cache.invariants import CacheInvariantError
from jradix.cache.namespace import Namespace
from jradix.cache.prefix_cache import PrefixCache
from jradix.cache.statistics import CacheStatistics, Counters

__all__ = [
    "CacheInvariantError",
    "CacheStatistics",
    "Counters",
    "Insert",
    "Lock",
    "Match",
    "Namespace",
    "PrefixCache",
    "StaleMatchError",
]
