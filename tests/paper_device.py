"""A device on paper: steps write the hash of each token's whole prefix to its slot, and check what every row reads.

It runs the real scheduler over the real cache, one step ahead as the engine does. A wrong page table, a page handed
out twice, or KV shared between different prefixes shows up as a wrong hash, at the step where it happens. The
log-probability of a token is made of its hash, so that one of another token or prefix is told apart.
"""

import itertools
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jradix.cache.prefix_cache import PrefixCache
from jradix.cache.radix import as_page_ids
from jradix.request import FinishReason, Request, RequestState
from jradix.sampling_params import SamplingParams
from jradix.schedule_plan import PlannedRow, StepPlan
from jradix.scheduler import ResultsNeededError, Scheduler
from jradix.token_logprobs import TokenLogprobs

VOCAB = 50
MODULUS = 2**31 - 1


def prefix_hashes(token_ids: list[int]) -> list[int]:
    """One number for each prefix `[0, i]`: the KV of a token depends on all before it."""
    return list(itertools.accumulate(token_ids, lambda h, t: (h * 1_000_003 + t + 1) % MODULUS, initial=17))[1:]


def next_token(token_ids: list[int]) -> int:
    return prefix_hashes(token_ids)[-1] % VOCAB


def serial_output(prompt_ids: list[int], max_new_tokens: int, stop_ids: frozenset[int]) -> list[int]:
    """What the request must yield, computed alone."""
    tokens = list(prompt_ids)
    for _ in range(max_new_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt_ids) :]


def logprobs_of(token_ids: list[int]) -> npt.NDArray[np.float32]:
    """Of each token after all before it."""
    return as_logprobs(np.array(prefix_hashes(token_ids)))


