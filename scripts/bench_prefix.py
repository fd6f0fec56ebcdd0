"""Four workloads whose prompts share prefixes, with the prefix cache on and off: seconds, ratio, cached tokens.

    python scripts/bench_prefix.py --json prefix.json --plot prefix.png
    python scripts/bench_prefix.py --scenarios chat documents --one-by-one --repeats 1

One engine runs everything, so both modes have the same weights, programs and pool. *Off* is the code path of
`disable_radix_cache`: nothing enters the tree. Modes alternate, every run starts with an empty cache, and numbers are
medians over `--repeats` runs. All programs are compiled before the first.

Requests arrive a *wave* at a time: of a chat, one turn of every conversation, because a turn needs the answer before;
of the other scenarios, all requests. With `--one-by-one` each is a wave of its own. Prompts are random token ids of
exact length, the same in every run up to a chat's answers, and outputs are greedy and of exact length.

*predicted* is the ratio that the tokens saved should bring, given this engine's own costs:

    (off_tokens * prefill_cost + decode_seconds) / (on_tokens * prefill_cost + decode_seconds)

where `on_tokens` and `off_tokens` are the prompt tokens computed in either mode, `prefill_cost` is the seconds a token
takes when some of the scenario's prompts are computed alone, uncached, and `decode_seconds` is the time of as many
steps as the waves' outputs are long, at the batch and context of the middle wave. Both costs are measured once a
repeat. *bound* is off_tokens / on_tokens: the ratio if decoding were free.

*ideal* counts the tokens that a cache could save if every request began after all before it had been computed: the
longest prefix that a prompt shares with an earlier prompt or its output.
"""

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
from bench_engine import (
    TokenIds,
    add_engine_options,
    decode_step_seconds,
    describe,
    exactly,
    make_engine,
    prefill_seconds,
    random_tokens,
)
from tqdm import tqdm

from jradix import Engine, EngineConfig

NUM_COST_PROMPTS = 6  # enough to fill many prefill steps
COST_TOKENS = 64  # requests whose decode steps are timed generate up to so many more


@dataclass(frozen=True, slots=True)
class Scenario:
    """Groups of requests that share a prefix; with several turns, conversations that go on.

    Lengths in tokens. Every group has a prefix of its own; in a turn, each of its members appends `own_len` new
    tokens to what it has and generates `output_len`.
    """

    name: str
    title: str
    groups: int
    members: int
    prefix_len: int
    own_len: int
    output_len: int
    turns: int = 1

    @property
    def concurrency(self) -> int:
        """Requests that arrive at once."""
        return self.groups * self.members

    @property
    def num_requests(self) -> int:
        return self.concurrency * self.turns

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prefix_len + self.turns * (self.own_len + self.output_len)

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        turns = range(self.turns)
        lens = [self.prefix_len + (turn + 1) * self.own_len + turn * self.output_len for turn in turns]
        return self.concurrency * sum(lens)


SCENARIOS = (
    Scenario("chat", "multi-turn chat", 1, 8, 512, 100, 32, turns=8),
    Scenario("system", "one system prompt", 1, 64, 1000, 30, 16),
    Scenario("code", "files to complete", 4, 8, 1200, 60, 32),
    Scenario("documents", "long documents", 2, 16, 1800, 25, 16),
)
QUICK_SCENARIOS = (
    Scenario("chat", "multi-turn chat", 1, 3, 70, 20, 6, turns=3),
    Scenario("system", "one system prompt", 1, 4, 100, 9, 5),
    Scenario("code", "files to complete", 2, 2, 120, 11, 5),
    Scenario("documents", "long documents", 1, 3, 180, 7, 5),
)


@dataclass(slots=True)
class Run:
    """One scenario, once, in one mode."""

    seconds: float = 0.0  # from a wave's submission to its last output, summed over the waves
    waves: list[list[TokenIds]] = field(default_factory=list)  # prompts
    outputs: list[list[int]] = field(default_factory=list)  # of all requests, in the order of the prompts
    cached_tokens: int = 0

    @property
    def prompts(self) -> list[TokenIds]:
        return [prompt for wave in self.waves for prompt in wave]


