"""Turns what a caller of `generate` passes into validated requests; nothing is queued before all of it is right."""

import functools
import uuid
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jradix.grammar import Constraint, Grammars
from jradix.request import Request
from jradix.sampling_batch import MAX_SUPPRESSED_IDS
from jradix.sampling_params import DEFAULT_MAX_NEW_TOKENS, SEED_LIMIT, SamplingParams
from jradix.tokenizer import Tokenizer

Params = SamplingParams | Mapping[str, Any]
TokenIds = Sequence[int] | npt.NDArray[np.integer]


class Submission:
    """Makes requests for one engine: tokenizes, checks limits, numbers and seeds them."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        context_length: int,
        eos_ids: frozenset[int],
        pool_tokens: int,
        random_seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size, self._context_length, self._eos_ids = vocab_size, context_length, eos_ids
        self._pool_tokens = pool_tokens
        self._seeds = np.random.default_rng(random_seed)

    def requests(
        self,
        prompt: str | Sequence[str] | None,
        input_ids: TokenIds | Sequence[TokenIds] | None,
        sampling_params: Params | Sequence[Params] | None,
        rid: str | Sequence[str] | None,
        namespace: Hashable | None,
    ) -> tuple[list[Request], bool]:
        """The requests, and whether the caller passed a single prompt instead of a list.

        Raises:
            ValueError: names the argument, what was expected and what was given.
        """
        if namespace is not None and (isinstance(namespace, bool) or not isinstance(namespace, str | int)):
            raise ValueError(f"cache_salt must be a string, an integer or None, got {namespace!r}")
        prompts, single = self._prompts(prompt, input_ids)
        params = [
            _as_params(p)
            for p in _one_each(sampling_params, len(prompts), "sampling_params", (Mapping, SamplingParams))
        ]
        ids = _one_each(rid, len(prompts), "rid", (str,))
        if rid is not None and len(set(ids)) < len(ids):
            raise ValueError(f"rid must name each request differently, got {list(ids)}")
        made = [
            self._request(token_ids, param, number, namespace)
            for token_ids, param, number in zip(prompts, params, ids, strict=True)
        ]
        return made, single

    def _prompts(
        self, prompt: str | Sequence[str] | None, input_ids: TokenIds | Sequence[TokenIds] | None
    ) -> tuple[list[npt.NDArray[np.int32]], bool]:
        if (prompt is None) == (input_ids is None):
            raise ValueError("give exactly one of prompt and input_ids")
        if input_ids is not None:
            if not _is_sequence(input_ids) or not len(input_ids):
                raise ValueError(
                    f"input_ids must be a list of token ids or of such lists, not empty, got {input_ids!r}"
                )
            single = not _is_sequence(input_ids[0])
            return [self._checked(ids) for ids in ([input_ids] if single else input_ids)], single
        if self._tokenizer is None:
            raise ValueError("prompt needs a tokenizer, and skip_tokenizer_init is set: pass input_ids")
        single = isinstance(prompt, str)
        texts: Any = [prompt] if isinstance(prompt, str) else prompt
        if not _is_sequence(texts) or not len(texts) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"prompt must be a string or a list of strings, not empty, got {prompt!r}")
        return [self._checked(self._tokenizer.encode(text)) for text in texts], single

    def _checked(self, token_ids: Any) -> npt.NDArray[np.int32]:
        if not _is_sequence(token_ids):
            raise ValueError(f"input_ids must be a list of token ids, got {token_ids!r}")
        if not len(token_ids):
            raise ValueError("the prompt is empty: at least one token is needed to predict the next")
        for kind in set(map(type, token_ids)):  # a mixed list would become an array of one type, True a 1
            if not issubclass(kind, int | np.integer) or kind is bool:
                raise ValueError(f"input_ids must be integers, got a {kind.__name__} in {_shortened(token_ids)}")
        ids = np.asarray(token_ids)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            wrong = ids[(ids < 0) | (ids >= self._vocab_size)][0]
            raise ValueError(f"input_ids must lie in [0, {self._vocab_size}) for this model, got {wrong}")
        if len(ids) >= self._context_length:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and at most {self._context_length - 1} leave room for an output "
                f"in context_length {self._context_length}: shorten it or raise context_length"
            )
        return ids.astype(np.int32)

    def _request(
        self, prompt_ids: npt.NDArray[np.int32], params: SamplingParams, rid: str | None, namespace: Hashable | None
    ) -> Request:
        params.validate_for_vocab(self._vocab_size)
        max_new_tokens = self._max_new_tokens(params.max_new_tokens, len(prompt_ids))
        if (params.stop or params.stop_regex) and self._tokenizer is None:
            raise ValueError("stop and stop_regex need a tokenizer, and skip_tokenizer_init is set: use stop_token_ids")
        stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos_ids)
        if params.min_new_tokens and len(stop_ids) > MAX_SUPPRESSED_IDS:
            raise ValueError(
                f"min_new_tokens can hold back at most {MAX_SUPPRESSED_IDS} stop ids, EOS included, got {len(stop_ids)}"
            )
        seed = params.seed if params.seed is not None else int(self._seeds.integers(SEED_LIMIT))
        return Request(
            id=rid if rid is not None else uuid.uuid4().hex,
            prompt_ids=prompt_ids,
            params=params,
            stop_ids=stop_ids,
            max_new_tokens=max_new_tokens,
            seed=seed,
            namespace=namespace,
            constraint=self._constraint(params, stop_ids),
        )

    def _constraint(self, params: SamplingParams, stop_ids: frozenset[int]) -> Constraint | None:
        if params.json_schema is params.regex is params.ebnf is None:
            return None
        if self._tokenizer is None:
            raise ValueError("json_schema, regex and ebnf need a tokenizer, and skip_tokenizer_init is set")
        return self._grammars.compile(params, stop_ids)

    @functools.cached_property
    def _grammars(self) -> Grammars:
        assert self._tokenizer is not None
        return Grammars(*self._tokenizer.to_json_with_end(), self._vocab_size)

    def _max_new_tokens(self, asked: int | None, prompt_len: int) -> int:
        room = self._context_length - prompt_len
        if asked is None or asked == DEFAULT_MAX_NEW_TOKENS:
            # The KV of a request's last token is never written.
            fits = max(1, min(room, self._pool_tokens + 1 - prompt_len))
            return fits if asked is None else min(asked, fits)
        if asked > room:
            raise ValueError(
                f"max_new_tokens {asked} does not fit: the prompt has {prompt_len} tokens and context_length is "
                f"{self._context_length}, which leaves {room}; None asks for as many as fit"
            )
        return asked


def _as_params(params: Params | None) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    if isinstance(params, Mapping):
        return SamplingParams.from_dict(params)
    raise ValueError(f"sampling_params must be SamplingParams or a dict of its fields, got {params!r}")


def _one_each(value: Any, count: int, name: str, single_types: tuple[type, ...]) -> list[Any]:
    """`value` once per prompt, whether it was given once or as a list."""
    if value is None or isinstance(value, single_types):
        if name == "rid" and value is not None and count != 1:
            raise ValueError(f"rid must be a list of {count} ids for {count} prompts, got {value!r}")
        return [value] * count
    if not _is_sequence(value) or len(value) != count:
        got = f"{len(value)}" if _is_sequence(value) else repr(value)
        raise ValueError(f"{name} must be one for all or a list with one for each of the {count} prompts, got {got}")
    for item in value:
        if not isinstance(item, single_types):
            raise ValueError(f"{name} holds {item!r}, expected {' or '.join(t.__name__ for t in single_types)}")
    return list(value)


def _is_sequence(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
