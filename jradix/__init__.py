"""jradix: an LLM inference engine for JAX in which every request shares the KV cache of every other."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jradix.config import EngineConfig
    from jradix.delivery import StepFailedError
    from jradix.engine import Engine
    from jradix.follower import follow
    from jradix.logit_processor import ProcessorRow
    from jradix.loop import ShutDownError
    from jradix.sampling_params import SamplingParams
    from jradix.schedule_queue import QueueFullError

__all__ = [
    "Engine",
    "EngineConfig",
    "ProcessorRow",
    "QueueFullError",
    "SamplingParams",
    "ShutDownError",
    "StepFailedError",
    "follow",
]

_HOMES = {
    "Engine": "jradix.engine",
    "EngineConfig": "jradix.config",
    "ProcessorRow": "jradix.logit_processor",
    "QueueFullError": "jradix.schedule_queue",
    "SamplingParams": "jradix.sampling_params",
    "ShutDownError": "jradix.loop",
    "StepFailedError": "jradix.delivery",
    "follow": "jradix.follower",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `jradix.cache` and the CLI's help need no jax."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jradix' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
