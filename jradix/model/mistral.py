"""Mistral: Llama with a sliding window in every layer, or with none."""

from typing import Any, Final

from jradix.model.family import DENSE_PARTS, Family
from jradix.model.fields import Fields


def _parse(fields: Fields) -> dict[str, Any]:
    # A missing window means that of Mistral 7B v0.1; null, as later versions write, means none.
    window = None if fields.get("sliding_window", 4096) is None else fields.integer("sliding_window", 4096)
    return {"windows": (window,) * fields.integer("num_hidden_layers")}


MISTRAL: Final = Family(_parse, DENSE_PARTS, kv_heads=8)
