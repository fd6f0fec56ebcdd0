"""The prefix cache: a radix tree over the pages of one KV pool. Host only: standard library and numpy."""

from jradix.cache.invariants import CacheInvariantError
from jradix.cache.prefix_cache import Insert, Lock, Match, PrefixCache, StaleMatchError

__all__ = ["CacheInvariantError", "Insert", "Lock", "Match", "PrefixCache", "StaleMatchError"]
