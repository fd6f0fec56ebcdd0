"""The engine's loop: plan a step, launch it, collect the one before, end what is complete or overdue."""

import heapq
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy.typing as npt

from jradix.batch import build_arrays, build_copies, first_tokens, row_indices, step_shape
from jradix.cache.prefix_cache import PrefixCache
from jradix.cache.snapshot import Restoration, Snapshot
from jradix.config import EngineConfig, StepShape
from jradix.output import Output
from jradix.request import FinishReason, Request, RequestState
from jradix.runner import Collected, LaunchedStep, Runner
from jradix.sampling_batch import SamplingInputs, build_mask, build_sampling_inputs
from jradix.schedule_plan import StepPlan
from jradix.scheduler import ResultsNeededError, Scheduler
from jradix.snapshot_reader import SnapshotReader
from jradix.startup import Parts

MANY_DEADLINES = 1_000
"""So many deadlines of requests that have ended are kept beside twice as many as live, before they are thrown out."""

PauseMode = Literal["retract", "in_place", "abort"]


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    shape: StepShape
    inputs: SamplingInputs
    launched: LaunchedStep


class Core:
    """Requests on their way through the scheduler and over the device, one step ahead of the host.

    While the device computes a step, the host plans and launches the next. Everything here belongs to one thread at a
    time: see `Loop`, which owns it.

    Attributes:
        paused: by a caller; no step is launched, calls and deadlines go on.
        weights_are_whole: False after an update that failed in the middle; then no step is launched either.
        weight_version: counts updates of the weights.
        last_progress: when a step was last collected, or begun after a rest; seconds of `time.perf_counter`.
    """

    def __init__(self, config: EngineConfig, parts: Parts) -> None:
        self.config, self.runner, self.buckets, self.layout = config, parts.runner, parts.buckets, parts.layout
        self._processes = parts.processes
        self._context_length, self._vocab_size = parts.context_length, parts.model_config.vocab_size
        self.paused = False
        self.weights_are_whole = True
        self.weight_version = 0
        self.last_progress = time.perf_counter()
        self.outputs: dict[str, Output] = {}  # of live requests
        self._in_flight: deque[_InFlight] = deque()
        self._groups: Counter[str] = Counter()  # live requests of each of the ids that stand for several
        # A heap of deadline, number among all, and output; with requests that have ended.
        self._deadlines: list[tuple[float, int, Output]] = []
        self._deadline_numbers = itertools.count()
        self._snapshot_reader: SnapshotReader | None = None
        self._start_afresh()

    @property
    def can_step(self) -> bool:
        """Whether a turn would do anything."""
        return not self.paused and self.weights_are_whole and bool(self.outputs or self._in_flight)

    @property
    def stalled_seconds(self) -> float:
        """For how long the step that is on its way has been, or none has come; 0 at rest. For any thread."""
        return time.perf_counter() - self.last_progress if self.can_step else 0.0

    def seconds_to_deadline(self) -> float | None:
        """How long nothing may be done at most; None if no request has a deadline."""
        while self._deadlines and self._deadlines[0][2].finished:
            heapq.heappop(self._deadlines)
        if not self._deadlines:
            return None
        # A thread cannot be told to wait for longer than that; it then just looks again.
        return min(max(0.0, self._deadlines[0][0] - time.perf_counter()), threading.TIMEOUT_MAX)

    def submit(self, outputs: Sequence[Output]) -> None:
        """Queue requests, all of them or none.

        Raises:
            ValueError: an id is taken by a live request, or a request could never run in this pool.
            QueueFullError: there are more than `max_queued_requests` waiting.
        """
        for output in outputs:
            for rid in (output.request.id, *output.request.groups):
                if rid in self.outputs or rid in self._groups:
                    raise ValueError(f"rid {rid!r} belongs to a request that is still running: choose another")
            self.scheduler.validate(output.request)
        self.scheduler.require_room(len(outputs))
        for output in outputs:
            if output.request.params.custom_logit_processor is not None:
                self.runner.register_processor(output.request.params.custom_logit_processor)
        if not self.can_step:
            self.last_progress = time.perf_counter()
        for output in outputs:
            request = output.request
            self.outputs[request.id] = output
            self._groups.update(request.groups)
            self.scheduler.add(request)
            if request.deadline is not None:
                heapq.heappush(self._deadlines, (request.deadline, next(self._deadline_numbers), output))
            if request.max_new_tokens == 0 and not request.wants_prompt:
                self._finish(request, FinishReason("length", length=0))

        if len(self._deadlines) > 2 * len(self.outputs) + MANY_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].finished]
            heapq.heapify(self._deadlines)

    def forecast(self, requests: Sequence[Request]) -> tuple[list[int] | None, float]:
        """What helps to plan a batch: tokens cached of each prompt, and the share of `max_new_tokens` that is used.

        The first is None while others run, for whom this would be a pause.
        """
        cached_lens = None
        if not self.outputs and self.cache.num_evictable:
            matches = (self.cache.match(request.prompt_ids[:-1], request.namespace) for request in requests)
            cached_lens = [match.num_tokens + match.head_len for match in matches]
        return cached_lens, self.scheduler.estimate.share

    def abort(self, rid: str) -> bool:
        """End the live requests of this id, of which several may be known by it; False if there are none."""
        outputs = [output for output in self.outputs.values() if rid in (output.request.id, *output.request.groups)]
        for output in outputs:
            self._finish(output.request, FinishReason("abort", message="aborted by the caller"))
        return bool(outputs)

    def abandon(self, outputs: Sequence[Output], message: str = "abandoned by the caller") -> None:
        """Abort those of the outputs that are still alive: nobody waits for them, or `message` says why else."""
        for output in outputs:
            if self.outputs.get(output.request.id) is output:  # its id may belong to another one by now
                self._finish(output.request, FinishReason("abort", message=message))

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping until `resume`, with all results collected. "retract": running requests give up their pages;
        "in_place": they keep them; "abort": they end, and so do those that wait."""
        self._collect_all()
        if mode == "abort":
            self.abandon(list(self.outputs.values()), "aborted by a pause")
        elif mode == "retract":
            self.scheduler.retract_all()
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.last_progress = time.perf_counter()

    @contextmanager
    def new_weights(self) -> Iterator[Runner]:
        """Lend the runner, whose parameters are to be replaced, and forget the KV of the old ones, pinned or not.

        Running requests go back to the queue: the KV of what they have produced is computed again. If the block fails,
        the weights may be of both kinds: then no step is launched until another one succeeds.
        """
        self._collect_all()
        self.scheduler.retract_all()
        self._end_reading("the weights were updated")
        self.cache.pins.remove_all()
        self.flush_cache()
        assert self.cache.num_free == self.cache.num_total, "KV of the old weights has stayed in the cache"
        self.weights_are_whole = False
        yield self.runner
        self.weights_are_whole = True
        self.weight_version += 1

    def turn(self) -> None:
        """What the loop does when nobody calls: end overdue requests, and step unless paused."""
        self._expire()
        if self.can_step:
            self.step()

    def step(self) -> None:
        """Launch the next step if there is one, then collect the one before it.

        If the device fails, every live request ends with finish reason "abort" and the error, and the cache starts
        afresh. Where there are several processes the error is raised then, and the others end.
        """
        try:
            plan = self._plan()
            if self._snapshot_reader is not None:
                self._snapshot_reader.keep_endangered()
            if plan is not None:
                self._launch(plan)
            if self._in_flight and (plan is None or len(self._in_flight) > 1):
                self._collect()
        except BaseException as error:
            self._recover(error)

    def flush_cache(self) -> int:
        """Forget every cached prefix that no running request holds; returns the number of pages freed."""
        self._restoration = None  # what is still to come is forgotten too
        self._end_reading("it was flushed")
        return self.cache.flush()

    def begin_reading(self, is_wanted: Callable[[Hashable], bool]) -> SnapshotReader:
        """What the cache holds now, of the namespaces that are wanted: to be read between steps, and then ended.

        A flush, new weights and a step that fails end it too.
        """
        self._end_reading("it was saved a second time")
        self._snapshot_reader = SnapshotReader(self.cache, self.runner, is_wanted)
        return self._snapshot_reader

    def end_reading(self, reader: SnapshotReader) -> None:
        """Nobody will read on."""
        if self._snapshot_reader is reader:
            self._end_reading("the save ended")

    def begin_restoration(self, snapshot: Snapshot) -> None:
        """Let `restore_pages` follow; before the first request."""
        self._restoration = self.cache.restore(snapshot)

    def restore_pages(self, start: int, content: npt.NDArray[Any]) -> int | None:
        """Enter the pages of the snapshot from `start` on, in its order. None: there is no use in more of them.

        content: as `Runner.read_pages` gives it. Returns how many the cache has taken.
        """
        restoration = self._restoration
        if restoration is None:
            return None
        try:
            taken, pages = restoration.enter(start, start + len(content))
            self.runner.write_pages(pages, content[taken])
        except BaseException as error:  # the tree may hold pages without content
            self._recover(error)
            raise
        if restoration.is_done:
            self._restoration = None
        return len(taken)

    def cache_report(self) -> dict[str, Any]:
        """Counters since the start and the pages by state, see `Engine.cache_report`."""
        cache, total = self.cache, self.cache.statistics.total
        window_asked_tokens, window_hit_tokens = cache.statistics.window
        return {
            **asdict(total),
            "hit_rate": total.hit_tokens / total.asked_tokens if total.asked_tokens else 0.0,
            "window_hit_rate": cache.statistics.window_hit_rate,
            "window_asked_tokens": window_asked_tokens,
            "window_hit_tokens": window_hit_tokens,
            "page_size": cache.page_size,
            "num_pages": cache.num_total,
            "free_pages": cache.num_free,
            "evictable_pages": cache.num_evictable,
            "protected_pages": cache.num_protected,
            "private_pages": cache.num_private,
            "pinned_pages": cache.pins.num_pages,
        }

    def info(self) -> dict[str, Any]:
        """What runs now, see `Engine.get_server_info`."""
        return {
            "paused": self.paused or not self.weights_are_whole,
            "weight_version": self.weight_version,
            "num_running_requests": len(self.scheduler.running),
            "num_waiting_requests": len(self.scheduler.waiting),
            "num_retractions": self.scheduler.num_retractions,
            "num_compiled_programs": self.runner.num_compiled,
            "weight_bytes_per_device": self.runner.weight_bytes_per_device,
            "pool_bytes_per_device": self.runner.pool_bytes_per_device,
            "cache": self.cache_report(),
        }

    def check_idle(self) -> None:
        """Raise unless nothing runs and every page is free or evictable: what must hold between requests."""
        self._collect_all()
        self.cache.check()
        unaccounted = self.cache.num_total - self.cache.num_free - self.cache.num_evictable
        assert not self.outputs, f"requests are still alive: {list(self.outputs)}"
        assert not self.scheduler.has_work, "the scheduler still holds requests that have ended"
        assert not unaccounted, f"{unaccounted} pages are neither free nor evictable"

    def close(self) -> None:
        """Abort every live request and give the device's memory back."""
        self.abandon(list(self.outputs.values()), "the engine was shut down")
        self._in_flight.clear()
        self.runner.close()
        if self._processes is not None:
            self._processes.close()

    def _plan(self) -> StepPlan | None:
        try:
            return self.scheduler.plan(in_flight=bool(self._in_flight))
        except ResultsNeededError:
            self._collect_all()
            return self.scheduler.plan(in_flight=False)

    def _launch(self, plan: StepPlan) -> None:
        shape = step_shape(plan, self.buckets)
        arrays = build_arrays(plan, shape, self.scheduler.page_tables, self.config.page_size, self.layout.num_pages)
        copies = build_copies(plan, self.runner.max_copies)
        self.runner.launch_forward(shape, arrays, copies)
        inputs = build_sampling_inputs(plan, shape, self.runner.features.max_prompt_logprobs)
        if any(row.samples and row.request.constraint is not None for row in plan.rows):
            self._collect_all()  # which tokens may follow depends on them; the device has the forward pass to do
            inputs.mask = build_mask(plan, shape, self._vocab_size)
        self._in_flight.append(_InFlight(plan, shape, inputs, self.runner.launch_sampling(inputs)))

    def _collect_all(self) -> None:
        while self._in_flight:
            self._collect()

    def _collect(self) -> None:
        """Take the oldest step's results and end the requests that they complete."""
        step = self._in_flight.popleft()
        results = self.runner.collect(step.launched)
        now = self.last_progress = time.perf_counter()
        self._take_prompt_results(step, results)
        for index, row in zip(row_indices(step.plan, step.shape), step.plan.rows, strict=True):
            request = row.request
            if request.state is RequestState.FINISHED:
                continue  # it ended while this step was in flight: the token is one too many
            if not row.samples:
                if request.max_new_tokens == 0 and row.start + row.num_tokens == request.prompt_len:
                    self._finish(request, FinishReason("length", length=0))
                continue
            if request.first_token_time is None:
                request.first_token_time = now
            reason = self.outputs[request.id].append(int(results.tokens[index]), results.logprobs, index)
            if request.logprobs is not None and results.logprobs is not None:
                position = request.prompt_len + len(request.output_ids) - 1
                self.scheduler.keep_logprobs(request, position, results.logprobs.chosen[index : index + 1])
            if reason is not None:
                self._finish(request, reason)

    def _take_prompt_results(self, step: _InFlight, results: Collected) -> None:
        """Log-probabilities of prompt tokens, and hidden states, to the outputs of the requests that wait for them."""
        if results.prompt_logprobs is not None and step.inputs.prompt_logprobs is not None:
            for row, position, offset, num_tokens in step.inputs.prompt_logprobs.spans:
                request = step.plan.rows[row].request
                if request.state is not RequestState.FINISHED:
                    found = results.prompt_logprobs.part(offset, offset + num_tokens)
                    self.outputs[request.id].take_prompt_logprobs(position, found)
                    self.scheduler.keep_logprobs(request, position, found.chosen)
        if results.hidden is not None:
            for first, row in zip(first_tokens(step.plan, step.shape), step.plan.rows, strict=True):
                if row.request.return_hidden_states and row.request.state is not RequestState.FINISHED:
                    hidden = results.hidden[first : first + row.num_tokens]
                    self.outputs[row.request.id].take_hidden_states(row.start, hidden)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        for group in request.groups:
            self._groups[group] -= 1
            if not self._groups[group]:
                del self._groups[group]
        self.outputs.pop(request.id).finish(weight_version=self.weight_version)

    def _expire(self) -> None:
        """End the requests whose time is up, running or waiting."""
        while self.seconds_to_deadline() == 0:
            _, _, output = heapq.heappop(self._deadlines)
            request = output.request
            seconds = time.perf_counter() - request.arrival_time
            self._finish(request, FinishReason("abort", message=f"timed out after {seconds:.3g} s"))

    def _recover(self, error: BaseException) -> None:
        """After a failed step trust nothing, on the device or in the books: start afresh and leave nobody waiting."""
        outputs = list(self.outputs.values())
        self.outputs.clear()
        self._groups.clear()
        self._in_flight.clear()
        for output in outputs:
            output.request.finish_reason = FinishReason("abort", message=f"the step failed: {error!r}")
            output.request.change_state(RequestState.FINISHED)
            output.finish(error)
        if self._processes is not None:  # which have other pools and pages by now, or hang in this step
            self._processes.fail(error)
            raise error
        self._start_afresh()
        self.runner.reset()

    def _end_reading(self, reason: str) -> None:
        if self._snapshot_reader is not None:
            self._snapshot_reader.end(reason)
            self._snapshot_reader = None

    def _start_afresh(self) -> None:
        """An empty cache, and a scheduler without requests."""
        self._end_reading("a step failed")
        self._restoration: Restoration | None = None  # into this cache
        self.cache = PrefixCache(
            self.layout.num_pages - 1,
            self.config.page_size,
            eviction_policy=self.config.radix_eviction_policy,
            enabled=not self.config.disable_radix_cache,
            min_copied_tokens=self.config.min_copied_tokens,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_running_requests=self.config.max_running_requests,
            chunked_prefill_size=self.config.chunked_prefill_size,
            max_extend_rows=self.buckets.extend_rows[-1],
            context_length=self._context_length,
            schedule_policy=self.config.schedule_policy,
            preemption_threshold=self.config.priority_scheduling_preemption_threshold,
            max_queued_requests=self.config.max_queued_requests,
            random_seed=self.config.random_seed,
        )
