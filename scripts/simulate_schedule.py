"""Runs the scheduler and the prefix cache without model or device: what each policy computes, and how long some wait.

    python scripts/simulate_schedule.py --load few-shot --pages 512 --policies fcfs lpm
    python scripts/simulate_schedule.py --trace prompts.jsonl --pages 512 --json outcomes.json

Loads: *few-shot*: questions on tasks, each behind some of the task's examples, all waiting from the start in random
order; *chat*: conversations on one system prompt, whose users pause between turns; a trace: the texts of JSONL lines
with `prompt`, one token a byte, in random order. Answers are made up, and end at random before `max_new_tokens`.

Columns: *hit rate*, cached over asked prompt tokens; *computed*, tokens of all steps, those that retraction computes
again too; *steps*; *rows*, the mean of a step; *retracted*; *waited*, the most admissions of others that a request saw
while it waited, and its *bound*; *nearest*, the largest part of its bound that any request waited.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import get_args

import numpy as np
from simulate_cache import NO_TOKENS, TokenIds, read_trace, tokens_of
from tqdm import tqdm

from jradix.cache import PrefixCache
from jradix.config import SchedulePolicy
from jradix.request import FinishReason, Request
from jradix.sampling_params import SamplingParams
from jradix.schedule_plan import StepPlan
from jradix.schedule_queue import OLDEST_TURN
from jradix.scheduler import Scheduler

PARAMS = SamplingParams()
MAX_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """What is asked after the conversation so far, and the answer."""

    question: TokenIds
    answer: TokenIds


@dataclass(slots=True, eq=False)
class Client:
    """Asks its turns one after another, each `pause` steps after the answer to the one before."""

    turns: list[Turn]
    next_step: int = 0
    pause: int = 0
    history: TokenIds = field(default_factory=lambda: NO_TOKENS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a load under one policy; the docstring of the module explains the fields."""

    policy: str
    hit_rate: float
    computed_tokens: int
    steps: int
    rows: float
    retractions: int
    waited: int
    bound: int
    nearest: float


# Loads


