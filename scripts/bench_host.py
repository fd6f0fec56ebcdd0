"""Host work of a decode step, apart from the device: microseconds of planning, arrays, dispatch and bookkeeping.

    python scripts/bench_host.py
    python scripts/bench_host.py --batch 16 --steps 500 --json host.json

The engine is the real one, and so are its steps; the model is random and very narrow, with `--layers` layers, because
the time of a dispatch grows with the number of arrays handed over and not with their size. Before each timed step the
device is left to finish. Time is CPU time of the thread that calls `Core.step`, so neither the threads that XLA
computes with nor other processes add to it. Timers stand around these parts:

    plan          Scheduler.plan: who decodes, pages for the next token
    arrays        the bucket and the padded arrays, sampling parameters too where rows are not greedy
    dispatch      Runner.launch_forward, launch_sampling: handing two programs and their arrays to XLA
    read          Runner.collect: the tokens of the step before, which is ready
    bookkeeping   everything else: tokens appended to their requests, ends noticed

Whether a step's host work is hidden behind the device's is another question: `bench_raw.py` times whole steps.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
from bench_engine import decoding, random_tokens
from tqdm import tqdm

import jradix.core
from jradix import Engine

PARTS: tuple[str, ...] = ("plan", "arrays", "dispatch", "read", "bookkeeping")
SAMPLERS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": {"temperature": 1.0, "top_p": 0.9}}
PROMPT_LEN = 12


def narrow_engine(layers: int, batch: int, steps: int, context_length: int) -> Engine:
    """A llama of random weights, `layers` deep and as narrow as can be."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 256,
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config))
        return Engine(
            model_path=directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_running_requests=batch,
            max_total_tokens=batch * (PROMPT_LEN + steps + 64),
        )


class Stopwatch:
    """Adds up the thread's seconds by part, and keeps what each part returned last."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.returned: dict[str, Any] = {}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            self.returned[part] = function(*args, **kwargs)
            self.seconds[part] += time.thread_time() - start
            return self.returned[part]

        return run

    def lap(self) -> dict[str, float]:
        """The sums since the last lap."""
        sums, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return sums


@contextmanager
def timers(engine: Engine) -> Iterator[Stopwatch]:
    """Puts the stopwatch around the parts of the engine's steps."""
    watch = Stopwatch()
    parts = [
        (engine.scheduler, "plan", "plan"),
        (jradix.core, "step_shape", "arrays"),
        (jradix.core, "build_arrays", "arrays"),
        (jradix.core, "build_sampling_inputs", "arrays"),
        (engine.runner, "launch_forward", "dispatch"),
        (engine.runner, "launch_sampling", "dispatch"),
        (engine.runner, "collect", "read"),
    ]
    patches = [patch.object(owner, name, watch.timed(part, getattr(owner, name))) for owner, name, part in parts]
    for each in patches:
        each.start()
    try:
        yield watch
    finally:
        for each in patches:
            each.stop()


def host_seconds(engine: Engine, batch: int, steps: int, sampler: str) -> list[dict[str, float]]:
    """Seconds by part of each of `steps` steps in which `batch` requests decode."""
    rng = np.random.default_rng(0)
    prompts = [random_tokens(rng, engine.model_config.vocab_size, PROMPT_LEN) for _ in range(batch)]
    laps: list[dict[str, float]] = []
    with decoding(engine, prompts, steps + 1, **SAMPLERS[sampler]) as core, timers(engine) as watch:
        core.step()
        watch.lap()
        num_compiled = engine.runner.num_compiled
        for _ in tqdm(range(steps), desc=sampler, unit="step", file=sys.stderr):
            jax.block_until_ready(watch.returned["dispatch"].tokens)
            start = time.thread_time()
            core.step()
            whole = time.thread_time() - start
            lap = watch.lap()
            lap["bookkeeping"] = whole - sum(lap.values())
            laps.append(lap)
        assert engine.runner.num_compiled == num_compiled, "something was compiled while it was timed"
    engine.flush_cache()
    return laps


def format_table(table: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = ["microseconds  " + "".join(f"{sampler + ' median':>16} {'mean':>8} {'lowest':>8}" for sampler in table)]
    for part in (*PARTS, "host"):
        cells = [table[sampler][part] for sampler in table]
        lines.append(f"{part:<14}" + "".join(f"{c['median']:16.0f} {c['mean']:8.0f} {c['lowest']:8.0f}" for c in cells))
    return "\n".join(lines)


def summarize(laps: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Microseconds of each part, and of all of them as `host`."""
    samples = {part: [lap[part] for lap in laps] for part in PARTS}
    samples["host"] = [sum(lap.values()) for lap in laps]
    return {
        part: {"median": median(values) * 1e6, "mean": mean(values) * 1e6, "lowest": min(values) * 1e6}
        for part, values in samples.items()
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="requests that decode")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=30, help="as many as SmolLM2-135M has")
    parser.add_argument("--context-length", type=int, default=2048, help="decides the width of the page tables")
    parser.add_argument("--json", type=Path, help="write the table here")
    options = parser.parse_args(arguments)
    engine = narrow_engine(options.layers, options.batch, options.steps, options.context_length)
    table = {sampler: summarize(host_seconds(engine, options.batch, options.steps, sampler)) for sampler in SAMPLERS}
    print(f"a decode step at batch {options.batch}, {options.layers} layers, {options.steps} steps")
    print(format_table(table))
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
