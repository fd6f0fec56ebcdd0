"""Qwen3: a norm on every head's query and key before rope, no biases unless asked for, head_dim of its own."""

from typing import Any, Final

from jradix.model.family import DENSE_PARTS, Family
from jradix.model.fields import Fields
from jradix.model.qwen2 import upper_layer_windows


def _parse(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True, "windows": upper_layer_windows(fields)}


QWEN3: Final = Family(_parse, DENSE_PARTS, kv_heads=32, head_dim=128)