@dataclass(frozen=True, slots=True)
class Costs:
    """What the engine's own steps take in one scenario, in seconds."""

    prefill_token: float
    decode_step: float


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. Seconds are medians of `samples_on` and `samples_off`."""

    name: str
    title: str
    num_requests: int
    on_s: float
    off_s: float
    ratio: float
    predicted_ratio: float
    of_predicted: float
    bound: float
    prompt_tokens: int
    cached_tokens: int
    ideal_cached_tokens: int
    output_tokens: int
    output_tokens_per_s_on: float
    output_tokens_per_s_off: float
    prefill_us_per_token: float
    decode_step_ms: float
    equal_outputs: float  # share of requests with the same output in both modes; below 1 where rounding differs
    peak_memory_mib: float  # of the process so far
    samples_on: list[float]
    samples_off: list[float]


def run_scenario(engine: Engine, scenario: Scenario, *, cached: bool, one_by_one: bool, seed: int) -> Run:
    """Run every wave on an empty cache and leave it empty."""
    engine.check_idle()
    engine.flush_cache()
    engine.cache.enabled = cached
    rng = np.random.default_rng(seed)
    vocab_size = engine.model_config.vocab_size
    prefixes = [random_tokens(rng, vocab_size, scenario.prefix_len) for _ in range(scenario.groups)]
    # Members of different groups take turns, as requests of different users would.
    sequences = [prefix for _ in range(scenario.members) for prefix in prefixes]
    run = Run()
    for _ in range(scenario.turns):
        prompts = [joined(tokens, random_tokens(rng, vocab_size, scenario.own_len)) for tokens in sequences]
        waves = [[prompt] for prompt in prompts] if one_by_one else [prompts]
        for wave in waves:
            start = time.perf_counter()
            results = engine.generate(input_ids=wave, sampling_params=exactly(scenario.output_len))
            run.seconds += time.perf_counter() - start
            run.waves.append(wave)
            run.outputs += [result["output_ids"] for result in results]
            run.cached_tokens += sum(result["meta_info"]["cached_tokens"] for result in results)
        outputs = run.outputs[-len(prompts) :]
        sequences = [joined(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    engine.check_idle()
    engine.flush_cache()
    engine.cache.enabled = True
    return run


def ideal_cached_tokens(prompts: Sequence[TokenIds], outputs: Sequence[Sequence[int]]) -> int:
    """Tokens shared with the requests before, by comparing each pair; see the module's text."""
    earlier: list[TokenIds] = []
    total = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        reusable = prompt[:-1]  # the last is always computed, to have logits
        total += max((shared_len(reusable, sequence) for sequence in earlier), default=0)
        earlier.append(joined(prompt, output[:-1]))  # the last token is never fed back: it has no KV
    return total


def joined(tokens: TokenIds, more: Sequence[int] | TokenIds) -> TokenIds:
    return np.concatenate([tokens, np.asarray(more, np.int32)])


