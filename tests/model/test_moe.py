"""Experts against a dense product with every expert, over loads from balanced to all on one expert."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix.model.config import ModelConfig
from jradix.model.moe import Experts, _tile

HIDDEN, MLP = 16, 12


def make_experts(experts: int, experts_per_token: int, layers: int | None = None, *, normalize: bool = True) -> Experts:
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "moe_intermediate_size": MLP,
        "norm_topk_prob": normalize,
        "num_attention_heads": 4,
        "num_experts": experts,
        "num_experts_per_tok": experts_per_token,
        "num_hidden_layers": 1,
        "vocab_size": 8,
    }
    rng = np.random.default_rng(experts)

    def make(name: str, shape: tuple[int, ...]) -> jax.Array:
        stack = () if layers is None or name == "router" else (layers,)
        return jnp.asarray(rng.standard_normal(stack + shape), jnp.float32)

    return Experts(ModelConfig.from_hf(config), make)


def dense(model: Experts, x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Every expert computes every token; the unchosen ones weigh nothing."""
    scores = np.exp(x @ np.asarray(model.router[...]).T)
    scores /= scores.sum(axis=1, keepdims=True)
    unchosen = np.argsort(-scores, axis=1, kind="stable")[:, model.experts_per_token :]
    np.put_along_axis(scores, unchosen, 0.0, axis=1)
    if model.normalize:
        scores /= scores.sum(axis=1, keepdims=True)
    gate, up = np.moveaxis(np.einsum("th,ecmh->tecm", x, gate_up), 2, 0)
    return np.einsum("te,tem,ehm->th", scores, gate / (1 + np.exp(-gate)) * up, down)


@pytest.mark.parametrize(
    ("tokens", "experts", "experts_per_token"), [(1, 8, 2), (5, 3, 3), (40, 64, 4), (200, 4, 1), (33, 1, 1)]
)
def test_the_chosen_experts_are_what_a_dense_product_gives(tokens: int, experts: int, experts_per_token: int) -> None:
    model = make_experts(experts, experts_per_token, normalize=tokens % 2 == 0)
    x = np.random.default_rng(0).standard_normal((tokens, HIDDEN)).astype(np.float32)
    expected = dense(model, x, np.asarray(model.gate_up[...]), np.asarray(model.down[...]))
    np.testing.assert_allclose(model(jnp.asarray(x), 0), expected, rtol=1e-4, atol=1e-4)


def test_no_token_is_dropped_when_all_choose_one_expert() -> None:
    model = make_experts(8, 1)
    x = np.tile(np.random.default_rng(0).standard_normal((1, HIDDEN)).astype(np.float32), (100, 1))
    expected = dense(model, x, np.asarray(model.gate_up[...]), np.asarray(model.down[...]))
    np.testing.assert_allclose(model(jnp.asarray(x), 0), expected, rtol=1e-4, atol=1e-4)


def test_a_stack_of_layers_uses_the_experts_of_its_slot() -> None:
    model = make_experts(4, 2, layers=3)
    x = np.random.default_rng(0).standard_normal((6, HIDDEN)).astype(np.float32)
    for slot in range(3):
        expected = dense(model, x, np.asarray(model.gate_up[...])[slot], np.asarray(model.down[...])[slot])
        np.testing.assert_allclose(model(jnp.asarray(x), jnp.int32(slot)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("experts", [1, 3, 50])
@pytest.mark.parametrize("tile_len", [1, 8])
def test_tiles_hold_one_expert_each_and_no_more_than_are_needed(experts: int, tile_len: int) -> None:
    rng = np.random.default_rng(experts)
    for pairs in (1, 7, 64):
        expert = rng.integers(0, experts, pairs).astype(np.int32)
        place, tile_expert, num_tiles = (np.asarray(a) for a in _tile(jnp.asarray(expert), experts, tile_len))
        assert len(set(place.tolist())) == pairs
        np.testing.assert_array_equal(tile_expert[place // tile_len], expert)
        assert num_tiles == sum(-(-int(count) // tile_len) for count in np.bincount(expert))
        assert num_tiles <= len(tile_expert)
