"""Long random runs: clients that ask for everything at once, and are disturbed, get what each request gives alone.

JRADIX_RANDOM_ROUNDS sets how many rounds there are of each scheduling policy.
"""

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any, get_args

import pytest
from safetensors.numpy import load_file

from jradix import Engine, SamplingParams
from jradix.config import EvictionPolicy, SchedulePolicy
from tests.random_requests import Job, assert_begins, assert_same, draw_jobs
from tests.tiny_engine import start

NUM_ROUNDS = int(os.environ.get("JRADIX_RANDOM_ROUNDS", "1"))
NUM_CALLS, MOST_PROMPTS = 16, 3
MIN_PAGES, MAX_PAGES = 24, 40
SALTS = [None, None, None, "a", 1]
MODES = ["whole", "whole", "stream", "stream", "close"]


@pytest.fixture(scope="module")
def alone(tiny_text_path: Path) -> Engine:
    """One request at a time, and nothing is ever reused."""
    return start(tiny_text_path, skip_tokenizer_init=False, disable_radix_cache=True, max_running_requests=1)


@pytest.fixture(scope="module")
def crowded(tiny_text_path: Path) -> Iterator[Engine]:
    """A pool of 40 pages, of which one request may need 20; six run at once."""
    with start(tiny_text_path, skip_tokenizer_init=False, max_total_tokens=4 * MAX_PAGES, max_running_requests=6) as it:
        yield it


@pytest.fixture(scope="module")
def weights(tiny_text_path: Path) -> dict[str, Any]:
    return load_file(tiny_text_path / "model.safetensors")


@dataclass
class Call:
    """One call of `generate`: its prompts, what its client does with the results, and what has come of them."""

    jobs: list[Job]
    rids: list[str]
    options: dict[str, Any]
    mode: str
    items: int  # that a client who closes its stream takes before
    last: dict[int, dict[str, Any]] = field(default_factory=dict)
    num_ends: int = 0
    num_rounded: int = 0

    @property
    def arguments(self) -> dict[str, Any]:
        names = {name for job in self.jobs for name in job.options}
        return {
            "input_ids": [job.prompt for job in self.jobs],
            "sampling_params": [SamplingParams(**job.params) for job in self.jobs],
            "rid": self.rids,
            **self.options,
            **{name: [job.options.get(name) for job in self.jobs] for name in names},
        }

    @property
    def samples(self) -> list[tuple[str, Job, int]]:
        """The id, the job, and the number in it of each result, in their order."""
        return [
            (rid if job.num_samples == 1 else f"{rid}-{index}", job, index)
            for rid, job in zip(self.rids, self.jobs, strict=True)
            for index in range(job.num_samples)
        ]

    def take(self, result: dict[str, Any], index: int) -> None:
        before = self.last.get(index, {"output_ids": [], "text": ""})
        assert result["output_ids"][: len(before["output_ids"])] == before["output_ids"], "a stream took tokens back"
        assert result["text"].startswith(before["text"]), "a stream took text back"
        self.last[index] = result
        self.num_ends += result["meta_info"]["finish_reason"] is not None

    def run(self, engine: Engine) -> None:
        """On a thread of its own."""
        if self.mode == "whole":
            for index, result in enumerate(engine.generate(**self.arguments)):
                self.take(result, index)
            return
        stream = engine.generate(**self.arguments, stream=True)
        for count, result in enumerate(stream):
            self.take(result, result["index"])
            if self.mode == "close" and count == self.items:
                break
        stream.close()

    async def run_as_task(self, engine: Engine) -> None:
        if self.mode == "whole":
            for index, result in enumerate(await engine.async_generate(**self.arguments)):
                self.take(result, index)
            return
        stream = await engine.async_generate(**self.arguments, stream=True)
        count = 0
        async for result in stream:
            self.take(result, result["index"])
            if self.mode == "close" and count == self.items:
                break
            count += 1
        await stream.aclose()

    def check(self, alone: Engine, aborted: set[str]) -> None:
        """Every request has ended once, with its own result, unless somebody has ended it: then with a part of it."""
        if self.mode != "close":
            assert self.num_ends == len(self.last) == len(self.samples)
        for index, result in self.last.items():
            rid, job, sample = self.samples[index]
            expected = job.solve(alone)[sample]
            message = (result["meta_info"]["finish_reason"] or {}).get("message", "")
            assert result["meta_info"]["id"] == rid
            if result["meta_info"]["finish_reason"] is None:
                assert self.mode == "close"
                continue
            was_ended = "aborted by the caller" in message or "timed out" in message
            if was_ended:
                assert rid in aborted or rid.rsplit("-", 1)[0] in aborted or "timeout" in self.options
            if job.may_round_to(alone, sample, result["output_ids"]):
                self.num_rounded += 1
            else:
                (assert_begins if was_ended else assert_same)(result, expected)