def as_logprobs(hashes: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Numbers that float32 holds."""
    return (-(hashes % 2**20) / 16).astype(np.float32)


class PaperLogprobs(NamedTuple):
    """Of some tokens of a prompt; the likeliest token is always 7, a bit likelier than the one that stands there."""

    chosen: npt.NDArray[np.float32]

    @property
    def top(self) -> npt.NDArray[np.float32]:
        return self.chosen[:, None] + 1

    @property
    def top_ids(self) -> npt.NDArray[np.int32]:
        return np.full((len(self.chosen), 1), 7, np.int32)

    @property
    def given(self) -> npt.NDArray[np.float32]:
        return np.zeros((len(self.chosen), 0), np.float32)


class PaperDevice:
    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        rows: int = 8,
        chunk: int = 16,
        context: int = 256,
        enabled: bool = True,
        min_copied_tokens: int | None = 1,
        eviction_policy: str = "lru",
        **options: Any,
    ) -> None:
        """`options` are further arguments of `Scheduler`."""
        self.cache = PrefixCache(
            num_pages,
            page_size,
            enabled=enabled,
            min_copied_tokens=min_copied_tokens,
            eviction_policy=eviction_policy,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_running_requests=rows,
            chunked_prefill_size=chunk,
            max_extend_rows=min(4, rows),
            context_length=context,
            **options,
        )
        self.page_size, self.chunk = page_size, chunk
        self.slots = np.full((num_pages + 1, page_size), -1)
        self.in_flight: deque[tuple[StepPlan, list[int]]] = deque()
        self.requests: list[Request] = []
        self.num_steps = 0
        self.batch_sizes: list[int] = []
        self._tokens: dict[str, list[int]] = {}  # prompt and all sampled tokens, those in flight too

    def add(
        self,
        prompt_ids: list[int],
        max_new_tokens: int = 4,
        stop_ids: frozenset[int] = frozenset(),
        *,
        priority: int = 0,
        routing_key: str | None = None,
        namespace: str | None = None,
        logprob_start: int | None = None,
        num_top: int = 0,
    ) -> Request:
        ids = np.array(prompt_ids, np.int32)
        request = Request(
            id=f"r{len(self.requests)}",
            prompt_ids=ids,
            params=SamplingParams(max_new_tokens=max_new_tokens, temperature=0),
            stop_ids=stop_ids,
            max_new_tokens=max_new_tokens,
            priority=priority,
            routing_key=routing_key,
            namespace=namespace,
            logprobs=None if logprob_start is None else TokenLogprobs(ids, logprob_start, num_top, ()),
        )
        self.scheduler.validate(request)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self) -> StepPlan | None:
        try:
            plan = self.scheduler.plan(in_flight=bool(self.in_flight))
        except ResultsNeededError:
            self.collect_all()
            plan = self.scheduler.plan(in_flight=False)
        if plan is not None:
            self._launch(plan)
        if self.in_flight and (plan is None or len(self.in_flight) > 1):
            self._collect()
        return plan

    def run(self, at_most: int = 10_000) -> None:
        while self.scheduler.has_work or self.in_flight:
            assert self.num_steps < at_most, "the scheduler makes no progress"
            self.step()
            self.check()

    def abort(self, request: Request) -> None:
        if request.state is not RequestState.FINISHED:
            self.scheduler.finish(request, FinishReason("abort"))

    def collect_all(self) -> None:
        while self.in_flight:
            self._collect()

    def check(self) -> None:
        """Every page is where it belongs: private ones in exactly one running request's table past its lock. And every
        log-probability that is kept of a cached token is its own."""
        private = []
        for request in self.scheduler.running:
            assert request.lock is not None
            held = request.lock.num_tokens // self.page_size
            private += self.scheduler.page_tables[request.slot, held : request.num_pages].tolist()
        self.cache.check(private)
        if self.cache.kept_logprobs is not None:
            for root in self.cache.tree.roots.values():
                for node in self.cache.tree.subtree(root):
                    pages = as_page_ids(node.pages)
                    kept = self.cache.kept_logprobs.read(pages, 0, node.num_tokens)
                    own = as_logprobs(self.slots[pages].reshape(-1)[: node.num_tokens])
                    assert (np.isnan(kept) | (kept == own)).all(), "another token's is kept"

    def check_idle(self) -> None:
        self.cache.check()
        assert self.cache.num_free + self.cache.num_evictable == self.cache.num_total

    def check_outputs(self) -> None:
        for request in self.requests:
            if request.finish_reason is not None and request.finish_reason.type != "abort":
                prompt = request.prompt_ids.tolist()
                want = serial_output(prompt, request.max_new_tokens, request.stop_ids)
                assert request.output_ids == want, request.id
                if request.logprobs is not None:
                    check_logprobs(request.logprobs, prompt)

    def _launch(self, plan: StepPlan) -> None:
        self.num_steps += 1
        rows = plan.rows
        self.batch_sizes.append(len(rows))
        assert rows, "a step without rows"
        assert sum(row.num_tokens for row in plan.extend) <= self.chunk
        assert len({row.request.id for row in rows}) == len(rows), "a request twice in one step"
        for source, target in plan.copies:
            self.slots[target] = self.slots[source]
        writes: dict[int, int] = {}
        for row in rows:  # all rows write before any reads, as on the device
            tokens = self._tokens_of(row.request)
            assert row.num_tokens >= 1
            assert row.samples == (row.start + row.num_tokens == len(tokens) and row.request.max_new_tokens > 0)
            hashes = prefix_hashes(tokens[: row.start + row.num_tokens])
            table = self.scheduler.page_tables[row.request.slot]
            for position in range(row.write_from, row.start + row.num_tokens):
                page = int(table[position // self.page_size])
                assert page > 0, "a token written to the null page"
                slot = page * self.page_size + position % self.page_size
                assert writes.setdefault(slot, hashes[position]) == hashes[position], "two tokens in one slot"
                self.slots.flat[slot] = hashes[position]
        sampled = []
        for row in rows:
            tokens = self._tokens_of(row.request)
            end = row.start + row.num_tokens
            table = self.scheduler.page_tables[row.request.slot]
            where = np.arange(end)
            seen = self.slots[table[where // self.page_size], where % self.page_size]
            assert seen.tolist() == prefix_hashes(tokens[:end]), f"{row.request.id} reads another sequence's KV"
            sampled.append(next_token(tokens[:end]))
        for row, token in zip(rows, sampled, strict=True):
            if row.samples:
                self._tokens[row.request.id].append(token)
        self.in_flight.append((plan, sampled))

    def _tokens_of(self, request: Request) -> list[int]:
        return self._tokens.setdefault(request.id, request.prompt_ids.tolist())

    def _collect(self) -> None:
        plan, sampled = self.in_flight.popleft()
        for row, token in zip(plan.rows, sampled, strict=True):
            request = row.request
            if request.state is RequestState.FINISHED:
                continue
            self._take_logprobs(row)
            if not row.samples:
                if not request.max_new_tokens and row.start + row.num_tokens == request.prompt_len:
                    self.scheduler.finish(request, FinishReason("length", length=0))
                continue
            request.output_ids.append(token)
            if token in request.stop_ids:
                self.scheduler.finish(request, FinishReason("stop", matched=token))
            elif len(request.output_ids) >= request.max_new_tokens:
                self.scheduler.finish(request, FinishReason("length", length=len(request.output_ids)))

    def _take_logprobs(self, row: PlannedRow) -> None:
        """What a row tells of the prompt, and of the token it samples, goes to its request and to the cache."""
        request = row.request
        if request.logprobs is None:
            return
        end = row.start + row.num_tokens + 1
        values = logprobs_of(self._tokens_of(request)[:end])
        first, stop = max(row.start + 1, request.logprobs.start), min(end, request.prompt_len)
        if first < stop:
            request.logprobs.take_prompt(first, PaperLogprobs(values[first:stop]))
            self.scheduler.keep_logprobs(request, first, values[first:stop])
        if row.samples:
            self.scheduler.keep_logprobs(request, end - 1, values[end - 1 :])


def check_logprobs(found: TokenLogprobs, prompt: list[int]) -> None:
    """Every position has its own value, and only the prompt's first token has none."""
    values = [None, *logprobs_of(prompt)[1:].tolist()][found.start :]
    meta = found.as_meta([], None)
    assert [value for value, *_ in meta["input_token_logprobs"]] == values
    if found.num_top:
        top = [None if value is None else [(value + 1, 7, None)] for value in values]
        assert meta["input_top_logprobs"] == top
