"""Replays request traces through the prefix cache, without model or device: hit rates by pool size and policy.

    python scripts/simulate_cache.py trace.jsonl --pages 1000 5000 10000 --policies lru adaptive
    python scripts/simulate_cache.py --synthetic chat --page-sizes 16 64 --plot hits.png --json hits.json

A trace is JSONL. Lines with `hash_ids` (the format of the Mooncake traces) name blocks of equal tokens, here of
`--block-len` tokens each; lines with `prompt` are texts, one token a byte. Requests run one after another, each through
the calls that the scheduler makes: match, lock, allocate, finish.

Beside the policies stand two bounds. *infinite*: nothing is ever evicted. *optimum*: Belady's rule with knowledge of
the future. After each request the pages of nearest next use stay, however many the request itself needed while it ran.
A page is never used before its prefix, so that what Belady keeps is closed under prefixes, and no policy can hit more.

Hits are counted in whole pages, unless `--copies` lets a match end inside a page, which the engine then copies. The
bounds, which know of whole pages only, are left out.
"""

import argparse
import heapq
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from jradix.cache import PrefixCache

TokenIds = npt.NDArray[np.int32]
NO_TOKENS: TokenIds = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    prompt: TokenIds  # [prompt_len]; the last token is always computed
    output: TokenIds  # [output_len], empty where the trace does not tell the tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """One replay, or one bound."""

    policy: str
    page_size: int
    num_pages: int
    hit_rate: float  # hit over asked tokens
    evicted_pages: int = 0
    refused_requests: int = 0  # larger than the pool
    us_per_request: float = 0.0  # median host time of all cache calls together


# Traces


def read_trace(path: Path, block_len: int) -> Iterator[TraceRequest]:
    """Requests of a JSONL file, in its order. ValueError for lines in neither format."""
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            entry = json.loads(line)
            if "hash_ids" in entry:
                blocks = np.array(entry["hash_ids"], np.int32)[:, None] * block_len
                tokens = (blocks + np.arange(block_len, dtype=np.int32)).reshape(-1)
                # One more token that nobody shares: the last is never looked up, and here all blocks shall be.
                yield TraceRequest(np.append(tokens, np.int32(-number)), NO_TOKENS)
            elif "prompt" in entry:
                yield TraceRequest(np.frombuffer(entry["prompt"].encode(), np.uint8).astype(np.int32), NO_TOKENS)
            else:
                raise ValueError(f"{path}:{number}: expected a `hash_ids` or a `prompt` field, got {sorted(entry)}")


def synthetic_chat(seed: int = 0, *, num_conversations: int = 2_000, num_turns: int = 6) -> Iterator[TraceRequest]:
    """Conversations on one system prompt of 200 tokens, ~150 tokens a turn (a third of them output), interleaved."""
    rng = np.random.default_rng(seed)
    system = tokens_of(rng, 200)
    history = [system] * num_conversations
    turns = np.repeat(np.arange(num_conversations), num_turns)
    # A conversation's turns come near each other: it starts at a random time and pauses for random times.
    times = np.cumsum(rng.exponential(300.0, (num_conversations, num_turns)), axis=1)
    times += rng.uniform(0, 12_000, (num_conversations, 1))
    for conversation in turns[np.argsort(times.reshape(-1), kind="stable")]:
        prompt = np.concatenate([history[conversation], tokens_of(rng, rng.integers(50, 150))])
        output = tokens_of(rng, rng.integers(25, 75))
        history[conversation] = np.concatenate([prompt, output])
        yield TraceRequest(prompt, output)


def synthetic_documents(seed: int = 0, *, num_documents: int = 200, num_questions: int = 20) -> Iterator[TraceRequest]:
    """Questions of 30 tokens, 50 of output, on documents of 8,000 tokens, in random order."""
    rng = np.random.default_rng(seed)
    documents = [tokens_of(rng, 8_000) for _ in range(num_documents)]
    for document in rng.permutation(np.repeat(np.arange(num_documents), num_questions)):
        yield TraceRequest(np.concatenate([documents[document], tokens_of(rng, 30)]), tokens_of(rng, 50))


def synthetic_few_shot(seed: int = 0, *, num_tasks: int = 100, num_requests: int = 8_000) -> Iterator[TraceRequest]:
    """Tasks of 1 to 8 examples of ~120 tokens, drawn by Zipf's law; a request asks with a prefix of the examples."""
    rng = np.random.default_rng(seed)
    examples = [[tokens_of(rng, rng.integers(80, 160)) for _ in range(8)] for _ in range(num_tasks)]
    popularity = 1 / np.arange(1, num_tasks + 1)
    for task in rng.choice(num_tasks, num_requests, p=popularity / popularity.sum()):
        shots = examples[task][: rng.integers(1, 9)]
        yield TraceRequest(np.concatenate([*shots, tokens_of(rng, 40)]), tokens_of(rng, 30))


