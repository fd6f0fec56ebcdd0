"""A model's shape and numbers, read from a Hugging Face config; what jradix cannot compute is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from jradix.model.activation import SILU, Activation
from jradix.model.family import Family
from jradix.model.fields import Fields, UnsupportedModelError
from jradix.model.gemma2 import GEMMA2
from jradix.model.gemma3 import GEMMA3_TEXT
from jradix.model.gpt_oss import GPT_OSS
from jradix.model.llama import LLAMA
from jradix.model.mistral import MISTRAL
from jradix.model.phi3 import PHI3
from jradix.model.qwen2 import QWEN2
from jradix.model.qwen3 import QWEN3
from jradix.model.qwen3_moe import QWEN3_MOE

FAMILIES: Final[Mapping[str, Family]] = {
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3_TEXT,
    "GptOssForCausalLM": GPT_OSS,
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Phi3ForCausalLM": PHI3,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
}
MODEL_TYPES: Final = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first `rotary_dim` dimensions of each head; see `rope.inverse_frequencies`.

    Attributes:
        kind: default, linear, llama3 or yarn. The fields after `factor` belong to some kinds only.
        factor: how much longer contexts the scaling is made for.
        original_len: positions the model was first trained on (llama3, yarn).
        attention_factor: multiplies cos and sin (yarn).
    """

    kind: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that decides what a model computes, and nothing else.

    Attributes:
        mlp_size: width of a dense layer's MLP.
        eos_token_ids: tokens that end a text.
        dtype: the weights' type as the checkpoint says, for example "bfloat16"; None where it does not say.
        windows: for each layer, how many positions a token sees, itself included; None for all of them.
        window_rope: rope of the layers with a window, where it is not that of the others.
        attention_scale: multiplies attention scores; None for `head_dim ** -0.5`.
        attention_soft_cap, logit_soft_cap: bound scores and logits `x` as `cap * tanh(x / cap)`.
        sinks: every query head has one more logit that takes probability and gives nothing.
        norm_offset: norms multiply with this plus their weight.
        post_norms: what attention and MLP give is normed too, before it is added.
        embed_scale: multiplies embeddings, rounded to their dtype.
        moe_layers: the layers that have experts in place of the dense MLP.
        normalize_experts: the chosen experts' weights sum to 1.
        expert_bias: router and experts have biases.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    mlp_size: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window_rope: RopeConfig | None = None
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    sinks: bool = False
    activation: Activation = SILU
    norm_offset: float = 0.0
    post_norms: bool = False
    embed_scale: float | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_mlp_size: int = 0
    normalize_experts: bool = False
    expert_bias: bool = False
    moe_layers: frozenset[int] = frozenset()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads a parsed config.json.

        Raises:
            UnsupportedModelError: the architecture, activation, rope type, quantization or any field that is not
                known to be harmless is something jradix does not compute.
            ValueError: a needed field is missing or makes no sense.
        """
        architecture = _architecture(config)
        family, fields = FAMILIES[architecture], Fields(config)
        _refuse_quantization(fields)
        _refuse_activation(fields, family)
        hidden_size, q_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        layers = fields.integer("num_hidden_layers")
        head_dim = fields.integer("head_dim", family.head_dim or max(1, hidden_size // q_heads))
        kv_heads = _kv_heads(fields, family, q_heads)
        own = {"windows": (None,) * layers, **family.parse(fields)}
        _check_layer_types(fields, own["windows"], layers)
        rope, window_rope = _ropes(fields, family, head_dim)
        result = cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            mlp_size=fields.integer("intermediate_size"),
            layers=layers,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=fields.integer("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
            rope=rope,
            window_rope=window_rope,
            tie_word_embeddings=fields.flag("tie_word_embeddings", family.tie_word_embeddings),
            eos_token_ids=_eos_token_ids(fields),
            dtype=fields.get("dtype", None) or fields.get("torch_dtype", None),
            **own,
        )
        fields.refuse_unread()
        return result


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [MODEL_TYPES.get(config.get("model_type", ""), config.get("model_type"))]
    known = [name for name in names if name in FAMILIES]
    if len(names) != 1 or not known:
        raise UnsupportedModelError(
            f"architecture {', '.join(map(str, names))} is not supported; jradix runs {', '.join(FAMILIES)}"
        )
    return known[0]


def _refuse_quantization(fields: Fields) -> None:
    if quantization := fields.get("quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedModelError(
            f"quantization_config (quant_method {method!r}) is not supported; use unquantized weights, those in mxfp4, "
            "or a GGUF file"
        )


def _refuse_activation(fields: Fields, family: Family) -> None:
    activation = fields.get("hidden_act", None)
    activation = fields.get("hidden_activation", None) or activation or family.activation  # the newer name goes first
    if ("silu" if activation == "swish" else activation) != family.activation:
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported here; jradix has {family.activation}")


def _kv_heads(fields: Fields, family: Family, q_heads: int) -> int:
    if fields.get("num_key_value_heads", family.kv_heads) is None:
        return q_heads
    kv_heads = fields.integer("num_key_value_heads", family.kv_heads)
    if q_heads % kv_heads:
        raise ValueError(
            f"num_attention_heads={q_heads} must be a multiple of num_key_value_heads, which is {kv_heads}"
        )
    return kv_heads


def _check_layer_types(fields: Fields, windows: tuple[int | None, ...], layers: int) -> None:
    """Where a config says which layers slide, it must agree with the windows, or we would compute something else."""
    types = fields.get("layer_types", None)
    if len(windows) != layers:
        raise ValueError(f"layer_types must have num_hidden_layers={layers} entries, got {len(windows)}")
    expected = ["full_attention" if window is None else "sliding_attention" for window in windows]
    if types is not None and list(types) != expected:
        raise UnsupportedModelError(f"layer_types={types} is not supported here, which would be {expected}")


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.get("eos_token_id", None)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def _ropes(fields: Fields, family: Family, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The rope of all layers, or of those without a window and of those with one.

    Reads `rope_parameters`, or `rope_scaling` with `rope_theta` beside it as configs before 2026 have them.
    """
    old, new = fields.nested("rope_scaling"), fields.nested("rope_parameters")
    theta, default = fields.number("rope_theta", family.rope_theta), Fields(family.rope, "rope_parameters")
    if family.window_rope_theta is None:
        return _rope(fields, old or new or default, theta, family, head_dim), None
    window_theta = fields.number("rope_local_base_freq", family.window_rope_theta)
    full, window = (new and new.nested(f"{kind}_attention") for kind in ("full", "sliding"))
    if new:
        new.refuse_unread()
    return (
        _rope(fields, old or full or default, theta, family, head_dim),
        _rope(fields, window or default, window_theta, family, head_dim),
    )


