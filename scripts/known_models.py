"""The shapes of models that people run, as their config.json gives them: for scripts that need no weights."""

from typing import Any

from jradix.model.config import ModelConfig
from jradix.pallas.geometry import Geometry

COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "eos_token_id": 0}
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}


def hf_config(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of one of `KNOWN_MODELS`, as far as jradix reads it."""
    return {**COMMON, **KNOWN_MODELS[name], **changes}


def model_config(name: str, layers: int | None = None) -> ModelConfig:
    """One of `KNOWN_MODELS`, with another number of layers if so told."""
    return ModelConfig.from_hf(hf_config(name, **({} if layers is None else {"num_hidden_layers": layers})))


def geometry_of(config: ModelConfig, page_size: int, dtype: str = "bfloat16") -> Geometry:
    return Geometry(config.q_heads, config.kv_heads, config.head_dim, page_size, dtype)
