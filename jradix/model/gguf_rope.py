"""The rotary embedding of a GGUF model as Hugging Face's ``rope_parameters``.

llama.cpp keeps linear and yarn scaling in metadata, longrope's factors in two tensors, and of llama 3's scaling only
the result: a divisor for every frequency.
"""

import math
from typing import Any

import numpy as np

from jradix.model.checkpoint_error import CheckpointError
from jradix.model.gguf_file import GGUFFile
from jradix.model.gguf_metadata import ArchMetadata

_LONGROPE_TENSORS = ("rope_factors_short.weight", "rope_factors_long.weight")
_FACTOR_TOLERANCE = 1e-5
"""Relative. Factors are stored as float32 and were computed from float32 frequencies."""


def rope_parameters(file: GGUFFile, keys: ArchMetadata, config: dict[str, Any]) -> dict[str, Any]:
    """Returns ``rope_type``, ``rope_theta`` and what the type needs; ``config`` gives ``head_dim`` and the context.

    Raises ``CheckpointError`` for a scaling that jradix does not know, or two at once.
    """
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


def _scaling_from_metadata(file: GGUFFile, keys: ArchMetadata, config: dict[str, Any]) -> dict[str, Any]:
    old_factor = keys.number("rope.scale_linear", 1.0)  # how linear scaling was written before there was a type
    factor = keys.number("rope.scaling.factor", old_factor)
    kind = keys.take("rope.scaling.type", "linear")
    original = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    attention_factor = keys.number("rope.scaling.attn_factor", 1.0)
    ramp = {
        f"beta_{speed}": keys.number(key)
        for speed in ("fast", "slow")
        if keys.take(key := f"rope.scaling.yarn_beta_{speed}", None) is not None
    }
    if isinstance(kind, str) and kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **ramp}
        if attention_factor != 1.0:  # a multiple of yarn's own 0.1 ln(factor) + 1, which is the default here and there
            scaling["attention_factor"] = attention_factor * (0.1 * math.log(max(factor, 1.0)) + 1.0)
        return scaling
    if not isinstance(kind, str) or kind not in ("none", "linear", "longrope"):
        raise CheckpointError(f"{file.path}: rope.scaling.type = {kind!r} is not supported; linear, yarn, longrope are")
    if attention_factor != 1.0 and not any(name in file.tensors for name in _LONGROPE_TENSORS):
        raise CheckpointError(
            f"{file.path}: rope.scaling.attn_factor = {attention_factor} is supported with yarn or longrope, "
            f"found rope.scaling.type = {kind!r} without factors"
        )
    if kind == "linear" and factor != 1.0:
        return {"rope_type": "linear", "factor": factor}
    return {}


def _longrope_scaling(file: GGUFFile, keys: ArchMetadata, config: dict[str, Any], rotary_dim: int) -> dict[str, Any]:
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
    divisors = _factors(file, "rope_freqs.weight", head_dim).astype(np.float64)
    if np.allclose(divisors, 1.0):
        return {}
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    scaling = _fit_llama3(divisors, frequencies)
    if scaling is None or not np.allclose(
        _llama3_divisors(scaling, frequencies), divisors, rtol=_FACTOR_TOLERANCE, atol=0
    ):
        raise CheckpointError(
            f"{file.path}: rope_freqs.weight is not llama 3's scaling of the rotary embedding (the closest is "
            f"{scaling}); jradix does not support other factors here"
        )
    return scaling


def _fit_llama3(divisors: np.ndarray, frequencies: np.ndarray) -> dict[str, Any] | None:
    """Returns the parameters that llama 3's ``divisors`` came from, or some nonsense or ``None`` for other divisors.

    High frequencies have divisor 1, low ones ``factor``. Between, 1 / divisor = 1 / factor + s (1 - 1 / factor) with
    s = (original / wavelength - low) / (high - low): a line over the frequency, through two or more points. Scaling
    ``original``, ``low`` and ``high`` together changes nothing, so ``low`` is 1, as Meta has it. With one point or
    none between, ``high`` is 4, as Meta has it, and ``original`` comes from the point, or else from the longest
    wavelength that was left as it was.
    """
    if not (divisors > 1 - _FACTOR_TOLERANCE).all() or np.isinf(divisors).any():
        return None
    factor = float(divisors.max())
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = (smooth > 1e-4) & (smooth < 1 - 1e-4)
    at = between if between.any() else smooth > 0.5
    if between.sum() >= 2:
        slope, intercept = np.polyfit(frequencies[between], smooth[between], 1)
        high = 1.0 - 1.0 / min(intercept, -1e-9)
        original = 2 * math.pi * slope * (high - 1.0)
    elif at.any():
        high = 4.0
        original = (2 * math.pi * (smooth[at] * (high - 1.0) + 1.0) / frequencies[at]).max()
    else:
        return None
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": round(float(high), 3),
        "original_max_position_embeddings": round(float(original)),
    }


def _llama3_divisors(scaling: dict[str, Any], frequencies: np.ndarray) -> np.ndarray:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)
