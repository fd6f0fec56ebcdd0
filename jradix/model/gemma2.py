"""Gemma 2: norms around attention and MLP, gated GELU, soft caps, and a sliding window in every other layer."""

from typing import Any, Final

from jradix.model.activation import Activation
from jradix.model.family import DENSE_PARTS, Family, alternating_windows, whole
from jradix.model.fields import Fields


def gemma_fields(fields: Fields) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common. They write 0 for a norm that changes nothing."""
    bias = fields.flag("attention_bias", False)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "activation": Activation("gelu_tanh"),
        "norm_offset": 1.0,
        "post_norms": True,
        "embed_scale": fields.integer("hidden_size") ** 0.5,
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
    }


def _parse(fields: Fields) -> dict[str, Any]:
    fields.get("sliding_window_size", None)  # the window by another name, which nobody reads
    return gemma_fields(fields) | {
        "windows": alternating_windows(fields, period=2),
        "attention_soft_cap": soft_cap(fields, "attn_logit_softcapping", 50.0),
        "logit_soft_cap": soft_cap(fields, "final_logit_softcapping", 30.0),
    }


def soft_cap(fields: Fields, key: str, default: float | None) -> float | None:
    """A cap, None where the config says null."""
    return None if fields.get(key, default) is None else fields.number(key, default)


GEMMA2: Final = Family(
    _parse,
    {
        **DENSE_PARTS,
        "attention_post_norm": whole("post_attention_layernorm.weight"),
        "mlp_norm": whole("pre_feedforward_layernorm.weight"),
        "mlp_post_norm": whole("post_feedforward_layernorm.weight"),
    },
    kv_heads=4,
    head_dim=256,
    tie_word_embeddings=True,
    activation="gelu_pytorch_tanh",
    rope_types=frozenset({"default"}),
)
