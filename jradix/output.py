"""What one request has produced: its tokens, their text, whether they end it, and who is to be told."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from jradix.request import FinishReason, Request
from jradix.token_logprobs import LogprobRows
from jradix.tokenizer import Detokenizer, Tokenizer


class Output:
    """Collects a request's tokens, and turns them into text when somebody asks, or at once to find stops in it.

    The loop's thread appends, others read; `as_dict` may be called from any.

    Attributes:
        error: what broke the step that the request was in.
        at_end: called on the loop's thread when it has ended, before anybody is told, with the request and whether its
            step broke.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        tell: Callable[["Output"], Any] | None = None,
        *,
        tell_each_token: bool = False,
    ) -> None:
        """tell: called on the loop's thread, with this output, when it ends, and with `tell_each_token` as it grows."""
        self.request = request
        self.finished = False
        self._tokenizer = tokenizer
        self.error: BaseException | None = None
        self.at_end: Callable[[Request, bool], None] | None = None
        self._weight_version = 0
        self._num_certain = 0  # tokens that are not the end: whether the last is kept as text is decided by `finish`
        self._tell, self._tell_each_token = tell, tell_each_token
        self._lock = threading.Lock()
        self._hidden: list[tuple[int, npt.NDArray[np.float32]]] = []  # of tokens from a position on, in order
        self._hidden_end = 0
        self._text = ""
        self._num_decoded = 0
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            params = request.params
            self._detokenizer = Detokenizer(
                tokenizer,
                stop=params.stop or (),
                stop_regex=params.stop_regex or (),
                no_stop_trim=params.no_stop_trim,
                skip_special_tokens=params.skip_special_tokens,
            )

    def append(self, token_id: int, logprobs: LogprobRows | None = None, index: int = 0) -> FinishReason | None:
        """Take the next token; returns the reason if the request ends with it, which `finish` must then be told.

        logprobs: if the request asks for log-probabilities, those of the step; this token's are `logprobs[index]`.
        """
        with self._lock:
            self.request.output_ids.append(token_id)
            if self.request.logprobs is not None and logprobs is not None:
                self.request.logprobs.take_output(logprobs, index)
            reason = self._reason_to_end(token_id)
            if reason is None:
                self._num_certain += 1
        if reason is None and self._tell_each_token:
            self._tell_change()
        return reason

    def take_prompt_logprobs(self, position: int, logprobs: LogprobRows) -> None:
        """Take log-probabilities of the prompt's tokens from `position` on."""
        assert self.request.logprobs is not None
        with self._lock:
            self.request.logprobs.take_prompt(position, logprobs)

    def take_hidden_states(self, position: int, hidden: npt.NDArray[Any]) -> None:
        """Take hidden states `[tokens, hidden]` of the tokens from `position` on; what was taken before stays."""
        new = max(0, self._hidden_end - position)
        if new < len(hidden):
            with self._lock:
                self._hidden.append((position + new, hidden[new:].astype(np.float32)))
                self._hidden_end = position + len(hidden)

    def finish(self, error: BaseException | None = None, *, weight_version: int = 0) -> None:
        """Decode what is left; text held back because it might have become a stop comes out.

        weight_version: of the weights that chose the last token.
        """
        reason = self.request.finish_reason
        assert reason is not None
        ends_in_stop_id = reason.type == "stop" and isinstance(reason.matched, int)
        hides_last = ends_in_stop_id and not self.request.params.no_stop_trim
        with self._lock:
            self.finished, self.error = True, error
            self._weight_version = weight_version
            self._num_certain = len(self.request.output_ids)
            self.request.finish_time = time.perf_counter()
            self._decode(self._num_certain - hides_last)
            if self._detokenizer is not None:
                self._text += self._detokenizer.finish()
                self._detokenizer = None
        if self.at_end is not None:
            self.at_end(self.request, error is not None)
        self._tell_change()

    def as_dict(self, first: int = 0) -> dict[str, Any]:
        """The result so far, as `Engine.generate` describes it; of tokens and their log-probabilities only those from
        output position `first` on."""
        with self._lock:
            return self._as_dict(first)

    def growth(self, first: int) -> tuple[str, list[int]] | None:
        """The text so far and the tokens from output position `first` on; None if the output has ended: then how it did
        is to be told with them, as `as_dict` does."""
        with self._lock:
            if self.finished:
                return None
            self._decode(self._num_certain)
            return self._text, self.request.output_ids[first : self._num_certain]

    def _tell_change(self) -> None:
        if self._tell is not None:
            try:
                self._tell(self)
            except RuntimeError:  # an event loop that was closed with the request alive: nobody is there to be told
                self._tell = None

    def _reason_to_end(self, token_id: int) -> FinishReason | None:
        request = self.request
        count = len(request.output_ids)
        if token_id in request.stop_ids and count > request.params.min_new_tokens:
            return FinishReason("stop", matched=token_id)
        if request.constraint is not None:
            request.constraint.accept(token_id)
        if request.params.has_text_stop:
            self._decode(count)
            if self._detokenizer is not None and self._detokenizer.stopped is not None:
                return FinishReason("stop", matched=self._detokenizer.stopped)
            if self._detokenizer is not None and self._detokenizer.error is not None:
                return FinishReason("abort", message=self._detokenizer.error)
        if request.constraint is not None and request.constraint.finished:
            error = request.constraint.error
            return FinishReason("stop") if error is None else FinishReason("abort", message=error)
        if count >= request.max_new_tokens:
            return FinishReason("length", length=count)
        return None

    def _as_dict(self, first: int) -> dict[str, Any]:
        request = self.request
        if not self.finished:
            self._decode(self._num_certain)
        meta: dict[str, Any] = {
            "id": request.id,
            "prompt_tokens": request.prompt_len,
            "completion_tokens": self._num_certain,
            "cached_tokens": request.cached_tokens,
            "finish_reason": request.finish_reason.as_dict() if self.finished and request.finish_reason else None,
        }
        if request.dp_rank is not None:
            meta["dp_rank"] = request.dp_rank
        if request.first_token_time is not None:
            meta["time_to_first_token"] = request.first_token_time - request.arrival_time
        if self.finished and request.finish_time is not None:
            meta["e2e_latency"] = request.finish_time - request.arrival_time
            meta["weight_version"] = self._weight_version
        if request.logprobs is not None:
            decode = None if self._tokenizer is None else self._text_of
            meta.update(request.logprobs.as_meta(request.output_ids[: self._num_certain], decode, first))
        if self._hidden:
            meta["hidden_states"] = np.concatenate([hidden for _, hidden in self._hidden])
            meta["hidden_state_positions"] = np.concatenate(
                [np.arange(position, position + len(hidden)) for position, hidden in self._hidden]
            )
        return {"text": self._text, "output_ids": request.output_ids[first : self._num_certain], "meta_info": meta}

    def _text_of(self, token_id: int) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _decode(self, num_tokens: int) -> None:
        """Turn the output up to `num_tokens` tokens into text, as far as it is sure."""
        if self._detokenizer is not None and num_tokens > self._num_decoded:
            self._text += self._detokenizer.add(self.request.output_ids[self._num_decoded : num_tokens])
            self._num_decoded = num_tokens
