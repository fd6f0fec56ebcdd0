"""Sends a trace to replicas without a model: what each way to choose finds cached, and how long its requests take.

    python scripts/simulate_routing.py --trace conversation.jsonl --replicas 4 --speed 2 --requests 3000

The trace: JSONL lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for each block of 512
prompt tokens. A replica computes prompts one after another beside its decodes; a step takes as long as an 8B model on a
TPU v6e needs by bytes and peaks (docs/performance.md): 10 ms for the weights and 0.07 ms a row, or 1 ms for 63 tokens.

Columns: *hit rate*, cached over asked prompt tokens; *first* and *end*, seconds from arrival to first token and to the
end, mean and 90th percentile; *busy*, the share of time that the replica that had least to do was busy.
"""

import argparse
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jradix.request import Request
from jradix.routing import Router
from jradix.sampling_params import SamplingParams

BLOCK = 512
CHUNK = 512
ROWS = 64
WEIGHTS_MS, ROW_MS, TOKENS_PER_MS = 10.0, 0.07, 63.0
PARAMS = SamplingParams()


@dataclass(slots=True, eq=False)
class Job:
    """A request of the trace, and how far it is. Times in ms."""

    request: Request
    arrival: float
    blocks: list[int]
    output_len: int
    missing: int = 0
    produced: int = 0
    first: float = 0.0


@dataclass(slots=True)
class Replica:
    """A cache of blocks, requests that wait in order, and those that decode."""

    num_blocks: int
    now: float = 0.0
    busy: float = 0.0
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    waiting: list[Job] = field(default_factory=list)
    decoding: list[Job] = field(default_factory=list)
    asked: int = 0
    hit: int = 0

    def take(self, job: Job) -> None:
        if not (self.waiting or self.decoding):
            self.now = max(self.now, job.arrival)
        self.waiting.append(job)

    def step(self) -> Iterator[Job]:
        """One step; yields the requests that end with it."""
        room = CHUNK
        done: list[Job] = []
        rows = len(self.decoding)
        while self.waiting and room and rows + len(done) < ROWS:
            job = self.waiting[0]
            if not job.missing:
                self._look_up(job)
            part = min(room, job.missing)
            job.missing, room = job.missing - part, room - part
            if job.missing:
                break
            done.append(self.waiting.pop(0))
        tokens = rows + CHUNK - room
        took = max(WEIGHTS_MS + ROW_MS * rows, tokens / TOKENS_PER_MS)
        self.now += took
        self.busy += took
        for job in done:
            job.first = self.now
            job.request.computed_len = job.request.prompt_len
            self._keep(job.blocks)
        self.decoding += done
        for job in self.decoding:
            job.produced += 1
        ended = [job for job in self.decoding if job.produced >= job.output_len]
        self.decoding = [job for job in self.decoding if job.produced < job.output_len]
        yield from ended

    def _look_up(self, job: Job) -> None:
        known = next((i for i, block in enumerate(job.blocks) if block not in self.cached), len(job.blocks))
        hit = min(known * BLOCK, job.request.prompt_len - 1)
        self.asked += job.request.prompt_len
        self.hit += hit
        job.missing = job.request.prompt_len - hit

    def _keep(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.cached[block] = None
            self.cached.move_to_end(block)
        while len(self.cached) > self.num_blocks:
            self.cached.popitem(last=False)


type Choose = Callable[[Job, list[Replica]], int]


def cache_aware(router: Router) -> Choose:
    return lambda job, _: router.place([job.request])[0]


def round_robin(job: Job, replicas: list[Replica]) -> int:
    return int(job.request.id) % len(replicas)


def least_requests(job: Job, replicas: list[Replica]) -> int:
    return min(range(len(replicas)), key=lambda r: len(replicas[r].waiting) + len(replicas[r].decoding))


def thresholds(job: Job, replicas: list[Replica]) -> int:
    """SGLang's router: the longest prefix, if it is 0.3 of the prompt and loads do not differ by 64 and 1.5 times."""
    loads = [len(replica.waiting) + len(replica.decoding) for replica in replicas]
    if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
        return least_requests(job, replicas)
    known = [sum(1 for _ in _known(job.blocks, replica.cached)) for replica in replicas]
    best = max(range(len(replicas)), key=lambda r: known[r])
    if known[best] * BLOCK > 0.3 * job.request.prompt_len:
        return best
    return min(range(len(replicas)), key=lambda r: len(replicas[r].cached))


def _known(blocks: list[int], cached: OrderedDict[int, None]) -> Iterator[int]:
    for block in blocks:
        if block not in cached:
            return
        yield block


def jobs(path: Path, count: int, speed: float) -> list[Job]:
    made = []
    with path.open() as lines:
        for index, line in zip(range(count), lines, strict=False):
            entry = json.loads(line)
            length = max(2, entry["input_length"])
            ids: npt.NDArray[np.int32] = np.repeat(np.array(entry["hash_ids"], np.int32), BLOCK)[:length]
            output_len = max(1, entry["output_length"])
            request = Request(
                id=str(index), prompt_ids=ids, params=PARAMS, stop_ids=frozenset(), max_new_tokens=output_len
            )
            made.append(Job(request, entry["timestamp"] / speed, entry["hash_ids"][: length // BLOCK], output_len))
    return made


def run(all_jobs: list[Job], choose: Choose, router: Router | None, num_replicas: int, num_blocks: int) -> str:
    replicas = [Replica(num_blocks) for _ in range(num_replicas)]
    ended: list[tuple[Job, float]] = []

    def advance(until: float) -> None:
        for replica in replicas:
            while (replica.waiting or replica.decoding) and replica.now < until:
                for job in replica.step():
                    ended.append((job, replica.now))
                    if router is not None:
                        router.end(job.request)

    for job in all_jobs:
        advance(job.arrival)
        replicas[choose(job, replicas)].take(job)
    advance(float("inf"))
    first = np.array([job.first - job.arrival for job, _ in ended]) / 1000
    whole = np.array([end - job.arrival for job, end in ended]) / 1000
    last = max(replica.now for replica in replicas)
    hit_rate = sum(replica.hit for replica in replicas) / sum(replica.asked for replica in replicas)
    return (
        f"| {hit_rate:.3f} | {first.mean():.2f} | {np.quantile(first, 0.9):.2f} | {whole.mean():.1f} "
        f"| {np.quantile(whole, 0.9):.1f} | {min(replica.busy for replica in replicas) / last:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=1000, help="of each replica's cache")
    parser.add_argument("--speed", type=float, default=1.0, help="of the trace's clock")
    parser.add_argument("--requests", type=int, default=3000)
    options = parser.parse_args()
    print("| way | hit rate | first, mean | first, p90 | end, mean | end, p90 | busy |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    router = Router(options.replicas, BLOCK, options.blocks)
    ways: dict[str, tuple[Choose, Router | None]] = {
        "round robin": (round_robin, None),
        "fewest requests": (least_requests, None),
        "thresholds": (thresholds, None),
        "jradix": (cache_aware(router), router),
    }
    for name, (choose, used) in ways.items():
        made = jobs(options.trace, options.requests, options.speed)
        print(f"| {name} {run(made, choose, used, options.replicas, options.blocks)}", flush=True)


if __name__ == "__main__":
    main()
