"""A Hugging Face directory: config.json beside model.safetensors, or beside shards with an index."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from jradix.model.checkpoint_error import CheckpointError

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

_BYTES: dict[str, Any] = {"U8": np.uint8}


class _Stored(NamedTuple):
    """Where a tensor lies: `dtype` as the file calls it, `offset` in bytes from the file's begin."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsCheckpoint:
    """Tensors by their Hugging Face names, read one at a time; see ``jradix.model.checkpoint.Checkpoint``.

    Without ``weights`` only config.json is read, and there are no tensors.

    All headers are read and checked at once. Each tensor that is read is a mapping of its own, so that of a tensor cut
    into shards only what is used is read: pages of a mapping count as memory of this process for as long as it lives,
    and one of the whole file would in the end count all of it.

    Raises ``CheckpointError`` for missing or corrupt files and for an index that does not match its shards.
    """

    def __init__(self, directory: Path, *, weights: bool = True) -> None:
        self.path = directory
        self.config: dict[str, Any] = read_json(directory / _CONFIG)
        self._tensors: dict[str, _Stored] = {}
        if not weights:
            return
        if (directory / _SINGLE).is_file():
            self._tensors = _tensors_of(directory / _SINGLE)
        elif (directory / _INDEX).is_file():
            self._open_shards(directory / _INDEX)
        else:
            found = sorted(entry.name for entry in directory.iterdir())
            raise CheckpointError(f"{directory}: expected {_SINGLE} or {_INDEX} beside {_CONFIG}, found {found}")

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: expected weight_map from tensor names to files, found {weight_map!r}")
        names_of = defaultdict(set)
        for name, file_name in weight_map.items():
            # A downloaded index must not reach outside its directory.
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise CheckpointError(f"{index}: expected the name of a file beside it for {name}, found {file_name!r}")
            names_of[file_name].add(name)
        missing = sorted(file_name for file_name in names_of if not (self.path / file_name).is_file())
        if missing:
            raise CheckpointError(f"{index}: expected {len(names_of)} shards beside it, missing {missing}")
        for file_name, names in names_of.items():
            path = self.path / file_name
            tensors = _tensors_of(path)
            absent = sorted(names - tensors.keys())
            if absent:
                raise CheckpointError(f"{path}: expected {len(names)} tensors that {_INDEX} names, missing {absent}")
            self._tensors.update((name, tensors[name]) for name in names)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, dtype: npt.DTypeLike | None = None) -> np.ndarray:
        del dtype
        return self._read(name, _DTYPES)

    def read_bytes(self, name: str) -> np.ndarray:
        """Returns a tensor of bytes, in which quantised numbers are packed. Raises as ``read``."""
        return self._read(name, _BYTES)

    def _read(self, name: str, dtypes: dict[str, Any]) -> np.ndarray:
        path, stored, shape, offset = self._tensors[name]
        if stored not in dtypes:
            raise CheckpointError(f"{path}: expected {name} in one of {tuple(dtypes)}, found {stored}")
        try:
            return np.memmap(path, dtypes[stored], "r", offset, shape)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error


def _tensors_of(path: Path) -> dict[str, _Stored]:
    """What the header of a file says, which is a whole one if it opens."""
    try:
        with safe_open(path, framework="numpy", backend="pread"):
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise CheckpointError(
            f"{path}: expected a whole safetensors file, found {size} bytes that are none: {error}"
        ) from error
    header.pop("__metadata__", None)
    return {
        name: _Stored(path, entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # bad JSON, or not UTF-8
        raise CheckpointError(f"{path}: expected JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content
