"""Where a parameter's numbers lie: the same numbers on every mesh and in both layer loops."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jradix.mesh import tensor_mesh
from jradix.model.checkpoint import open_checkpoint
from jradix.model.config import ModelConfig
from jradix.model.parameters import SAMPLES, list_parameters
from jradix.model.sharding import Sharding
from jradix.model.transformer import LayerLoop
from jradix.model.weights import host_parameters, load_transformer


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("llama", None), ("llama", "int8"), ("qwen3_wide", None), ("qwen3_moe_mixed", "int8"), ("gpt_oss", None)],
)
def test_samples_are_those_of_the_checkpoint_s_parameters_on_any_mesh(
    name: str, quantization: str | None, tiny_path: Callable[[str], Path]
) -> None:
    """KV heads are copied or padded, and so are experts; Gemma and gpt-oss stack every second layer."""
    checkpoint = open_checkpoint(tiny_path(name))
    config = ModelConfig.from_hf(checkpoint.config)
    whole = host_parameters(config, checkpoint, dtype=np.float32, quantization=quantization)
    expected = {
        key: array.reshape(-1)[np.linspace(0, array.size - 1, SAMPLES).astype(np.int64)] for key, array in whole.items()
    }
    loops: tuple[LayerLoop, ...] = ("scan", "unroll")
    for devices, layer_loop in [*product((1, 4), loops), (8, "scan")]:
        sharding = Sharding(config, tensor_mesh(devices))
        model = load_transformer(
            config, checkpoint, dtype=np.float32, layer_loop=layer_loop, sharding=sharding, quantization=quantization
        )
        found: dict[str, np.ndarray] = {}
        parameters = list_parameters(config, layer_loop, quantized=quantization is not None)
        for parameter, array in zip(parameters, jax.tree.leaves(nnx.state(model)), strict=True):
            sampled = np.asarray(array)[parameter.samples(sharding)]
            found |= zip(parameter.layer_names, sampled, strict=True)
        assert found.keys() == expected.keys()
        for key, numbers in expected.items():
            np.testing.assert_array_equal(found[key], numbers, err_msg=f"{key} on {devices}, {layer_loop}")
