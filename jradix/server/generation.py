"""What a client's requests have produced so far, in the HTTP process: tokens, text, log-probabilities."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from jradix.sampling_params import SamplingParams
from jradix.server.messages import Change
from jradix.tokenizer import Detokenizer, Tokenizer

_OUTPUT_LOGPROBS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


class Sample:
    """One output, as it grows.

    Attributes:
        index: among all of its generation.
        params: how it is sampled.
        output_ids, text: all so far.
        meta: `meta_info` as `Engine.generate` gives it, log-probabilities and all.
    """

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.index, self.params = index, params
        self.output_ids: list[int] = []
        self.text = ""
        self.meta: dict[str, Any] = {"finish_reason": None}
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and not params.has_text_stop:
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)

    @property
    def finish_reason(self) -> Mapping[str, Any] | None:
        return self.meta["finish_reason"]

    def take(self, change: Change) -> None:
        """Add what is new."""
        self.output_ids += change.output_ids
        if change.meta is None:
            self.meta["completion_tokens"] += len(change.output_ids)
        else:
            before = {name: self.meta.get(name, []) for name in _OUTPUT_LOGPROBS}
            self.meta.update(change.meta)
            for name in _OUTPUT_LOGPROBS:
                if name in change.meta:
                    self.meta[name] = before[name] + change.meta[name]
        self.text += self._new_text(change) if change.text is None else change.text

    def _new_text(self, change: Change) -> str:
        """The text of the new tokens, as far as it is sure. That of a token that ends the output is no part of it."""
        if self._detokenizer is None:
            return ""
        if self.finish_reason is None:
            return self._detokenizer.add(change.output_ids)
        ends_in_stop_id = isinstance(self.finish_reason.get("matched"), int) and not self.params.no_stop_trim
        text = self._detokenizer.add(change.output_ids[:-1] if ends_in_stop_id else change.output_ids)
        return text + self._detokenizer.finish()


class Generation:
    """The outputs of one submission. Leaving it as a context aborts those that have not ended.

    Attributes:
        samples: prompt after prompt, `n` for each.
        num_unfinished: how many of them have not ended.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        tokenizer: Tokenizer | None,
        abandon: Callable[[], None],
        tell_end: Callable[[Sample], None] | None = None,
    ) -> None:
        """params: of each prompt. abandon: aborts all. tell_end: called with each output that has ended."""
        each = [one for one in params for _ in range(one.n)]
        self.samples = [Sample(index, one, tokenizer) for index, one in enumerate(each)]
        self.num_unfinished = len(self.samples)
        self._abandon, self._tell_end = abandon, tell_end
        self._closed = False
        self._news = asyncio.Event()
        self._changed: dict[Sample, None] = {}
        self._error: Exception | None = None

    def take(self, change: Change) -> None:
        """Add what is new of one output."""
        sample = self.samples[change.sample_index]
        sample.take(change)
        self._changed[sample] = None
        if sample.finish_reason is not None:
            self.num_unfinished -= 1
            if self._tell_end is not None:
                self._tell_end(sample)
        if change.error is not None:
            self.fail(change.error)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Nothing more will come, for this reason."""
        self._error = self._error or error
        self._news.set()

    async def changes(self) -> AsyncIterator[list[Sample]]:
        """Those that have grown or ended since the last time, again and again until all have ended.

        Who comes back late finds more in each, and nothing is lost.

        Raises:
            StepFailedError, EngineDeadError: the rest is not coming.
        """
        while self.num_unfinished or self._changed:
            await self._news.wait()
            self._news.clear()
            if self._error is not None:
                raise self._error
            changed, self._changed = list(self._changed), {}
            yield changed

    async def finished(self) -> list[Sample]:
        """All of them, once they have ended. Raises like `changes`."""
        async for _ in self.changes():
            pass
        return self.samples

    def close(self) -> None:
        """Abort what has not ended. Does nothing the second time."""
        if self.num_unfinished and not self._closed:
            self._closed = True
            self._abandon()

    def facts(self) -> dict[str, Any]:
        """For the log: ids, numbers of tokens and how the outputs ended, and no text."""
        metas = [sample.meta for sample in self.samples]
        return {
            "rid": ",".join(str(meta["id"]) for meta in metas[:4] if "id" in meta),
            "prompt_tokens": sum(meta.get("prompt_tokens", 0) for meta in metas),
            "cached_tokens": sum(meta.get("cached_tokens", 0) for meta in metas),
            "completion_tokens": sum(meta.get("completion_tokens", 0) for meta in metas),
            "finish": ",".join(sorted({(meta["finish_reason"] or {}).get("type", "gone") for meta in metas})),
        }
