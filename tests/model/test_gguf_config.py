"""GGUF metadata to a Hugging Face config: every key translated, harmless, or refused by name."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jradix.model.checkpoint_error import CheckpointError
from jradix.model.gguf_config import hf_config
from jradix.model.gguf_file import GGUFFile
from tests.model.gguf_writing import COMMON_METADATA, HEAD_DIM, HIDDEN, VOCAB, write_gguf

EMBEDDING = {"token_embd.weight": np.ones((VOCAB, HIDDEN), np.float32)}
MOE = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 48}


def config_of(
    tmp_path: Path,
    arch: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    general: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    path = write_gguf(tmp_path / "m.gguf", arch, {**EMBEDDING, **(tensors or {})}, metadata, general=general)
    return hf_config(GGUFFile(path))


@pytest.mark.parametrize(
    ("arch", "metadata", "architecture", "fields"),
    [
        ("llama", {}, "LlamaForCausalLM", {}),
        ("llama", {"attention.sliding_window": 32}, "MistralForCausalLM", {"sliding_window": 32}),
        ("llama", {"attention.key_length": 32, "attention.value_length": 32}, "LlamaForCausalLM", {"head_dim": 32}),
        ("llama", {"attention.head_count_kv": None}, "LlamaForCausalLM", {"num_key_value_heads": 4}),
        ("llama", {"attention.head_count_kv": [2, 2]}, "LlamaForCausalLM", {"num_key_value_heads": 2}),
        ("qwen2", {}, "Qwen2ForCausalLM", {"model_type": "qwen2"}),
        ("qwen3", {}, "Qwen3ForCausalLM", {"model_type": "qwen3"}),
        ("qwen3moe", MOE, "Qwen3MoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}),
        ("qwen3moe", MOE | {"expert_weights_norm": False}, "Qwen3MoeForCausalLM", {"norm_topk_prob": False}),
        ("phi3", {"attention.sliding_window": 0}, "Phi3ForCausalLM", {"sliding_window": None}),
        ("phi3", {"attention.sliding_window": 2047}, "Phi3ForCausalLM", {"sliding_window": 2047}),
    ],
)
def test_each_architecture_has_its_fields(
    tmp_path: Path, arch: str, metadata: dict[str, Any], architecture: str, fields: dict[str, Any]
) -> None:
    config = config_of(tmp_path, arch, metadata)
    assert config["architectures"] == [architecture]
    expected = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5} | fields
    assert {key: config[key] for key in expected} == expected


def test_a_file_without_an_output_matrix_ties_its_embedding(tmp_path: Path) -> None:
    assert config_of(tmp_path)["tie_word_embeddings"] is True
    assert config_of(tmp_path, tensors={"output.weight": np.ones((VOCAB, HIDDEN), np.float32)})[
        "tie_word_embeddings"
    ] is False  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "eos"), [({"eos": 2}, 2), ({"eos": 2, "eot": 7}, [2, 7]), ({"eos": 2, "eot": 2}, 2), ({}, None)]
)
def test_every_id_that_ends_a_text_is_an_eos(tmp_path: Path, ids: dict[str, int], eos: int | list[int] | None) -> None:
    config = config_of(tmp_path, general={f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()})
    assert config.get("eos_token_id") == eos


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        ({"attention.some_new_trick": 3}, "attention.some_new_trick"),
        ({"expert_count": 8}, "expert_count"),
        ({"attention.scale": 0.5}, "attention.scale"),
        ({"logit_scale": 0.25}, "logit_scale"),
        ({"attention.value_length": 8}, "attention.value_length"),
        ({"attention.causal": False}, "attention.causal"),
        ({"rope.dimension_count": 8}, "rope.dimension_count"),
        ({"rope.scaling.type": "dynamic"}, "rope.scaling.type"),
        ({"rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"attention.head_count_kv": [2, 4]}, "attention.head_count_kv"),
        ({"block_count": None}, "block_count"),
        ({"block_count": 0}, "block_count"),
        ({"block_count": "two"}, "block_count"),
        ({"attention.layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon"),
        ({"pooling_type": 3}, "pooling_type"),
    ],
)
def test_metadata_that_changes_the_computation_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], key: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"m\.gguf: .*{key}"):
        config_of(tmp_path, metadata=metadata)


@pytest.mark.parametrize("value", ["text", [1, 2], ["a", "b"], 0, 0.0, -1.5, math.nan, True], ids=repr)
def test_metadata_of_a_wrong_kind_is_refused_by_name_or_changes_nothing(tmp_path: Path, value: Any) -> None:
    keys = [*COMMON_METADATA, "attention.key_length", "attention.value_length", "attention.scale", "vocab_size"]
    keys += ["attention.sliding_window", "rope.dimension_count", "rope.scale_linear", "expert_count", "logit_scale"]
    keys += [f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length", "attn_factor")]
    keys += [f"rope.scaling.{key}" for key in ("yarn_beta_fast", "yarn_beta_slow", "yarn_ext_factor", "finetuned")]
    base = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
    expected = config_of(tmp_path, metadata=base)
    for key in keys:
        try:
            assert config_of(tmp_path, metadata=base | {key: value}) == expected, key
        except CheckpointError as error:
            message = str(error)
            assert key in message or ".attention." in message, key
    general = ("general.type", "split.count", "tokenizer.ggml.eos_token_id")
    for key in general:
        try:
            config_of(tmp_path, general={key: value})
        except CheckpointError as error:
            assert key in str(error)  # noqa: PT017


def test_metadata_that_changes_nothing_is_accepted(tmp_path: Path) -> None:
    harmless = {"attention.causal": True, "expert_count": 0, "attention.scale": HEAD_DIM**-0.5, "vocab_size": 9}
    assert config_of(tmp_path, metadata=harmless) == config_of(tmp_path)


@pytest.mark.parametrize(
    ("arch", "general", "message"),
    [
        ("gemma9", {}, "expected general.architecture among .* found 'gemma9'"),
        ("llama", {"general.type": "adapter"}, "expected a model .* found 'adapter'"),
        ("llama", {"split.count": 3}, "one of 3 parts"),
    ],
)
def test_what_is_no_whole_model_is_refused(tmp_path: Path, arch: str, general: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(tmp_path, arch, general=general)


def test_a_file_without_an_embedding_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", {"output_norm.weight": np.ones(HIDDEN, np.float32)})
    with pytest.raises(CheckpointError, match=r"expected the tensor token_embd\.weight"):
        hf_config(GGUFFile(path))


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"scaling.factor": 4.0}, LINEAR),
        ({"scale_linear": 4.0}, LINEAR),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, LINEAR),
        ({"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 128}, YARN),
        (
            {
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.original_context_length": 128,
                "scaling.yarn_beta_fast": 16.0,
                "scaling.yarn_beta_slow": 2.0,
                "scaling.attn_factor": 0.5,
            },
            YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.5 * (0.1 * math.log(4.0) + 1)},
        ),
    ],
)
def test_rope_scaling_is_translated(tmp_path: Path, scaling: dict[str, Any], expected: dict[str, Any]) -> None:
    config = config_of(tmp_path, metadata={f"rope.{key}": value for key, value in scaling.items()})
    assert config["rope_parameters"] == expected | {"rope_theta": 10000.0}


def llama3_divisors(theta: float, head_dim: int, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """What a converter writes for llama 3's scaling, case by case as Meta's code has it."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(
    ("theta", "head_dim", "factor", "low", "high", "original"),
    [
        (500000.0, 128, 8.0, 1.0, 4.0, 8192),
        (500000.0, 64, 32.0, 1.0, 4.0, 8192),
        (500000.0, 32, 8.0, 1.0, 4.0, 64),
        (500000.0, 16, 8.0, 1.0, 4.0, 8192),
        (10000.0, 16, 4.0, 1.0, 4.0, 100),
        (500000.0, 128, 8.0, 1.0, 8.0, 4096),
        (500000.0, 128, 16.0, 2.0, 8.0, 16384),
    ],
)
def test_llama3_scaling_is_recovered_from_its_divisors(
    tmp_path: Path, theta: float, head_dim: int, factor: float, low: float, high: float, original: int
) -> None:
    divisors = llama3_divisors(theta, head_dim, factor, low, high, original)
    metadata = {"attention.key_length": head_dim, "attention.value_length": head_dim, "rope.freq_base": theta}
    rope = config_of(tmp_path, metadata=metadata, tensors={"rope_freqs.weight": divisors})["rope_parameters"]
    assert rope["rope_type"] == "llama3"
    again = llama3_divisors(
        theta,
        head_dim,
        rope["factor"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )
    np.testing.assert_allclose(again, divisors, rtol=1e-5)
    if low == 1.0 and head_dim >= 64:
        assert (rope["high_freq_factor"], rope["original_max_position_embeddings"]) == (high, original)


def test_divisors_of_one_scale_nothing(tmp_path: Path) -> None:
    rope = config_of(tmp_path, tensors={"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)})["rope_parameters"]
    assert rope == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "divisors",
    [
        np.linspace(1, 8, 8, dtype=np.float32),
        np.array([1, 1, 1, 2, 1, 8, 8, 8], np.float32),
        np.full(8, 2, np.float32),
        np.ones(5, np.float32),
        np.array([1, 1, 1, 1, 1, 8, 8, np.nan], np.float32),
        np.zeros(8, np.float32),
    ],
)
def test_divisors_of_another_scaling_are_refused(tmp_path: Path, divisors: np.ndarray) -> None:
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        config_of(tmp_path, tensors={"rope_freqs.weight": divisors})


def test_two_scalings_at_once_are_refused(tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": llama3_divisors(10000.0, HEAD_DIM, 4.0, 1.0, 4.0, 100)}
    with pytest.raises(CheckpointError, match="expected one rope scaling, found linear and"):
        config_of(tmp_path, metadata={"rope.scaling.factor": 2.0}, tensors=tensors)


def test_phi3_has_longrope_from_two_tensors_and_partial_rotation(tmp_path: Path) -> None:
    short, long = np.full(6, 1.1, np.float32), np.full(6, 2.3, np.float32)
    rope = config_of(
        tmp_path,
        "phi3",
        {"rope.dimension_count": 12, "rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.19},
        {"rope_factors_short.weight": short, "rope_factors_long.weight": long},
    )["rope_parameters"]
    assert rope == {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.1] * 6,
        "long_factor": [2.3] * 6,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.19,
    }


def test_longrope_with_one_of_its_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rope_factors_long\.weight"):
        config_of(tmp_path, "phi3", tensors={"rope_factors_long.weight": np.ones(8, np.float32)})