def draw_calls(jobs: list[Job], rng: random.Random) -> list[Call]:
    calls: list[Call] = []
    for number in range(NUM_CALLS):
        chosen = rng.sample(jobs, rng.randint(1, MOST_PROMPTS))
        options: dict[str, Any] = {
            "cache_salt": rng.choice(SALTS),
            "priority": rng.randrange(-30, 31),
            "routing_key": rng.choice([None, "x", "y"]),
        }
        if rng.random() < 0.1:
            options["timeout"] = rng.uniform(1e-4, 0.2)
        rids = [f"{number}.{index}" for index in range(len(chosen))]
        calls.append(Call(chosen, rids, options, rng.choice(MODES), rng.randrange(12)))
    return calls


class Disturber:
    """Does to an engine, while it runs, what its users may do, and notes whom it has aborted."""

    def __init__(self, engine: Engine, calls: list[Call], weights: dict[str, Any], rng: random.Random) -> None:
        self._engine, self._weights, self._rng = engine, weights, rng
        self._rids = [rid for call in calls for rid in [*call.rids, *(sample for sample, _, _ in call.samples)]]
        self.aborted: set[str] = set()
        self._actions: list[Callable[[], object]] = [
            self._abort,
            self._abort,
            self._pause,
            self._pause,
            engine.flush_cache,
            engine.flush_cache,
            engine.cache_report,
            lambda: engine.update_weights(weights),
        ]

    def disturb(self) -> None:
        time.sleep(self._rng.uniform(0, 0.03))
        self._rng.choice(self._actions)()

    def _abort(self) -> None:
        rid = self._rng.choice(self._rids)
        self.aborted.add(rid)
        self._engine.abort_request(rid)

    def _pause(self) -> None:
        self._engine.pause_generation(self._rng.choice(["retract", "in_place"]))
        time.sleep(self._rng.uniform(0, 0.003))
        self._engine.continue_generation()


def prepare(engine: Engine, policy: SchedulePolicy, eviction: EvictionPolicy, rng: random.Random) -> None:
    """An empty cache over a part of the pool, and other policies, without compiling anything anew."""
    with engine.hold() as core:
        core.config = replace(
            core.config,
            schedule_policy=policy,
            radix_eviction_policy=eviction,
            priority_scheduling_preemption_threshold=rng.choice([1, 10]),
            chunked_prefill_size=rng.choice([3, 16, 64]),
            min_copied_tokens=rng.choice([1, 1, 2, None]),
            disable_radix_cache=rng.random() < 0.1,
        )
        layout = core.layout
        core.layout = replace(layout, num_pages=rng.randint(MIN_PAGES, MAX_PAGES) + 1)
        core._start_afresh()
        core.layout = layout  # that of the pool on the device


def run_on_threads(engine: Engine, calls: list[Call], disturber: Disturber) -> None:
    clients = ThreadPoolExecutor(len(calls))
    futures = [clients.submit(call.run, engine) for call in calls]
    while wait(futures, timeout=0).not_done:
        disturber.disturb()
    clients.shutdown()
    for future in futures:
        future.result()


def run_as_tasks(engine: Engine, calls: list[Call], disturber: Disturber) -> None:
    async def all_of_them() -> None:
        tasks = [asyncio.create_task(call.run_as_task(engine)) for call in calls]
        while not all(task.done() for task in tasks):
            await asyncio.to_thread(disturber.disturb)
        await asyncio.gather(*tasks)

    asyncio.run(all_of_them())


@pytest.mark.parametrize("seed", range(NUM_ROUNDS))
def test_whatever_happens_around_it_a_request_gives_what_it_gives_alone(
    alone: Engine, crowded: Engine, weights: dict[str, Any], seed: int
) -> None:
    """The same 60 prompts and wishes in a round for each policy; in every second one the clients are threads."""
    jobs = draw_jobs(60, random.Random(seed))
    num_retracted = num_evicted = num_ended = num_rounded = 0
    policies = zip(get_args(SchedulePolicy), cycle(get_args(EvictionPolicy)[seed % 8 :]), strict=False)
    for number, (policy, eviction) in enumerate(policies):
        rng = random.Random(100 * seed + number)
        prepare(crowded, policy, eviction, rng)
        calls = draw_calls(jobs, rng)
        disturber = Disturber(crowded, calls, weights, rng)
        (run_on_threads if (seed + number) % 2 else run_as_tasks)(crowded, calls, disturber)
        crowded.check_idle()
        for call in calls:
            try:
                call.check(alone, disturber.aborted)
            except AssertionError as error:
                error.add_note(f"under {policy} and {eviction}, of {call}")
                raise
            num_ended += call.num_ends
            num_rounded += call.num_rounded
        num_retracted += crowded.scheduler.num_retractions
        num_evicted += crowded.cache.statistics.total.evicted_tokens
    assert num_retracted > 3, "hardly anybody was retracted"
    assert num_evicted > 100, "hardly anything was evicted"
    assert num_ended > 200, "hardly anything was compared"
    assert num_rounded < 0.02 * num_ended, "rounding cannot explain so much"
