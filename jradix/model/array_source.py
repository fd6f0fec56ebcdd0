"""Tensors in memory as a checkpoint: for weights that come from a trainer rather than from files."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


class ArraySource:
    """Arrays of numpy or jax under the tensor names of the Hugging Face format, see `layer_parts.TensorSource`."""

    def __init__(self, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Raises ValueError if a name is no string or a tensor no array."""
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
                raise ValueError(f"weights must map names of tensors to arrays, got {name!r}: {type(tensor).__name__}")
        self._tensors = tensors
        self.config = config

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, dtype: npt.DTypeLike | None = None) -> np.ndarray:
        del dtype
        return np.asarray(self._tensors[name])