def shared_len(a: TokenIds, b: TokenIds) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def measure_costs(engine: Engine, run: Run, scenario: Scenario) -> Costs:
    """Costs of a token of prefill and of a decode step, on prompts of a run of the scenario."""
    every = max(1, len(run.prompts) // NUM_COST_PROMPTS)
    sample = run.prompts[every // 2 :: every]
    engine.cache.enabled = False
    prefill_token = prefill_seconds(engine, sample) / sum(map(len, sample))
    engine.cache.enabled = True  # decoding costs the same, and its prompts are sooner computed
    together = run.waves[len(run.waves) // 2][: engine.config.max_running_requests]
    steps = decode_step_seconds(engine, together, scenario.output_len - 1)
    engine.flush_cache()
    return Costs(prefill_token, median(steps))


def measure_scenario(
    engine: Engine, scenario: Scenario, *, repeats: int, one_by_one: bool, seed: int, advance: Callable[[], object]
) -> Result:
    runs: dict[bool, list[Run]] = {True: [], False: []}
    costs: list[Costs] = []
    for repeat in range(repeats):
        for cached in (repeat % 2 == 0, repeat % 2 == 1):
            run = run_scenario(engine, scenario, cached=cached, one_by_one=one_by_one, seed=seed)
            runs[cached].append(run)
            advance()
        costs.append(measure_costs(engine, runs[True][-1], scenario))
        advance()
    return summarize(scenario, runs[True], runs[False], costs, engine.config)


def summarize(scenario: Scenario, on: list[Run], off: list[Run], costs: list[Costs], config: EngineConfig) -> Result:
    assert not any(run.cached_tokens for run in off), "tokens were cached with the cache off"
    on_s, off_s = median(run.seconds for run in on), median(run.seconds for run in off)
    prefill_token = median(cost.prefill_token for cost in costs)
    decode_step = median(cost.decode_step for cost in costs)
    prompt_tokens, cached_tokens = scenario.prompt_tokens, int(median(run.cached_tokens for run in on))
    computed_tokens = prompt_tokens - cached_tokens
    num_batches = sum(math.ceil(len(wave) / config.max_running_requests) for wave in on[0].waves)
    decode_seconds = num_batches * (scenario.output_len - 1) * decode_step  # the prefill samples the first token
    predicted = (prompt_tokens * prefill_token + decode_seconds) / (computed_tokens * prefill_token + decode_seconds)
    output_tokens = scenario.num_requests * scenario.output_len
    assert all(sum(map(len, run.outputs)) == output_tokens for run in on + off), "an output is not of its length"
    equal = [a == b for a, b in zip(on[0].outputs, off[0].outputs, strict=True)]
    return Result(
        name=scenario.name,
        title=scenario.title,
        num_requests=scenario.num_requests,
        on_s=on_s,
        off_s=off_s,
        ratio=off_s / on_s,
        predicted_ratio=predicted,
        of_predicted=off_s / on_s / predicted,
        bound=prompt_tokens / computed_tokens,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        ideal_cached_tokens=ideal_cached_tokens(on[-1].prompts, on[-1].outputs),
        output_tokens=output_tokens,
        output_tokens_per_s_on=output_tokens / on_s,
        output_tokens_per_s_off=output_tokens / off_s,
        prefill_us_per_token=prefill_token * 1e6,
        decode_step_ms=decode_step * 1e3,
        equal_outputs=sum(equal) / len(equal),
        peak_memory_mib=peak_memory_mib(),
        samples_on=[run.seconds for run in on],
        samples_off=[run.seconds for run in off],
    )


def peak_memory_mib() -> float:
    """The most resident memory this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)  # bytes there, KiB on Linux


def format_table(results: Sequence[Result]) -> str:
    lines = [
        f"{'scenario':<10} {'off s':>7} {'on s':>7} {'ratio':>6} {'predicted':>9} {'of it':>6} {'bound':>6}"
        f" {'prompt':>7} {'cached':>7} {'ideal':>7} {'out/s off':>9} {'out/s on':>8} {'us/token':>8} {'ms/step':>7}"
        f" {'peak MiB':>8}"
    ]
    lines += [
        f"{r.name:<10} {r.off_s:7.2f} {r.on_s:7.2f} {r.ratio:6.2f} {r.predicted_ratio:9.2f} {r.of_predicted:6.0%}"
        f" {r.bound:6.2f} {r.prompt_tokens:>7} {r.cached_tokens:>7} {r.ideal_cached_tokens:>7}"
        f" {r.output_tokens_per_s_off:9.1f} {r.output_tokens_per_s_on:8.1f} {r.prefill_us_per_token:8.1f}"
        f" {r.decode_step_ms:7.2f} {r.peak_memory_mib:8.0f}"
        for r in results
    ]
    lines += [
        f"{r.name}: {r.equal_outputs:.0%} of the outputs are the same in both modes, the others differ by rounding"
        for r in results
        if r.equal_outputs < 1
    ]
    return "\n".join(lines)


def save_plot(results: Sequence[Result], path: Path, title: str) -> None:
    """Seconds with the cache off and on, and the ratios beside the predicted ones."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (times, ratios) = plt.subplots(1, 2, figsize=(11, 4.2))
    places = np.arange(len(results))
    labels = [f"{r.title}\n{r.num_requests} requests" for r in results]
    for offset, name, values, samples, color in (
        (-0.2, "cache off", [r.off_s for r in results], [r.samples_off for r in results], "0.65"),
        (0.2, "cache on", [r.on_s for r in results], [r.samples_on for r in results], "tab:green"),
    ):
        spread = [[v - min(s) for v, s in zip(values, samples, strict=True)]]
        spread += [[max(s) - v for v, s in zip(values, samples, strict=True)]]
        bars = times.bar(places + offset, values, 0.38, yerr=spread, capsize=3, color=color, label=name)
        times.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    times.set(ylabel="seconds, less is better", xticks=places)
    bars = ratios.bar(places, [r.ratio for r in results], 0.5, color="tab:green", label="measured")
    ratios.bar_label(bars, fmt="%.1fx", padding=2, fontsize=8, label_type="center", color="white")
    predicted = [r.predicted_ratio for r in results]
    ratios.hlines(predicted, places - 0.33, places + 0.33, "black", lw=2, label="predicted from tokens saved")
    ratios.axhline(1, color="0.4", lw=0.8, ls=":")
    ratios.set(ylabel="times as fast as without the cache", xticks=places)
    for axis in (times, ratios):
        axis.set_xticklabels(labels, fontsize=8)
        axis.margins(y=0.25)  # room for the legend
        axis.legend(fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--scenarios", nargs="+", choices=[s.name for s in SCENARIOS], help="default: all four")
    parser.add_argument("--one-by-one", action="store_true", help="each request waits for the one before it")
    parser.add_argument("--max-running-requests", type=int, help="default: as many as ever arrive at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--quick", action="store_true", help="small scenarios, for tests; times include compilation")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    scenarios = [
        scenario
        for scenario in (QUICK_SCENARIOS if options.quick else SCENARIOS)
        if not options.scenarios or scenario.name in options.scenarios
    ]
    context_len = max(scenario.longest for scenario in scenarios) + COST_TOKENS
    engine = make_engine(
        options,
        context_length=-(-context_len // options.page_size) * options.page_size,
        max_running_requests=options.max_running_requests or max(scenario.concurrency for scenario in scenarios),
        # Room for every request of a wave without sharing, so that nothing is evicted or retracted in either mode.
        max_total_tokens=max(s.concurrency * (s.longest + COST_TOKENS + options.page_size) for s in scenarios),
    )
    if not options.quick:
        engine.warm_up()
    num_compiled = engine.runner.num_compiled
    results: list[Result] = []
    with tqdm(total=3 * options.repeats * len(scenarios), unit="run", file=sys.stderr) as progress:
        for scenario in scenarios:
            progress.set_description(scenario.title)
            result = measure_scenario(
                engine,
                scenario,
                repeats=options.repeats,
                one_by_one=options.one_by_one,
                seed=options.seed,
                advance=progress.update,
            )
            results.append(result)
    assert options.quick or engine.runner.num_compiled == num_compiled, "something was compiled while it was timed"
    arrival = "one by one" if options.one_by_one else "all at once"
    title = f"{describe(options)}, {arrival}"
    print(title)
    print(format_table(results))
    if options.json:
        content = {"title": title, "repeats": options.repeats, "scenarios": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.plot:
        save_plot(results, options.plot, title)


if __name__ == "__main__":
    main()
