"""jradix: an LLM inference engine for JAX in which every request shares the KV cache of every other."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jradix.config import EngineConfig
    from jradix.engine import Engine
    from jradix.sampling_params import SamplingParams

__all__ = ["Engine", "EngineConfig", "SamplingParams"]

_HOMES = {"Engine": "jradix.engine", "EngineConfig": "jradix.config", "SamplingParams": "jradix.sampling_params"}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `jradix.cache` and the CLI's help need no jax."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jradix' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
