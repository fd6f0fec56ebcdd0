"""GGUF metadata as a Hugging Face config: the same model, described in the other format's words.

Every metadata key of the architecture is either translated, or known to change nothing at its value, or refused by
name: a key that is not understood may change the computation. The keys' meaning is that of llama.cpp, which writes
and runs these files.
"""

from typing import Any

from gguf import GGMLQuantizationType

from jradix.model.checkpoint_error import CheckpointError
from jradix.model.gguf_file import GGUFFile
from jradix.model.gguf_metadata import ArchMetadata
from jradix.model.gguf_rope import rope_parameters

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
}
SUPPORTED = tuple(_ARCHITECTURES)

_TOKEN_IDS = {"bos_token_id": ("bos",), "eos_token_id": ("eos", "eot", "eom"), "pad_token_id": ("padding",)}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Returns the config.json that Hugging Face would have for this model, as a dict.

    ``rope_parameters`` holds everything about the rotary embedding, as in transformers 5. Raises ``CheckpointError``
    for an architecture or metadata outside what jradix runs.
    """
    _check_kind(file)
    arch = file.metadata["general.architecture"]
    keys = ArchMetadata(file, arch)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: expected the tensor token_embd.weight, found {len(file.tensors)} others")
    architecture, model_type = _ARCHITECTURES[arch]
    q_heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // q_heads)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": _dtype_name(embedding.type),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": q_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", q_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    keys.expect("attention.value_length", head_dim)
    keys.expect("attention.scale", head_dim**-0.5, 0.0)
    keys.take("vocab_size", None)  # the embedding's rows count, padding included
    config["rope_parameters"] = rope_parameters(file, keys, config)
    config |= _arch_fields(file, arch, keys, config)
    config |= _token_ids(file)
    keys.refuse_the_rest()
    return config


def _check_kind(file: GGUFFile) -> None:
    kind = file.metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise CheckpointError(f"{file.path}: expected a model (general.type), found {kind!r}")
    num_parts = file.metadata.get("split.count", 1)
    if not isinstance(num_parts, int) or num_parts > 1:
        raise CheckpointError(
            f"{file.path}: is one of {num_parts!r} parts (split.count); join them with llama-gguf-split --merge"
        )
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in _ARCHITECTURES:
        raise CheckpointError(f"{file.path}: expected general.architecture among {SUPPORTED}, found {arch!r}")


def _dtype_name(type_: GGMLQuantizationType) -> str:
    """A dtype that loses nothing of what the file holds: only unquantised files have one of their own."""
    plain = {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}
    return plain.get(type_, "bfloat16")


def _arch_fields(file: GGUFFile, arch: str, keys: ArchMetadata, config: dict[str, Any]) -> dict[str, Any]:
    window = keys.integer("attention.sliding_window", 0, low=0)
    fields: dict[str, Any] = {}
    if arch == "llama":
        # Mistral's files carry llama's name; a window is what tells it apart.
        if window:
            fields = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        if _has_bias(file, "ffn_down"):
            fields["mlp_bias"] = True
    elif arch == "phi3":
        fields = {"sliding_window": window or None}
    elif window:
        raise CheckpointError(
            f"{file.path}: {arch}.attention.sliding_window = {window} needs to know which layers use it, "
            "which this format does not say; jradix does not support it"
        )
    if arch == "qwen3moe":
        fields |= {
            "num_experts": keys.integer("expert_count"),
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
            "norm_topk_prob": bool(keys.take("expert_weights_norm", True)),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [
                layer for layer in range(config["num_hidden_layers"]) if f"blk.{layer}.ffn_gate.weight" in file.tensors
            ],
        }
    if arch in ("llama", "qwen3", "qwen3moe") and _has_bias(file, "attn_q"):
        fields["attention_bias"] = True
    return fields


def _has_bias(file: GGUFFile, module: str) -> bool:
    return f"blk.0.{module}.bias" in file.tensors


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    """Ids as config.json gives them: ``eos_token_id`` is a list where end of turn and end of text differ."""
    ids: dict[str, Any] = {}
    for field, names in _TOKEN_IDS.items():
        found = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
        distinct = list(dict.fromkeys(token_id for token_id in found if isinstance(token_id, int)))
        if distinct:
            ids[field] = distinct[0] if len(distinct) == 1 else distinct
    return ids
