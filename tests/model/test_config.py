"""What a Hugging Face config means, and what of it is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jradix.model.config import ModelConfig, RopeConfig
from jradix.model.fields import UnsupportedModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
GEMMA2 = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "sliding_window": 8}
GEMMA3 = {**GEMMA2, "architectures": ["Gemma3ForCausalLM"]}
GPT_OSS = {
    **LLAMA,
    "architectures": ["GptOssForCausalLM"],
    "num_experts_per_tok": 4,
    "num_local_experts": 8,
    "sliding_window": 8,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
MOE = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}


def test_missing_fields_mean_what_they_meant_to_the_family() -> None:
    llama = ModelConfig.from_hf(LLAMA)
    assert (llama.head_dim, llama.rms_norm_eps, llama.tie_word_embeddings) == (16, 1e-6, False)
    assert llama.rope == RopeConfig("default", 10000.0, 16)
    assert llama.windows == (None, None, None)
    few = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_hf(few).kv_heads == 4
    wide = {**few, "num_attention_heads": 8}
    assert ModelConfig.from_hf({**wide, "architectures": ["MistralForCausalLM"]}).kv_heads == 8
    assert ModelConfig.from_hf({**LLAMA, "architectures": ["MistralForCausalLM"]}).windows == (4096,) * 3
    assert ModelConfig.from_hf({**LLAMA, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128
    assert ModelConfig.from_hf({**LLAMA, "architectures": ["Phi3ForCausalLM"]}).rms_norm_eps == 1e-5
    assert ModelConfig.from_hf({**LLAMA, "architectures": None, "model_type": "llama"}) == llama


def test_old_and_new_spelling_of_rope_are_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    new = {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(old)
    assert ModelConfig.from_hf(new).rope == RopeConfig("llama3", 5e5, 16, 8.0, 64, 1.0, 4.0)
    assert ModelConfig.from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": None}).rope.theta == 5e5


def test_gemma_3_has_a_rope_for_each_kind_of_layer_in_both_spellings() -> None:
    old = {**GEMMA3, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}}
    full = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    new = {**GEMMA3, "rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    config = ModelConfig.from_hf(old)
    assert (config.rope, config.window_rope) == (RopeConfig("linear", 1e6, 256, 8.0), RopeConfig("default", 1e4, 256))
    assert ModelConfig.from_hf(new) == config
    bare = ModelConfig.from_hf(GEMMA3)
    assert (bare.rope, bare.window_rope) == (RopeConfig("default", 1e6, 256), RopeConfig("default", 1e4, 256))
    with pytest.raises(UnsupportedModelError, match="rope_theta"):
        ModelConfig.from_hf({**GEMMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})


def test_gpt_oss_as_it_is_published_is_read() -> None:
    """With fields twice under two names, and rope parameters that are the defaults."""
    scaling = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    rope = {"rope_theta": 150000, "rope_scaling": {"rope_type": "yarn", "truncate": False, **scaling}}
    config = ModelConfig.from_hf(GPT_OSS | rope | {"experts_per_token": 4, "initial_context_length": 4096})
    assert config.rope == RopeConfig("yarn", 150000.0, 64, 32.0, 4096, truncate=False)
    assert (config.experts, config.experts_per_token, config.expert_mlp_size, config.normalize_experts) == (
        8,
        4,
        96,
        True,
    )
    assert (config.activation.alpha, config.activation.limit) == (1.702, 7.0)
    assert config.qkv_bias
    assert config.o_bias
    assert ModelConfig.from_hf(GPT_OSS) == config


def test_windows_follow_each_family() -> None:
    def windows(**fields: Any) -> tuple[int | None, ...]:
        return ModelConfig.from_hf({**QWEN2, **fields}).windows

    assert windows(sliding_window=8, use_sliding_window=False) == (None, None, None)
    assert windows(sliding_window=8, use_sliding_window=True, max_window_layers=1) == (None, 8, 8)
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert windows(sliding_window=8, use_sliding_window=True, layer_types=types) == (8, None, None)
    moe = {**MOE, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}
    assert ModelConfig.from_hf(moe).windows == (8, 8, 8)
    assert ModelConfig.from_hf(GEMMA2).windows == (8, None, 8)
    assert ModelConfig.from_hf({**GPT_OSS, "layer_types": types}).windows == (8, None, None)
    assert ModelConfig.from_hf({**GEMMA3, "num_hidden_layers": 8}).windows == (*[8] * 5, None, 8, 8)
    assert ModelConfig.from_hf({**GEMMA3, "sliding_window_pattern": 2}).windows == (8, None, 8)


def test_soft_caps_may_be_switched_off() -> None:
    def caps(config: dict[str, Any]) -> tuple[float | None, float | None]:
        parsed = ModelConfig.from_hf(config)
        return parsed.attention_soft_cap, parsed.logit_soft_cap

    assert caps(GEMMA2) == (50.0, 30.0)
    assert caps({**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": 20.0}) == (None, 20.0)
    assert caps(GEMMA3) == (None, None)


def test_the_newer_name_of_the_activation_goes_first() -> None:
    ModelConfig.from_hf({**GEMMA2, "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"})
    for fields in ({"hidden_activation": "gelu"}, {"hidden_act": "silu"}):
        with pytest.raises(UnsupportedModelError, match="jradix has gelu_pytorch_tanh"):
            ModelConfig.from_hf(GEMMA2 | fields)


def test_experts_stand_where_step_and_list_say() -> None:
    def moe_layers(**fields: Any) -> set[int]:
        return set(ModelConfig.from_hf({**MOE, **fields}).moe_layers)

    assert moe_layers() == {0, 1, 2}
    assert moe_layers(mlp_only_layers=[1]) == {0, 2}
    assert moe_layers(num_hidden_layers=4, decoder_sparse_step=2) == {1, 3}


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (2, (2,)), ([2, 7], (2, 7)), (0, (0,))])
def test_end_of_text_is_none_one_or_several_ids(value: object, ids: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf({**LLAMA, "eos_token_id": value}).eos_token_ids == ids


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}}, "longrope"),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 8}}, "beta_fast"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"residual_multiplier": 0.2}, "residual_multiplier"),
        ({"vision_config": {"layers": 2}}, "vision_config"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        ModelConfig.from_hf({**LLAMA, **fields})


def test_fields_that_change_nothing_are_accepted() -> None:
    harmless = {
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "use_cache": True,
        "pretraining_tp": 1,
        "attention_dropout": 0.1,
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "attn_logit_softcapping": None,
        "rope_interleaved": False,
        "is_llama_config": True,
        "quantization_config": None,
        "pruned_heads": {},
    }
    assert ModelConfig.from_hf({**LLAMA, **harmless}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "320"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"head_dim": 15}, "head_dim"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({**GEMMA2, "sliding_window": None}, "sliding_window is null"),
        ({**GEMMA2, "layer_types": ["sliding_attention"]}, "num_hidden_layers=3 entries, got 1"),
    ],
)
def test_values_that_make_no_sense_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_hf({**LLAMA, **fields})


def test_missing_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="hidden_size"):
        ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize("config", [MOE, GPT_OSS])
def test_more_chosen_experts_than_there_are_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="num_experts_per_tok=9"):
        ModelConfig.from_hf({**config, "num_experts_per_tok": 9})


def test_partial_rotary_is_known_to_phi3_alone(tiny_path: Callable[[str], Path]) -> None:
    config = json.loads((tiny_path("phi3_partial") / "config.json").read_text("utf-8"))
    assert ModelConfig.from_hf(config).rope.rotary_dim == 8
