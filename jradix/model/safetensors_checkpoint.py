"""A Hugging Face directory: config.json beside model.safetensors, or beside shards with an index."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # registers bfloat16 with numpy, as which safetensors returns BF16
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from jradix.model.checkpoint_error import CheckpointError

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsCheckpoint:
    """Tensors by their Hugging Face names, read one at a time; see ``jradix.model.checkpoint.Checkpoint``.

    Without ``weights`` only config.json is read, and there are no tensors.

    All headers are read and checked at once. The files are read, not mapped: pages of a mapping count as memory of
    this process for as long as it lives, so reading a 302 MB file costs 605 MB mapped, 303 MB read.

    Raises ``CheckpointError`` for missing or corrupt files and for an index that does not match its shards.
    """

    def __init__(self, directory: Path, *, weights: bool = True) -> None:
        self.path = directory
        self.config: dict[str, Any] = _read_json(directory / _CONFIG)
        self._files: dict[str, tuple[Path, Any]] = {}
        if not weights:
            return
        if (directory / _SINGLE).is_file():
            file = _open(directory / _SINGLE)
            self._files = dict.fromkeys(file.keys(), (directory / _SINGLE, file))
        elif (directory / _INDEX).is_file():
            self._open_shards(directory / _INDEX)
        else:
            found = sorted(entry.name for entry in directory.iterdir())
            raise CheckpointError(f"{directory}: expected {_SINGLE} or {_INDEX} beside {_CONFIG}, found {found}")

    def _open_shards(self, index: Path) -> None:
        weight_map = _read_json(index).get("weight_map")
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
            file = _open(path)
            absent = sorted(names.difference(file.keys()))
            if absent:
                raise CheckpointError(f"{path}: expected {len(names)} tensors that {_INDEX} names, missing {absent}")
            self._files.update(dict.fromkeys(names, (path, file)))

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name][1].get_slice(name).get_shape())

    def read(self, name: str, dtype: npt.DTypeLike | None = None) -> np.ndarray:
        array = self._read(name, _DTYPES)
        return array if dtype is None else array.astype(dtype, copy=False)

    def read_bytes(self, name: str) -> np.ndarray:
        """Returns a tensor of bytes, in which quantised numbers are packed. Raises as ``read``."""
        return self._read(name, ("U8",))

    def _read(self, name: str, dtypes: tuple[str, ...]) -> np.ndarray:
        path, file = self._files[name]
        stored = file.get_slice(name).get_dtype()
        if stored not in dtypes:
            raise CheckpointError(f"{path}: expected {name} in one of {dtypes}, found {stored}")
        try:
            return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy", backend="pread")
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise CheckpointError(
            f"{path}: expected a whole safetensors file, found {size} bytes that are none: {error}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # bad JSON, or not UTF-8
        raise CheckpointError(f"{path}: expected JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content
