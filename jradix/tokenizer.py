"""Text to token ids and back: encode, chat template, and a detokenizer that can stream."""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from jradix.gguf_tokenizer import GGUFVocabulary, read_gguf_vocabulary
from jradix.stops import StopFinder

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_END = "<|jradix: end of a structured output|>"
_FILES = ("*.json", "*.jinja", "*.tiktoken", "tokenizer.model", "merges.txt", "vocab.txt")
_MAX_PENDING = 16
"""Tokens held back for a character that does not get complete. A character has at most four bytes, so this many tokens
without a complete one are no text at all, and are let go as they are."""


class Tokenizer:
    """One model's tokenizer, whatever file it came from.

    Attributes:
        vocab_size: Number of ids that have a token. A model's embedding may have more rows (padding).
        bos_id: The token that begins a text, ``None`` if the model has none.
        eos_ids: The tokens that end a generation, each once: end of turn, end of text.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None,
        eos_ids: Sequence[int],
        render_chat: Callable[..., str] | None = None,
    ) -> None:
        self._backend = backend
        self._render_chat = render_chat
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._adds_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text. Special tokens that the text spells out become those tokens.

        Args:
            text: Any text, the empty one included.
            add_special_tokens: Add what the model wants around a text, usually BOS. A text that begins with BOS itself,
                such as a rendered chat template, gets no second one.

        Raises:
            ValueError: the text is not a string of Unicode characters.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {type(text).__name__}")
        try:
            # As a batch, since a single text would keep the interpreter's lock, for 8 seconds if it has 2 MB.
            [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError("text must not hold lone surrogates: they are halves of a character, not text") from error
        ids = encoding.ids
        if add_special_tokens and self._adds_bos and ids[:2] == [self.bos_id, self.bos_id]:
            return ids[1:]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ids; bytes that are no UTF-8 become U+FFFD, ids without a token become nothing."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def to_json_with_end(self) -> tuple[str, int]:
        """Returns the tokenizer as the text of a tokenizer.json, and the id in it of one special token more.

        The model cannot sample that token: it stands for the end of a text where every other one may be part of it.

        Raises:
            ValueError: the tokens are not numbered one after the other, and the new one would take another's id.
        """
        backend = Backend.from_str(self._backend.to_str())
        backend.no_padding()
        backend.no_truncation()
        backend.add_special_tokens([_END])
        end_id = backend.token_to_id(_END)
        if end_id is None or self._backend.id_to_token(end_id) is not None:
            raise ValueError("this model's tokenizer leaves ids out, which structured output does not support")
        return backend.to_str(), end_id

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Returns the ids of a conversation in the model's own format.

        Special tokens, BOS included, are those that the template writes; none are added.

        Args:
            messages: ``{"role": ..., "content": ...}`` each, and whatever else the template reads.
            add_generation_prompt: End with the beginning of the assistant's answer.
            variables: More for the template, such as ``tools`` or ``enable_thinking``.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables), add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Returns the text that ``apply_chat_template`` encodes. Raises like it."""
        if self._render_chat is None:
            raise ValueError("this model has no chat template: pass a prompt instead of messages")
        if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise ValueError(f"messages must be a list of dicts with 'role' and 'content', got {messages!r}")
        from jinja2 import TemplateError

        try:
            return self._render_chat(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error


def load_tokenizer(model_path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a local Hugging Face directory or of a GGUF file.

    Raises:
        ValueError: there is none, or one of a kind that is not supported.
    """
    path = Path(model_path)
    if GGUFVocabulary.is_in(path):
        return _from_gguf(GGUFVocabulary.load(path))
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        return _from_gguf(read_gguf_vocabulary(path))
    raise ValueError(f"model_path must be a directory or a GGUF file, got {str(path)!r}, which does not exist")


def copy_tokenizer(model_path: str | os.PathLike[str], directory: Path) -> None:
    """Writes to `directory` what `load_tokenizer` needs to load this tokenizer from there.

    Of a Hugging Face directory these are its small files, of which it may have none; see `GGUFVocabulary.save`.

    Raises:
        ValueError: as `load_tokenizer` for a GGUF file; a file cannot be read.
    """
    path = Path(model_path)
    if path.is_dir():
        for file in sorted({file for pattern in _FILES for file in path.glob(pattern)}):
            if file.name != "config.json" and not file.name.endswith(".index.json"):
                shutil.copyfile(file, directory / file.name)
        return
    read_gguf_vocabulary(path).save(directory)


def _from_directory(path: Path) -> Tokenizer:
    transformers = _import_transformers()
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} holds no tokenizer that can be loaded (skip_tokenizer_init=True runs on token ids alone): {error}"
        ) from error
    if not loaded.is_fast:
        raise ValueError(f"{path} has a {type(loaded).__name__} without a tokenizer.json, which is not supported")
    eos_ids = [*_configured_eos_ids(path), *([] if loaded.eos_token_id is None else [loaded.eos_token_id])]
    return Tokenizer(
        loaded.backend_tokenizer,
        bos_id=loaded.bos_token_id,
        eos_ids=eos_ids,
        render_chat=loaded.apply_chat_template if loaded.chat_template else None,
    )


def _configured_eos_ids(path: Path) -> list[int]:
    """EOS ids of generation_config.json and config.json; chat models often name their end of turn only there."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        file = path / name
        value = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return ids


def _from_gguf(vocabulary: GGUFVocabulary) -> Tokenizer:
    def render_chat(messages: list[Any], **variables: Any) -> str:
        # the sandbox and the extras of transformers; its import takes 1.5 s, which completions need not wait for
        with lock:  # of two threads that import transformers at once, one may find it half there
            if not renderers:
                renderers.append(
                    _import_transformers().PreTrainedTokenizerFast(
                        tokenizer_object=vocabulary.backend,
                        chat_template=vocabulary.chat_template,
                        bos_token=vocabulary.bos_token,
                        eos_token=vocabulary.eos_token,
                    )
                )
        return renderers[0].apply_chat_template(messages, **variables)

    renderers: list[Any] = []
    lock = threading.Lock()
    return Tokenizer(
        vocabulary.backend,
        bos_id=vocabulary.bos_id,
        eos_ids=vocabulary.eos_ids,
        render_chat=render_chat if vocabulary.chat_template else None,
    )


def _import_transformers() -> Any:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install PyTorch otherwise
    import transformers

    return transformers


class Detokenizer:
    """Turns one request's tokens into text piece by piece, and finds stops.

    The pieces joined are the decoded whole, cut at the stop. Nothing is returned that could still change: a character
    whose bytes have not all arrived and text that may become a stop wait. Every token costs two decodes of a few
    tokens, however long the text: the tokens since the last complete character, behind the few before them (a decoder
    may treat the first token of a text differently).

    The stop that is complete first ends the text (see `StopFinder`), so the outcome does not depend on how many tokens
    arrive at a time. Tokens after it are ignored.

    Attributes:
        num_tokens: Tokens taken so far; with ``stopped`` set, those up to the end of the stop.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: str | Sequence[str] = (),
        stop_regex: str | Sequence[str] = (),
        no_stop_trim: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = StopFinder(_several(stop), _several(stop_regex), keep=no_stop_trim)
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []  # tokens whose text has all been taken
        self._pending: list[int] = []  # tokens behind them
        self._num_taken = 0  # characters of the text of context + pending that have been taken
        self._finished = False
        self.num_tokens = 0

    @property
    def stopped(self) -> str | None:
        """The stop string or regular expression that was found, else ``None``."""
        return self._stops.stopped

    @property
    def error(self) -> str | None:
        """Why the search for stops was given up, else ``None``."""
        return self._stops.error

    def add(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens; returns the text that is now certain."""
        assert not self._finished, "add after finish"
        pieces: list[str] = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            pieces.append(self._stops.add(self._take(token_id)))
        return "".join(pieces)

    def finish(self) -> str:
        """Returns what was held back, once: an incomplete character as U+FFFD, the beginning of a stop."""
        if self._finished or self.stopped is not None:
            return ""
        self._finished = True
        return self._stops.add(self._decode(self._context + self._pending)[self._num_taken :]) + self._stops.finish()

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)

    def _take(self, token_id: int) -> str:
        """Adds a token and returns the new text up to its last complete character."""
        has_no_text = not 0 <= token_id < self._tokenizer.vocab_size
        if has_no_text or (self._skip_special_tokens and token_id in self._tokenizer.special_ids):
            return ""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        complete = text if len(self._pending) >= _MAX_PENDING else text.rstrip(_REPLACEMENT)
        piece = complete[self._num_taken :]
        self._num_taken = max(self._num_taken, len(complete))
        if piece and len(complete) == len(text):
            self._context, self._pending = self._pending, []
            self._num_taken = len(self._decode(self._context))
        return piece


def _several(texts: str | Sequence[str]) -> Sequence[str]:
    return (texts,) if isinstance(texts, str) else texts
