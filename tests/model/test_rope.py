"""Rotary frequencies against those of transformers, and the rotation against complex numbers."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jradix.model.config import ModelConfig, RopeConfig
from jradix.model.rope import inverse_frequencies, rope_tables, rotate

CASES = json.loads((Path(__file__).parents[1] / "data" / "rope.json").read_text("utf-8"))["cases"]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}


@pytest.mark.parametrize("case", CASES, ids=[f"{c['rope_parameters']['rope_type']}-{i}" for i, c in enumerate(CASES)])
def test_frequencies_are_those_of_transformers(case: dict[str, Any]) -> None:
    config = ModelConfig.from_hf({**CONFIG, "rope_parameters": case["rope_parameters"]})
    freqs, scale = inverse_frequencies(config.rope)
    np.testing.assert_allclose(freqs, case["inverse_frequencies"], rtol=1e-6)
    assert scale == pytest.approx(case["scale"], rel=1e-12)


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rotation_is_a_product_of_complex_numbers_and_leaves_the_rest_alone(rotary_dim: int) -> None:
    rng, half = np.random.default_rng(0), rotary_dim // 2
    x = rng.standard_normal((3, 2, 5, 8)).astype(np.float32)
    positions = np.asarray([0, 7, 4095], np.int32)
    rope = RopeConfig("default", 100.0, rotary_dim)
    out = np.asarray(rotate(jnp.asarray(x), rope_tables(jnp.asarray(positions), rope)))
    angles = positions[:, None, None, None] * 100.0 ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:rotary_dim]) * np.exp(1j * angles)
    np.testing.assert_allclose(out[..., :half], turned.real, atol=1e-3)
    np.testing.assert_allclose(out[..., half:rotary_dim], turned.imag, atol=1e-3)
    np.testing.assert_array_equal(out[..., rotary_dim:], x[..., rotary_dim:])
    np.testing.assert_array_equal(out[0], x[0])
