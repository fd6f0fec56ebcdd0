"""The loop: plan a step, launch it, collect the one before; and `generate` on top of it."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from jradix import startup
from jradix.batch import build_arrays, build_copies, row_indices, step_shape
from jradix.cache.prefix_cache import PrefixCache
from jradix.config import EngineConfig, StepShape
from jradix.output import Output
from jradix.request import FinishReason, Request, RequestState
from jradix.runner import LaunchedStep
from jradix.sampling_batch import build_sampling_inputs
from jradix.scheduler import ResultsNeededError, Scheduler, StepPlan
from jradix.submission import Params, Submission, TokenIds


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    shape: StepShape
    launched: LaunchedStep


class Engine:
    """Runs a model on one device, sharing the KV of common prefixes between all requests it has ever seen.

    One step is always in flight: while the device computes it, the host plans and launches the next. Methods may be
    called from several threads; each `generate` drives the loop, for everybody's requests, until its own are done.
    """

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        """Load a model. Give an `EngineConfig`, or its fields as keywords.

        Raises:
            ValueError: an option or the model's files are wrong; the message names which.
        """
        if config is not None and options:
            raise ValueError("give either an EngineConfig or keyword options, not both")
        self.config = config or EngineConfig.from_kwargs(**options)
        parts = startup.build(self.config)
        self.tokenizer, self.runner, self.model_config = parts.tokenizer, parts.runner, parts.model_config
        self.context_length = parts.context_length
        self._layout, self._buckets = parts.layout, parts.buckets
        self._start_afresh()
        self._submission = Submission(
            self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            context_length=self.context_length,
            eos_ids=parts.eos_ids,
            pool_tokens=(self._layout.num_pages - 1) * self.config.page_size,
            random_seed=self.config.random_seed,
        )
        self._in_flight: deque[_InFlight] = deque()
        self._outputs: dict[str, Output] = {}  # of live requests
        self._to_abort: list[str] = []  # asked for from inside a step, by a stream that the garbage collector closed
        self._stepping = False
        self._lock = threading.RLock()
        if self.config.warmup:
            self.warm_up()

    def warm_up(self) -> float:
        """Compile every bucket, with a progress bar; returns the seconds it took."""
        return self.runner.warm_up(lambda shapes: tqdm(shapes, desc="compiling", unit="program"))

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        input_ids: TokenIds | Sequence[TokenIds] | None = None,
        *,
        stream: bool = False,
        rid: str | Sequence[str] | None = None,
        cache_salt: str | int | None = None,
    ) -> Any:
        """Generate from a prompt or from many at once.

        Args:
            prompt: text, or a list of texts.
            sampling_params: one for all prompts or a list with one for each; a dict of fields will do.
            input_ids: token ids instead of `prompt`, or a list of such.
            stream: yield results as they grow instead of returning the last.
            rid: the requests' ids, unique among those alive; made up if None.
            cache_salt: requests share KV only with those of equal salt.

        Returns:
            A dict for a single prompt, a list of dicts in the order of the prompts for many: `text`, `output_ids`,
            and `meta_info` with `id`, `prompt_tokens`, `completion_tokens`, `cached_tokens`, `finish_reason`,
            `e2e_latency` and `time_to_first_token` (seconds). With `stream`, an iterator over such dicts, each with
            all the text so far and, for many prompts, `index`; a dict comes whenever a request has new tokens.

        Raises:
            ValueError: an argument is wrong. Then none of the prompts was run.
        """
        outputs, single = self._submit(prompt, input_ids, sampling_params, rid, cache_salt)
        if stream:
            results = self._stream(outputs, single)
            next(results)  # enter it: closing a generator that never started would leave its requests alive
            return results
        self._run(outputs)
        with self._lock:  # another thread may be in the step that finished the last of them
            finished = [output.as_dict() for output in outputs]
        return finished[0] if single else finished

    def abort_request(self, rid: str) -> bool:
        """End a live request; its result has finish reason "abort". False if no such request is alive."""
        if not isinstance(rid, str):
            raise ValueError(f"rid must be the id of one request, a string, got {rid!r}")
        with self._lock:
            output = self._outputs.get(rid)
            if output is None:
                return False
            if self._stepping:
                self._to_abort.append(rid)  # this thread is inside a step, which must not lose a request half way
            else:
                self._finish(output.request, FinishReason("abort", message="aborted by the caller"))
            return True

    def flush_cache(self) -> int:
        """Forget every cached prefix that no running request holds; returns the number of pages freed."""
        with self._lock:
            return self.cache.flush()

    def check_idle(self) -> None:
        """Raise unless nothing runs and every page is free or evictable: what must hold between requests."""
        with self._lock:
            self._collect_all()
            self.cache.check()
            unaccounted = self.cache.num_total - self.cache.num_free - self.cache.num_evictable
            assert not self._outputs, f"requests are still alive: {list(self._outputs)}"
            assert not self.scheduler.has_work, "the scheduler still holds requests that have ended"
            assert not unaccounted, f"{unaccounted} pages are neither free nor evictable"

    def step(self) -> None:
        """One turn of the loop: launch the next step if there is one, then collect the one before it.

        If the device fails, every request alive ends with finish reason "abort", the cache starts afresh, and the
        error goes to the caller.
        """
        with self._lock:
            self._stepping = True
            try:
                plan = self._plan()
                if plan is not None:
                    self._launch(plan)
                if self._in_flight and (plan is None or len(self._in_flight) > 1):
                    self._collect()
            except BaseException as error:  # Ctrl-C too: it may fall between planning a step and launching it
                self._recover(error)
                raise
            finally:
                self._stepping = False
            while self._to_abort:
                self.abort_request(self._to_abort.pop())

    def _submit(
        self,
        prompt: str | Sequence[str] | None,
        input_ids: TokenIds | Sequence[TokenIds] | None,
        sampling_params: Params | Sequence[Params] | None,
        rid: str | Sequence[str] | None,
        cache_salt: str | int | None,
    ) -> tuple[list[Output], bool]:
        requests, single = self._submission.requests(prompt, input_ids, sampling_params, rid, cache_salt)
        with self._lock:
            for request in requests:
                if request.id in self._outputs:
                    raise ValueError(f"rid {request.id!r} belongs to a request that is still running: choose another")
                self.scheduler.validate(request)
            outputs = [Output(request, self.tokenizer) for request in requests]
            for output in outputs:
                self._outputs[output.request.id] = output
                self.scheduler.add(output.request)
                if output.request.max_new_tokens == 0:
                    self._finish(output.request, FinishReason("length", length=0))
        return outputs, single

    def _run(self, outputs: list[Output]) -> None:
        """Drive the loop until the outputs are finished; abort them if the caller is interrupted."""
        unfinished = list(outputs)
        try:
            while unfinished:
                if unfinished[-1].finished:
                    unfinished.pop()
                else:
                    self.step()
        finally:
            self._abandon(unfinished)

    def _stream(self, outputs: list[Output], single: bool) -> Iterator[dict[str, Any]]:
        """Drive the loop, yielding each output when it has grown; abort them if the caller stops iterating.

        The first item is empty: whoever makes the generator takes it, so that it has begun.
        """
        unfinished = dict(enumerate(outputs))
        reported = dict.fromkeys(unfinished, 0)
        try:
            yield {}
            while unfinished:
                for index, output in list(unfinished.items()):
                    with self._lock:  # another thread's step may be appending to this output
                        if not output.finished and len(output.request.output_ids) == reported[index]:
                            continue
                        result = output.as_dict()
                    reported[index] = len(result["output_ids"])
                    if result["meta_info"]["finish_reason"] is not None:
                        del unfinished[index]
                    yield result if single else {**result, "index": index}
                if unfinished:
                    self.step()
        finally:
            self._abandon(unfinished.values())

    def _abandon(self, outputs: Iterable[Output]) -> None:
        with self._lock:
            for output in outputs:
                if not output.finished:  # a finished request's rid may belong to another one by now
                    self.abort_request(output.request.id)

    def _plan(self) -> StepPlan | None:
        try:
            return self.scheduler.plan(in_flight=bool(self._in_flight))
        except ResultsNeededError:
            self._collect_all()
            return self.scheduler.plan(in_flight=False)

    def _launch(self, plan: StepPlan) -> None:
        shape = step_shape(plan, self._buckets)
        arrays = build_arrays(plan, shape, self.scheduler.page_tables, self.config.page_size, self._layout.num_pages)
        copies = build_copies(plan, self.runner.max_copies)
        forward = self.runner.launch_forward(shape, arrays, copies)
        inputs = build_sampling_inputs(plan, shape, self.runner.max_prompt_logprobs)
        self._in_flight.append(_InFlight(plan, shape, self.runner.launch_sampling(forward, inputs)))

    def _collect_all(self) -> None:
        while self._in_flight:
            self._collect()

    def _collect(self) -> None:
        """Take the oldest step's tokens and end the requests that they complete."""
        step = self._in_flight.popleft()
        tokens = self.runner.collect(step.launched).tokens.tolist()
        now = time.perf_counter()
        for index, row in zip(row_indices(step.plan, step.shape), step.plan.rows, strict=True):
            request = row.request
            if not row.samples or request.state is RequestState.FINISHED:
                continue  # it ended while this step was in flight: the token is one too many
            if request.first_token_time is None:
                request.first_token_time = now
            reason = self._outputs[request.id].append(tokens[index])
            if reason is not None:
                self._finish(request, reason)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        request.finish_time = time.perf_counter()
        self._outputs.pop(request.id).finish()

    def _recover(self, error: BaseException) -> None:
        """After a failed step trust nothing, on the device or in the books: start afresh and leave nobody waiting."""
        self._in_flight.clear()
        self._to_abort.clear()
        self._start_afresh()
        self.runner.reset()
        for output in self._outputs.values():
            output.request.finish_reason = FinishReason("abort", message=f"the step failed: {error!r}")
            output.request.finish_time = time.perf_counter()
            output.request.change_state(RequestState.FINISHED)
            output.finish()
        self._outputs.clear()

    def _start_afresh(self) -> None:
        """An empty cache, and a scheduler without requests."""
        self.cache = PrefixCache(
            self._layout.num_pages - 1,
            self.config.page_size,
            eviction_policy=self.config.radix_eviction_policy,
            enabled=not self.config.disable_radix_cache,
            min_copied_tokens=self.config.min_copied_tokens,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_running_requests=self.config.max_running_requests,
            chunked_prefill_size=self.config.chunked_prefill_size,
            max_extend_rows=self._buckets.extend_rows[-1],
            context_length=self.context_length,
        )
