"""Host time and memory of the prefix cache, without model or device.

    python scripts/bench_cache.py
    python scripts/bench_cache.py --trace conversation.jsonl --json cache.json

*loads*: requests one after another through the calls the scheduler makes, match + lock + allocate (which evicts) +
finish (which inserts and unlocks); microseconds a request. Pages of 16 tokens. Interleaved chat: 2,000 conversations of
6 turns, a system prompt of 200 tokens, about 150 a turn, a pool of 200k tokens. Documents: 200 of 8,000 tokens with 20
questions each, a pool of 1M. The trace, in the format of Mooncake: its first 4,000 requests, each block of 512 tokens
scaled to 32, a pool of 160k.

*hit*: a prompt of 2,000 tokens that is cached whole, through the same calls but for eviction, in trees of 10,000 and
100,000 leaves. *eviction*: 10,000 evictions of one page, from among 50,000 leaves of one page. *memory*: what Python
and numpy allocate for a tree of random prompts, whole and after a split of every edge, as a share of 12 bytes a token
and 400 a node.

Times are CPU time of one thread, each the lowest of `--repeats` runs, because other programs only add to it; a hit,
which is timed one by one, is a median.
"""

import argparse
import json
import sys
import time
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import numpy as np
from simulate_cache import SYNTHETIC, TraceRequest, read_trace, serve, tokens_of
from tqdm import tqdm

from jradix.cache import PrefixCache

PAGE_SIZE = 16
TRACE_REQUESTS = 4_000
TRACE_BLOCK_LEN = 32  # tokens that stand for a block of 512
CACHED_LEN = 2_000
POOL_TOKENS = {"chat": 200_000, "documents": 1_000_000, "trace": 160_000}


def load_us(requests: list[TraceRequest], pool_tokens: int, policy: str) -> float:
    """Microseconds a request."""
    cache = PrefixCache(pool_tokens // PAGE_SIZE, PAGE_SIZE, eviction_policy=policy)
    sequences = [(request.prompt, np.concatenate([request.prompt, request.output])) for request in requests]
    start = time.thread_time()
    for prompt, tokens in sequences:
        cached = serve(cache, prompt, tokens)
        assert cached is not None, "a request is larger than the pool"
    return (time.thread_time() - start) / len(requests) * 1e6


def wide_tree(num_leaves: int, num_free: int, policy: str = "lru") -> PrefixCache:
    """Leaves of one page each under stems of two pages that a hundred share."""
    cache = PrefixCache(num_leaves + num_leaves // 50 + 2 + num_free, PAGE_SIZE, eviction_policy=policy)
    rng = np.random.default_rng(0)
    for _ in range(num_leaves // 100):
        stem = tokens_of(rng, 2 * PAGE_SIZE)
        for _ in range(100):
            prompt = np.concatenate([stem, tokens_of(rng, PAGE_SIZE)])
            serve(cache, prompt, prompt)
    return cache


def hit_us(num_leaves: int, repeats: int) -> float:
    """Microseconds of match, lock, allocate one page, and finish where a whole prompt is cached."""
    cache = wide_tree(num_leaves, 2 * CACHED_LEN // PAGE_SIZE)
    prompt = tokens_of(np.random.default_rng(1), CACHED_LEN)
    serve(cache, prompt, prompt)
    samples: list[float] = []
    for _ in range(100 * repeats):
        start = time.thread_time()
        serve(cache, prompt, prompt)
        samples.append(time.thread_time() - start)
    return median(samples) * 1e6


def eviction_us(policy: str, num_leaves: int, num_evictions: int) -> float:
    """Microseconds to allocate one page from a pool that the tree has filled."""
    cache = wide_tree(num_leaves, 0, policy)
    cache.allocate(cache.num_free)
    start = time.thread_time()
    for _ in range(num_evictions):
        cache.allocate(1)
    seconds = time.thread_time() - start
    assert cache.statistics.total.evicted_tokens == num_evictions * PAGE_SIZE
    return seconds / num_evictions * 1e6


def memory_share(num_prompts: int, prompt_len: int, *, split: bool) -> tuple[float, int]:
    """Bytes allocated, over 12 a cached token and 400 a node; and the tokens a node has on average."""
    rng = np.random.default_rng(0)
    prompts = [tokens_of(rng, prompt_len) for _ in range(num_prompts)]
    cache = PrefixCache(num_prompts * prompt_len // PAGE_SIZE, PAGE_SIZE)
    tracemalloc.start()
    for prompt in prompts:
        serve(cache, prompt, prompt)
    if split:
        for prompt in prompts:
            cache.unlock(cache.lock(cache.match(prompt[: prompt_len // 2])))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    nodes = [node for root in cache.tree.roots.values() for node in cache.tree.subtree(root)]
    num_tokens = sum(node.num_tokens for node in nodes)
    return used / (12 * num_tokens + 400 * len(nodes)), num_tokens // len(nodes)


def loads(trace: Path | None) -> Iterable[tuple[str, list[TraceRequest]]]:
    for name in ("chat", "documents"):
        yield name, list(SYNTHETIC[name](0))
    if trace is not None:
        yield "trace", list(read_trace(trace, TRACE_BLOCK_LEN))[:TRACE_REQUESTS]


def measure(options: argparse.Namespace) -> list[tuple[str, float, str]]:
    """(what, number, unit)."""
    scale = 100 if options.quick else 1
    rows: list[tuple[str, float, str]] = []
    with tqdm(
        total=len(options.policies) * (3 + (options.trace is not None)) + 6, unit="number", file=sys.stderr
    ) as progress:

        def add(what: str, number: float, unit: str) -> None:
            rows.append((what, number, unit))
            progress.update()

        for name, requests in loads(options.trace):
            some = requests[: max(1, len(requests) // scale)]
            for policy in options.policies:
                samples = [load_us(some, POOL_TOKENS[name], policy) for _ in range(options.repeats)]
                add(f"load {name}, {policy}", min(samples), "us a request")
        for policy in options.policies:
            samples = [eviction_us(policy, 50_000 // scale, 10_000 // scale) for _ in range(options.repeats)]
            add(f"eviction, {policy}", min(samples), "us a page")
        for num_leaves in (10_000, 100_000):
            add(f"hit of {CACHED_LEN} tokens, {num_leaves} leaves", hit_us(num_leaves // scale, options.repeats), "us")
        for prompt_len, split in ((640, False), (640, True), (32, False), (32, True)):
            share, per_node = memory_share(4_000 // scale, prompt_len, split=split)
            add(f"memory, {per_node} tokens a node", 100 * share, "% of 12 bytes a token and 400 a node")
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="JSONL with `hash_ids`")
    parser.add_argument("--policies", nargs="+", default=["lru", "adaptive"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a hundredth of everything, for tests")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args(arguments)
    rows = measure(options)
    for what, number, unit in rows:
        print(f"{what:<36} {number:10.1f} {unit}")
    if options.json:
        options.json.write_text(json.dumps({what: number for what, number, _ in rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
