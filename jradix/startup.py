"""Builds what the replicas of an engine run on: weights, now and later, buckets, the KV pool's size, tokenizer."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jradix import mesh
from jradix.cache.pool import pages_that_fit
from jradix.config import Buckets, EngineConfig
from jradix.mirror import Mirror
from jradix.model.array_source import ArraySource
from jradix.model.checkpoint import Checkpoint, open_checkpoint
from jradix.model.config import ModelConfig
from jradix.model.quantized import FORMATS
from jradix.model.sharding import Sharding
from jradix.model.transformer import LayerLoop, Transformer
from jradix.model.weights import (
    check_tensors,
    copy_transformer,
    load_transformer,
    random_transformer,
    replace_parameters,
    replaced_quantization,
)
from jradix.model.weights_sample import sample_weights
from jradix.pallas.geometry import Geometry
from jradix.pallas.layout import KVLayout
from jradix.pallas.ops import Kernels
from jradix.processes import Processes
from jradix.runner import Runner, wait_for
from jradix.tokenizer import Tokenizer, load_tokenizer

DTYPES: dict[str, Any] = {"auto": jnp.bfloat16, "bfloat16": jnp.bfloat16, "float32": jnp.float32}
KV_DTYPES: dict[str, Any] = {"bfloat16": jnp.bfloat16, "fp8_e4m3": jnp.float8_e4m3fn, "int8": jnp.int8}
QUANTIZATIONS: dict[str, str | None] = {"auto": None, **{name: name for name in FORMATS}}


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything an engine is made of that depends on the model.

    model_files: the directory or GGUF file that the weights and the tokenizer came from.
    """

    model_config: ModelConfig
    tokenizer: Tokenizer | None
    runner: Runner
    kernels: Kernels
    layout: KVLayout
    buckets: Buckets
    context_length: int
    eos_ids: frozenset[int]
    model_files: Path
    processes: Processes | None


def build(config: EngineConfig, processes: Processes | None = None) -> list[Parts]:
    """Load the model and size the pool: the parts of each replica, which differ in the runner alone.

    With several processes each of them does so, and has the same; if one fails the others end.

    Raises:
        ValueError: files missing or corrupt, a model jradix does not run, limits that contradict each other, fewer
            devices than `dp_size` times `tp_size`, or too little memory for one page.
    """
    try:
        return _build(config, processes)
    except BaseException as error:
        if processes is not None:
            processes.fail(error)
        raise


def _build(config: EngineConfig, processes: Processes | None) -> list[Parts]:
    if config.compilation_cache_dir is not None:
        _keep_compiled_programs_in(config.compilation_cache_dir)
    checkpoint = open_checkpoint(config.model_path, weights=config.load_format != "dummy")
    model_config = ModelConfig.from_hf(checkpoint.config)
    devices = None
    if processes is not None:
        processes.require_same({f"the model's {name}": value for name, value in asdict(model_config).items()})
        if config.load_format != "dummy":
            processes.require_same({"the content of the weights' files": sample_weights(checkpoint.path)})
        devices = jax.devices()
    meshes = mesh.replica_meshes(config.dp_size, config.tp_size, devices)
    shardings = [Sharding(model_config, each) for each in meshes]
    context_length = _context_length(config, model_config)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(checkpoint.path)
    models = _load_models(config, shardings, checkpoint)
    buckets = Buckets.of(config, context_length)
    kernels = _choose_kernels(config, shardings[0], buckets.max_pages[-1])
    layout = _size_pool(config, shardings, context_length, processes, joined=kernels.joined_pages)
    eos_ids = frozenset(tokenizer.eos_ids if tokenizer is not None else model_config.eos_token_ids)
    runners = [
        Runner(
            model,
            sharding,
            layout,
            kernels,
            DTYPES[config.dtype],
            buckets,
            config.max_running_requests,
            kv_dtype=kv_dtype_of(config),
            strict=config.strict_compile,
            mirror=Mirror(processes.tell) if processes is not None and processes.rank == 0 else Mirror(),
        )
        for model, sharding in zip(models, shardings, strict=True)
    ]
    common = model_config, tokenizer
    sizes = kernels, layout, buckets, context_length, eos_ids
    return [Parts(*common, runner, *sizes, checkpoint.path, processes) for runner in runners]


def weights_to_replace(
    config: EngineConfig,
    model_config: ModelConfig,
    weights: str | os.PathLike[str] | Mapping[str, Any],
    parameters: Sequence[jax.Array],
) -> Callable[[list[jax.Array], Sharding], None]:
    """Check other weights of the same model, and give what puts them in the place of a runner's `parameters`.

    Where there are several processes it can be pickled: arrays are sent with it, files have to be everywhere.

    Raises:
        ValueError: they are not there, of another model, or stored in another quantization.
    """
    source = _open_weights(config, model_config, weights)
    replaced_quantization(parameters, source)
    if config.nnodes == 1:
        return partial(_replace_weights, config=config, source=source)
    if isinstance(source, ArraySource):  # arrays of jax would go to one device
        arrays = {name: source.read(name) for name in source.names()}
        return partial(_replace_weights, config=config, source=ArraySource(arrays, {}))
    return partial(_replace_by_files, config=config, path=weights, sample=sample_weights(source.path))


