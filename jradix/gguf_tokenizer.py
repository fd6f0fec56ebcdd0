"""Builds the tokenizer that lies inside a GGUF file: vocabulary, merges, splitting rules and special tokens.

Byte-level BPE (``tokenizer.ggml.model`` "gpt2") with the splitting rules named in ``_SPLITTERS``; every other kind is
refused by name, because a text split otherwise than in training is tokenized wrongly without any error. The rules are
those of the models' own tokenizer.json; "default" is llama.cpp's for files that name none.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jradix.model.gguf_file import GGUFFile

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_BACKEND, _REST = "tokenizer.json", "gguf_vocabulary.json"
_SAVED = ("bos_id", "eos_ids", "bos_token", "eos_token", "chat_template")

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end a turn, for files that name an end of text only."""


class _TokenType(IntEnum):
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """A tokenizer read from a GGUF file, with its special tokens and chat template."""

    backend: Tokenizer
    bos_id: int | None
    eos_ids: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None

    def save(self, directory: Path) -> None:
        """Writes tokenizer.json, which other programs read too, and beside it the rest."""
        self.backend.save(str(directory / _BACKEND))
        rest = {name: getattr(self, name) for name in _SAVED}
        (directory / _REST).write_text(json.dumps(rest, indent=2, ensure_ascii=False), "utf-8")

    @staticmethod
    def is_in(directory: Path) -> bool:
        """Whether one has been saved there."""
        return (directory / _REST).is_file()

    @classmethod
    def load(cls, directory: Path) -> "GGUFVocabulary":
        """Reads what `save` has written.

        Raises:
            ValueError: a file is missing or damaged.
        """
        try:
            rest = json.loads((directory / _REST).read_text("utf-8"))
            backend = Tokenizer.from_str((directory / _BACKEND).read_text("utf-8"))
            saved: Any = [rest[name] for name in _SAVED]
            bos_id, eos_ids, *texts = saved
            return cls(backend, bos_id, tuple(eos_ids), *texts)
        except Exception as error:  # of the tokenizers library are no narrower
            raise ValueError(f"{directory}: {_REST} and {_BACKEND} hold no tokenizer: {error}") from error


def read_gguf_vocabulary(path: str | os.PathLike[str]) -> GGUFVocabulary:
    """Reads the tokenizer of one GGUF file.

    Raises:
        ValueError: the file is corrupt, has no tokenizer, or one of a kind that is not supported.
    """
    return vocabulary_from_metadata(GGUFFile(path).metadata, source=str(path))


def vocabulary_from_metadata(metadata: Mapping[str, Any], source: str) -> GGUFVocabulary:
    """Builds the tokenizer from a file's metadata; `source` names the file in errors, which are ``ValueError``."""
    fields = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind, pre = fields.get("model"), fields.get("pre")
    if kind != "gpt2":
        raise ValueError(
            f"{source}: tokenizer model {kind!r} is not supported in GGUF, only 'gpt2' (byte-level BPE) is"
        )
    if pre not in _SPLITTERS:
        raise ValueError(f"{source}: pre-tokenizer {pre!r} is not supported, only {', '.join(_SPLITTERS)} are")
    if missing := [name for name in ("tokens", "merges") if not len(fields.get(name, ()))]:
        raise ValueError(f"{source}: the tokenizer has no {' and no '.join(missing)}")

    tokens: Sequence[str] = fields["tokens"]
    backend = _byte_level_bpe(tokens, fields["merges"], pre)
    _add_special_tokens(backend, tokens, fields.get("token_type", ()))
    bos_id, eos_id = (_checked_id(fields.get(f"{name}_token_id"), tokens, source) for name in ("bos", "eos"))
    adds_bos = fields.get("add_bos_token", pre in _LLAMA3_NAMES)
    _add_around_text(backend, tokens, bos_id if adds_bos else None, eos_id if fields.get("add_eos_token") else None)
    return GGUFVocabulary(
        backend=backend,
        bos_id=bos_id,
        eos_ids=_eos_ids(fields, tokens, eos_id, source),
        bos_token=None if bos_id is None else tokens[bos_id],
        eos_token=None if eos_id is None else tokens[eos_id],
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _byte_level_bpe(tokens: Sequence[str], merges: Sequence[str], pre: str) -> Tokenizer:
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    # llama 3 takes a whole word that is in the vocabulary without merging its way to it
    backend = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre in _LLAMA3_NAMES))  # type: ignore[arg-type]
    backend.pre_tokenizer = _SPLITTERS[pre]()
    if pre in _QWEN2_NAMES:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _split_by(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Each pattern splits what the one before it left whole; then bytes become the printable letters of GPT-2."""
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _split_by_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split_by_smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _split_by_gpt2()])


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
_SPLITTERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": lambda: _split_by(*_DEFAULT),
    "gpt-2": _split_by_gpt2,
    "smollm": _split_by_smollm,
    **{name: lambda: _split_by(_LLAMA3) for name in _LLAMA3_NAMES},
    **{name: lambda: _split_by(_QWEN2) for name in _QWEN2_NAMES},
}


def _add_special_tokens(backend: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Makes control and user-defined tokens match in a text as a whole; only control tokens are left out of output."""
    for kind, special in ((_TokenType.CONTROL, True), (_TokenType.USER_DEFINED, False)):
        ids = [token_id for token_id, token_type in enumerate(types) if token_type == kind]
        backend.add_tokens([AddedToken(tokens[token_id], special=special, normalized=False) for token_id in ids])


def _add_around_text(backend: Tokenizer, tokens: Sequence[str], bos_id: int | None, eos_id: int | None) -> None:
    around = [(tokens[token_id], token_id) for token_id in (bos_id, eos_id) if token_id is not None]
    if around:
        first = [] if bos_id is None else [f"{tokens[bos_id]}:0"]
        last = [] if eos_id is None else [f"{tokens[eos_id]}:0"]
        backend.post_processor = processors.TemplateProcessing(single=[*first, "$A:0", *last], special_tokens=around)


def _eos_ids(fields: Mapping[str, Any], tokens: Sequence[str], eos_id: int | None, source: str) -> tuple[int, ...]:
    """End of text, of turn and of message; the turn's end by its usual names if the file does not say."""
    named = [_checked_id(fields.get(f"{name}_token_id"), tokens, source) for name in ("eot", "eom")]
    ids = [token_id for token_id in (eos_id, *named) if token_id is not None]
    types = fields.get("token_type", ())
    if named[0] is None:
        ids += [i for i, kind in enumerate(types) if kind == _TokenType.CONTROL and tokens[i] in _END_OF_TURN]
    return tuple(dict.fromkeys(ids))


def _checked_id(value: Any, tokens: Sequence[str], source: str) -> int | None:
    if value is not None and not 0 <= value < len(tokens):
        raise ValueError(f"{source}: special token id must lie in [0, {len(tokens)}), got {value}")
    return None if value is None else int(value)
