"""Hit rates of offline batches in the order given and reordered for reuse, by pool size, without model or device.

    python scripts/simulate_batch.py prompts.jsonl few-shot chat --pool-tokens 16000 64000 256000

A load is a made-up one or a JSONL file with a `prompt` in each line, one token a byte. Its requests are shuffled, as
those of a data set or of many users may be. Both orders run through an engine on paper: the real cache, requests side
by side, steps of a limited number of prompt tokens. *bound* is what an infinite cache could reach in the best order.
All are tokens hit over prompt tokens. *ms* is the time to order the batch and to predict its hits from a sample, as
the engine does.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from simulate_cache import TokenIds, read_trace, synthetic_chat, tokens_of
from tqdm import tqdm

from jradix.offline import plan_batch
from jradix.offline_prediction import Capacity, simulate_hits


@dataclass(frozen=True, slots=True)
class Outcome:
    """One load in one pool; rates are tokens hit over prompt tokens."""

    load: str
    num_requests: int
    prompt_tokens: int
    pool_tokens: int
    given: float
    reordered: float
    predicted: float  # of the reordered batch, from a sample if it is large
    bound: float
    plan_ms: float


def few_shot(
    seed: int = 0, *, num_requests: int = 2_000, num_templates: int = 8, num_tasks: int = 12
) -> list[TokenIds]:
    """A template of 60 tokens, five examples of one task, some 100 tokens each, and a question of 40."""
    rng = np.random.default_rng(seed)
    templates = [tokens_of(rng, 60) for _ in range(num_templates)]
    tasks = [np.concatenate([tokens_of(rng, rng.integers(60, 140)) for _ in range(5)]) for _ in range(num_tasks)]
    pairs = rng.integers((num_templates, num_tasks), size=(num_requests, 2))
    return [np.concatenate([templates[template], tasks[task], tokens_of(rng, 40)]) for template, task in pairs]


def chat(seed: int = 0) -> list[TokenIds]:
    """Six turns of 300 conversations on one system prompt, each with its whole history."""
    return [request.prompt for request in synthetic_chat(seed, num_conversations=300)]


LOADS: dict[str, Callable[[], list[TokenIds]]] = {"few-shot": few_shot, "chat": chat}


def compare(load: str, prompts: Sequence[TokenIds], output_len: int, capacity: Capacity) -> Outcome:
    """The prompts in the order given and reordered, every request simulated."""
    count = len(prompts)
    namespaces, output_lens = [None] * count, [output_len] * count
    start = time.process_time()
    plan = plan_batch(prompts, namespaces, output_lens, capacity)
    plan_ms = 1e3 * (time.process_time() - start)
    given, reordered = (
        sum(simulate_hits(prompts, namespaces, output_lens, capacity, order)) for order in (range(count), plan.order)
    )
    total = plan.prompt_tokens
    return Outcome(
        load=load,
        num_requests=count,
        prompt_tokens=total,
        pool_tokens=capacity.num_pages * capacity.page_size,
        given=given / total,
        reordered=reordered / total,
        predicted=plan.predicted / total,
        bound=plan.bound / total,
        plan_ms=plan_ms,
    )


def format_table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        f"{'load':<24} {'requests':>8} {'tokens':>9} {'pool':>9} {'given':>7} {'reordered':>9} {'predicted':>9}"
        f" {'bound':>7} {'ms':>6}"
    ]
    lines += [
        f"{o.load:<24} {o.num_requests:>8} {o.prompt_tokens:>9} {o.pool_tokens:>9} {o.given:7.1%} {o.reordered:9.1%}"
        f" {o.predicted:9.1%} {o.bound:7.1%} {o.plan_ms:6.0f}"
        for o in outcomes
    ]
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="*", default=list(LOADS), help=f"files, or {', '.join(LOADS)}; default: these")
    parser.add_argument("--pool-tokens", nargs="+", type=int, default=[16_000, 64_000, 256_000, 1_000_000])
    parser.add_argument("--page-size", type=int, default=16, help="tokens")
    parser.add_argument("--min-copied-tokens", type=int, default=1, help="the page size: only whole pages are reused")
    parser.add_argument("--output-len", type=int, default=64, help="tokens that each request generates")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--chunked-prefill-size", type=int, default=512, help="the most prompt tokens of a step")
    parser.add_argument("--limit", type=int, help="so many of the shuffled requests")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    outcomes: list[Outcome] = []
    with tqdm(total=len(options.loads) * len(options.pool_tokens), unit="run", file=sys.stderr) as progress:
        for load in options.loads:
            if load in LOADS:
                name, prompts = load, LOADS[load]()
            else:
                name, prompts = Path(load).stem, [request.prompt for request in read_trace(Path(load), 1)]
            shuffled = [prompts[i] for i in np.random.default_rng(0).permutation(len(prompts))[: options.limit]]
            for pool_tokens in options.pool_tokens:
                progress.set_description(f"{name}, {pool_tokens} tokens")
                capacity = Capacity(
                    num_pages=pool_tokens // options.page_size,
                    page_size=options.page_size,
                    granularity=min(options.page_size, options.min_copied_tokens),
                    max_running_requests=options.max_running_requests,
                    chunked_prefill_size=options.chunked_prefill_size,
                )
                outcomes.append(compare(name, shuffled, options.output_len, capacity))
                progress.update()
    print(format_table(outcomes))
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


if __name__ == "__main__":
    main()
