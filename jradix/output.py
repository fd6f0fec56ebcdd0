"""What one request has produced: its tokens, their text, and whether they end it."""

from typing import Any

from jradix.request import FinishReason, Request
from jradix.tokenizer import Detokenizer, Tokenizer


class Output:
    """Collects a request's tokens, and turns them into text when somebody asks, or at once to find stops in it."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
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

    @property
    def finished(self) -> bool:
        return self.request.finish_reason is not None

    def append(self, token_id: int) -> FinishReason | None:
        """Take the next token; returns the reason if the request ends with it."""
        request = self.request
        request.output_ids.append(token_id)
        count = len(request.output_ids)
        if token_id in request.stop_ids and count > request.params.min_new_tokens:
            return FinishReason("stop", matched=token_id)
        if request.constraint is not None:
            request.constraint.accept(token_id)
        if request.params.stop or request.params.stop_regex:
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

    def finish(self) -> None:
        """Decode what is left; text held back because it might have become a stop comes out."""
        reason = self.request.finish_reason
        assert reason is not None
        ends_in_stop_id = reason.type == "stop" and isinstance(reason.matched, int)
        hides_last = ends_in_stop_id and not self.request.params.no_stop_trim
        self._decode(len(self.request.output_ids) - hides_last)
        if self._detokenizer is not None:
            self._text += self._detokenizer.finish()
            self._detokenizer = None

    def as_dict(self) -> dict[str, Any]:
        """The result so far, as `Engine.generate` describes it."""
        request = self.request
        if not self.finished:
            self._decode(len(request.output_ids))
        meta: dict[str, Any] = {
            "id": request.id,
            "prompt_tokens": request.prompt_len,
            "completion_tokens": len(request.output_ids),
            "cached_tokens": request.cached_tokens,
            "finish_reason": request.finish_reason.as_dict() if request.finish_reason else None,
        }
        if request.first_token_time is not None:
            meta["time_to_first_token"] = request.first_token_time - request.arrival_time
        if request.finish_time is not None:
            meta["e2e_latency"] = request.finish_time - request.arrival_time
        return {"text": self._text, "output_ids": list(request.output_ids), "meta_info": meta}

    def _decode(self, num_tokens: int) -> None:
        """Turn the output up to `num_tokens` tokens into text, as far as it is sure."""
        if self._detokenizer is not None and num_tokens > self._num_decoded:
            self._text += self._detokenizer.add(self.request.output_ids[self._num_decoded : num_tokens])
            self._num_decoded = num_tokens
