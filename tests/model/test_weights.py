"""Checkpoints that do not fit are refused with every difference named; those that do are read without waste."""

import gc
import math
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jradix.mesh import tensor_mesh
from jradix.model.checkpoint import open_checkpoint
from jradix.model.config import ModelConfig
from jradix.model.sharding import Sharding
from jradix.model.transformer import LayerLoop
from jradix.model.weights import load_transformer, random_transformer, replace_parameters


class Tensors:
    """A checkpoint in memory; `make` gives the tensors' content, so that nothing need be kept."""

    def __init__(self, config: Mapping[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
        self.config, self.shapes, self.reads = config, shapes, list[str]()

    @classmethod
    def like(cls, path: Path) -> "Tensors":
        checkpoint = open_checkpoint(path)
        return cls(checkpoint.config, {name: checkpoint.shape(name) for name in checkpoint.names()})

    def names(self) -> frozenset[str]:
        return frozenset(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str, dtype: Any = None) -> np.ndarray:
        self.reads.append(name)
        return np.full(self.shapes[name], len(self.reads), dtype or np.float32)


def load(source: Tensors, layer_loop: LayerLoop = "unroll", **options: Any) -> Any:
    config = ModelConfig.from_hf(source.config)
    return load_transformer(config, source, **{"dtype": np.float32, "layer_loop": layer_loop, **options})


def test_missing_misshapen_and_foreign_tensors_are_all_named_before_anything_is_read(
    tiny_path: Callable[[str], Path],
) -> None:
    source = Tensors.like(tiny_path("llama"))
    del source.shapes["model.layers.1.mlp.down_proj.weight"]
    source.shapes["model.norm.weight"] = (65,)
    source.shapes["model.layers.0.self_attn.q_proj.bias"] = (64,)
    with pytest.raises(ValueError, match="do not fit its config") as error:
        load(source)
    message = str(error.value)
    assert "missing: model.layers.1.mlp.down_proj.weight" in message
    assert "model.norm.weight (expected [64], got [65])" in message
    assert "not part of the model: model.layers.0.self_attn.q_proj.bias" in message
    assert source.reads == []


def test_a_long_list_of_differences_is_cut(tiny_path: Callable[[str], Path]) -> None:
    source = Tensors.like(tiny_path("llama"))
    source.shapes = {"model.norm.weight": (64,)}
    with pytest.raises(ValueError, match=r"and \d+ more"):
        load(source)


def test_tensors_that_repeat_what_is_known_are_ignored(tiny_path: Callable[[str], Path]) -> None:
    source = Tensors.like(tiny_path("llama_mqa"))
    source.shapes["lm_head.weight"] = source.shapes["model.embed_tokens.weight"]
    source.shapes["model.layers.0.self_attn.rotary_emb.inv_freq"] = (8,)
    load(source)
    assert not any("lm_head" in name or "rotary" in name for name in source.reads)


@pytest.mark.parametrize("layer_loop", ["unroll", "scan"])
@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3_moe", "gemma2", "gpt_oss"])
def test_every_tensor_is_read_once(name: str, layer_loop: LayerLoop, tiny_path: Callable[[str], Path]) -> None:
    source = Tensors.like(tiny_path(name))
    load(source, layer_loop)
    assert sorted(source.reads) == sorted(source.shapes)


class Weighed(Tensors):
    """Notes at each read, in bytes, what the host holds beside finished arrays, and the size of all arrays."""

    def __init__(self, config: Mapping[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(config, shapes)
        self.held, self.live = list[int](), list[int]()

    def read(self, name: str, dtype: Any = None) -> np.ndarray:
        tensor = super().read(name, dtype)
        # On a CPU a finished array keeps the buffer that it was made of.
        finished = {shard.data.unsafe_buffer_pointer(): shard.data.nbytes for shard in live_shards()}
        self.live.append(sum(array.nbytes for array in jax.live_arrays()))
        self.held.append(tracemalloc.get_traced_memory()[0] - sum(finished.values()))
        return tensor


def live_shards() -> list[Any]:
    return [shard for array in jax.live_arrays() for shard in array.addressable_shards]


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("layer_loop", ["unroll", "scan"])
def test_the_host_holds_one_shard_and_one_tensor_at_a_time(
    layer_loop: LayerLoop, devices: int, tiny_path: Callable[[str], Path]
) -> None:
    source = Weighed.like(tiny_path("llama"))
    source.config = {**source.config, "intermediate_size": 8192}
    for name, shape in source.shapes.items():
        source.shapes[name] = tuple(8192 if size == 96 else size for size in shape)
    sharding = Sharding(ModelConfig.from_hf(source.config), tensor_mesh(devices))
    load(source, layer_loop, sharding=sharding)  # what jax and flax keep from a first call is not of interest
    gc.collect()
    assert isinstance(source, Weighed)
    source.held.clear()
    before = sum(shard.data.nbytes for shard in live_shards())
    tracemalloc.start()
    parameters = jax.tree.leaves(nnx.state(load(source, layer_loop, sharding=sharding)))
    tracemalloc.stop()
    largest_shard = max(array.addressable_shards[0].data.nbytes for array in parameters)
    largest_tensor = max(math.prod(shape) for shape in source.shapes.values()) * 4
    total = sum(array.nbytes for array in parameters)
    assert min(source.held) + before > 0, "arrays no longer keep their buffers, which are then counted twice"
    assert max(source.held) + before < 1.1 * largest_shard + largest_tensor + 2**20 < total


def test_random_weights_keep_activations_in_range_and_repeat(tiny_path: Callable[[str], Path]) -> None:
    config = ModelConfig.from_hf(open_checkpoint(tiny_path("llama_bias_yarn")).config)

    def model(seed: int) -> Any:
        return random_transformer(config, dtype=np.float32, layer_loop="scan", seed=seed)

    block = model(0).blocks[0]
    assert np.std(block.attention.qkv[...]) == pytest.approx(64**-0.5, rel=0.05)
    assert np.std(block.mlp.down[...]) == pytest.approx(96**-0.5, rel=0.05)
    assert np.all(block.mlp_norm[...] == 1)
    assert np.all(block.attention.qkv_bias[...] == 0)
    np.testing.assert_array_equal(block.mlp.down[...], model(0).blocks[0].mlp.down[...])
    assert np.any(block.mlp.down[...] != model(1).blocks[0].mlp.down[...])


@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe_mixed", "phi3", "qwen2_mixed_window", "gpt_oss"])
def test_replaced_parameters_are_those_of_a_fresh_model(
    tiny_path: Callable[[str], Path], name: str, layer_loop: LayerLoop
) -> None:
    """In the order of the runner's flat list, whatever the grouping of layers."""
    source = open_checkpoint(tiny_path(name))
    config = ModelConfig.from_hf(source.config)
    options: dict[str, Any] = {"dtype": np.float32, "layer_loop": layer_loop}
    wanted = jax.tree.leaves(nnx.state(load_transformer(config, source, **options)))
    parameters = [jnp.full_like(array, jnp.nan) for array in wanted]
    replace_parameters(parameters, config, source, **options)
    for got, want in zip(parameters, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_while_parameters_are_replaced_no_more_than_one_is_there_twice(tiny_path: Callable[[str], Path]) -> None:
    source = Weighed.like(tiny_path("llama"))
    assert isinstance(source, Weighed)
    config = ModelConfig.from_hf(source.config)
    options: dict[str, Any] = {"dtype": np.float32, "layer_loop": "scan"}
    parameters = jax.tree.leaves(nnx.state(load_transformer(config, source, **options)))
    other_bytes = sum(array.nbytes for array in jax.live_arrays()) - sum(array.nbytes for array in parameters)
    total, largest = sum(array.nbytes for array in parameters), max(array.nbytes for array in parameters)
    source.live.clear()
    replace_parameters(parameters, config, source, **options)
    assert max(source.live) - other_bytes <= total + largest


def test_tensors_that_do_not_fit_replace_nothing(tiny_path: Callable[[str], Path]) -> None:
    source = Tensors.like(tiny_path("llama"))
    config = ModelConfig.from_hf(source.config)
    parameters = jax.tree.leaves(nnx.state(load(source)))
    before = list(parameters)
    source.shapes["model.norm.weight"] = (65,)
    source.reads.clear()
    with pytest.raises(ValueError, match="wrong shape"):
        replace_parameters(parameters, config, source, dtype=np.float32, layer_loop="unroll")
    assert source.reads == []
    assert all(now is then for now, then in zip(parameters, before, strict=True))
