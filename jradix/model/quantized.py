"""Weights in 8 bits with one scale for each output channel, dequantised inside the matmul that reads them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any, Final

import jax
import ml_dtypes
import numpy as np

FORMATS: Final[Mapping[str, np.dtype]] = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
"""What `quantization` may be, and what the values are stored as."""

_LARGEST: Final = {"int8": 127.0, "fp8": float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)}

INPUT_AXES: Final[Mapping[str, int]] = {
    "lm_head": 1,
    "qkv": 1,
    "o": 3,
    "gate_up": 1,
    "down": 1,
    "expert_gate_up": 1,
    "expert_down": 1,
}
"""The parameters that are quantised, and how many of their last axes are inputs.

The embedding is not: a step reads only a few of its rows. Nor is a router, which is small and decides much.
"""

SCALE: Final = ".scale"
"""What follows a parameter's name in that of its scales."""


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=[])
@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Stands where a weight `[*out, *in]` would: `values` times `scale`.

    Attributes:
        values: int8 or float8 `[*out, *in]`.
        scale: float32 `[*out]`.
    """

    values: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def __getitem__(self, index: EllipsisType | jax.Array | int | tuple[Any, ...] | None) -> "QuantizedWeight":
        """An index of output axes, or all of it, as a parameter of flax is read."""
        return self if index is ... else QuantizedWeight(self.values[index], self.scale[index])


def quantize(weight: np.ndarray, input_axes: int, quantization: str) -> tuple[np.ndarray, np.ndarray]:
    """Values `[*out, *in]` and float32 scales `[*out]` of a float32 weight `[*out, *in]`, which is overwritten.

    The scale maps the largest magnitude of an output channel to the largest number of the format, so that int8 values
    are at most half a scale away from the weight.
    """
    axes = tuple(range(weight.ndim - input_axes, weight.ndim))
    largest = np.maximum(weight.max(axes), -weight.min(axes))
    scale = np.where(largest > 0, largest / np.float32(_LARGEST[quantization]), np.float32(1))
    weight /= np.expand_dims(scale, axes)
    if quantization == "int8":
        np.rint(weight, out=weight)
    return weight.astype(FORMATS[quantization]), scale
