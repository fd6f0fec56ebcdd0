"""Qwen2 and Qwen2.5: biases on q, k and v alone, and, if asked for, a sliding window in the upper layers."""

from typing import Any, Final

from jradix.model.family import DENSE_PARTS, Family
from jradix.model.fields import Fields


def upper_layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """The window of each layer: `layer_types` says which have one, else those from `max_window_layers` up do."""
    layers = fields.integer("num_hidden_layers")
    window, first = fields.get("sliding_window", 4096), fields.get("max_window_layers", 28)
    if not fields.flag("use_sliding_window", False) or window is None:
        return (None,) * layers
    window = fields.integer("sliding_window", 4096)
    if types := fields.get("layer_types", None):
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    return tuple(window if layer >= first else None for layer in range(layers))


def _parse(fields: Fields) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": upper_layer_windows(fields)}


QWEN2: Final = Family(_parse, DENSE_PARTS, kv_heads=32)
