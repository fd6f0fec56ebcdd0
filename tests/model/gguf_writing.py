"""Writes tiny GGUF files for the tests, with the package gguf's own writer and quantiser."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, LAYERS = 64, 4, 2, 16, 96, 160, 2

COMMON_METADATA: Mapping[str, Any] = {
    "block_count": LAYERS,
    "context_length": 512,
    "embedding_length": HIDDEN,
    "feed_forward_length": MLP,
    "attention.head_count": Q_HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}


def write_gguf(
    path: Path,
    arch: str,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any] | None = None,
    *,
    quantisation: GGMLQuantizationType = GGMLQuantizationType.F32,
    general: Mapping[str, Any] | None = None,
) -> Path:
    """Writes ``tensors`` (float32; vectors stay so) with ``COMMON_METADATA`` overridden by ``metadata``.

    A value of ``None`` leaves the key out. Keys of ``general`` are written as they are, without the architecture.
    """
    writer = gguf.GGUFWriter(path, arch)
    keys = {f"{arch}.{key}": value for key, value in {**COMMON_METADATA, **(metadata or {})}.items()}
    for key, value in (keys | dict(general or {})).items():
        if value is not None:
            add_value(writer, key, value)
    for name, array in tensors.items():
        kind = GGMLQuantizationType.F32 if array.ndim == 1 else quantisation
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def llama_shapes(num_layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    """The tensors of a llama GGUF file with an output matrix of its own, and their shapes as numpy has them."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (VOCAB, HIDDEN),
    }
    for layer in range(num_layers):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (Q_HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, Q_HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (MLP, HIDDEN),
            "ffn_up": (MLP, HIDDEN),
            "ffn_down": (HIDDEN, MLP),
        }
        shapes |= {f"blk.{layer}.{module}.weight": shape for module, shape in block.items()}
    return shapes
