"""One shuffled few-shot batch on a small pool: scheduling policies, and the batch reordered, against first come first
served.

    python scripts/bench_schedule.py --json schedule.json
    python scripts/bench_schedule.py --policies fcfs lpm dfs-weight --repeats 5

Each task has examples of its own, and its questions come in random order among those of the other tasks. The pool holds
a few requests only. Every policy streams the requests in the order in which they are given, on an engine of its own;
*reordered* is `generate` with the whole batch, which reorders it, under fcfs. All ways alternate in one process, each
run begins with an empty cache, and a run in which something was compiled is repeated. Prompts are random token ids,
outputs greedy and of exact length.

*computed* are the prompt tokens that were not cached. *ratio* is the first way's seconds over this one's, the median
over rounds, since other programs may slow down some of them. *predicted* is what the simulation without a model expects
under fcfs.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench_engine import TokenIds, add_engine_options, describe, exactly, make_engine, random_tokens
from tqdm import tqdm

from jradix import Engine
from jradix.offline import BatchPlan, plan_batch
from jradix.offline_prediction import Capacity, simulate_hits

REORDERED = "reordered"


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths in tokens. The pool has room for the requests that run at once, as if they shared nothing."""

    tasks: int
    questions: int
    examples_len: int
    question_len: int
    output_len: int
    rows: int  # requests that run at once

    @property
    def longest(self) -> int:
        return self.examples_len + self.question_len + self.output_len

    def prompts(self, vocab_size: int, seed: int) -> list[TokenIds]:
        rng = np.random.default_rng(seed)
        examples = [random_tokens(rng, vocab_size, self.examples_len) for _ in range(self.tasks)]
        grouped = [
            np.concatenate([shared, random_tokens(rng, vocab_size, self.question_len)])
            for shared in examples
            for _ in range(self.questions)
        ]
        return [grouped[index] for index in rng.permutation(len(grouped))]


DEFAULT_LOAD = Load(tasks=10, questions=4, examples_len=220, question_len=20, output_len=4, rows=3)
QUICK_LOAD = Load(tasks=6, questions=4, examples_len=37, question_len=6, output_len=3, rows=2)


@dataclass(slots=True)
class Way:
    """One way to run the batch, and its runs."""

    name: str
    engine: Engine
    predicted_hit_rate: float | None  # None: the prediction knows fcfs only
    seconds: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)

    def run(self, prompts: Sequence[TokenIds], output_len: int) -> None:
        """Once, or again if anything had to be compiled."""
        arguments: Any = {"input_ids": prompts, "sampling_params": exactly(output_len)}
        while True:
            num_compiled = self.engine.runner.num_compiled
            self.engine.flush_cache()
            start = time.perf_counter()
            if self.name == REORDERED:
                results = self.engine.generate(show_progress=False, **arguments)
            else:
                stream = self.engine.generate(stream=True, **arguments)
                results = [result for result in stream if result["meta_info"]["finish_reason"] is not None]
            seconds = time.perf_counter() - start
            if self.engine.runner.num_compiled == num_compiled:
                self.seconds.append(seconds)
                self.cached_tokens.append(sum(result["meta_info"]["cached_tokens"] for result in results))
                return


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. Medians over the runs, whose seconds are `samples`."""

    name: str
    seconds: float
    ratio: float
    hit_rate: float  # of prompt tokens
    predicted_hit_rate: float | None
    computed_tokens: int
    samples: list[float]


def make_ways(options: argparse.Namespace, load: Load) -> tuple[list[Way], list[TokenIds], BatchPlan]:
    """The ways to run the batch, its prompts in the order given, and its plan."""
    page_size = options.page_size
    context_length = -(-load.longest // page_size) * page_size
    engines = {
        policy: make_engine(
            options,
            schedule_policy=policy,
            context_length=context_length,
            max_running_requests=load.rows,
            max_total_tokens=load.rows * context_length,
        )
        for policy in dict.fromkeys(["fcfs", *options.policies])
    }
    engine = engines["fcfs"]
    prompts = load.prompts(engine.model_config.vocab_size, options.seed)
    capacity = Capacity(
        num_pages=engine.cache.num_total,
        page_size=page_size,
        granularity=engine.cache.granularity,
        max_running_requests=load.rows,
        chunked_prefill_size=options.chunked_prefill_size,
    )
    given = list(range(len(prompts)))
    namespaces, output_lens = [None] * len(prompts), [load.output_len] * len(prompts)
    plan = plan_batch(prompts, namespaces, output_lens, capacity)
    predicted = sum(simulate_hits(prompts, namespaces, output_lens, capacity, given)) / plan.prompt_tokens
    ways = [Way(policy, engines[policy], predicted if policy == "fcfs" else None) for policy in options.policies]
    ways.append(Way(REORDERED, engine, plan.predicted / plan.prompt_tokens))
    return ways, prompts, plan


def summarize(ways: Sequence[Way], plan: BatchPlan) -> list[Result]:
    results: list[Result] = []
    for way in ways:
        cached = int(median(way.cached_tokens))
        results.append(
            Result(
                name=way.name,
                seconds=median(way.seconds),
                ratio=median(first / mine for first, mine in zip(ways[0].seconds, way.seconds, strict=True)),
                hit_rate=cached / plan.prompt_tokens,
                predicted_hit_rate=way.predicted_hit_rate,
                computed_tokens=plan.prompt_tokens - cached,
                samples=way.seconds,
            )
        )
    return results


def format_table(results: Sequence[Result], plan: BatchPlan) -> str:
    lines = [f"{'order':<24} {'s':>7} {'lowest':>7} {'ratio':>6} {'hit rate':>8} {'predicted':>9} {'computed':>9}"]
    for r in results:
        predicted = f"{r.predicted_hit_rate:9.1%}" if r.predicted_hit_rate is not None else " " * 9
        lines.append(
            f"{r.name:<24} {r.seconds:7.2f} {min(r.samples):7.2f} {r.ratio:6.2f} {r.hit_rate:8.1%} {predicted}"
            f" {r.computed_tokens:>9}"
        )
    lines.append(
        f"{'bound of any order':<24} {'':7} {'':7} {'':6} {plan.bound / plan.prompt_tokens:8.1%} {'':9}"
        f" {plan.prompt_tokens - plan.bound:>9}"
    )
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.set_defaults(chunked_prefill_size=64)  # few shapes, soon compiled
    parser.add_argument("--policies", nargs="+", default=["fcfs", "lpm"], help="values of schedule_policy")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and their order")
    parser.add_argument("--quick", action="store_true", help="a small load, for tests")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    load = QUICK_LOAD if options.quick else DEFAULT_LOAD
    ways, prompts, plan = make_ways(options, load)
    with tqdm(total=options.repeats * len(ways), unit="run", file=sys.stderr) as progress:
        for repeat in range(options.repeats):
            for way in ways if repeat % 2 == 0 else ways[::-1]:
                progress.set_description(way.name)
                way.run(prompts, load.output_len)
                progress.update()
    results = summarize(ways, plan)
    pool_tokens = ways[0].engine.cache.num_total * options.page_size
    title = (
        f"{describe(options)}, {len(prompts)} requests of {load.tasks} tasks, {plan.prompt_tokens} prompt tokens, "
        f"pool of {pool_tokens} tokens"
    )
    print(title)
    print(format_table(results, plan))
    if options.json:
        content = {"title": title, "bound": plan.bound, "prompt_tokens": plan.prompt_tokens}
        content["ways"] = [asdict(result) for result in results]
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
