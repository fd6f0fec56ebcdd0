"""An Orbax checkpoint of the engine's own parameters: what a start reads without rearranging anything.

A directory with config.json, the tokenizer's files, and `params`, an Orbax PyTree checkpoint: a flat dict with one
array for each parameter of each layer, under `layer_parts.parameter_name`; and what `seal` writes. Orbax writes the
arrays. TensorStore, in whose format (zarr arrays in an OCDBT database) Orbax stores them, reads them: a part of an
array goes straight to its place.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import ml_dtypes  # noqa: F401  # registers bfloat16 with numpy
import numpy as np
import numpy.typing as npt
import tensorstore

from jradix.model.checkpoint_error import CheckpointError
from jradix.model.quantized import FORMATS
from jradix.model.safetensors_checkpoint import read_json
from jradix.model.seal import check_seal, write_seal

PARAMETERS: Final = "params"
_CONFIG: Final = "config.json"
_METADATA: Final = "_METADATA"
_FORMAT: Final = {"format": "jradix parameters", "version": 2}
"""The version changes with the layout of any parameter or of the directory."""
_CHUNK_BYTES: Final = 2**25  # read in parallel, and a device that needs a part of an array reads no more than it must
_ERRORS: Final = (ValueError, OSError, RuntimeError, KeyError)


def is_orbax(directory: Path) -> bool:
    """Whether this directory claims to be such a checkpoint, whole or not."""
    return (directory / _CONFIG).is_file() and (directory / PARAMETERS).is_dir()


class OrbaxCheckpoint:
    """Parameters by their `layer_parts.parameter_name`, see `layer_parts.ParameterSource`.

    Without ``weights`` only config.json is read, and there are no parameters.

    Raises ``CheckpointError`` for missing or damaged files, and for what another program or version wrote. All files
    are read when it is opened, and compared with their checksums: Orbax keeps none of an array's numbers.
    """

    def __init__(self, directory: Path, *, weights: bool = True) -> None:
        self.path = directory
        self.config: dict[str, Any] = read_json(directory / _CONFIG)
        self.quantization: str | None = None
        self._stores: dict[str, Any] = {}
        if weights:
            self._open(directory / PARAMETERS)

    def _open(self, parameters: Path) -> None:
        metadata = read_json(parameters / _METADATA)
        found, tree = metadata.get("custom_metadata"), metadata.get("tree_metadata")
        expected = {key: found.get(key) for key in _FORMAT} if isinstance(found, dict) else None
        if expected != _FORMAT or not isinstance(found, dict) or not isinstance(tree, dict):
            raise CheckpointError(
                f"{parameters}: expected a checkpoint that jradix convert wrote, {_FORMAT}, found {found!r}; "
                "convert the model again"
            )
        check_seal(self.path)
        self.quantization = found.get("quantization")
        if self.quantization not in (None, *FORMATS):
            raise CheckpointError(f"{parameters}: expected quantization {list(FORMATS)}, found {self.quantization!r}")
        try:
            names = [entry["key_metadata"][0]["key"] for entry in tree.values()]
            opening = {name: tensorstore.open(_spec(parameters, name), read=True, open=True) for name in names}
            self._stores = {name: future.result() for name, future in opening.items()}
        except (*_ERRORS, IndexError, TypeError) as error:
            raise CheckpointError(f"{parameters}: expected a whole Orbax checkpoint: {error}") from error

    def names(self) -> frozenset[str]:
        return frozenset(self._stores)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._stores[name].shape)

    def read(self, name: str, dtype: npt.DTypeLike | None = None) -> np.ndarray:
        stored = self._stores[name].dtype.numpy_dtype
        array = np.empty(self.shape(name), stored if dtype is None else dtype)
        self.read_into(array, name, tuple(map(slice, array.shape)))
        return array

    def read_into(self, target: np.ndarray, name: str, box: tuple[slice, ...]) -> None:
        store = self._stores[name]
        try:
            if store.dtype.numpy_dtype == target.dtype:
                tensorstore.array(target).write(store[box].translate_to[0]).result()
            else:
                target[...] = store[box].read().result()
        except _ERRORS as error:
            raise CheckpointError(f"{self.path / PARAMETERS}: {name} cannot be read: {error}") from error


def write_parameters(directory: Path, arrays: Mapping[str, np.ndarray], quantization: str | None) -> None:
    """Writes `directory / params`, uncompressed: weights hardly shrink, and a start should wait for the disk alone.

    Raises:
        OSError: it cannot be written.
    """
    import orbax.checkpoint as ocp  # takes 2 seconds, which no start waits for

    save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in arrays}
    metadata = {**_FORMAT, "quantization": quantization}
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    args = ocp.args.PyTreeSave(dict(arrays), save_args=save_args, custom_metadata=metadata)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save((directory / PARAMETERS).absolute(), args=args)
    except ValueError as error:  # what Orbax makes of a disk that is full
        raise OSError(str(error)) from error


def seal_parameters(directory: Path) -> None:
    """The last thing to write: without it nothing in the directory is believed."""
    write_seal(directory, PARAMETERS)


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    (directory / _CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")


def _spec(parameters: Path, name: str) -> dict[str, Any]:
    base = {"driver": "file", "path": f"{parameters.absolute()}/"}
    return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
