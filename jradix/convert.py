"""Writes a model once as an Orbax checkpoint of the engine's own parameters, from which later starts are faster."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jradix.config import EngineConfig
from jradix.durable import sync_path, sync_tree
from jradix.model.checkpoint import open_checkpoint
from jradix.model.config import ModelConfig
from jradix.model.layer_parts import quantization_of
from jradix.model.orbax_checkpoint import seal_parameters, write_config, write_parameters
from jradix.model.weights import host_parameters
from jradix.startup import DTYPES, QUANTIZATIONS
from jradix.tokenizer import copy_tokenizer


def convert(config: EngineConfig, output: str | os.PathLike[str]) -> Path:
    """Write the model of a configuration to the directory `output`, in its dtype and quantization.

    The directory appears when it is whole: it is written beside, under a name of its own, forced to disk, and renamed.
    What a conversion that was killed has left there, the next one to the same directory removes. The host holds all
    parameters at once.

    Raises:
        ValueError: `output` exists already, cannot be written, or is being written by another conversion; or the model
            cannot be read.
    """
    target = Path(output).expanduser()
    if target.exists() or target.is_symlink():
        raise ValueError(
            f"output must be a directory that does not exist yet, got {target}: remove it, or name another"
        )
    source = open_checkpoint(config.model_path)
    model_config = ModelConfig.from_hf(source.config)
    quantization = quantization_of(source, QUANTIZATIONS[config.quantization])
    arrays = host_parameters(model_config, source, dtype=DTYPES[config.dtype], quantization=quantization)
    try:
        with _appearing(target) as partial:
            write_parameters(partial, arrays, quantization)
            write_config(partial, source.config)
            if not config.skip_tokenizer_init:
                copy_tokenizer(source.path, partial)
            seal_parameters(partial)
    except OSError as error:
        raise ValueError(f"output {target} cannot be written: {error}") from error
    return target


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """An empty directory beside `target`, which takes its place at the end, or is removed if something fails."""
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        _lock(descriptor, target)
        try:
            for entry in partial.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            yield partial
            sync_tree(partial)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_path(target.parent)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, target: Path) -> None:
    """The kernel ends the lock with the process, so that none is left behind."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"output {target} is being written by another conversion") from error