SYNTHETIC: dict[str, Callable[[int], Iterator[TraceRequest]]] = {
    "chat": synthetic_chat,
    "documents": synthetic_documents,
    "few-shot": synthetic_few_shot,
}


def tokens_of(rng: np.random.Generator, num_tokens: int | np.integer) -> TokenIds:
    return rng.integers(0, 50_000, int(num_tokens)).astype(np.int32)


# Replays and bounds


def serve(cache: PrefixCache, prompt: TokenIds, tokens: TokenIds) -> int | None:
    """A request through the calls that the scheduler makes; `tokens` are prompt and output.

    Returns the prompt tokens that were cached, or None if the request is larger than the pool.
    """
    match = cache.match(prompt[:-1])
    lock = cache.lock(match)
    new = cache.allocate(-(-len(tokens) // cache.page_size) - len(match.pages))
    if new is None:
        cache.unlock(lock)
        return None
    cache.finish(tokens, np.concatenate([match.pages, new]), lock, prompt_len=len(prompt))
    return match.num_tokens + match.head_len


def replay(
    requests: Iterable[TraceRequest], policy: str, page_size: int, num_pages: int, *, copies: bool = False
) -> Outcome:
    """All requests through one cache, one after another; host time in microseconds (the column `us`)."""
    min_copied_tokens = 1 if copies else None
    cache = PrefixCache(num_pages, page_size, eviction_policy=policy, min_copied_tokens=min_copied_tokens)
    spent: list[float] = []
    asked = hit = refused = 0
    for request in requests:
        tokens = np.concatenate([request.prompt, request.output])
        start = time.perf_counter()
        cached = serve(cache, request.prompt, tokens)
        spent.append(time.perf_counter() - start)
        asked += len(request.prompt) - 1
        hit += cached or 0
        refused += cached is None
    cache.check()
    evicted = cache.statistics.total.evicted_tokens // page_size
    return Outcome(policy, page_size, num_pages, hit / max(1, asked), evicted, refused, 1e6 * float(np.median(spent)))


@dataclass(frozen=True, slots=True)
class PageTrace:
    """A trace as page numbers: equal numbers are equal prefixes."""

    asked: list[list[int]]  # per request, the whole pages that may hit
    stored: list[list[int]]  # per request, the whole pages of prompt and output
    page_size: int
    asked_tokens: int

    @classmethod
    def of(cls, requests: Iterable[TraceRequest], page_size: int) -> "PageTrace":
        numbers: dict[tuple[int, bytes], int] = {}
        asked: list[list[int]] = []
        stored: list[list[int]] = []
        asked_tokens = 0
        for request in requests:
            tokens = np.concatenate([request.prompt, request.output])
            pages, parent = [], -1
            for start in range(0, len(tokens) - page_size + 1, page_size):
                key = parent, tokens[start : start + page_size].tobytes()
                parent = numbers.setdefault(key, len(numbers))
                pages.append(parent)
            stored.append(pages)
            asked.append(pages[: (len(request.prompt) - 1) // page_size])
            asked_tokens += len(request.prompt) - 1
        return cls(asked, stored, page_size, asked_tokens)

    def infinite(self) -> Outcome:
        seen: set[int] = set()
        hit = 0
        for asked, stored in zip(self.asked, self.stored, strict=True):
            hit += sum(page in seen for page in asked)
            seen.update(stored)
        return Outcome("infinite", self.page_size, len(seen), hit * self.page_size / max(1, self.asked_tokens))

    def optimum(self, num_pages: int) -> Outcome:
        """Belady's rule, O(accesses x log accesses)."""
        never = len(self.asked)
        upcoming: dict[int, int] = {}
        next_uses: list[list[int]] = []  # parallel to `stored`: the next request that asks for each page
        for index in range(never - 1, -1, -1):
            next_uses.append([upcoming.get(page, never) for page in self.stored[index]])
            upcoming.update(dict.fromkeys(self.asked[index], index))
        next_uses.reverse()

        kept: dict[int, int] = {}  # page -> next use
        furthest: list[tuple[int, int]] = []  # (-next use, page), with stale entries
        hit = evicted = 0
        for asked, stored, uses in zip(self.asked, self.stored, next_uses, strict=True):
            hit += sum(page in kept for page in asked)
            for page, use in zip(stored, uses, strict=True):
                if use == never:
                    kept.pop(page, None)
                else:
                    kept[page] = use
                    heapq.heappush(furthest, (-use, page))
            while len(kept) > num_pages:
                use, page = heapq.heappop(furthest)
                if kept.get(page) == -use:
                    del kept[page]
                    evicted += 1
        return Outcome("optimum", self.page_size, num_pages, hit * self.page_size / max(1, self.asked_tokens), evicted)


# Reports


def simulate(
    requests: list[TraceRequest], policies: list[str], page_sizes: list[int], pools: list[int], *, copies: bool = False
) -> list[Outcome]:
    """Every policy on every page size and pool, with the bounds if hits are whole pages."""
    outcomes: list[Outcome] = []
    num_bounds = 0 if copies else len(page_sizes) * (1 + len(pools))
    total = num_bounds + len(page_sizes) * len(pools) * len(policies)
    with tqdm(total=total, unit="run", file=sys.stderr) as progress:

        def add(outcome: Outcome) -> None:
            outcomes.append(outcome)
            progress.update()

        for page_size in page_sizes:
            pages = None if copies else PageTrace.of(requests, page_size)
            if pages is not None:
                add(pages.infinite())
            for num_pages in pools:
                if pages is not None:
                    add(pages.optimum(num_pages))
                for policy in policies:
                    progress.set_description(f"{policy}, {num_pages} pages of {page_size}")
                    add(replay(requests, policy, page_size, num_pages, copies=copies))
    return outcomes


def format_table(outcomes: list[Outcome]) -> str:
    lines = [
        f"{'page size':>9} {'pages':>8} {'policy':<10} {'hit rate':>8} {'of the gap':>10} {'evicted':>9} {'us':>10}"
    ]
    known = {(outcome.page_size, outcome.num_pages, outcome.policy): outcome.hit_rate for outcome in outcomes}
    for outcome in outcomes:
        place = outcome.page_size, outcome.num_pages
        lru, best = known.get((*place, "lru")), known.get((*place, "optimum"))
        closed = (
            f"{(outcome.hit_rate - lru) / (best - lru):10.1%}" if lru is not None and best and best > lru else " " * 10
        )
        cost = f"{outcome.us_per_request:10.1f}" if outcome.us_per_request else ""
        refused = f"  ({outcome.refused_requests} requests larger than the pool)" if outcome.refused_requests else ""
        lines.append(
            f"{outcome.page_size:>9} {outcome.num_pages:>8} {outcome.policy:<10} {outcome.hit_rate:8.4f} {closed}"
            f" {outcome.evicted_pages:>9} {cost}{refused}".rstrip()
        )
    return "\n".join(lines)


def save_plot(outcomes: list[Outcome], path: Path, title: str) -> None:
    """Hit rate over pool size, a line for each policy, a panel for each page size."""
    import matplotlib.pyplot as plt

    page_sizes = sorted({outcome.page_size for outcome in outcomes})
    figure, axes = plt.subplots(1, len(page_sizes), figsize=(6 * len(page_sizes), 4.5), squeeze=False, sharey=True)
    for axis, page_size in zip(axes[0], page_sizes, strict=True):
        mine = [outcome for outcome in outcomes if outcome.page_size == page_size]
        for policy in dict.fromkeys(outcome.policy for outcome in mine if outcome.policy != "infinite"):
            line = [(outcome.num_pages, outcome.hit_rate) for outcome in mine if outcome.policy == policy]
            axis.plot(
                *zip(*sorted(line), strict=True), marker="o", ls="--" if policy == "optimum" else "-", label=policy
            )
        for outcome in mine:
            if outcome.policy == "infinite":
                axis.axhline(outcome.hit_rate, color="grey", ls=":", label="infinite")
        axis.set(xscale="log", xlabel=f"pool, pages of {page_size} tokens", ylabel="hit rate, tokens", title=title)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?", help="JSONL with `hash_ids` or `prompt`")
    parser.add_argument("--synthetic", choices=SYNTHETIC, help="a made-up load instead of a trace")
    parser.add_argument("--policies", nargs="+", default=["lru", "lfu", "slru", "adaptive"])
    parser.add_argument("--page-sizes", nargs="+", type=int, default=[16], help="tokens")
    parser.add_argument("--pages", nargs="+", type=int, default=[1_000, 5_000, 10_000], help="pool sizes")
    parser.add_argument("--copies", action="store_true", help="hits may end inside a page")
    parser.add_argument("--block-len", type=int, default=16, help="tokens that stand for one block of `hash_ids`")
    parser.add_argument("--limit", type=int, help="only the first requests")
    parser.add_argument("--shuffle", action="store_true", help="requests in random order, for comparison")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    options = parser.parse_args(arguments)
    if (options.trace is None) == (options.synthetic is None):
        parser.error("give either a trace or --synthetic")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    trace = read_trace(options.trace, options.block_len) if options.trace else SYNTHETIC[options.synthetic](0)
    requests = list(trace)[: options.limit]
    if options.shuffle:
        random.Random(0).shuffle(requests)
    outcomes = simulate(requests, options.policies, options.page_sizes, options.pages, copies=options.copies)
    print(f"{len(requests)} requests, {sum(len(request.prompt) for request in requests)} prompt tokens")
    print(format_table(outcomes))
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    if options.plot:
        save_plot(outcomes, options.plot, options.trace.stem if options.trace else options.synthetic)


if __name__ == "__main__":
    main()