def _replace_by_files(
    parameters: list[jax.Array], sharding: Sharding, *, config: EngineConfig, path: Any, sample: str
) -> None:
    """Open the files of this process, of which `sample_weights` must be what it is in process 0."""
    source = _open_weights(config, sharding.config, path)
    assert not isinstance(source, ArraySource), "it was opened from files"
    if sample_weights(source.path) != sample:
        raise ValueError(
            f"weights {path} have another content here than in process 0: copy the same files to all hosts"
        )
    _replace_weights(parameters, sharding, config=config, source=source)


def _replace_weights(
    parameters: list[jax.Array], sharding: Sharding, *, config: EngineConfig, source: ArraySource | Checkpoint
) -> None:
    replace_parameters(
        parameters,
        sharding.config,
        source,
        dtype=DTYPES[config.dtype],
        layer_loop=layer_loop_of(config),
        sharding=sharding,
    )


def _open_weights(
    config: EngineConfig, model_config: ModelConfig, weights: str | os.PathLike[str] | Mapping[str, Any]
) -> ArraySource | Checkpoint:
    if isinstance(weights, Mapping):
        source: ArraySource | Checkpoint = ArraySource(weights, {})
    elif not isinstance(weights, str | os.PathLike):
        raise ValueError(f"weights must be a path, a hub id, or a dict from tensor names to arrays, got {weights!r}")
    else:
        source = open_checkpoint(weights)
        other = ModelConfig.from_hf(source.config)
        if other != model_config:
            raise ValueError(f"{weights} is another model: its config gives {other}, the engine runs {model_config}")
    check_tensors(model_config, source, layer_loop_of(config))
    return source


def _choose_kernels(config: EngineConfig, sharding: Sharding, max_pages: int) -> Kernels:
    geometry = Geometry(
        q_heads=sharding.q_heads_of_device,
        kv_heads=sharding.kv_heads_of_device,
        head_dim=sharding.config.head_dim,
        page_size=config.page_size,
        dtype=jnp.dtype(DTYPES[config.dtype]).name,
        kv_dtype=kv_dtype_of(config).name,
    )
    return mesh.choose_kernels(geometry, max_pages)


def _keep_compiled_programs_in(path: str) -> None:
    directory = os.path.expanduser(path)
    if jax.config.jax_compilation_cache_dir != directory:
        reset_cache()  # jax keeps to the first directory it has used
        jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _context_length(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    if config.context_length is not None and config.context_length > limit:
        raise ValueError(f"context_length must be at most {limit}, the model's limit, got {config.context_length}")
    return config.context_length or limit


def _load_models(config: EngineConfig, shardings: Sequence[Sharding], checkpoint: Checkpoint) -> list[Transformer]:
    """The model, read once, on the devices of each replica."""
    model_config = shardings[0].config
    options: Any = {
        "dtype": DTYPES[config.dtype],
        "layer_loop": layer_loop_of(config),
        "sharding": shardings[0],
        "quantization": QUANTIZATIONS[config.quantization],
    }
    if config.load_format == "dummy":
        model = random_transformer(model_config, seed=config.random_seed, **options)
    else:
        model = load_transformer(model_config, checkpoint, **options)
    models = [model, *(copy_transformer(model, sharding) for sharding in shardings[1:])]
    for each in models:
        wait_for(each)  # so that what the pool may take is measured after the weights
    return models


def kv_dtype_of(config: EngineConfig) -> jnp.dtype:
    """Of the KV pool."""
    return jnp.dtype(DTYPES[config.dtype] if config.kv_cache_dtype == "auto" else KV_DTYPES[config.kv_cache_dtype])


def layer_loop_of(config: EngineConfig) -> LayerLoop:
    """The one that is used: the configuration's, or what suits the device."""
    return mesh.default_layer_loop() if config.layer_loop == "auto" else config.layer_loop


def _size_pool(
    config: EngineConfig,
    shardings: Sequence[Sharding],
    context_length: int,
    processes: Processes | None,
    *,
    joined: bool,
) -> KVLayout:
    """Of each replica, and so what the fullest of all their devices has room for."""
    sharding = shardings[0]
    one_page = KVLayout(
        layers=sharding.config.layers,
        num_pages=1,
        page_size=config.page_size,
        kv_heads=sharding.heads.slots,
        head_dim=sharding.config.head_dim,
        joined=joined,
    )
    pages_per_request = -(-context_length // config.page_size)
    if config.max_total_tokens is not None:
        usable = config.max_total_tokens // config.page_size
    else:
        page_bytes = one_page.page_bytes(kv_dtype_of(config).itemsize) // sharding.devices
        devices = [device for each in shardings for device in each.device_list]
        budget = mesh.pool_budget_bytes(config.mem_fraction_static, devices)
        if processes is not None:
            budget = processes.agree(budget, min)
        usable = pages_that_fit(page_bytes, budget, config.max_running_requests * pages_per_request)
    return replace(one_page, num_pages=usable + 1)
