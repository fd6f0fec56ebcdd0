"""Finds the scales of a KV pool in 8 bits: the model runs once, and the largest keys and values are looked up."""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jradix.model.attention import AttentionInputs
from jradix.model.config import ModelConfig
from jradix.model.quantized_kv import largest_number
from jradix.model.transformer import Transformer
from jradix.pallas.layout import KVLayout

TOKENS: Final = 512
"""As many tokens the scales come from."""
HEADROOM: Final = 1.25
"""Times the largest number that was seen, which must fit into 8 bits."""
PAGE_SIZE: Final = 16  # of the pool that calibration fills; any will do


def calibration_ids(config: ModelConfig) -> np.ndarray:
    """The same tokens at every start, int32 `[tokens]`: random ones, for which no tokenizer is needed."""
    num_tokens = min(TOKENS, config.max_position_embeddings)
    return np.random.default_rng(0).integers(0, config.vocab_size, num_tokens, np.int32)


def scales_shape(layout: KVLayout) -> tuple[int, ...]:
    """Of the scales, float32, of a pool."""
    return (layout.layers, layout.kv_heads, 2, layout.head_dim)


def calibrate(model: Transformer, token_ids: jax.Array, kv_heads: int, kv_dtype: Any) -> jax.Array:
    """Scales for a pool of `kv_dtype`, float32 `[layers, kv_heads, 2, head_dim]`: the keys', then the values'.

    The model computes `token_ids` as one prompt, on a pool of its own dtype. Inside `jax.shard_map`, each device finds
    the scales of its `kv_heads`.
    """
    config, tokens = model.config, token_ids.shape[0]
    pages = -(-tokens // PAGE_SIZE)
    layout = KVLayout(config.layers, pages + 1, PAGE_SIZE, kv_heads, config.head_dim)
    positions = jnp.arange(tokens, dtype=jnp.int32)
    inputs = AttentionInputs(
        positions=positions,
        write_pages=1 + positions // PAGE_SIZE,
        page_table=1 + jnp.arange(pages, dtype=jnp.int32)[None],
        seq_lens=jnp.full(1, tokens, jnp.int32),
        query_starts=jnp.array([0, tokens], jnp.int32),
        pages_per_layer=layout.num_pages,
    )
    pool = jnp.zeros(layout.shape, model.embed[...].dtype)
    _, _, pool = model(token_ids, pool, inputs, jnp.zeros(1, jnp.int32))
    # [layers, pages, kv_heads, page_size, head_dim]
    keys, values = jnp.moveaxis(pool.reshape(config.layers, layout.num_pages, *layout.shape[1:]), 3, 0).astype(
        jnp.float32
    )
    largest = jnp.stack([_radius(keys, config.rope.rotary_dim), jnp.abs(values)], axis=3).max(axis=(1, 4))
    return _rounded_up(jnp.where(largest > 0, largest * (HEADROOM / largest_number(kv_dtype)), 1.0))


def _radius(keys: jax.Array, rotary_dim: int) -> jax.Array:
    """Of two channels that rotary embedding turns into each other, what either may become at another position."""
    half = rotary_dim // 2
    radius = jnp.hypot(keys[..., :half], keys[..., half:rotary_dim])
    return jnp.concatenate([radius, radius, jnp.abs(keys[..., rotary_dim:])], axis=-1)


def _rounded_up(x: jax.Array) -> jax.Array:
    """To four significant bits, so that sums in another order, as over more devices, seldom change a scale."""
    mantissa, exponent = jnp.frexp(x)
    return jnp.ldexp(jnp.ceil(mantissa * 16) / 16, exponent)
