"""Turns what a caller of `generate` passes into validated requests; nothing is queued before all of it is right."""

import functools
import threading
import time
import uuid
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from jradix.grammar import Constraint, Grammars
from jradix.logprobs import MAX_LOGPROB_IDS
from jradix.request import Request
from jradix.request_options import RequestOptions, options_of_each
from jradix.sampling_batch import MAX_SUPPRESSED_IDS
from jradix.sampling_params import DEFAULT_MAX_NEW_TOKENS, SEED_LIMIT, Params, SamplingParams, params_of_each
from jradix.token_logprobs import TokenLogprobs
from jradix.tokenizer import Tokenizer
from jradix.validation import is_sequence

_LOGPROB_DETAILS = ("top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs")
TokenIds = Sequence[int] | npt.NDArray[np.integer]


class Submission:
    """Makes requests for one engine: tokenizes, checks limits, numbers and seeds them. For any thread."""

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
        self._drawing = threading.Lock()

    def requests(
        self,
        prompt: str | Sequence[str] | None,
        input_ids: TokenIds | Sequence[TokenIds] | None,
        sampling_params: Params | Sequence[Params] | None,
        **options: Unpack[RequestOptions],
    ) -> tuple[list[Request], bool]:
        """The requests, and whether the caller passed a single prompt instead of a list.

        Raises:
            ValueError: names the argument, what was expected and what was given.
        """
        arrival_time = time.perf_counter()
        prompts, single = self._prompts(prompt, input_ids)
        params = params_of_each(sampling_params, len(prompts))
        each = options_of_each(options, len(prompts))
        rid = options.get("rid")
        groups = (rid,) if isinstance(rid, str) and len(prompts) > 1 else ()
        made = [
            request
            for prompt_ids, one_params, one_options in zip(prompts, params, each, strict=True)
            for request in self._samples(self._request(prompt_ids, one_params, one_options, groups, arrival_time))
        ]
        [(rid, count)] = Counter(request.id for request in made).most_common(1)
        if count > 1:
            raise ValueError(
                f"rid must name each request differently, also where n makes rid-0 and so on of it, got {rid!r} twice"
            )
        return made, single and params[0].n == 1

    def _samples(self, first: Request) -> Iterator[Request]:
        """The `n` requests of one prompt, which differ in their seeds, and in their ids if they are several."""
        count = first.params.n
        if count == 1:
            yield first
            return
        for index in range(count):
            yield replace(
                first,
                id=f"{first.id}-{index}",
                groups=(*first.groups, first.id),
                seed=(first.seed + index) % SEED_LIMIT,
                constraint=None if first.constraint is None else first.constraint.fork(),
                logprobs=None if first.logprobs is None else first.logprobs.fresh(),
                output_ids=[],
            )

    def token_ids(self, text: str | TokenIds, *, begins: bool = True) -> npt.NDArray[np.int32]:
        """The checked ids of a text or of ids; `begins`: with what the model wants at the beginning of a text."""
        if not isinstance(text, str):
            return self._checked(text)
        if self._tokenizer is None:
            raise ValueError("a text needs a tokenizer, and skip_tokenizer_init is set: pass token ids")
        return self._checked(self._tokenizer.encode(text, add_special_tokens=begins))

    def _prompts(
        self, prompt: str | Sequence[str] | None, input_ids: TokenIds | Sequence[TokenIds] | None
    ) -> tuple[list[npt.NDArray[np.int32]], bool]:
        if (prompt is None) == (input_ids is None):
            raise ValueError("give exactly one of prompt and input_ids")
        if input_ids is not None:
            if not is_sequence(input_ids) or not len(input_ids):
                raise ValueError(
                    f"input_ids must be a list of token ids or of such lists, not empty, got {input_ids!r}"
                )
            single = not is_sequence(input_ids[0])
            return [self._checked(ids) for ids in ([input_ids] if single else input_ids)], single
        if self._tokenizer is None:
            raise ValueError("prompt needs a tokenizer, and skip_tokenizer_init is set: pass input_ids")
        single = isinstance(prompt, str)
        texts: Any = [prompt] if isinstance(prompt, str) else prompt
        if not is_sequence(texts) or not len(texts) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"prompt must be a string or a list of strings, not empty, got {prompt!r}")
        return [self.token_ids(text) for text in texts], single

    def _checked(self, token_ids: Any) -> npt.NDArray[np.int32]:
        if not is_sequence(token_ids):
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
        self,
        prompt_ids: npt.NDArray[np.int32],
        params: SamplingParams,
        options: dict[str, Any],
        groups: tuple[str, ...],
        arrival_time: float,
    ) -> Request:
        params.validate_for_vocab(self._vocab_size)
        max_new_tokens = self._max_new_tokens(params.max_new_tokens, len(prompt_ids))
        if params.has_text_stop and self._tokenizer is None:
            raise ValueError("stop and stop_regex need a tokenizer, and skip_tokenizer_init is set: use stop_token_ids")
        stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos_ids)
        if params.min_new_tokens and len(stop_ids) > MAX_SUPPRESSED_IDS:
            raise ValueError(
                f"min_new_tokens can hold back at most {MAX_SUPPRESSED_IDS} stop ids, EOS included, got {len(stop_ids)}"
            )
        timeout = options.get("timeout")
        return Request(
            id=options["rid"] if "rid" in options else uuid.uuid4().hex,
            prompt_ids=prompt_ids,
            params=params,
            stop_ids=stop_ids,
            max_new_tokens=max_new_tokens,
            seed=params.seed if params.seed is not None else self._draw_seed(),
            namespace=options.get("cache_salt"),
            constraint=self._constraint(params, stop_ids, options.get("cache_salt")),
            logprobs=self._logprobs(prompt_ids, options),
            return_hidden_states=options.get("return_hidden_states", False),
            groups=groups,
            priority=options.get("priority", 0),
            routing_key=options.get("routing_key"),
            deadline=None if timeout is None else arrival_time + timeout,
            arrival_time=arrival_time,
        )

    def _logprobs(self, prompt_ids: npt.NDArray[np.int32], options: dict[str, Any]) -> TokenLogprobs | None:
        details = [name for name in _LOGPROB_DETAILS if options.get(name)]
        if not options.get("return_logprob"):
            if details:
                raise ValueError(f"{details[0]} needs return_logprob=True")
            return None
        start = options.get("logprob_start_len", -1)
        if start > len(prompt_ids):
            raise ValueError(f"logprob_start_len must be at most the prompt's {len(prompt_ids)} tokens, got {start}")
        given_ids = options.get("token_ids_logprob", ())
        if len(given_ids) > MAX_LOGPROB_IDS:
            raise ValueError(f"token_ids_logprob must hold at most {MAX_LOGPROB_IDS} ids, got {len(given_ids)}")
        if given_ids and given_ids[-1] >= self._vocab_size:
            raise ValueError(
                f"token_ids_logprob must lie in [0, {self._vocab_size}) for this model, got {given_ids[-1]}"
            )
        return TokenLogprobs(
            prompt_ids,
            len(prompt_ids) if start < 0 else start,
            options.get("top_logprobs_num", 0),
            given_ids,
            with_texts=options.get("return_text_in_logprobs", False),
        )

    def _draw_seed(self) -> int:
        with self._drawing:
            return int(self._seeds.integers(SEED_LIMIT))

    def _constraint(self, params: SamplingParams, stop_ids: frozenset[int], namespace: Hashable) -> Constraint | None:
        if params.json_schema is params.regex is params.ebnf is None:
            return None
        if self._tokenizer is None:
            raise ValueError("json_schema, regex and ebnf need a tokenizer, and skip_tokenizer_init is set")
        return self._grammars.compile(params, stop_ids, namespace)

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


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
