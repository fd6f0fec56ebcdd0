"""The metadata of a GGUF file that belongs to its architecture, of which nothing may stay unread."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jradix.model.checkpoint_error import CheckpointError
from jradix.model.gguf_file import GGUFFile

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


class ArchMetadata:
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

    def integer(self, key: str, default: Any = ..., *, low: int = 1) -> int:
        """One integer, at least ``low``. A list with one value a layer will do where all layers agree."""
        value = self.take(key, default)
        if isinstance(value, np.ndarray) and len(set(value.tolist())) == 1:
            value = value[0].item()
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise CheckpointError(
                f"{self._path}: expected one integer >= {low} as {self._prefix}{key}, found {value!r}"
            )
        return value

    def number(self, key: str, default: Any = ...) -> float:
        value = self.take(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
            raise CheckpointError(f"{self._path}: expected a number > 0 as {self._prefix}{key}, found {value!r}")
        return value

    def expect(self, key: str, *supported: float) -> None:
        value = self.take(key, supported[0])
        is_number = isinstance(value, int | float)
        if not (is_number and any(math.isclose(value, number, rel_tol=1e-6) for number in supported)):
            raise CheckpointError(
                f"{self._path}: {self._prefix}{key} = {value} changes the computation in a way jradix does not "
                f"support; expected {supported[0]}"
            )

    def refuse_the_rest(self) -> None:
        for key in sorted(self._values.keys() - self._taken):
            value = self._values[key]
            if isinstance(value, np.ndarray | list) or value not in _HARMLESS.get(key, ()):
                raise CheckpointError(
                    f"{self._path}: metadata {self._prefix}{key} = {value!r} may change the computation "
                    "and jradix does not support it"
                )
