"""GGUF metadata as a Hugging Face config: the same model, described in the other format's words.

Every metadata key of the architecture is either translated, or known to change nothing at its value, or refused by
name: a key that is not understood may change the computation. The keys' meaning is that of llama.cpp, which writes
and runs these files.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from jradix.model.checkpoint_error import CheckpointError
from jradix.model.gguf_file import GGUFFile

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
}
SUPPORTED = tuple(_ARCHITECTURES)

_HARMLESS: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # not given, softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""Keys that may stand in a file without being translated, and the values at which they change nothing."""

_TOKEN_IDS = {"bos_token_id": ("bos",), "eos_token_id": ("eos", "eot", "eom"), "pad_token_id": ("padding",)}
_FACTOR_TOLERANCE = 1e-5
"""Relative. Factors are stored as float32 and were computed from float32 frequencies."""


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Returns the config.json that Hugging Face would have for this model, as a dict.

    ``rope_parameters`` holds everything about the rotary embedding, as in transformers 5. Raises ``CheckpointError``
    for an architecture or metadata outside what jradix runs.
    """
    _check_kind(file)
    arch = file.metadata["general.architecture"]
    keys = _Keys(file, arch)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: expected the tensor token_embd.weight, found {len(file.tensors)} others")
    architecture, model_type = _ARCHITECTURES[arch]
    q_heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // q_heads)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": _dtype_name(embedding.type),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": q_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", q_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    keys.expect("attention.value_length", head_dim)
    keys.expect("attention.scale", head_dim**-0.5, 0.0)
    keys.take("vocab_size", None)  # the embedding's rows count, padding included
    config["rope_parameters"] = _rope_parameters(file, keys, config)
    config |= _arch_fields(file, arch, keys, config)
    config |= _token_ids(file)
    keys.refuse_the_rest()
    return config


class _Keys:
    """The metadata of one architecture. What nobody took is refused at the end, unless it is harmless."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self._path = file.path
        self._prefix = f"{arch}."
        self._values = {k.removeprefix(self._prefix): v for k, v in file.metadata.items() if k.startswith(self._prefix)}
        self._taken: set[str] = set()

    def take(self, key: str, default: Any = ...) -> Any:
        self._taken.add(key)
        value = self._values.get(key, default)
        if value is ...:
            raise CheckpointError(f"{self._path}: expected metadata {self._prefix}{key}, found none")
        return value

    def integer(self, key: str, default: Any = ...) -> int:
        """One positive integer. A list with one value a layer will do where all layers agree."""
        value = self.take(key, default)
        if isinstance(value, np.ndarray) and len(set(value.tolist())) == 1:
            value = value[0].item()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self._path}: expected one integer >= 1 as {self._prefix}{key}, found {value!r}")
        return value

    def number(self, key: str, default: Any = ...) -> float:
        value = self.take(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
            raise CheckpointError(f"{self._path}: expected a number > 0 as {self._prefix}{key}, found {value!r}")
        return value

    def expect(self, key: str, *supported: float) -> None:
        value = self.take(key, supported[0])
        if not any(math.isclose(value, number, rel_tol=1e-6) for number in supported):
            raise CheckpointError(
                f"{self._path}: {self._prefix}{key} = {value} changes the computation in a way jradix does not "
                f"support; expected {supported[0]}"
            )

    def refuse_the_rest(self) -> None:
        for key in sorted(self._values.keys() - self._taken):
            if self._values[key] not in _HARMLESS.get(key, ()):
                raise CheckpointError(
                    f"{self._path}: metadata {self._prefix}{key} = {self._values[key]!r} may change the computation "
                    "and jradix does not support it"
                )


def _check_kind(file: GGUFFile) -> None:
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{file.path}: expected a model (general.type), found {kind!r}")
    num_parts = file.metadata.get("split.count", 1)
    if num_parts > 1:
        raise CheckpointError(
            f"{file.path}: is one of {num_parts} parts (split.count); join them with llama-gguf-split --merge"
        )
    arch = file.metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise CheckpointError(f"{file.path}: expected general.architecture among {SUPPORTED}, found {arch!r}")


def _dtype_name(type_: GGMLQuantizationType) -> str:
    """A dtype that loses nothing of what the file holds: only unquantised files have one of their own."""
    plain = {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}
    return plain.get(type_, "bfloat16")


def _arch_fields(file: GGUFFile, arch: str, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    window = keys.take("attention.sliding_window", 0)
    fields: dict[str, Any] = {}
    if arch == "llama":
        # Mistral's files carry llama's name; a window is what tells it apart.
        if window:
            fields = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        if _has_bias(file, "ffn_down"):
            fields["mlp_bias"] = True
    elif arch == "phi3":
        fields = {"sliding_window": window or None}
    elif window:
        raise CheckpointError(
            f"{file.path}: {arch}.attention.sliding_window = {window} needs to know which layers use it, "
            "which this format does not say; jradix does not support it"
        )
    if arch == "qwen3moe":
        fields |= {
            "num_experts": keys.integer("expert_count"),
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
            "norm_topk_prob": bool(keys.take("expert_weights_norm", True)),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [
                layer for layer in range(config["num_hidden_layers"]) if f"blk.{layer}.ffn_gate.weight" in file.tensors
            ],
        }
    if arch in ("llama", "qwen3", "qwen3moe") and _has_bias(file, "attn_q"):
        fields["attention_bias"] = True
    return fields


def _has_bias(file: GGUFFile, module: str) -> bool:
    return f"blk.0.{module}.bias" in file.tensors


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    """Ids as config.json gives them: ``eos_token_id`` is a list where end of turn and end of text differ."""
    ids: dict[str, Any] = {}
    for field, names in _TOKEN_IDS.items():
        found = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
        distinct = list(dict.fromkeys(token_id for token_id in found if token_id is not None))
        if distinct:
            ids[field] = distinct[0] if len(distinct) == 1 else distinct
    return ids


def _rope_parameters(file: GGUFFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    arch, head_dim = file.metadata["general.architecture"], config["head_dim"]
    theta = float(keys.number("rope.freq_base", 10000.0))
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and arch != "phi3":
        raise CheckpointError(
            f"{file.path}: {arch}.rope.dimension_count = {rotary_dim} rotates a part of each head of {head_dim}, "
            "which jradix supports for phi3 alone"
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    rope |= _scaling_from_metadata(file, keys, config)
    tensors = [name for name in ("rope_freqs.weight", *_LONGROPE_TENSORS) if name in file.tensors]
    if not tensors:
        return rope
    if rope["rope_type"] != "default":
        raise CheckpointError(f"{file.path}: expected one rope scaling, found {rope['rope_type']} and {tensors}")
    if arch == "llama" and tensors == ["rope_freqs.weight"]:
        return rope | _llama3_scaling(file, theta, head_dim)
    if arch == "phi3" and tensors == list(_LONGROPE_TENSORS):
        return rope | _longrope_scaling(file, keys, config, rotary_dim)
    raise CheckpointError(f"{file.path}: {tensors} scale the rotary embedding in a way jradix does not know for {arch}")


def _scaling_from_metadata(file: GGUFFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    old_factor = keys.take("rope.scale_linear", 1.0)  # written before 2023-10
    factor = keys.take("rope.scaling.factor", old_factor) or 1.0
    kind = keys.take("rope.scaling.type", "linear")
    original = keys.take("rope.scaling.original_context_length", config["max_position_embeddings"])
    attention_factor = keys.take("rope.scaling.attn_factor", 1.0)
    ramp = {
        f"beta_{speed}": beta
        for speed in ("fast", "slow")
        if (beta := keys.take(f"rope.scaling.yarn_beta_{speed}", None)) is not None
    }
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **ramp}
        if attention_factor != 1.0:  # a multiple of yarn's own 0.1 ln(factor) + 1, which is the default here and there
            scaling["attention_factor"] = attention_factor * (0.1 * math.log(max(factor, 1.0)) + 1.0)
        return scaling
    if kind not in ("none", "linear", "longrope"):
        raise CheckpointError(f"{file.path}: rope.scaling.type = {kind!r} is not supported; linear, yarn, longrope are")
    if attention_factor != 1.0 and not any(name in file.tensors for name in _LONGROPE_TENSORS):
        raise CheckpointError(
            f"{file.path}: rope.scaling.attn_factor = {attention_factor} is supported with yarn or longrope, "
            f"found rope.scaling.type = {kind!r} without factors"
        )
    if kind == "linear" and factor != 1.0:
        return {"rope_type": "linear", "factor": factor}
    return {}


_LONGROPE_TENSORS = ("rope_factors_short.weight", "rope_factors_long.weight")


def _longrope_scaling(file: GGUFFile, keys: _Keys, config: dict[str, Any], rotary_dim: int) -> dict[str, Any]:
    short, long = (_factors(file, name, rotary_dim) for name in _LONGROPE_TENSORS)
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": [float(str(factor)) for factor in short],
        "long_factor": [float(str(factor)) for factor in long],
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
    }
    attention_factor = keys.take("rope.scaling.attn_factor", None)
    return scaling if attention_factor is None else scaling | {"attention_factor": attention_factor}


def _factors(file: GGUFFile, name: str, rotary_dim: int) -> np.ndarray:
    factors = file.read(name)
    if factors.shape != (rotary_dim // 2,) or factors.dtype != np.float32:
        raise CheckpointError(
            f"{file.path}: expected {rotary_dim // 2} float32 factors in {name}, found {factors.dtype}{factors.shape}"
        )
    return factors


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Recovers llama 3's parameters from what they were turned into: a divisor of every frequency.

    High frequencies have divisor 1, low ones ``factor``. Between, 1 / divisor = 1 / factor + s (1 - 1 / factor) with
    s = (original / wavelength - low) / (high - low): a line over the frequency, through two or more points. Scaling
    ``original``, ``low`` and ``high`` together changes nothing, so ``low`` is 1, as Meta has it. With one point or
    none between, ``high`` is 4, as Meta has it. The result is checked against every divisor.
    """
    divisors = _factors(file, "rope_freqs.weight", head_dim).astype(np.float64)
    factor = float(divisors.max())
    if np.allclose(divisors, 1.0):
        return {}
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = (smooth > 1e-4) & (smooth < 1 - 1e-4)
    if between.sum() >= 2:
        slope, intercept = np.polyfit(frequencies[between], smooth[between], 1)
        high = 1.0 - 1.0 / intercept
        original = slope * 2 * math.pi * (high - 1.0)
    else:
        high = 4.0
        # s = 0 at the wavelength `original`: from the one point between, or the longest wavelength left as it was.
        at = between if between.any() else np.isclose(divisors, 1.0)
        original = float((2 * math.pi * (smooth[at] * (high - 1.0) + 1.0) / frequencies[at]).max())
    scaling = {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": round(float(high), 3),
        "original_max_position_embeddings": round(original),
    }
    if not np.allclose(_llama3_divisors(scaling, frequencies), divisors, rtol=_FACTOR_TOLERANCE, atol=0):
        raise CheckpointError(
            f"{file.path}: rope_freqs.weight is not llama 3's scaling of the rotary embedding (closest: {scaling}); "
            "jradix does not support other factors here"
        )
    return scaling


def _llama3_divisors(scaling: dict[str, Any], frequencies: np.ndarray) -> np.ndarray:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)
