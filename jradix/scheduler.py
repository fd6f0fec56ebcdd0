"""Decides what the next step computes: who decodes, whose prompt goes on, who is admitted, who is retracted."""

import random
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from jradix.cache.prefix_cache import Lock, Match, PrefixCache
from jradix.config import SchedulePolicy
from jradix.request import FinishReason, Request, RequestState
from jradix.schedule_estimate import OutputEstimate
from jradix.schedule_plan import PlannedRow, StepPlan
from jradix.schedule_policy import arrange
from jradix.schedule_queue import WaitingQueue


class ResultsNeededError(Exception):
    """The plan depends on tokens that are still in flight: collect every launched step, then plan again."""


class Scheduler:
    """Continuous batching and chunked prefill, over a queue of waiting requests in the order of a policy.

    If the request at its head finds no room, nobody overtakes it. Under policy "priority" it may take the room of
    running requests of much lower priority.

    Computed whole pages enter the cache as soon as their step is *planned*: a step writes all its KV of a layer before
    it reads any, so another row of the same step may already hit them. A prompt is matched again before each chunk;
    what another request has computed in the meantime is skipped, and so two requests never write the same prefix.

    Where a match ends inside a page, the page is copied before the step. It is not locked: the plan that copies it may
    evict it, and make it the target of a later copy. Pages that this very step fills have nothing to copy yet.

    Pages of a request come from the cache; `page_tables[slot]` lists them, `[max_running_requests, max_pages]` int32.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_running_requests: int,
        chunked_prefill_size: int,
        max_extend_rows: int,
        context_length: int,
        schedule_policy: SchedulePolicy = "fcfs",
        preemption_threshold: int = 10,
        max_queued_requests: int | None = None,
        random_seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock`: that of the requests' `arrival_time`. The other arguments are named as in `EngineConfig`."""
        self.cache = cache
        self.page_size = cache.page_size
        self.context_length = context_length
        self.chunked_prefill_size = chunked_prefill_size
        self.max_extend_rows = max_extend_rows
        self.schedule_policy: SchedulePolicy = schedule_policy
        self.preemption_threshold = preemption_threshold
        self.waiting = WaitingQueue(
            None if schedule_policy == "fcfs" else self._arrange, max_queued=max_queued_requests
        )
        self.running: list[Request] = []  # in order of admission
        self.page_tables: npt.NDArray[np.int32] = np.zeros(
            (max_running_requests, self._pages_for(context_length)), np.int32
        )
        self._free_slots = list(range(max_running_requests))[::-1]
        self._filling: set[int] = set()  # pages that extend rows of the plan in the making write
        self.estimate = OutputEstimate()
        self._rng, self._clock = random.Random(random_seed), clock
        self.num_retractions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def validate(self, request: Request) -> None:
        """ValueError, with the numbers, if the request could never run in this pool."""
        need = self._pages_for(request.prompt_len + max(0, request.max_new_tokens - 1))
        if need > self.cache.num_total:
            raise ValueError(
                f"a prompt of {request.prompt_len} tokens with max_new_tokens {request.max_new_tokens} needs {need} KV "
                f"pages of {self.page_size} tokens, the pool has {self.cache.num_total}: ask for fewer tokens or start "
                "the engine with a larger max_total_tokens"
            )

    def require_room(self, count: int) -> None:
        """QueueFullError if `count` more requests would be more than may wait."""
        self.waiting.require_room(count)

    def add(self, request: Request) -> None:
        """Queue a request that `validate` has passed, in a number that `require_room` has."""
        if request.logprobs is not None and request.logprobs.start < request.prompt_len:
            self.cache.keep_logprobs()
        self.waiting.add(request)

    def plan(self, *, in_flight: bool) -> StepPlan | None:
        """The next step, or None when no request can use one now.

        Pages are allocated and cache entries made as a side effect, so every plan must be launched, in order.

        Args:
            in_flight: whether a launched step has not been collected.

        Raises:
            ResultsNeededError: somebody is to be retracted, and whom depends on results in flight. What was planned so
                far is undone by planning again: nothing is lost.
        """
        self._preempt(in_flight)
        plan = StepPlan(self._plan_decodes(in_flight), [])
        self._plan_extends(plan)
        if not plan.rows:
            if self._stuck() and not in_flight:
                self._retract_for_pages()
                return self.plan(in_flight=in_flight)
            return None
        self.estimate.step()
        for row in plan.rows:
            row.request.computed_len = row.start + row.num_tokens
            row.request.num_sampled += row.samples
            if row.request.logprobs is not None:
                row.request.logprobs.planned(row.request.computed_len)
        return plan

    def keep_logprobs(self, request: Request, position: int, values: npt.NDArray[np.float32]) -> None:
        """Leave log-probabilities of a request's tokens, from a position on, to those that will share its pages."""
        kept = self.cache.kept_logprobs
        if kept is not None and request.state is RequestState.RUNNING:
            values = values[: request.num_pages * self.page_size - position]
            kept.record(self.page_tables[request.slot], position, values)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request: what it computed stays in the cache, everything else is given back."""
        request.finish_reason = reason
        if request.output_ids and reason.type != "abort":
            self.estimate.finished(len(request.output_ids), request.max_new_tokens)
        if request.state is RequestState.RUNNING:
            # The step in flight may be computing the KV of the last sampled token; steps run in order, so its pages
            # can be handed out again at once.
            self._release(request, min(request.computed_len, request.prompt_len + len(request.output_ids)))
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.change_state(RequestState.FINISHED)

    def retract_all(self) -> None:
        """Put all running requests back to the head of the queue, in order of admission: to pause, or for new weights.

        No tokens may be in flight. What was computed stays in the cache, unlocked.
        """
        for request in reversed(self.running.copy()):
            self._retract(request)
            self.waiting.put_first(request)

    def _arrange(self, waiting: Sequence[Request]) -> list[Request]:
        return arrange(
            self.schedule_policy,
            waiting,
            cache=self.cache,
            running=self.running,
            output_share=self.estimate.share,
            now=self._clock(),
            rng=self._rng,
        )

    def _plan_decodes(self, in_flight: bool) -> list[PlannedRow]:
        """One token for each running request whose prompt is done, retracting others when pages run out."""
        decoding = [request for request in self.running if self._decodes(request)]
        for request in decoding:
            while request.state is RequestState.RUNNING and not self._grow(request, request.computed_len + 1):
                if in_flight:
                    raise ResultsNeededError
                self._retract_for_pages()
        return [
            PlannedRow(request, request.computed_len, 1, request.max_new_tokens > 0, request.computed_len)
            for request in decoding
            if request.state is RequestState.RUNNING
        ]

    def _plan_extends(self, plan: StepPlan) -> None:
        """Add chunks of prompts within the token budget: the one that is under way first, then waiting requests."""
        budget = self.chunked_prefill_size
        self._filling.clear()
        for request in self.running:
            if request.wants_step and request.seq_len - request.computed_len > 1 and budget:
                budget -= self._plan_chunk(request, self._match_again(request), budget, plan)
        while self.waiting and budget and self._free_slots and len(plan.extend) < self.max_extend_rows:
            request = self.waiting.head()
            match = self._admit(request)
            if match is None:
                break
            budget -= self._plan_chunk(request, match, budget, plan)
        if all(row.num_tokens == 1 and row.samples for row in plan.extend):
            plan.decode.extend(plan.extend)  # all else is cached: padding them to a bucket of chunks would cost more
            plan.extend.clear()
        for rows in (plan.decode, plan.extend):
            rows.sort(key=lambda row: self._place_among_rows(row.request))

    def _plan_chunk(self, request: Request, match: Match, budget: int, plan: StepPlan) -> int:
        """Plan up to `budget` tokens of the request's prompt, which `match` has just looked up; returns how many."""
        copied = match.head_len
        if request.computed_len != match.num_tokens or match.head_page in self._filling:
            copied = 0
        if request.logprobs is not None and request.logprobs.first_unknown < request.prompt_len:
            copied = max(0, min(copied, request.logprobs.first_unknown - 1 - request.computed_len))
        start = request.computed_len + copied
        room = (self.cache.num_allocatable + request.num_pages) * self.page_size - start
        num_tokens = min(request.seq_len - start, budget, room)
        if num_tokens <= 0 or not self._grow(request, start + num_tokens):
            return 0
        end = start + num_tokens
        self._count_cached(request, copied)
        table, held = self.page_tables[request.slot], _held(request).num_tokens
        first = max(start, held) // self.page_size  # of the pages that are not the tree's
        own = table[first : self._pages_for(end)].copy()
        self._insert(request, end, start - match.num_tokens)
        # Where the tree had a page already, others may be reading it: it is not written again, nor copied to.
        num_shared = int(np.count_nonzero(table[first : first + len(own)] != own))
        write_from = (first + num_shared) * self.page_size if num_shared else max(start, held)
        if copied and not num_shared:
            self._copy_head(match, int(own[0]), copied, plan)
        samples = end == request.seq_len and request.max_new_tokens > 0
        plan.extend.append(PlannedRow(request, start, num_tokens, samples, min(end, write_from)))
        self._filling.update(own[num_shared:].tolist())
        return num_tokens

    def _copy_head(self, match: Match, target: int, num_tokens: int, plan: StepPlan) -> None:
        plan.copies.append((match.head_page, target))
        if self.cache.kept_logprobs is not None:
            self.cache.kept_logprobs.copy_head(match.head_page, target, num_tokens)

    def _admit(self, request: Request) -> Match | None:
        """Give the head of the queue a slot and its cached prefix, if the pool has room for it and those running.

        Returns the match, or None, and nothing changed.
        """
        match = self._match(request)
        # Not locked before it is admitted: to be tried again in every step is no use of the prefix.
        if not self._fits(request, match):
            return None
        self.waiting.admit()
        request.change_state(RequestState.RUNNING)
        request.slot = self._free_slots.pop()
        request.lock = self.cache.lock(match, priority=request.priority, recomputation=request.num_retractions > 0)
        request.num_pages = len(match.pages)
        self.page_tables[request.slot, : request.num_pages] = match.pages
        request.computed_len = self._first_to_compute(request, match)
        if not request.num_retractions:
            request.cached_tokens = request.computed_len
        self.running.append(request)
        return match

    def _first_to_compute(self, request: Request, match: Match) -> int:
        """What is cached need not be computed, unless a log-probability of the prompt is wanted there and not known.

        That of a token comes with the token before it.
        """
        wanted, kept = request.logprobs, self.cache.kept_logprobs
        if wanted is None or wanted.first_unknown >= request.prompt_len:
            return match.num_tokens
        if kept is not None and not wanted.wants_more_than_the_token:
            found = self.cache.match(request.prompt_ids, request.namespace)  # with the last token, which `match` lacks
            pages, end = np.append(found.pages, found.head_page), found.num_tokens + found.head_len
            wanted.take_kept(kept.read(pages, wanted.first_unknown, max(wanted.first_unknown, end)))
        if wanted.first_unknown >= request.prompt_len:
            return match.num_tokens
        return min(match.num_tokens, wanted.first_unknown - 1)

    def _match(self, request: Request) -> Match:
        return self.cache.match(request.token_ids(request.seq_len - 1), request.namespace)

    def _fits(self, request: Request, match: Match, ended: Sequence[Request] = ()) -> bool:
        """Whether the pool has room for a waiting request and those running, if those in `ended` did not run."""
        need = self._pages_for(self.estimate.reserved_len(request)) - len(match.pages)
        need += sum(self._expected_pages(other) for other in self.running if other not in ended)
        room = self.cache.num_allocatable_beside(match, [_held(other) for other in ended])
        room += sum(other.num_pages - _held(other).num_tokens // self.page_size for other in ended)
        return need <= room

    def _match_again(self, request: Request) -> Match:
        """Skip what another request has computed of this prompt since the last chunk."""
        match, held = self._match(request), _held(request)
        if match.num_tokens <= request.computed_len:
            return match
        table = self.page_tables[request.slot]
        if match.num_tokens > held.num_tokens:
            counted = held.uncounted is None
            request.lock = self.cache.lock(match, priority=request.priority, recomputation=counted)
            first_private = held.num_tokens // self.page_size
            self.cache.unlock(held)
            self.cache.free(table[first_private : request.num_pages].copy())
            table[: len(match.pages)] = match.pages
            request.num_pages = len(match.pages)
        start = self._first_to_compute(request, match)
        self._count_cached(request, start - request.computed_len)
        request.computed_len = start
        return match

    def _count_cached(self, request: Request, num_tokens: int) -> None:
        """Count tokens that the request has found after all; in the cache too, unless its first insert will."""
        if not request.num_retractions:
            request.cached_tokens += num_tokens
            if num_tokens and _held(request).uncounted is None:
                self.cache.statistics.count_late_hit(request.namespace, num_tokens)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate pages so that the request can hold `num_tokens`; False, and nothing changed, if there are none."""
        missing = self._pages_for(num_tokens) - request.num_pages
        if missing <= 0:
            return True
        pages = self.cache.allocate(missing, owner=request.id)
        if pages is None:
            return False
        self.page_tables[request.slot, request.num_pages : request.num_pages + missing] = pages
        request.num_pages += missing
        return True

    def _insert(self, request: Request, num_tokens: int, num_copied: int) -> None:
        """Share the request's first `num_tokens` tokens, and take over the tree's pages where it had them already."""
        table = self.page_tables[request.slot]
        inserted = self.cache.insert(
            request.token_ids(num_tokens),
            table[: request.num_pages],
            _held(request),
            request.namespace,
            num_copied=num_copied,
        )
        table[: request.num_pages] = inserted.pages

    def _release(self, request: Request, num_tokens: int) -> None:
        """Leave `num_tokens` computed tokens to the cache and give back pages, lock and slot."""
        self.cache.finish(
            request.token_ids(num_tokens),
            self.page_tables[request.slot, : request.num_pages],
            _held(request),
            request.namespace,
            prompt_len=request.prompt_len,
        )
        self._free_slots.append(request.slot)
        request.lock, request.slot, request.num_pages = None, -1, 0

    def _preempt(self, in_flight: bool) -> None:
        """Under policy "priority", make room for the head of the queue, at the cost of those of lower priority.

        Only if it can then be admitted in this very plan; so this comes before anything else is planned.
        """
        if self.schedule_policy != "priority" or not self.waiting:
            return
        request = self.waiting.head()
        victims = self._victims(request)
        chunks = [other for other in self.running if other not in victims and other.seq_len - other.computed_len > 1]
        left = self.chunked_prefill_size - sum(other.seq_len - other.computed_len for other in chunks)
        if not victims or left <= 0 or len(chunks) >= self.max_extend_rows:
            return
        if in_flight:
            raise ResultsNeededError
        for victim in victims:
            victim.preemptions_left -= 1
            self._retract(victim)
            self.waiting.restore(victim)

    def _victims(self, request: Request) -> list[Request]:
        """The fewest running requests whose room `request` needs and may take: of lowest priority, then the youngest.

        None if it fits anyway, or not even then.
        """
        limit = request.priority - self.preemption_threshold
        allowed = [other for other in reversed(self.running) if other.priority <= limit and other.preemptions_left]
        if not allowed:
            return []
        allowed.sort(key=lambda other: other.priority)
        match = self._match(request)
        first = 0 if self._free_slots else 1
        counts = range(first, len(allowed) + 1)
        enough = first + bisect_left(counts, True, key=lambda count: self._fits(request, match, allowed[:count]))
        return allowed[:enough] if enough <= len(allowed) else []

    def _retract_for_pages(self) -> None:
        """The pool has run out: retract the running request of lowest priority, the youngest of them."""
        request = min(reversed(self.running), key=lambda other: other.priority)
        self._retract(request)
        self.waiting.put_first(request)
        self.estimate.retracted()

    def _retract(self, request: Request) -> None:
        """Take a running request's pages back, for the caller to queue it; what it computed becomes evictable."""
        assert len(request.output_ids) == request.num_sampled, "retracted with tokens in flight"
        self._release(request, request.computed_len)
        request.computed_len = 0
        request.num_retractions += 1
        self.num_retractions += 1
        self.running.remove(request)
        request.change_state(RequestState.WAITING)

    def _stuck(self) -> bool:
        """Whether running requests want a step and none could be planned: they hold the pool's last pages."""
        return any(request.wants_step for request in self.running)

    def _place_among_rows(self, request: Request) -> bytes:
        """A sort key: attention reads the pages that neighbouring rows share only once."""
        return self.page_tables[request.slot, : request.num_pages].tobytes()

    def _expected_pages(self, request: Request) -> int:
        return max(0, self._pages_for(self.estimate.reserved_len(request)) - request.num_pages)

    def _decodes(self, request: Request) -> bool:
        return request.wants_step and request.seq_len - request.computed_len == 1

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def _held(request: Request) -> Lock:
    """The lock of a running request."""
    assert request.lock is not None, f"{request.id} does not run"
    return request.lock
