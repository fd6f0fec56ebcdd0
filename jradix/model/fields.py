"""Reads the fields of a Hugging Face config and refuses, by name, whatever nobody has read."""

from collections.abc import Mapping
from typing import Any, Final

REQUIRED: Final = object()

# They change training, sampling, files or reporting, never the logits of a forward pass.
# fmt: off
HARMLESS: Final = frozenset({
    # files
    "architectures", "model_type", "auto_map", "dtype", "torch_dtype", "transformers_version",
    "transformers.js_config", "_name_or_path", "name_or_path", "_attn_implementation", "attn_implementation",
    "unsloth_fixed", "unsloth_version", "is_llama_config",
    # tokens and sampling
    "bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "temperature", "top_k", "top_p",
    "min_p", "typical_p", "do_sample", "num_beams", "max_length", "max_new_tokens", "min_length",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "num_return_sequences",
    # how transformers runs it
    "use_cache", "cache_implementation",
    "pretraining_tp", "return_dict", "return_dict_in_generate", "output_attentions",
    "output_hidden_states", "output_router_logits", "chunk_size_feed_forward", "gradient_checkpointing",
    # training
    "initializer_range", "attention_dropout", "embd_pdrop", "resid_pdrop", "hidden_dropout", "classifier_dropout",
    "classifier_dropout_prob", "router_aux_loss_coef", "id2label", "label2id", "num_labels", "problem_type",
    "task_specific_params", "finetuning_task",
})
# fmt: on


class UnsupportedModelError(ValueError):
    """The model asks for something that jradix does not compute; running it anyway would give wrong text."""


class Fields:
    """A config's fields, each checked where it is read; a field is known once somebody has asked for it.

    Args:
        values: the parsed JSON object.
        name: what error messages call it.
    """

    def __init__(self, values: Mapping[str, Any], name: str = "config.json") -> None:
        self._values = values
        self._name = name
        self._read: set[str] = set()

    def get(self, key: str, default: Any = REQUIRED) -> Any:
        """The value as it stands, `default` where the key is missing; an explicit null is None."""
        self._read.add(key)
        if key in self._values:
            return self._values[key]
        if default is REQUIRED:
            raise ValueError(f"{self._name} has no {key}, which this architecture needs")
        return default

    def integer(self, key: str, default: Any = REQUIRED) -> int:
        """A whole number of at least 1; null counts as missing."""
        value = self._or_default(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self._name}: {key} must be an integer of at least 1, got {value!r}")
        return value

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """A positive number; null counts as missing."""
        value = self._or_default(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{self._name}: {key} must be a positive number, got {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key, None) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._or_default(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self._name}: {key} must be true or false, got {value!r}")
        return value

    def nested(self, key: str) -> "Fields | None":
        """The object under `key`; None where it is missing, null or empty."""
        value = self.get(key, None)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{self._name}: {key} must be an object, got {value!r}")
        return Fields(value, f"{self._name}: {key}") if value else None

    def refuse_unread(self) -> None:
        """Raises `UnsupportedModelError` naming every field that is set, not harmless, and that nobody has read."""
        unread = {
            key: value
            for key, value in self._values.items()
            if key not in self._read | HARMLESS and not (value is None or value is False or value in ("", [], {}))
        }
        if unread:
            raise UnsupportedModelError(
                f"{self._name} has fields that jradix does not know and that may change what the model computes: "
                f"{', '.join(f'{key}={str(value)[:60]}' for key, value in sorted(unread.items()))}"
            )

    def _or_default(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            if default is REQUIRED:
                raise ValueError(f"{self._name}: {key} is null, but this architecture needs it")
            return default
        return value
