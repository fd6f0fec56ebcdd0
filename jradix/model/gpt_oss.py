"""gpt-oss: attention sinks, a window in every other layer, and experts with biases and a clamped gate."""

from typing import Any, Final

from jradix.model.activation import Activation
from jradix.model.family import ALL, DENSE_PARTS, Family, Part, Shape, alternating_windows, whole
from jradix.model.fields import Fields


def _parse(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", True)
    experts, experts_per_token = fields.integer("num_local_experts", 128), fields.integer("num_experts_per_tok", 4)
    if experts_per_token > experts:
        raise ValueError(f"num_experts_per_tok={experts_per_token} exceeds the number of experts, {experts}")
    for repeated in ("experts_per_token", "initial_context_length"):  # also under the names that are read
        fields.get(repeated, None)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "sinks": True,
        "windows": alternating_windows(fields, period=2),
        "experts": experts,
        "experts_per_token": experts_per_token,
        "expert_mlp_size": fields.integer("intermediate_size"),
        "expert_bias": True,
        # Its router's softmax is over the chosen experts alone, which is that over all, normalised.
        "normalize_experts": True,
        "moe_layers": frozenset(range(fields.integer("num_hidden_layers"))),
        "activation": Activation(
            "clamped", alpha=fields.number("swiglu_alpha", 1.702), limit=fields.number("swiglu_limit", 7.0)
        ),
    }


def _sinks(shape: Shape) -> list[Part]:
    kv_heads, group = shape
    return [Part("self_attn.sinks", (kv_heads * group,))]


def _gate_and_up(shape: Shape) -> list[Part]:
    """One tensor of all experts, gate and up in turn, in an `[experts, 2, mlp, hidden]`."""
    experts, _, mlp, hidden = shape
    return [Part("mlp.experts.gate_up_proj", (experts, hidden, 2 * mlp), _TURNS, axes=(0, 2, 1))]


def _gate_and_up_bias(shape: Shape) -> list[Part]:
    experts, _, mlp = shape
    return [Part("mlp.experts.gate_up_proj_bias", (experts, 2 * mlp), _TURNS)]


def _down(shape: Shape) -> list[Part]:
    experts, hidden, mlp = shape
    return [Part("mlp.experts.down_proj", (experts, mlp, hidden), axes=(0, 2, 1))]


_TURNS: Final = tuple(((ALL, slice(i, None, 2)), (ALL, i)) for i in (0, 1))

GPT_OSS: Final = Family(
    _parse,
    {
        **DENSE_PARTS,
        "sinks": _sinks,
        "router": whole("mlp.router.weight"),
        "router_bias": whole("mlp.router.bias"),
        "expert_gate_up": _gate_and_up,
        "expert_gate_up_bias": _gate_and_up_bias,
        "expert_down": _down,
        "expert_down_bias": whole("mlp.experts.down_proj_bias"),
    },
    kv_heads=8,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    rope_theta=150000.0,
    rope_types=frozenset({"default", "yarn"}),
)
