"""Keys and values in 8 bits are near those that they stand for, and attention gets what these would give."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jradix.jitted import jit_calibration
from jradix.mesh import tensor_mesh
from jradix.model.attention import AttentionInputs, paged_attention
from jradix.model.checkpoint import open_checkpoint
from jradix.model.config import ModelConfig
from jradix.model.kv_calibration import HEADROOM, calibration_ids
from jradix.model.quantized_kv import largest_number, quantize
from jradix.model.sharding import Sharding
from jradix.model.weights import load_transformer
from jradix.pallas.layout import KEY, VALUE
from jradix.pallas.scoring import Scoring
from tests.model.paged_driver import PagedDriver

NARROW = [jnp.int8, jnp.float8_e4m3fn]


def floats(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.mark.parametrize("dtype", NARROW, ids=["int8", "fp8"])
def test_a_number_is_off_by_half_a_step_at_most_and_never_beyond_the_largest(dtype: Any) -> None:
    x, limit = floats(1000) * 3, largest_number(dtype)
    scale = jnp.float32(2.0 / limit)  # so that some of them are too large
    found = np.asarray(quantize(x, scale, dtype), np.float32) * np.asarray(scale)
    step = np.full(1000, scale) if dtype == jnp.int8 else np.maximum(np.abs(found) / 8, scale / 512)
    inside = np.abs(x) <= 2
    assert 0 < (~inside).sum() < 800
    assert np.all(np.abs(found - x)[inside] <= step[inside] * 0.5001)
    np.testing.assert_allclose(found[~inside], np.sign(np.asarray(x)[~inside]) * 2, rtol=1e-6)


@pytest.mark.parametrize("dtype", NARROW, ids=["int8", "fp8"])
def test_no_outlier_becomes_nan_or_turns_its_sign(dtype: Any) -> None:
    x = jnp.asarray([1e30, -1e30, 1e4, -1e4, 0.0])
    found = np.asarray(quantize(x, jnp.float32(1), dtype), np.float32)
    np.testing.assert_array_equal(found, np.array([1, -1, 1, -1, 0]) * largest_number(dtype))


@pytest.mark.parametrize("dtype", NARROW, ids=["int8", "fp8"])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_attention_is_that_of_the_dequantised_keys_and_values(dtype: Any, soft_cap: float | None) -> None:
    """Scales differ by head and channel, between keys and values, and two layers have their own."""
    tokens, kv_heads, group, head_dim, page_size, layers = 7, 2, 3, 8, 4, 2
    q = floats(tokens, kv_heads * group, head_dim, seed=1)
    keys, values = floats(tokens, kv_heads, head_dim, seed=2), floats(tokens, kv_heads, head_dim, seed=3)
    scales = jnp.exp(floats(layers, kv_heads, 2, head_dim, seed=4)) * (2 / largest_number(dtype))
    positions = jnp.arange(tokens, dtype=jnp.int32)
    inputs: dict[str, Any] = {
        "positions": positions,
        "write_pages": 1 + positions // page_size,
        "page_table": jnp.array([[1, 2]], jnp.int32),
        "seq_lens": jnp.array([tokens], jnp.int32),
        "query_starts": jnp.array([0, tokens], jnp.int32),
        "pages_per_layer": 3,
    }
    shape, sinks, scoring = (
        (layers * 3, kv_heads, 2, page_size, head_dim),
        floats(6, seed=5),
        Scoring(0.5, None, soft_cap),
    )
    layer = 1
    stored_keys, stored_values = (
        quantize(x, scales[layer, :, which], dtype).astype(jnp.float32) * scales[layer, :, which]
        for which, x in ((KEY, keys), (VALUE, values))
    )
    plain, _ = paged_attention(
        jnp.zeros(shape),
        q,
        stored_keys,
        stored_values,
        AttentionInputs(**inputs),
        layer,
        scoring,
        sinks,
        dtype=jnp.float32,
    )
    narrow = AttentionInputs(**inputs, kv_scales=scales)
    found, pool = paged_attention(
        jnp.zeros(shape, dtype), q, keys, values, narrow, layer, scoring, sinks, dtype=jnp.float32
    )
    assert pool.dtype == dtype
    np.testing.assert_allclose(found, plain, atol=2e-5)


def scales_of(path: Path, devices: int, dtype: Any = jnp.int8) -> tuple[np.ndarray, Sharding]:
    config = ModelConfig.from_hf(open_checkpoint(path).config)
    sharding = Sharding(config, tensor_mesh(devices))
    options: dict[str, Any] = {"dtype": np.float32, "layer_loop": "scan", "sharding": sharding}
    model = load_transformer(config, open_checkpoint(path), **options)
    run = jit_calibration(model, dtype, sharding)
    return np.asarray(run(jax.tree.leaves(nnx.state(model)), calibration_ids(config))), sharding


@pytest.fixture(scope="module")
def llama_scales(tiny_path: Callable[[str], Path]) -> np.ndarray:
    return scales_of(tiny_path("llama"), 1)[0]


def test_scales_leave_room_for_the_largest_of_a_channel_whatever_the_position(
    llama_scales: np.ndarray, tiny_path: Callable[[str], Path]
) -> None:
    source = open_checkpoint(tiny_path("llama"))
    config = ModelConfig.from_hf(source.config)
    driver = PagedDriver(load_transformer(config, source, dtype=np.float32, layer_loop="scan"), 16)
    ids = calibration_ids(config)
    row = driver.new_row(len(ids))
    driver.step(extend=[(row, ids.tolist())])
    pool = np.asarray(driver.pool).reshape(config.layers, driver.num_pages, *driver.pool.shape[1:])[:, row.pages]
    flat = np.moveaxis(pool, (3, 4), (0, 1))[:, :, :, :].reshape(2, -1, *pool.shape[:3], pool.shape[-1])
    keys, values = np.nan_to_num(flat)  # [page_size, layers, pages, kv_heads, head_dim]
    pairs = keys.reshape(*keys.shape[:-1], 2, -1)  # the two halves are turned into each other
    radius = np.tile(np.hypot(pairs[..., 0, :], pairs[..., 1, :]), 2)
    for which, largest in ((KEY, radius), (VALUE, np.abs(values))):
        ratio = llama_scales[:, :, which] * 127 / HEADROOM / largest.max(axis=(0, 2))
        assert np.all((ratio > 0.9999) & (ratio < 1.126)), "rounded up to four significant bits"


def test_scales_are_the_same_on_four_devices_and_those_of_copied_heads_too(
    llama_scales: np.ndarray, tiny_path: Callable[[str], Path]
) -> None:
    scales, sharding = scales_of(tiny_path("llama"), 4)
    assert sharding.heads.copies == 2
    np.testing.assert_array_equal(scales, np.repeat(llama_scales, 2, axis=1))
