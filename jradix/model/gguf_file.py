"""The GGUF container: metadata and tensors of one file, nothing about models.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Little endian: magic, version, two counts, the
metadata (key, type, value), the tensor table (name, dims, type, offset), padding, then the tensors' bytes.

The package ``gguf`` supplies the constants and the dequantisation of its block formats. Its reader is not used: it
makes several numpy arrays of every vocabulary entry (SmolLM2's 49k: 5.2 s and 159 MB; here 0.3 s and 9 MB)
and maps the file, whose touched pages then count as this process's memory.
"""

import os
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType

from jradix.model.checkpoint_error import CheckpointError

MAGIC = b"GGUF"

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_PLAIN_DTYPES = {
    GGMLQuantizationType.F64: np.dtype(np.float64),
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_CHUNK_ELEMENTS = 1 << 17
"""Elements converted at once: a few MB of temporaries."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. ``shape`` is row-major as in numpy: GGUF's dims reversed. Offset and length in bytes."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GGUFFile:
    """Header of one GGUF file, read at once; the tensors' bytes are read when asked for.

    ``metadata`` maps keys to ``int``, ``float``, ``bool``, ``str``, lists of ``str`` (or of lists), and numpy arrays
    for arrays of scalars. A float32 is given as the shortest decimal that rounds to it (1e-05, not 9.99999974e-06),
    which is what the converter read in the model's config.json.

    Raises ``CheckpointError`` for whatever is not a whole GGUF file of version 2 or 3.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with self.path.open("rb") as file:
                self._read_header(_Cursor(self.path, file))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        self._check_types()

    def read(self, name: str, index: int | None = None, dtype: npt.DTypeLike | None = None) -> np.ndarray:
        """Returns the tensor ``name``, or its ``index``-th slice along the first axis, in memory of its own.

        Without ``dtype``, F64, F32, F16 and BF16 come as stored, everything else dequantised to float32. Nothing is
        mapped and conversion goes chunk by chunk: besides the result, a few MB are needed.
        """
        tensor = self.tensors[name]
        shape, offset = tensor.shape, tensor.offset
        if index is not None:
            assert 0 <= index < shape[0], (name, index, shape)
            offset += index * (tensor.num_bytes // shape[0])
            shape = shape[1:]
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                flat = self._read_flat(file, tensor.type, prod(shape), dtype)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read: {error.strerror or error}") from error
        return flat.reshape(shape)

    def _read_flat(
        self, file: BinaryIO, type_: GGMLQuantizationType, num_elements: int, dtype: npt.DTypeLike | None
    ) -> np.ndarray:
        stored = _PLAIN_DTYPES.get(type_)
        flat = np.empty(num_elements, dtype or stored or np.float32)
        if flat.dtype == stored:
            self._fill(file, flat.view(np.uint8))
            return flat
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[type_]
        step = max(1, _CHUNK_ELEMENTS // block_size) * block_size
        for begin in range(0, num_elements, step):
            chunk = flat[begin : begin + step]
            blocks = np.empty(chunk.size // block_size * block_bytes, np.uint8)
            self._fill(file, blocks)
            chunk[:] = blocks.view(stored) if stored else gguf.quants.dequantize(blocks[None], type_)[0]
        return flat

    def _fill(self, file: BinaryIO, buffer: np.ndarray) -> None:
        num_bytes = file.readinto(buffer)  # type: ignore[attr-defined]  # BinaryIO lacks it, every binary file has it
        if num_bytes != buffer.size:
            raise CheckpointError(f"{self.path}: ended while a tensor was read; has the file changed since?")

    def _read_header(self, cursor: "_Cursor") -> None:
        magic = cursor.take(4, "the magic")
        if magic != MAGIC:
            raise CheckpointError(f"{self.path}: expected a GGUF file, which starts with {MAGIC!r}, found {magic!r}")
        version = cursor.integer("<I", "the version")
        if version not in _VERSIONS:
            hint = " (a big-endian file)" if version and version & 0xFFFF == 0 else ""
            raise CheckpointError(f"{self.path}: expected GGUF version 2 or 3, found {version}{hint}")
        num_tensors = cursor.integer("<Q", "the number of tensors")
        num_keys = cursor.integer("<Q", "the number of metadata keys")
        for i in range(num_keys):
            key = cursor.string(f"metadata key {i}")
            if key in self.metadata:
                raise CheckpointError(f"{self.path}: expected each metadata key once, found {key} twice")
            self.metadata[key] = cursor.value(cursor.integer("<I", f"the type of {key}"), key)
        placed = [cursor.tensor_info(i) for i in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path}: expected general.alignment >= 1, found {alignment!r}")
        data_begin = -(-cursor.position // alignment) * alignment
        for name, type_, shape, offset in placed:
            if name in self.tensors:
                raise CheckpointError(f"{self.path}: expected each tensor once, found {name} twice")
            self.tensors[name] = self._place(name, type_, shape, data_begin + offset, cursor.size)

    def _place(
        self, name: str, type_: GGMLQuantizationType, shape: tuple[int, ...], offset: int, size: int
    ) -> GGUFTensor:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[type_]
        if not shape or min(shape) < 1 or shape[-1] % block_size:
            raise CheckpointError(
                f"{self.path}: expected rows of {name} in blocks of {block_size} ({type_.name}), found shape {shape}"
            )
        num_bytes = prod(shape) // block_size * block_bytes
        if offset + num_bytes > size:
            raise CheckpointError(
                f"{self.path}: truncated: expected {name} at bytes {offset} to {offset + num_bytes}, "
                f"found a file of {size} bytes"
            )
        return GGUFTensor(name, type_, shape, offset, num_bytes)

    def _check_types(self) -> None:
        counts = Counter(tensor.type for tensor in self.tensors.values())
        for type_ in counts.keys() - _PLAIN_DTYPES.keys():
            try:
                gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[type_][1]), np.uint8), type_)
            except NotImplementedError:
                raise CheckpointError(
                    f"{self.path}: {counts[type_]} tensors are of type {type_.name}, which the package gguf "
                    "cannot dequantise; use a file in another quantisation, such as Q4_K_M or Q8_0"
                ) from None


class _Cursor:
    """Reads the header's values one after another; every read is checked against the file's end."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0
        self._file = file

    def take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > self.size - self.position:
            raise CheckpointError(
                f"{self.path}: truncated or corrupt: expected {num_bytes} bytes of {what} at byte {self.position}, "
                f"found a file of {self.size} bytes"
            )
        self.position += num_bytes
        return self._file.read(num_bytes)

    def integer(self, layout: str, what: str) -> int:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]

    def string(self, what: str) -> str:
        text = self.take(self.integer("<Q", what), what)
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: expected UTF-8 in {what}, found {text[:40]!r}") from error

    def value(self, type_id: int, key: str) -> Any:
        type_ = self._known(GGUFValueType, type_id, f"a type of metadata for {key}")
        if type_ == GGUFValueType.STRING:
            return self.string(key)
        if type_ == GGUFValueType.ARRAY:
            return self._array(key)
        array = np.frombuffer(self.take(np.dtype(_SCALARS[type_]).itemsize, key), _SCALARS[type_])
        return float(str(array[0])) if type_ == GGUFValueType.FLOAT32 else array[0].item()

    def _array(self, key: str) -> np.ndarray | list[Any]:
        type_id = self.integer("<I", f"the type of {key}")
        count = self.integer("<Q", f"the length of {key}")
        if dtype := _SCALARS.get(type_id):  # type: ignore[call-overload]  # an IntEnum's keys are found by int
            return np.frombuffer(self.take(count * np.dtype(dtype).itemsize, key), dtype)
        if type_id == GGUFValueType.STRING:
            return [self.string(key) for _ in range(count)]
        return [self.value(type_id, key) for _ in range(count)]

    def tensor_info(self, i: int) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        """Returns name, type, shape and the offset from the begin of the data."""
        name = self.string(f"the name of tensor {i}")
        num_dims = self.integer("<I", f"the number of dims of {name}")
        if num_dims > _MAX_DIMS:
            raise CheckpointError(f"{self.path}: expected at most {_MAX_DIMS} dims of {name}, found {num_dims}")
        dims = [self.integer("<Q", f"the dims of {name}") for _ in range(num_dims)]
        type_id = self.integer("<I", f"the type of {name}")
        type_ = self._known(GGMLQuantizationType, type_id, f"a tensor type for {name}")
        return name, type_, tuple(reversed(dims)), self.integer("<Q", f"the offset of {name}")

    def _known[E: (GGUFValueType, GGMLQuantizationType)](self, types: type[E], type_id: int, what: str) -> E:
        try:
            return types(type_id)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: expected {what}, found the unknown number {type_id}") from error
