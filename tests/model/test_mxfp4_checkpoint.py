"""Experts in MXFP4 against a decoder that takes the format's bits one number at a time."""

import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jradix.model.checkpoint import CheckpointError, open_checkpoint
from jradix.model.config import ModelConfig
from jradix.model.mxfp4_checkpoint import Mxfp4Checkpoint
from jradix.model.weights import load_transformer

EXPERTS = "model.layers.0.mlp.experts."


def e2m1(bits: int) -> float:
    """A sign, two bits of exponent with a bias of 1, a bit of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    return (-1) ** sign * (2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2)


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """`[experts, in, out]`."""
    experts, rows, num_blocks, _ = blocks.shape
    out = np.empty((experts, num_blocks * 32, rows))
    for expert, row, block, place in np.ndindex(experts, rows, num_blocks, 32):
        byte = int(blocks[expert, row, block, place // 2])
        number = e2m1(byte >> 4 if place % 2 else byte & 15)
        out[expert, block * 32 + place, row] = number * 2.0 ** (int(scales[expert, row, block]) - 127)
    return out


def quantized_gpt_oss(source: Path, target: Path) -> dict[str, np.ndarray]:
    """Writes the tiny gpt-oss with experts of random bytes; returns all its tensors."""
    config = json.loads((source / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (target / "config.json").write_text(json.dumps(config))
    rng, tensors = np.random.default_rng(0), {}
    stored = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name, tensor in stored.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": rng.integers(100, 130, blocks.shape[:3], np.uint8)}
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors")
    return tensors


def test_every_number_and_scale_is_what_its_bits_say(tmp_path: Path) -> None:
    tensors = {
        "w_blocks": np.arange(2 * 16 * 2 * 16).astype(np.uint8).reshape(2, 16, 2, 16),
        "w_scales": np.arange(2 * 16 * 2).astype(np.uint8).reshape(2, 16, 2) * 4,
        "w_bias": np.ones(3, np.float32),
    }
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, Mxfp4Checkpoint)
    assert checkpoint.names() == {"w", "w_bias"}
    assert checkpoint.shape("w") == (2, 64, 16)
    expected = decoded(tensors["w_blocks"], tensors["w_scales"])
    np.testing.assert_array_equal(checkpoint.read("w"), expected.astype(np.float32), strict=True)
    half = checkpoint.read("w", ml_dtypes.bfloat16)
    np.testing.assert_array_equal(half, expected.astype(ml_dtypes.bfloat16), strict=True)
    np.testing.assert_array_equal(checkpoint.read("w_bias"), tensors["w_bias"], strict=True)


def test_a_quantized_gpt_oss_is_loaded_as_one_that_is_not(tmp_path: Path, tiny_path: Callable[[str], Path]) -> None:
    """No two numbers of an expert are in each other's place: gate and up take turns in the checkpoint."""
    tensors = quantized_gpt_oss(tiny_path("gpt_oss"), tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    plain = ModelConfig.from_hf(open_checkpoint(tiny_path("gpt_oss")).config)
    assert ModelConfig.from_hf(checkpoint.config) == plain
    model = load_transformer(plain, checkpoint, dtype=jnp.bfloat16, layer_loop="scan")
    experts = model.blocks[0].mlp
    gate_up = decoded(tensors[f"{EXPERTS}gate_up_proj_blocks"], tensors[f"{EXPERTS}gate_up_proj_scales"])
    down = decoded(tensors[f"{EXPERTS}down_proj_blocks"], tensors[f"{EXPERTS}down_proj_scales"])
    for half in (0, 1):
        got = np.asarray(experts.gate_up[0, :, half], np.float32)
        np.testing.assert_array_equal(got, gate_up[:, :, half::2].transpose(0, 2, 1))
    np.testing.assert_array_equal(np.asarray(experts.down[0], np.float32), down.transpose(0, 2, 1))


@pytest.mark.parametrize(
    ("scales", "found"),
    [
        (None, "expected w_scales beside w_blocks"),
        (np.zeros((1, 2, 4), np.uint8), r"found blocks \[1, 2, 3, 16\] and scales \[1, 2, 4\]"),
        (np.full((1, 2, 3), 255, np.uint8), "w_scales has 255"),
        (np.zeros((1, 2, 3), np.float32), "found F32"),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path: Path, scales: np.ndarray | None, found: str) -> None:
    tensors = {"w_blocks": np.zeros((1, 2, 3, 16), np.uint8)} | ({} if scales is None else {"w_scales": scales})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=found):
        open_checkpoint(tmp_path).read("w")
