"""The door to model files: opens what ``model_path`` names, whatever its format, as one thing.

``Checkpoint`` gives the config and tensors of a Hugging Face model; ``jradix.model.weights`` puts them on the device.
"""

import os
import re
from pathlib import Path
from typing import Any, Protocol

import huggingface_hub
import numpy as np
import numpy.typing as npt

from jradix.model.checkpoint_error import CheckpointError
from jradix.model.gguf_checkpoint import GGUFCheckpoint
from jradix.model.mxfp4_checkpoint import Mxfp4Checkpoint, is_mxfp4
from jradix.model.orbax_checkpoint import OrbaxCheckpoint, is_orbax
from jradix.model.safetensors_checkpoint import SafetensorsCheckpoint

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "tokenizer.model", "*.tiktoken", "*.jinja", "merges.txt", "vocab.txt"]
_HUB_WEIGHTS = ["model*.safetensors"]
_HUB_SUBDIRECTORIES = ["*/*"]  # the same weights in other formats


class Checkpoint(Protocol):
    """A model on disk in Hugging Face's terms, whichever format holds it.

    Attributes:
        config: The content of config.json.
        path: The directory with the tokenizer's files, or the GGUF file that contains the tokenizer.
    """

    config: dict[str, Any]
    path: Path

    def names(self) -> frozenset[str]:
        """Returns the tensors' names as transformers writes them, such as model.layers.0.mlp.up_proj.weight.

        Experts are named one by one: model.layers.0.mlp.experts.7.up_proj.weight.
        """
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one tensor without reading it: ``[out, in]`` for a matrix."""
        ...

    def read(self, name: str, dtype: npt.DTypeLike | None = None) -> np.ndarray:
        """Returns one tensor, to copy from and let go: of safetensors it is a read-only view of the file.

        It comes in the dtype that is stored, its axes in any order in memory. A quantised one is float32, or
        ``dtype``, which it is converted to on the way: then it never exists whole in float32.

        Raises ``CheckpointError`` where the file cannot be read, or the dtype is no float of 16 bits or more.
        """
        ...


def open_checkpoint(
    model_path: str | os.PathLike[str], *, revision: str | None = None, weights: bool = True
) -> Checkpoint:
    """Opens a model and checks that its files are whole; no tensor is read yet.

    Args:
        model_path: A Hugging Face directory (config.json and safetensors), a directory that ``jradix convert`` wrote,
            a GGUF file, a directory with one GGUF file and no config.json, or the id of a model on the Hugging Face
            hub. Something that exists is never taken for an id. Downloads show their progress and stay in the hub's
            cache.
        revision: Branch, tag or commit on the hub; no meaning for local files.
        weights: False where the config is all that is wanted: the tensors of a Hugging Face model need not be there,
            and are not downloaded.

    Raises:
        CheckpointError: (a ``ValueError``) nothing is there, files are missing or corrupt, or of an unknown kind.
    """
    if not os.fspath(model_path):
        raise CheckpointError(
            "model_path is empty: expected a directory, a GGUF file, or an id of the Hugging Face hub"
        )
    path = Path(model_path).expanduser()
    if not path.exists():
        path = _download(model_path, revision, weights)
    if path.is_dir():
        return _open_directory(path, weights)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: expected the directory that holds this file beside config.json; pass that")
    return GGUFCheckpoint(path)


def _open_directory(directory: Path, weights: bool) -> Checkpoint:
    if is_orbax(directory):
        return OrbaxCheckpoint(directory, weights=weights)
    if (directory / "config.json").is_file():
        files = SafetensorsCheckpoint(directory, weights=weights)
        return Mxfp4Checkpoint(files) if is_mxfp4(files.config) else files
    gguf_files = sorted(directory.glob("*.gguf"))
    if len(gguf_files) == 1:
        return GGUFCheckpoint(gguf_files[0])
    if gguf_files:
        names = [file.name for file in gguf_files]
        raise CheckpointError(f"{directory}: expected one GGUF file, found {names}; pass the path of one")
    found = sorted(entry.name for entry in directory.iterdir())
    raise CheckpointError(
        f"{directory}: expected config.json and safetensors, or one GGUF file, found {found or 'nothing'}"
    )


def _download(model_path: str | os.PathLike[str], revision: str | None, weights: bool) -> Path:
    if not isinstance(model_path, str) or not _HUB_ID.fullmatch(model_path) or model_path.endswith(".gguf"):
        raise CheckpointError(
            f"model_path {os.fspath(model_path)!r}: there is no such file or directory, and it is no id of the "
            "Hugging Face hub, such as 'org/name'"
        )
    try:
        snapshot = huggingface_hub.snapshot_download(
            model_path,
            revision=revision,
            allow_patterns=_HUB_FILES + _HUB_WEIGHTS * weights,
            ignore_patterns=_HUB_SUBDIRECTORIES,
        )
    except Exception as error:  # of the network, the hub, the cache: to the user all the same, the model is not there
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"model_path {model_path!r}: there is no such file or directory, and as an id of the Hugging Face hub it "
            f"could not be downloaded{at}: {error}"
        ) from error
    return Path(snapshot)
