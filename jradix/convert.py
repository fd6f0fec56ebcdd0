"""Writes a model once as an Orbax checkpoint of the engine's own parameters, from which later starts are faster."""

import os
import shutil
from pathlib import Path

from jradix.config import EngineConfig
from jradix.model.checkpoint import open_checkpoint
from jradix.model.config import ModelConfig
from jradix.model.layer_parts import quantization_of
from jradix.model.orbax_checkpoint import write_config, write_parameters
from jradix.model.weights import host_parameters
from jradix.startup import DTYPES, QUANTIZATIONS
from jradix.tokenizer import copy_tokenizer


def convert(config: EngineConfig, output: str | os.PathLike[str]) -> Path:
    """Write the model of a configuration to the directory `output`, in its dtype and quantization.

    The directory appears when it is whole: it is written beside, under a name of its own, and renamed. The host holds
    all parameters at once.

    Raises:
        ValueError: `output` exists already or cannot be written, or the model cannot be read.
    """
    target = Path(output).expanduser()
    if target.exists():
        raise ValueError(
            f"output must be a directory that does not exist yet, got {target}: remove it, or name another"
        )
    source = open_checkpoint(config.model_path)
    model_config = ModelConfig.from_hf(source.config)
    quantization = quantization_of(source, QUANTIZATIONS[config.quantization])
    arrays = host_parameters(model_config, source, dtype=DTYPES[config.dtype], quantization=quantization)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        write_parameters(partial, arrays, quantization)
        write_config(partial, source.config)
        if not config.skip_tokenizer_init:
            copy_tokenizer(source.path, partial)
        partial.rename(target)
    except OSError as error:
        raise ValueError(f"output {target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target
