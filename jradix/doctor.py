"""`jradix doctor`: what this installation would run a model with, and why."""

import platform
from importlib import metadata

import jax

from jradix import mesh, startup
from jradix.config import EngineConfig
from jradix.model.sharding import Sharding
from jradix.processes import connect, join

VERSIONS = ("jradix", "jax", "jaxlib", "flax", "numpy")


def report(config: EngineConfig) -> str:
    """One fact a line: versions, device, kernels and reasons, model, KV pool, programs. Loads the model.

    Raises:
        ValueError: as `Engine`.
    """
    config = join(config)
    parts, *others = startup.build(config, connect(config))
    model, layout, buckets, kernels = parts.model_config, parts.layout, parts.buckets, parts.kernels
    dtype = parts.runner.pool.dtype
    sharding = parts.runner.sharding
    each = "" if sharding.devices == 1 else " on each device"
    tokens = (layout.num_pages - 1) * layout.page_size
    facts = {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in VERSIONS},
        "device": mesh.device_description(),
        "devices": f"{sharding.devices} of {len(jax.devices())} share each layer (tp_size)",
        **({"replicas": f"{1 + len(others)}, each with such devices, weights and pool (dp_size)"} if others else {}),
        **({"processes": config.nnodes} if config.nnodes > 1 else {}),
        "attention": "XLA" if kernels.name == "xla" else f"Pallas kernels for {kernels.name.upper()} {kernels.chip}",
        **({"because": "; ".join(kernels.reasons)} if kernels.reasons else {}),
        "model": f"{model.architecture}, {model.layers} layers, {model.q_heads} query and {model.kv_heads} KV heads of "
        f"{model.head_dim}, vocabulary of {model.vocab_size}",
        **({"heads": _heads(sharding)} if sharding.devices > 1 else {}),
        "weights": f"{_size(parts.runner.weight_bytes_per_device)}{each} in {parts.runner.parameters[0].dtype}",
        "layer loop": startup.layer_loop_of(config),
        "context": f"{parts.context_length} tokens of the model's {model.max_position_embeddings}",
        "KV pool": f"{layout.num_pages - 1} pages of {layout.page_size} tokens = {tokens} tokens, "
        f"{_size(parts.runner.pool_bytes_per_device)}{each} in {dtype}",
        "programs": f"{len(buckets.shapes())} step shapes to compile",
        "decode rows": _list(buckets.decode_rows),
        "prompt tokens": f"{_list(buckets.extend_tokens)} of {_list(buckets.extend_rows)} requests beside "
        f"{_list(buckets.mixed_decode_rows)} decode rows",
        "pages a request": _list(buckets.max_pages),
    }
    if parts.processes is not None:
        parts.processes.close()
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {fact}" for name, fact in facts.items())


def _heads(sharding: Sharding) -> str:
    padded = sharding.heads.slots - sharding.config.kv_heads * sharding.heads.copies
    held = f"{sharding.kv_heads_of_device} KV and {sharding.q_heads_of_device} query heads on each device"
    return f"{held}; each KV head {sharding.heads.copies} times, {padded} of {sharding.heads.slots} places empty"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _list(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
