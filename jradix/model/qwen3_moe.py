"""Qwen3-MoE: Qwen3 attention with a mixture of experts in all or some of the layers."""

from typing import Any, Final

from jradix.model.family import DENSE_PARTS, Family, Part, Shape, whole
from jradix.model.fields import Fields


def _parse(fields: Fields) -> dict[str, Any]:
    layers, bias = fields.integer("num_hidden_layers"), fields.flag("attention_bias", False)
    experts = fields.integer("num_experts", fields.get("num_local_experts", 128))
    experts_per_token = fields.integer("num_experts_per_tok", 8)
    if experts_per_token > experts:
        raise ValueError(f"num_experts_per_tok={experts_per_token} exceeds the number of experts, {experts}")
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers", None) or ()
    fields.get("max_window_layers", None)  # this architecture has one window for all layers
    window = fields.get("sliding_window", 4096)
    if not fields.flag("use_sliding_window", False):
        window = None
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "windows": (None if window is None else fields.integer("sliding_window", 4096),) * layers,
        "experts": experts,
        "experts_per_token": experts_per_token,
        "expert_mlp_size": fields.integer("moe_intermediate_size", 768),
        "normalize_experts": fields.flag("norm_topk_prob", False),
        "moe_layers": frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    }


def _gate_and_up(shape: Shape) -> list[Part]:
    """Two tensors an expert in an `[experts, 2, mlp, hidden]`."""
    return [
        Part(f"mlp.experts.{expert}.{kind}_proj.weight", shape[2:], ((slice(None), (expert, i)),))
        for expert in range(shape[0])
        for i, kind in enumerate(("gate", "up"))
    ]


def _down(shape: Shape) -> list[Part]:
    """One tensor an expert in an `[experts, hidden, mlp]`."""
    return [
        Part(f"mlp.experts.{expert}.down_proj.weight", shape[1:], ((slice(None), (expert,)),))
        for expert in range(shape[0])
    ]


QWEN3_MOE: Final = Family(
    _parse,
    {**DENSE_PARTS, "router": whole("mlp.gate.weight"), "expert_gate_up": _gate_and_up, "expert_down": _down},
    kv_heads=4,
)
