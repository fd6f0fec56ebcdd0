"""Structured output: keeps a request's tokens within a JSON schema, a regular expression or a grammar.

llguidance does the parsing. It follows a grammar byte by byte with an Earley parser behind a lexer made of derivatives
of regular expressions, and computes for each step which tokens may follow.
"""

import functools
import json
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from jradix.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

_WHITESPACE = r"\n[ \t]{0,32}| "
"""Between the parts of JSON: nothing, a space, or a line break and its indentation. llguidance's own default is any
amount, in which a model that samples can lose itself."""

_NO_FORCING = '\n%llguidance {"no_forcing": true}'
"""Where only one text may follow, allow it in any tokens. Otherwise it has to come in those that the tokenizer makes of
it, and a tokenizer that normalizes makes them of another text."""

_CACHED_GRAMMARS = 64
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class Grammars:
    """Compiles the grammars of one engine's requests. Methods may be called from any thread."""

    def __init__(self, tokenizer_json: str, end_id: int, vocab_size: int) -> None:
        """Reads the vocabulary, which takes some tenths of a second.

        Args:
            tokenizer_json: The text of a tokenizer.json.
            end_id: A special token in it that the model cannot sample (see `Tokenizer.to_json_with_end`).
            vocab_size: Of the model. Its ids without a token are never allowed.

        Raises:
            ValueError: llguidance cannot work with such a tokenizer.
        """
        from llguidance import LLTokenizer  # its 70 ms are for those who need it

        self._vocab_size = vocab_size
        self._model_bits = _bits([i for i in range(vocab_size) if i != end_id], vocab_size)
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=max(end_id + 1, vocab_size), eos_token=end_id)
        except ValueError as error:
            raise ValueError(f"structured output does not work with this model's tokenizer: {error}") from error
        self._compiled = functools.lru_cache(maxsize=_CACHED_GRAMMARS)(self._compile)

    def compile(
        self, params: SamplingParams, stop_ids: Iterable[int], namespace: Hashable = None
    ) -> "Constraint | None":
        """Returns the constraint of a request that has no output yet; None if it asks for none.

        `stop_ids` are the tokens that end the request. What is compiled is kept for its namespace alone: how long it
        takes must not tell one tenant what another has used.

        Raises:
            ValueError: names the field, and says with llguidance's words what does not parse or is not supported, or
                that no output but an empty one is allowed.
        """
        for field in _TO_LARK:
            source = getattr(params, field)
            if source is not None:
                matcher = self._compiled(namespace, field, source).deep_copy()
                stop_bits = _bits([i for i in stop_ids if i < self._vocab_size], self._vocab_size)
                constraint = Constraint(matcher, stop_bits, self._model_bits & ~stop_bits)
                if constraint.finished:
                    reason = constraint.error or "the empty output is all that it allows"
                    raise ValueError(f"{field} allows no token of this model at the start: {reason}")
                return constraint
        return None

    def _compile(self, namespace: Hashable, field: str, source: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = LLMatcher.grammar_from_lark(_TO_LARK[field](source) + _NO_FORCING)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        except ValueError as error:
            raise ValueError(f"{field} is refused: {error}") from error
        if matcher.is_error():
            raise ValueError(f"{field} is refused: {_message(matcher)}")
        return matcher


class Constraint:
    """How far one request's output is in its grammar, and which tokens may follow.

    A token that ends the request (EOS, stop ids) may follow exactly where the output is complete, so that what comes
    before it always is. A request that samples a token `accept`s it, and ends when `finished`.
    """

    def __init__(
        self, matcher: "LLMatcher", stop_bits: npt.NDArray[np.uint32], other_bits: npt.NDArray[np.uint32]
    ) -> None:
        """Owns `matcher`. The bits are uint32 `[words]`: tokens that end the request, and the model's other tokens."""
        self._matcher, self._stop_bits, self._other_bits = matcher, stop_bits, other_bits
        self._following: npt.NDArray[np.uint32] | None = None

    def fill(self, row: npt.NDArray[np.uint32]) -> None:
        """Writes which tokens may be sampled next: bit i % 32 of `row[i // 32]` is token i.

        Args:
            row: uint32 `[ceil(vocab_size / 32)]`.
        """
        np.bitwise_or(self._may_follow(), self._stop_bits if self._matcher.is_accepting() else 0, out=row)

    def accept(self, token_id: int) -> None:
        """Takes the token that was sampled, one that goes on with the output."""
        allowed = self._may_follow()[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1)
        assert allowed, f"token {token_id} was sampled, which the grammar does not allow"
        self._matcher.consume_token(token_id)
        self._following = None

    @property
    def finished(self) -> bool:
        """Whether no token may follow, but those that end the request."""
        return not self._may_follow().any()

    @property
    def error(self) -> str | None:
        """Why a finished output is not a complete one: the grammar is too complex, or the vocabulary too small."""
        if not self.finished:
            return None
        if self._matcher.is_error():
            return f"the output cannot follow its grammar any further: {_message(self._matcher)}"
        if not self._matcher.is_accepting():
            return "the output cannot follow its grammar any further: no token that may follow is left"
        return None

    def fork(self) -> "Constraint":
        """Returns a copy that goes its own way from here."""
        return Constraint(self._matcher.deep_copy(), self._stop_bits, self._other_bits)

    def _may_follow(self) -> npt.NDArray[np.uint32]:
        """The tokens that go on with the output."""
        if self._following is None:
            words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            self._following = words[: len(self._other_bits)] & self._other_bits
        return self._following


def _json_schema(schema: str) -> str:
    parsed = json.loads(schema)
    if isinstance(parsed, dict):
        parsed.setdefault("x-guidance", {"whitespace_pattern": _WHITESPACE})
    return f"start: %json {json.dumps(parsed)}"


def _regex(expression: str) -> str:
    from llguidance import LLMatcher

    [grammar] = json.loads(LLMatcher.grammar_from_regex(expression))["grammars"]  # it escapes what Lark would misread
    return grammar["lark_grammar"]


def _ebnf(grammar: str) -> str:
    if not _GBNF_RULE.search(grammar):
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # it raises plain ones
        raise ValueError(f"it is no GBNF: {error}") from error


_TO_LARK: Final[dict[str, Callable[[str], str]]] = {"json_schema": _json_schema, "regex": _regex, "ebnf": _ebnf}


def _message(matcher: "LLMatcher") -> str:
    """What is wrong, without the lines of the Lark that it is wrong in."""
    text = re.split(r"\n +\d+ \| ", matcher.get_error())[0]
    return text.partition("failed to compile JSON schema: ")[2] or text.removesuffix("<non-verbose/>").strip()


def _bits(ids: Sequence[int], size: int) -> npt.NDArray[np.uint32]:
    """A bitmask of `size` ids, in words of 32."""
    flags = np.zeros(-(-size // 32) * 32, np.bool_)
    flags[ids] = True
    return np.packbits(flags, bitorder="little").view(np.uint32)
