"""A GGUF file as a checkpoint: its tensors under Hugging Face's names and in Hugging Face's layout."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jradix.model.checkpoint_error import CheckpointError
from jradix.model.gguf_config import hf_config
from jradix.model.gguf_file import GGUFFile, GGUFTensor

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MODULES = {
    "llama": _NORMS | _ATTENTION | _MLP,
    "qwen2": _NORMS | _ATTENTION | _MLP,
    "qwen3": _NORMS | _ATTENTION | _HEAD_NORMS | _MLP,
    "qwen3moe": _NORMS | _ATTENTION | _HEAD_NORMS | _MLP | {"ffn_gate_inp": "mlp.gate"},
    "phi3": _NORMS
    | {
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
}
_WITH_BIAS = {
    "llama": _ATTENTION | _MLP,
    "qwen2": {"attn_q", "attn_k", "attn_v"},
    "qwen3": _ATTENTION,
    "qwen3moe": _ATTENTION,
    "phi3": {},
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # read into the config
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a Hugging Face tensor comes from: a whole GGUF tensor, or one expert's slice of a stacked one.

    ``num_rope_heads`` is set where the rows stand in the order of interleaved rope.
    """

    tensor: GGUFTensor
    expert: int | None = None
    num_rope_heads: int | None = None


class GGUFCheckpoint:
    """Tensors by their Hugging Face names, read one at a time; see ``jradix.model.checkpoint.Checkpoint``.

    ``path`` is the file itself, in which the tokenizer lies too. Quantised tensors are dequantised to float32, others
    come as stored. Raises ``CheckpointError`` for corrupt files, and for architectures, metadata or tensors that
    jradix does not support.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        self.config = hf_config(self._file)
        self._sources: dict[str, _Source] = {}
        for tensor in self._file.tensors.values():
            self._sources.update(self._map(tensor))

    def names(self) -> frozenset[str]:
        return frozenset(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._sources[name]
        return source.tensor.shape if source.expert is None else source.tensor.shape[1:]

    def read(self, name: str, dtype: npt.DTypeLike | None = None) -> np.ndarray:
        source = self._sources[name]
        array = self._file.read(source.tensor.name, source.expert, dtype)
        return array if source.num_rope_heads is None else rope_halves(array, source.num_rope_heads)

    def _map(self, tensor: GGUFTensor) -> dict[str, _Source]:
        arch = self._file.metadata["general.architecture"]
        if tensor.name in _TOP:
            return {_TOP[tensor.name]: _Source(tensor)}
        if tensor.name in _ROPE_TENSORS:
            return {}
        match = _IN_LAYER.fullmatch(tensor.name)
        if match is not None and int(match[1]) < self.config["num_hidden_layers"]:
            layer, module, kind = f"model.layers.{match[1]}", match[2], match[3]
            if module == "attn_rot_embd":  # the unscaled rotary frequencies, which the config implies
                return {}
            if arch == "qwen3moe" and module in _EXPERTS and kind == "weight":
                return self._map_experts(tensor, f"{layer}.mlp.experts", _EXPERTS[module])
            if module in (_MODULES[arch] if kind == "weight" else _WITH_BIAS[arch]):
                num_rope_heads = self._num_rope_heads(tensor, module) if arch == "llama" else None
                return {f"{layer}.{_MODULES[arch][module]}.{kind}": _Source(tensor, num_rope_heads=num_rope_heads)}
        raise CheckpointError(
            f"{self.path}: tensor {tensor.name} {tensor.shape} has no place in a {arch} model of "
            f"{self.config['num_hidden_layers']} layers as jradix knows it"
        )

    def _map_experts(self, tensor: GGUFTensor, prefix: str, module: str) -> dict[str, _Source]:
        num_experts = self.config["num_experts"]
        if len(tensor.shape) != 3 or tensor.shape[0] != num_experts:
            raise CheckpointError(
                f"{self.path}: expected {tensor.name} to stack {num_experts} matrices, found shape {tensor.shape}"
            )
        return {f"{prefix}.{e}.{module}.weight": _Source(tensor, expert=e) for e in range(num_experts)}

    def _num_rope_heads(self, tensor: GGUFTensor, module: str) -> int | None:
        counts = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        if module not in counts:
            return None
        num_heads, head_dim = self.config[counts[module]], self.config["head_dim"]
        if tensor.shape[0] != num_heads * head_dim or head_dim % 2:
            raise CheckpointError(
                f"{self.path}: expected {num_heads} heads x {head_dim} (even) rows in {tensor.name}, "
                f"found shape {tensor.shape}"
            )
        return num_heads


def rope_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders the rows of a q or k projection (or its bias) from interleaved rope to rope by halves.

    llama.cpp rotates rows (2i, 2i+1) of a llama head together, Hugging Face rows (i, i + head_dim / 2). Converters
    permute llama's q and k for it; this is the inverse. ``rows`` is ``[heads * head_dim, ...]``; returns a copy.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
