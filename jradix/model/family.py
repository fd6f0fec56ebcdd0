"""What one model family adds to the common decoder: config fields of its own, and the names of its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, Final

from jradix.model.fields import Fields

type Index = EllipsisType | slice | tuple[int | slice, ...]
type Shape = tuple[int, ...]

ALL: Final = slice(None)


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a checkpoint and where it goes in one layer's parameter.

    Attributes:
        tensor: its name, without the `model.layers.N.` of a layer's tensor.
        shape: the shape it must have, as stored.
        places: pairs of an index into the tensor, such as its rows, and one into the parameter; what the first finds,
            reshaped, fills what the second does.
        axes: order of the tensor's axes in which `places` index it; None as stored.
    """

    tensor: str
    shape: Shape
    places: tuple[tuple[Index, Index], ...] = ((ALL, ...),)
    axes: tuple[int, ...] | None = None


type PartsOf = Callable[[Shape], list[Part]]
"""A parameter's shape -> the tensors that fill it. Linear weights are stored `[out, in]`, as the parameters are."""


@dataclass(frozen=True, slots=True)
class Family:
    """How to read one architecture. Defaults are those its own code had when configs left the field out.

    Attributes:
        parse: reads the family's own config fields; returns arguments for `ModelConfig`.
        parts: for each parameter, by its name in `Transformer`, the tensors it is made of.
        kv_heads: what a config without `num_key_value_heads` means; None for as many as query heads.
        head_dim: what a config without `head_dim` means; None for `hidden_size / num_attention_heads`.
        rms_norm_eps: what a config without `rms_norm_eps` means.
        tie_word_embeddings: what a config without `tie_word_embeddings` means.
        activation: the one activation of its MLPs, as `hidden_act` calls it.
        rope: what a config without rope parameters means.
        rope_theta: what a config that has rope parameters without `rope_theta` means.
        window_rope_theta: the same for the layers with a window, where these have a rope of their own; else None.
        rope_types: the kinds of rotary embedding the family has.
        partial_rotary: whether rope may turn only the first part of a head.
    """

    parse: Callable[[Fields], dict[str, Any]]
    parts: Mapping[str, PartsOf]
    kv_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    activation: str = "silu"
    rope: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float = 10000.0
    window_rope_theta: float | None = None
    rope_types: frozenset[str] = frozenset({"default", "linear", "llama3", "yarn"})
    partial_rotary: bool = False


def whole(tensor: str) -> PartsOf:
    """One tensor that is the parameter."""
    return lambda shape: [Part(tensor, shape)]


def queries_keys_values(tensor: str) -> PartsOf:
    """Three tensors (`{}` is q, k, v) in a `[kv_heads, group + 2, head_dim, ...]`: per KV head its queries, K, V."""

    def parts(shape: Shape) -> list[Part]:
        kv_heads, group_and_kv, head_dim, *columns = shape
        kv_rows = kv_heads * head_dim
        return [
            Part(tensor.format("q"), ((group_and_kv - 2) * kv_rows, *columns), ((ALL, (ALL, slice(-2))),)),
            Part(tensor.format("k"), (kv_rows, *columns), ((ALL, (ALL, -2)),)),
            Part(tensor.format("v"), (kv_rows, *columns), ((ALL, (ALL, -1)),)),
        ]

    return parts


def heads_to_hidden(tensor: str) -> PartsOf:
    """The output projection, `[hidden, kv_heads, group, head_dim]`, stored as `[hidden, q_heads * head_dim]`."""

    def parts(shape: Shape) -> list[Part]:
        hidden, kv_heads, group, head_dim = shape
        return [Part(tensor, (hidden, kv_heads * group * head_dim))]

    return parts


def gate_and_up(tensor: str) -> PartsOf:
    """Two tensors (`{}` is gate, up) in a `[2, mlp, ...]`."""
    return lambda shape: [Part(tensor.format(kind), shape[1:], ((ALL, (i,)),)) for i, kind in enumerate(("gate", "up"))]


DENSE_PARTS: Final[Mapping[str, PartsOf]] = {
    "embed": whole("model.embed_tokens.weight"),
    "final_norm": whole("model.norm.weight"),
    "lm_head": whole("lm_head.weight"),
    "attention_norm": whole("input_layernorm.weight"),
    "qkv": queries_keys_values("self_attn.{}_proj.weight"),
    "qkv_bias": queries_keys_values("self_attn.{}_proj.bias"),
    "q_norm": whole("self_attn.q_norm.weight"),
    "k_norm": whole("self_attn.k_norm.weight"),
    "o": heads_to_hidden("self_attn.o_proj.weight"),
    "o_bias": whole("self_attn.o_proj.bias"),
    "mlp_norm": whole("post_attention_layernorm.weight"),
    "gate_up": gate_and_up("mlp.{}_proj.weight"),
    "gate_up_bias": gate_and_up("mlp.{}_proj.bias"),
    "down": whole("mlp.down_proj.weight"),
    "down_bias": whole("mlp.down_proj.bias"),
}
"""The names most families share."""


def alternating_windows(fields: Fields, period: int) -> tuple[int | None, ...]:
    """The window of each layer: `layer_types` says which have one; without it all but the last of each `period` do."""
    window, layers = fields.integer("sliding_window"), fields.integer("num_hidden_layers")
    if types := fields.get("layer_types", None):
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    return tuple(window if (layer + 1) % period else None for layer in range(layers))