def few_shot(seed: int, num_requests: int) -> Iterator[Client]:
    """Tasks of up to 8 examples of ~120 tokens; a request asks with a prefix of the examples."""
    rng = np.random.default_rng(seed)
    num_tasks = max(1, num_requests // 20)
    examples = [[tokens_of(rng, rng.integers(80, 160)) for _ in range(8)] for _ in range(num_tasks)]
    for number in rng.permutation(num_requests):
        shots = examples[number % num_tasks][: rng.integers(1, 9)]
        yield Client([Turn(np.concatenate([*shots, tokens_of(rng, 40)]), answer_of(rng))])


def chat(seed: int, num_requests: int) -> Iterator[Client]:
    """Conversations of 6 turns, on a system prompt of 200 tokens, that begin at random times."""
    rng = np.random.default_rng(seed)
    system = tokens_of(rng, 200)
    for _ in range(max(1, num_requests // 6)):
        turns = [Turn(tokens_of(rng, rng.integers(50, 150)), answer_of(rng)) for _ in range(6)]
        turns[0] = Turn(np.concatenate([system, turns[0].question]), turns[0].answer)
        yield Client(turns, next_step=int(rng.integers(num_requests)), pause=int(rng.integers(10, 100)))


def traced(path: Path, seed: int, num_requests: int) -> Iterator[Client]:
    rng = np.random.default_rng(seed)
    prompts = [request.prompt for request in read_trace(path, 1)]
    for index in rng.permutation(len(prompts))[:num_requests]:
        yield Client([Turn(prompts[index], answer_of(rng))])


def answer_of(rng: np.random.Generator) -> TokenIds:
    return tokens_of(rng, rng.integers(1, MAX_NEW_TOKENS + 1))


LOADS: dict[str, Callable[[int, int], Iterator[Client]]] = {"few-shot": few_shot, "chat": chat}


# The run


class Simulation:
    """Steps a scheduler on a device that computes nothing; the time is the number of steps."""

    def __init__(self, clients: list[Client], policy: SchedulePolicy, options: argparse.Namespace) -> None:
        self.policy, self.silent = policy, list(clients)
        self.cache = PrefixCache(options.pages, options.page_size)
        self.scheduler = Scheduler(
            self.cache,
            max_running_requests=options.rows,
            chunked_prefill_size=options.chunk,
            max_extend_rows=min(16, options.rows),
            context_length=options.pages * options.page_size,
            schedule_policy=policy,
            clock=lambda: float(self.num_steps),
        )
        self.asked_by: dict[str, Client] = {}
        self.waiting_since: dict[str, tuple[int, int]] = {}  # admissions at arrival, older requests that waited
        self.num_steps = self.num_admissions = self.num_rows = self.computed = self.asked = self.cached = 0
        self.waited, self.bound, self.nearest = 0, 0, 0.0

    def run(self) -> Outcome:
        with tqdm(
            total=sum(len(client.turns) for client in self.silent), desc=self.policy, file=sys.stderr
        ) as progress:
            while self.silent or self.scheduler.has_work:
                self._submit()
                plan = self.scheduler.plan(in_flight=False)
                self._count_admissions()
                self.num_steps += 1
                if plan is not None:
                    progress.update(self._collect(plan))
        self.cache.check()
        return Outcome(
            self.policy,
            self.cached / max(1, self.asked),
            self.computed,
            self.num_steps,
            self.num_rows / max(1, self.num_steps),
            self.scheduler.num_retractions,
            self.waited,
            self.bound,
            self.nearest,
        )

    def _submit(self) -> None:
        for client in [client for client in self.silent if client.next_step <= self.num_steps]:
            self.silent.remove(client)
            client.history = np.concatenate([client.history, client.turns[0].question])
            number = str(len(self.asked_by))
            request = Request(
                number, client.history, PARAMS, frozenset(), MAX_NEW_TOKENS, arrival_time=float(self.num_steps)
            )
            self.scheduler.validate(request)
            self.asked_by[number] = client
            self.waiting_since[number] = self.num_admissions, len(self.scheduler.waiting)
            self.scheduler.add(request)

    def _count_admissions(self) -> None:
        admitted = [request for request in self.scheduler.running if request.id in self.waiting_since]
        for request in admitted:  # in order of admission
            admissions, num_older = self.waiting_since.pop(request.id)
            waited, bound = self.num_admissions - admissions, OLDEST_TURN * (num_older + 1) - 1
            self.waited, self.bound = max((self.waited, self.bound), (waited, bound))
            self.nearest = max(self.nearest, waited / bound)
            self.num_admissions += 1

    def _collect(self, plan: StepPlan) -> int:
        """Give each row its token; returns how many requests ended."""
        num_ended = 0
        self.num_rows += len(plan.rows)
        self.computed += sum(row.num_tokens for row in plan.rows)
        for request in [row.request for row in plan.rows if row.samples]:
            client = self.asked_by[request.id]
            answer = client.turns[0].answer
            request.output_ids.append(int(answer[len(request.output_ids)]))
            if len(request.output_ids) == len(answer):
                self.scheduler.finish(request, FinishReason("stop"))
                self._answered(request, client)
                num_ended += 1
        return num_ended

    def _answered(self, request: Request, client: Client) -> None:
        self.asked += request.prompt_len - 1
        self.cached += request.cached_tokens
        client.history = np.concatenate([client.history, client.turns.pop(0).answer])
        if client.turns:
            client.next_step = self.num_steps + client.pause
            self.silent.append(client)


def format_table(outcomes: list[Outcome]) -> str:
    lines = [
        f"{'policy':<22} {'hit rate':>8} {'computed':>9} {'steps':>6} {'rows':>5} {'retracted':>9}"
        f" {'waited':>6} {'bound':>6} {'nearest':>7}"
    ]
    lines += [
        f"{o.policy:<22} {o.hit_rate:8.4f} {o.computed_tokens:>9} {o.steps:>6} {o.rows:5.1f} {o.retractions:>9}"
        f" {o.waited:>6} {o.bound:>6} {o.nearest:7.2f}"
        for o in outcomes
    ]
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=LOADS, default="few-shot")
    parser.add_argument("--trace", type=Path, help="JSONL with `prompt`, instead of a load")
    policies = get_args(SchedulePolicy)
    parser.add_argument("--policies", nargs="+", choices=policies, default=policies)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--page-size", type=int, default=16, help="tokens")
    parser.add_argument("--pages", type=int, default=512, help="size of the pool")
    parser.add_argument("--rows", type=int, default=16, help="the most requests that run at once")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens of a step")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    return parser.parse_args(arguments)


def simulate(options: argparse.Namespace) -> list[Outcome]:
    """The same load under each policy."""

    def clients() -> list[Client]:
        made = traced(options.trace, 0, options.requests) if options.trace else LOADS[options.load](0, options.requests)
        return list(made)

    return [Simulation(clients(), policy, options).run() for policy in options.policies]


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    outcomes = simulate(options)
    print(format_table(outcomes))
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


if __name__ == "__main__":
    main()
