"""Phi-3: Llama stored with q, k and v in one tensor, gate and up in another; rope may turn a part of each head."""

from typing import Any, Final

from jradix.model.family import DENSE_PARTS, Family, Part, Shape
from jradix.model.fields import Fields


def _parse(fields: Fields) -> dict[str, Any]:
    window = None if fields.get("sliding_window", None) is None else fields.integer("sliding_window")
    return {"windows": (window,) * fields.integer("num_hidden_layers")}


def _queries_keys_values(shape: Shape) -> list[Part]:
    """One tensor: all queries, then all keys, then all values."""
    kv_heads, group_and_kv, head_dim, hidden = shape
    kv_rows, rows, every = kv_heads * head_dim, kv_heads * group_and_kv * head_dim, slice(None)
    places = (
        (slice(0, rows - 2 * kv_rows), (every, slice(-2))),
        (slice(rows - 2 * kv_rows, rows - kv_rows), (every, -2)),
        (slice(rows - kv_rows, rows), (every, -1)),
    )
    return [Part("self_attn.qkv_proj.weight", (rows, hidden), places)]


def _gate_and_up(shape: Shape) -> list[Part]:
    _, mlp, hidden = shape
    return [Part("mlp.gate_up_proj.weight", (2 * mlp, hidden))]


PHI3: Final = Family(
    _parse,
    {**DENSE_PARTS, "qkv": _queries_keys_values, "gate_up": _gate_and_up},
    rms_norm_eps=1e-5,
    rope_types=frozenset({"default"}),
    partial_rotary=True,
)
