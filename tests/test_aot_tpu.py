"""The step compiled ahead of time for TPUs: what the chip would need, without one."""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jradix.batch import packed_len
from jradix.config import StepShape
from jradix.model.config import ModelConfig
from jradix.model.weights import random_transformer
from jradix.pallas.layout import KVLayout
from jradix.runner import jit_copies, jit_forward
from tests.test_runner import copied_shapes
from tests.tpu_topology import compile_for, on, tpu_mesh

LAYERS = 4
GEOMETRY = {"num_hidden_layers": LAYERS, "hidden_size": 256, "head_dim": 128, "intermediate_size": 512}
PAGES = 2048  # of a layer


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_a_step_updates_the_pool_in_place(topology: str, tiny_path: Callable[[str], Path]) -> None:
    """A 128 MiB pool in the carry of a scan over layers, as an engine on a TPU runs it."""
    mesh = tpu_mesh(topology)
    config = ModelConfig.from_hf(json.loads((tiny_path("llama") / "config.json").read_text()) | GEOMETRY)
    model = random_transformer(config, dtype=jnp.bfloat16, layer_loop="scan", seed=0)
    forward, parameters = jit_forward(model, PAGES)
    layout = KVLayout(LAYERS, PAGES, page_size=16, kv_heads=config.kv_heads, head_dim=config.head_dim)
    pool = jax.ShapeDtypeStruct(layout.shape, jnp.bfloat16)
    next_tokens = jax.ShapeDtypeStruct((9,), jnp.int32)
    pool_bytes = prod(pool.shape) * pool.dtype.itemsize
    for shape in (StepShape(8, 0, 0, 16), StepShape(8, 32, 2, 16)):
        arrays = jax.ShapeDtypeStruct((packed_len(shape),), jnp.int32)
        program = compile_for(mesh, forward, *on(mesh, (parameters, pool, next_tokens, arrays)), shape=shape)
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == pool_bytes
        assert memory.temp_size_in_bytes < pool_bytes / 8
        text = program.as_text()
        assert text is not None
        assert all(prod(sizes) < prod(pool.shape) / 8 for sizes in copied_shapes(text))


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_pages_are_copied_within_the_pool(topology: str) -> None:
    mesh = tpu_mesh(topology)
    layout = KVLayout(LAYERS, PAGES, page_size=16, kv_heads=2, head_dim=128)
    pool = jax.ShapeDtypeStruct(layout.shape, jnp.bfloat16)
    program = compile_for(mesh, jit_copies(PAGES), *on(mesh, (pool, jax.ShapeDtypeStruct((2, 16), jnp.int32))))
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == prod(pool.shape) * 2
    assert memory.temp_size_in_bytes < prod(pool.shape) / 8
