"""Experts in MXFP4, as gpt-oss is published: 4-bit floats, 32 to a block with one scale, dequantised as they are read.

The format is that of the OCP Microscaling Formats specification 1.0: numbers of a sign, two bits of exponent and one
of mantissa (E2M1), and scales that are exponents of 2 with a bias of 127 (E8M0).
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from jradix.model.checkpoint_error import CheckpointError
from jradix.model.safetensors_checkpoint import SafetensorsCheckpoint

BLOCK_BYTES: Final = 16  # two numbers a byte, the first in the low half
_NO_NUMBER: Final = 255  # the one scale that is no power of 2
_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS: Final = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
_PAIRS: Final = _NUMBERS[np.arange(256)[:, None] >> np.array([0, 4]) & 15].view(np.uint64)[:, 0]
"""Both numbers of a byte, looked up at once."""


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    quantization = config.get("quantization_config")
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"


class Mxfp4Checkpoint:
    """Safetensors in which `T_blocks` and `T_scales` stand for a tensor `T`; see ``checkpoint.Checkpoint``.

    `T` is `[experts, in, out]`. Stored are its blocks along `in`, `[experts, out, in / 32, 16]` bytes, and a scale for
    each. The config is that of the dequantised model.

    Raises ``CheckpointError`` where blocks and scales do not fit each other.
    """

    def __init__(self, files: SafetensorsCheckpoint) -> None:
        self.path = files.path
        self.config = {key: value for key, value in files.config.items() if key != "quantization_config"}
        self._files = files
        self._quantized = {name.removesuffix("_blocks") for name in files.names() if name.endswith("_blocks")}
        for name in sorted(self._quantized):
            if f"{name}_scales" not in files.names():
                raise CheckpointError(f"{self.path}: expected {name}_scales beside {name}_blocks")
            blocks, scales = files.shape(f"{name}_blocks"), files.shape(f"{name}_scales")
            if len(blocks) != 4 or blocks[-1] != BLOCK_BYTES or scales != blocks[:-1]:
                raise CheckpointError(
                    f"{self.path}: expected {name}_blocks [experts, out, blocks, {BLOCK_BYTES}] and a scale for each, "
                    f"found blocks {list(blocks)} and scales {list(scales)}"
                )

    def names(self) -> frozenset[str]:
        parts = {f"{name}_{part}" for name in self._quantized for part in ("blocks", "scales")}
        return self._files.names() - parts | self._quantized

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._quantized:
            return self._files.shape(name)
        experts, out, blocks, _ = self._files.shape(f"{name}_blocks")
        return experts, 2 * BLOCK_BYTES * blocks, out

    def read(self, name: str, dtype: npt.DTypeLike | None = None) -> np.ndarray:
        if name not in self._quantized:
            return self._files.read(name, dtype)
        blocks, scales = (self._files.read_bytes(f"{name}_{part}") for part in ("blocks", "scales"))
        if (scales == _NO_NUMBER).any():
            raise CheckpointError(f"{self.path}: {name}_scales has {_NO_NUMBER}, which is no number")
        experts, columns, rows = self.shape(name)
        out = np.empty((experts, rows, columns), np.float32 if dtype is None else dtype)
        for expert in range(experts):  # one at a time: float32 takes eight times the memory of the blocks
            numbers = _PAIRS[blocks[expert]].view(np.float32)  # [rows, blocks, 32]
            numbers *= np.ldexp(np.float32(1), scales[expert].astype(np.int32) - 127)[:, :, None]
            out[expert] = numbers.reshape(rows, columns)
        return out.transpose(0, 2, 1)
