"""GGUF files under Hugging Face's names and in its layout: permutation undone, experts unstacked, nothing dropped."""

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from jradix.model.checkpoint_error import CheckpointError
from jradix.model.gguf_checkpoint import GGUFCheckpoint, rope_halves
from tests.model.gguf_writing import (
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MLP,
    Q_HEADS,
    VOCAB,
    llama_shapes,
    random_tensors,
    write_gguf,
)

HF_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders rows as llama.cpp's converter does, spelled out row by row: (i, i + half) become (2i, 2i + 1)."""
    head_dim = rows.shape[0] // num_heads
    out = np.empty_like(rows)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            out[head * head_dim + 2 * i] = rows[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = rows[head * head_dim + head_dim // 2 + i]
    return out


def hf_name(name: str) -> str:
    if not name.startswith("blk."):
        return {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight",
        }[name]
    _, layer, module, kind = name.split(".")
    return f"model.layers.{layer}.{HF_MODULES[module]}.{kind}"


def stored_as(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns Hugging Face's llama tensors, under GGUF's names, as a llama GGUF file stores them."""
    heads = {"attn_q": Q_HEADS, "attn_k": KV_HEADS}
    return {
        name: interleaved(array, heads[name.split(".")[2]]) if any(f".{q}." in name for q in heads) else array
        for name, array in tensors.items()
    }


@pytest.mark.parametrize(
    "type_", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]
)
def test_llama_comes_back_under_hf_names_with_q_and_k_unpermuted(tmp_path: Path, type_: Type) -> None:
    tensors = random_tensors(llama_shapes())
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "llama", stored_as(tensors), quantisation=type_))
    assert checkpoint.names() == {hf_name(name) for name in tensors}
    stored_dtypes = {Type.F16: np.float16, Type.BF16: ml_dtypes.bfloat16}
    for name, array in tensors.items():
        read = checkpoint.read(hf_name(name))
        kind = Type.F32 if array.ndim == 1 else type_
        assert read.shape == array.shape == checkpoint.shape(hf_name(name))
        assert read.dtype == stored_dtypes.get(kind, np.float32)
        # Blocks lie within rows, so quantising commutes with the order of rows.
        expected = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        np.testing.assert_array_equal(read.astype(np.float32), expected, err_msg=name)


def test_biases_of_q_and_k_are_unpermuted_too(tmp_path: Path) -> None:
    biases = {"attn_q": Q_HEADS, "attn_k": KV_HEADS, "attn_v": KV_HEADS}
    shapes = llama_shapes() | {f"blk.0.{module}.bias": (heads * HEAD_DIM,) for module, heads in biases.items()}
    tensors = random_tensors(shapes)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "llama", stored_as(tensors)))
    for module in biases:
        expected = tensors[f"blk.0.{module}.bias"]
        np.testing.assert_array_equal(checkpoint.read(f"model.layers.0.{HF_MODULES[module]}.bias"), expected)


def test_other_architectures_are_not_permuted(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes())
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "qwen2", tensors))
    for name, array in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(hf_name(name)), array)


def test_rope_by_halves_after_reordering_gives_the_scores_of_interleaved_rope() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, Q_HEADS * HEAD_DIM, HIDDEN))
    x, y = rng.standard_normal((2, HIDDEN))
    half = HEAD_DIM // 2
    frequencies = 10000.0 ** (-np.arange(half) / half)

    def rotate(projected: np.ndarray, position: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        heads = projected.reshape(Q_HEADS, HEAD_DIM)
        cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
        out = np.empty_like(heads)
        out[:, first] = heads[:, first] * cos - heads[:, second] * sin
        out[:, second] = heads[:, first] * sin + heads[:, second] * cos
        return out

    pairs = np.arange(0, HEAD_DIM, 2), np.arange(1, HEAD_DIM, 2)
    halves = np.arange(half), np.arange(half, HEAD_DIM)
    expected = (rotate(q @ x, 11, *pairs) * rotate(k @ y, 4, *pairs)).sum(-1)
    q, k = rope_halves(q, Q_HEADS), rope_halves(k, Q_HEADS)
    np.testing.assert_allclose((rotate(q @ x, 11, *halves) * rotate(k @ y, 4, *halves)).sum(-1), expected)


def test_stacked_experts_are_read_one_by_one(tmp_path: Path) -> None:
    num_experts, moe_mlp = 4, 32
    shapes = llama_shapes() | {"blk.0.attn_q_norm.weight": (HEAD_DIM,), "blk.0.attn_k_norm.weight": (HEAD_DIM,)}
    for module in ("gate", "up", "down"):
        del shapes[f"blk.1.ffn_{module}.weight"]
        matrix = (HIDDEN, moe_mlp) if module == "down" else (moe_mlp, HIDDEN)
        shapes[f"blk.1.ffn_{module}_exps.weight"] = (num_experts, *matrix)
    shapes["blk.1.ffn_gate_inp.weight"] = (num_experts, HIDDEN)
    tensors = random_tensors(shapes)
    moe = {"expert_count": num_experts, "expert_used_count": 2, "expert_feed_forward_length": moe_mlp}
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", tensors, moe, quantisation=Type.Q8_0)
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.config["mlp_only_layers"] == [0]
    for module in ("gate", "up", "down"):
        array = tensors[f"blk.1.ffn_{module}_exps.weight"]
        expected = gguf.quants.dequantize(gguf.quants.quantize(array, Type.Q8_0), Type.Q8_0)
        for expert in range(num_experts):
            name = f"model.layers.1.mlp.experts.{expert}.{module}_proj.weight"
            assert checkpoint.shape(name) == array.shape[1:]
            np.testing.assert_array_equal(checkpoint.read(name), expected[expert])
    assert {"model.layers.1.mlp.gate.weight", "model.layers.0.self_attn.q_norm.weight"} <= checkpoint.names()


def test_phi3_keeps_its_fused_matrices(tmp_path: Path) -> None:
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_qkv.weight": ((Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (2 * MLP, HIDDEN),
        }
    tensors = random_tensors(shapes)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "phi3", tensors))
    layer = "model.layers.1"
    for hf, ours in {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}.items():
        np.testing.assert_array_equal(checkpoint.read(f"{layer}.{hf}.weight"), tensors[f"blk.1.{ours}.weight"])


@pytest.mark.parametrize(
    ("arch", "name", "shape"),
    [
        ("llama", "blk.0.attn_sinks.weight", (HIDDEN,)),
        ("llama", f"blk.{LAYERS}.attn_v.weight", (KV_HEADS * HEAD_DIM, HIDDEN)),
        ("llama", "blk.0.ffn_gate_exps.weight", (2, MLP, HIDDEN)),
        ("llama", "blk.0.attn_q.scale", (1,)),
        ("llama", "position_embd.weight", (8, HIDDEN)),
        ("llama", "blk.0.attn_q_norm.weight", (HEAD_DIM,)),
        ("qwen2", "blk.0.attn_output.bias", (HIDDEN,)),
        ("qwen3", "rope_freqs.weight", (HEAD_DIM // 2,)),
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(
    tmp_path: Path, arch: str, name: str, shape: tuple[int, ...]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch, random_tensors(llama_shapes() | {name: shape}))
    with pytest.raises(CheckpointError, match=rf"m\.gguf: .*{name}"):
        GGUFCheckpoint(path)


def test_q_rows_that_are_not_whole_heads_are_refused(tmp_path: Path) -> None:
    shapes = llama_shapes() | {"blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM + 2, HIDDEN)}
    with pytest.raises(CheckpointError, match=r"expected 2 heads x 16 .* in blk\.0\.attn_k\.weight"):
        GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "llama", random_tensors(shapes)))


def test_each_read_has_memory_of_its_own(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "llama", random_tensors(llama_shapes())))
    for name in checkpoint.names():
        first = checkpoint.read(name)
        before = first.copy()
        checkpoint.read(name)[...] = 0
        np.testing.assert_array_equal(first, before)
        np.testing.assert_array_equal(checkpoint.read(name), before)


def test_smollm2_has_the_shapes_and_the_config_it_is_known_for(smollm2_path: Path) -> None:
    checkpoint = GGUFCheckpoint(smollm2_path)
    assert checkpoint.path == smollm2_path
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    shapes = {
        "input_layernorm": (576,),
        "self_attn.q_proj": (576, 576),
        "self_attn.k_proj": (192, 576),
        "self_attn.v_proj": (192, 576),
        "self_attn.o_proj": (576, 576),
        "post_attention_layernorm": (576,),
        "mlp.gate_proj": (1536, 576),
        "mlp.up_proj": (1536, 576),
        "mlp.down_proj": (576, 1536),
    }
    expected = {f"model.layers.{i}.{module}.weight": shape for i in range(30) for module, shape in shapes.items()}
    expected |= {"model.embed_tokens.weight": (49152, 576), "model.norm.weight": (576,)}
    assert {name: checkpoint.shape(name) for name in checkpoint.names()} == expected
    for name in expected:
        array = checkpoint.read(name)
        assert array.shape == expected[name]
        assert np.isfinite(array).all()
        assert 1e-3 < np.abs(array).mean() < 10