def _rope(fields: Fields, rope: Fields, theta: float, family: Family, head_dim: int) -> RopeConfig:
    original_len, partial = fields.get("original_max_position_embeddings", None), fields.get("partial_rotary_factor", 1)
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope.get("type", None)
    if kind not in family.rope_types:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported here; jradix has {sorted(family.rope_types)}")
    partial = rope.number("partial_rotary_factor", 1.0 if partial is None else partial)
    if partial != 1.0 and not family.partial_rotary:
        raise UnsupportedModelError(f"partial_rotary_factor={partial} is not supported for this architecture")
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"rope needs an even number of dimensions, at most head_dim={head_dim}, got {rotary_dim}")
    options: dict[str, Any] = {}
    positions = fields.integer("max_position_embeddings")
    if kind in ("llama3", "yarn"):
        options["original_len"] = (
            rope.integer("original_max_position_embeddings", positions) if original_len is None else original_len
        )
        rope.get("original_max_position_embeddings", None)
    match kind:
        case "linear":
            options["factor"] = rope.number("factor")
        case "llama3":
            for key in ("factor", "low_freq_factor", "high_freq_factor"):
                options[key] = rope.number(key)
        case "yarn":
            options |= _yarn(rope, positions / options["original_len"])
    theta = rope.number("rope_theta", theta)
    rope.refuse_unread()
    return RopeConfig(kind, theta, rotary_dim, **options)


def _yarn(rope: Fields, default_factor: float) -> dict[str, Any]:
    rope.get("finetuned", None)  # says how the model was trained
    return {
        "factor": rope.number("factor", default_factor),
        "beta_fast": rope.number("beta_fast", 32.0),
        "beta_slow": rope.number("beta_slow", 1.0),
        "mscale": rope.optional_number("mscale"),
        "mscale_all_dim": rope.optional_number("mscale_all_dim"),
        "attention_factor": rope.optional_number("attention_factor"),
        "truncate": rope.flag("truncate", True),
    }
