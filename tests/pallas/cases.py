"""The inputs that every attention implementation must handle: one list, shared by all their tests."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jradix.pallas.layout import KEY, VALUE, join
from jradix.pallas.scoring import Scoring


@dataclass(frozen=True)
class Case:
    """Rows with `cached` tokens in the pool already and `new` ones to extend by; a row of 0 new tokens is padding."""

    name: str
    cached: tuple[int, ...]
    new: tuple[int, ...]
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    extra_tokens: int = 3  # padding tokens after the rows'
    key_scale: float = 1.0
    shared_pages: int = 0  # pages that rows holding so many have in common with the first row
    unused_table_entry: int = 0  # what stands in a page table past a row's pages


CASES = [
    Case("one token of one row", (0,), (1,), extra_tokens=0),
    Case("decode rows of ragged lengths", (1, 30, 7, 62), (1, 1, 1, 1), extra_tokens=0),
    Case("prefill that ends on page edges", (0, 0, 0), (4, 8, 16)),
    Case("one below and one above page edges", (0, 0, 0), (3, 5, 17)),
    Case("several queries on a cached prefix", (12, 5, 33), (5, 9, 2)),
    Case("query and cache lengths that cross", (0, 3, 4, 8), (1, 4, 1, 12)),
    Case("empty rows between others", (0, 9, 0, 4), (5, 0, 0, 7)),
    Case("no row at all", (0, 0), (0, 0)),
    Case("mixed decode and prefill", (40, 0, 17, 2), (1, 23, 1, 30)),
    Case("page of one token", (5, 0), (3, 7), page_size=1),
    Case("pages longer than any row", (5, 0), (3, 7), page_size=64),
    Case("page of 128", (130, 1), (2, 129), page_size=128),
    Case("one kv head for all", (9, 3), (4, 6), q_heads=8, kv_heads=1),
    Case("a kv head for each", (9, 3), (4, 6), q_heads=3, kv_heads=3, head_dim=64, page_size=16),
    Case("smollm heads", (9, 70), (4, 6), q_heads=9, kv_heads=3, head_dim=64, page_size=16),
    Case("head_dim 80", (9, 3), (4, 6), head_dim=80),
    Case("head_dim 128", (9, 3), (4, 6), head_dim=128),
    Case("head_dim 256", (9, 3), (4, 6), head_dim=256),
    Case("window of one", (9, 0), (4, 6), window=1),
    Case("window shorter than a page", (19, 0), (4, 16), window=3, page_size=8),
    Case("window across pages", (70, 0, 3), (1, 60, 40), window=24),
    Case("soft cap", (9, 3), (4, 6), soft_cap=5.0),
    Case("sinks", (9, 0), (4, 6), sinks=True),
    Case("window, soft cap and sinks", (30, 0), (4, 26), window=7, soft_cap=3.0, sinks=True),
    Case("extreme logits", (9, 3), (4, 6), key_scale=200.0),
    Case("table tails of -1", (9, 0, 3), (4, 6, 1), unused_table_entry=-1),
    Case("huge table tails", (9, 0, 3), (4, 6, 1), unused_table_entry=2**31 - 1),
    Case("decode rows on one prefix", (70, 64, 90, 65, 68), (1,) * 5, extra_tokens=0, page_size=16, shared_pages=4),
    Case("extend rows on one prefix", (600, 0, 512, 530), (3, 0, 20, 1), page_size=16, shared_pages=32),
    Case("rows of two prefixes in one group", (300, 300, 3, 5), (1, 2, 1, 3), page_size=16, shared_pages=16),
    Case("one prefix and a window", (300, 290, 280), (4, 5, 6), page_size=16, shared_pages=16, window=40),
    Case("one prefix, soft cap and sinks", (300, 290), (4, 5), page_size=16, shared_pages=16, soft_cap=4.0, sinks=True),
    Case("more rows and tokens than a tile", (0, 5, 200, 31), (150, 1, 3, 40), page_size=16),
]


def as_decode(case: Case) -> Case:
    """One query a row, the last of its tokens."""
    cached = tuple(cached + max(0, new - 1) for cached, new in zip(case.cached, case.new, strict=True))
    return replace(case, cached=cached, new=tuple(min(new, 1) for new in case.new), extra_tokens=case.new.count(0))


TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 2e-2}
"""Largest error against the float32 reference of the same inputs, values of about 1."""


@dataclass(frozen=True)
class Inputs:
    """Arrays of one case: pages are scattered and descending, and every slot that no row owns holds NaN."""

    q: jax.Array
    pool: jax.Array
    page_table: jax.Array
    seq_lens: jax.Array
    query_starts: jax.Array
    scoring: Scoring
    sinks: jax.Array | None
    is_query: np.ndarray

    def arrays(self) -> tuple[jax.Array, ...]:
        return self.q, self.pool, self.page_table, self.seq_lens, self.query_starts

    def joined_pool(self) -> jax.Array:
        """The same keys and values in the other layout."""
        return join(self.pool[:, :, KEY], self.pool[:, :, VALUE])


def make_inputs(case: Case, dtype: Any, seed: int = 0, *, poison: bool = True) -> Inputs:
    rng = np.random.default_rng(seed)
    new = np.array(case.new)
    seq_lens = np.where(new > 0, np.array(case.cached) + new, 0)
    pages = -(-seq_lens // case.page_size)
    num_pages = int(pages.sum()) + 3
    free = np.arange(num_pages - 1, 0, -1)
    pool = rng.normal(size=(num_pages, case.kv_heads, 2, case.page_size, case.head_dim)).astype(np.float32)
    pool[:, :, 0] *= case.key_scale
    owned = np.zeros((num_pages, case.page_size), bool)
    table = np.full((len(new), max(1, pages.max()) + 2), case.unused_table_entry, np.int32)
    for row, count in enumerate(pages):
        mine, free = free[:count].copy(), free[count:]
        if row and count >= case.shared_pages:
            mine[: case.shared_pages] = table[0, : case.shared_pages]
        table[row, :count] = mine
        owned[np.repeat(mine, case.page_size), np.tile(np.arange(case.page_size), count)] |= (
            np.arange(count * case.page_size) < seq_lens[row]
        )
    if poison:
        pool = np.where(owned[:, None, None, :, None], pool, np.nan)
    tokens = int(new.sum()) + case.extra_tokens
    return Inputs(
        q=jnp.asarray(rng.normal(size=(tokens, case.q_heads, case.head_dim)), dtype),
        pool=jnp.asarray(pool, dtype),
        page_table=jnp.asarray(table),
        seq_lens=jnp.asarray(seq_lens, jnp.int32),
        query_starts=jnp.asarray(np.concatenate([[0], np.cumsum(new)]), jnp.int32),
        scoring=Scoring(case.head_dim**-0.5, case.window, case.soft_cap),
        sinks=jnp.asarray(rng.normal(size=case.q_heads), jnp.float32) if case.sinks else None,
        is_query=np.arange(tokens) < new.sum(),
    )


NARROW = {"int8": 24.0, "fp8": 1.0}
"""Types of 8 bits, and what numbers of about 1 are multiplied with before they are rounded to them."""


def narrowed(inputs: Inputs, to: str) -> Inputs:
    """With a pool of 8 bits, and queries that give scores as large as before; values are `NARROW[to]` times as large.

    What no row owns stays NaN in float8, and becomes the largest number of int8.
    """
    factor = NARROW[to]
    pool = np.asarray(inputs.pool, np.float32) * factor
    if to == "int8":
        pool = np.clip(np.rint(np.where(np.isnan(pool), 127, pool)), -127, 127)
    else:
        pool = np.clip(pool, -448, 448)
    dtype = jnp.int8 if to == "int8" else jnp.float8_e4m3fn
    return replace(inputs, q=inputs.q / factor, pool=jnp.asarray(pool).astype(dtype))


def dense_attention(case: Case, inputs: Inputs) -> np.ndarray:
    """What the case must yield: a softmax written out over dense keys, in float64."""
    out = np.zeros(inputs.q.shape)
    pool, q = np.asarray(inputs.pool, np.float64), np.asarray(inputs.q, np.float64)
    starts = np.asarray(inputs.query_starts)
    for row, seq_len in enumerate(np.asarray(inputs.seq_lens)):
        for token in range(starts[row], starts[row + 1]):
            position = seq_len - starts[row + 1] + token
            first = 0 if case.window is None else max(0, position - case.window + 1)
            where = np.arange(first, position + 1)
            page = np.asarray(inputs.page_table)[row, where // case.page_size]
            for head in range(case.q_heads):
                kv = pool[page, head * case.kv_heads // case.q_heads, :, where % case.page_size]
                scores = kv[:, 0] @ q[token, head] * inputs.scoring.scale
                if case.soft_cap:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                sink = float(inputs.sinks[head]) if inputs.sinks is not None else -np.inf
                weights = np.exp(scores - max(scores.max(), sink))
                out[token, head] = weights @ kv[:, 1] / (weights.sum() + np.exp(sink - max(scores.max(), sink)))
    return out
