"""Runs a model over a paged pool from plain Python lists, the way a scheduler would."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jradix.model.attention import AttentionInputs
from jradix.model.transformer import Transformer
from jradix.pallas.layout import KVLayout
from jradix.pallas.ops import XLA, Kernels


# Compiling is what these tests cost: without LLVM's optimizations it takes half the time.
@partial(jax.jit, static_argnums=0, donate_argnums=3, compiler_options={"xla_backend_optimization_level": 0})
def step(graphdef, params, token_ids, pool, inputs, logits_at):
    """The pure function a runner would jit; the pool is donated."""
    logits, _, pool = nnx.merge(graphdef, params)(token_ids, pool, inputs, logits_at)
    return logits, pool


@dataclass
class Row:
    """One sequence: `cached_len` of its tokens are in `pages`, which stand in no order."""

    pages: list[int]
    cached_len: int = 0


@dataclass
class PagedDriver:
    """A pool of `num_pages` pages, the null page 0 included, filled with NaN wherever nothing was written."""

    model: Transformer
    page_size: int
    num_pages: int = 128
    kernels: Kernels = XLA
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        sizes = (config.layers, self.num_pages, self.page_size, config.kv_heads, config.head_dim)
        layout = KVLayout(*sizes, joined=self.kernels.joined_pages)
        self.graphdef, self.params = nnx.split(self.model)
        self.pool = jnp.full(layout.shape, jnp.nan, self.model.embed[...].dtype)
        self.free = list(range(self.num_pages - 1, 0, -1))[::2] + list(range(self.num_pages - 1, 0, -1))[1::2]

    def new_row(self, max_len: int) -> Row:
        pages = [self.free.pop(0) for _ in range(-(-max_len // self.page_size))]
        return Row(pages)

    def step(
        self, decode: Sequence[tuple[Row, int]] = (), extend: Sequence[tuple[Row, Sequence[int]]] = (), pad_to: int = 0
    ) -> np.ndarray:
        """Logits `[tokens, vocab]` of the decode rows' tokens, then the extend rows' tokens back to back."""
        pairs = [(row, [token]) for row, token in decode] + [(row, list(tokens)) for row, tokens in extend]
        token_ids = [token for _, tokens in pairs for token in tokens]
        positions = [row.cached_len + i for row, tokens in pairs for i in range(len(tokens))]
        owners = [row for row, tokens in pairs for _ in tokens]
        write_pages = [row.pages[pos // self.page_size] for row, pos in zip(owners, positions, strict=True)]
        padding = [0] * max(0, pad_to - len(token_ids))
        max_pages = max(len(row.pages) for row, _ in pairs)
        table = np.zeros((len(pairs), max_pages), np.int32)
        for i, (row, _) in enumerate(pairs):
            table[i, : len(row.pages)] = row.pages
        inputs = AttentionInputs(
            positions=_int32(positions + padding),
            write_pages=_int32(write_pages + padding),
            page_table=_int32(table),
            seq_lens=_int32([row.cached_len + len(tokens) for row, tokens in pairs]),
            query_starts=_int32(np.cumsum([0] + [len(tokens) for _, tokens in extend])),
            pages_per_layer=self.num_pages,
            kernels=self.kernels,
        )
        logits, self.pool = step(
            self.graphdef,
            self.params,
            _int32(token_ids + padding),
            self.pool,
            inputs,
            _int32(range(len(token_ids + padding))),
        )
        for row, tokens in pairs:
            row.cached_len += len(tokens)
        return np.asarray(logits)[: len(token_ids)]


def _int32(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(list(values) if not isinstance(values, np.ndarray) else values, np.int32))
