"""Attention of one new token a row on a Hopper GPU: `ops.decode_attention` with each row's keys split among blocks."""

from typing import Any

import jax
import jax.numpy as jnp

from jradix.pallas.gpu_blocks import LINES, MULTIPROCESSORS, Blocks
from jradix.pallas.gpu_kernel import Tiles, attend, merge
from jradix.pallas.layout import kv_heads_of, page_size_of
from jradix.pallas.scoring import Scoring

WAVES = 2
"""Thread blocks for each multiprocessor, so that the long rows' do not wait at the end for the short ones'."""
MIN_SPLIT_BLOCKS = 2
"""Blocks of a split, at least, for the longest row that fits into the page table."""


def decode_attention(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    scoring: Scoring,
    sinks: jax.Array | None = None,
    *,
    blocks: Blocks,
    interpret: Any = False,
) -> jax.Array:
    """See `ops.decode_attention`; the pool is split, and `gpu_blocks.unsupported` has nothing against the shapes.

    Args:
        blocks: `gpu_blocks.decode_blocks`.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    rows, q_heads, head_dim = q.shape
    kv_heads = kv_heads_of(pool)
    group = q_heads // kv_heads
    # Copies are of whole tiles of 8 lines.
    lines = blocks.lines if group > LINES else -(-group // 8) * 8
    grouped = jnp.pad(q.reshape(rows, kv_heads, group, head_dim), [(0, 0), (0, 0), (0, lines - group), (0, 0)])
    tiles = Tiles(grouped, jnp.arange(rows, dtype=jnp.int32), jnp.maximum(seq_lens - 1, 0), seq_lens)
    splits = num_splits(rows * kv_heads, page_table.shape[1] * page_size_of(pool), blocks)
    mixes, lse = attend(
        tiles, pool, page_table, scoring, group=group, splits=splits, blocks=blocks, interpret=interpret
    )
    sinks = None if sinks is None else sinks.reshape(kv_heads, group)
    return merge(mixes[..., :group, :], lse[..., :group], sinks).reshape(q.shape)


def num_splits(walks: int, max_len: int, blocks: Blocks) -> int:
    """Parts to cut each of `walks` walks over up to `max_len` positions into, so that all multiprocessors have some."""
    wanted = -(-WAVES * MULTIPROCESSORS // walks)
    return max(1, min(wanted, max_len // (MIN_SPLIT_BLOCKS * blocks.block_len)))
