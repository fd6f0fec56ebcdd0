"""Decode and prefill speed of one engine, against the limits of the machine, measured in the same process.

    python scripts/bench_raw.py
    python scripts/bench_raw.py --dtype float32 --repeats 9 --json raw.json

Limits and engine are measured in turn, `--repeats` times, so that whatever else the machine does meets all of them;
numbers are medians over the repeats. What is needed is compiled before the first.

*Bandwidth* is that of jitted sums over an array far larger than any cache (bytes read) and of an elementwise copy of
it (bytes read and written), the better of the two. *Matmul* is one square product in the engine's dtype.

*MBU*, model bandwidth utilisation, of decode: bytes that a step cannot avoid to read, weights (without the embedding
table where it is not the LM head as well) and the KV of every row, over the step's time and the bandwidth.

*MFU*, model FLOP utilisation, of prefill: 2 FLOPs a token and weight of the layers, 2 for each weight of the LM head,
which only the last token needs, and 4 * q_heads * head_dim for each layer and pair of tokens that causal attention
relates; over time and matmul FLOP/s. Sliding windows and idle experts are not taken off: use a dense model.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from bench_engine import (
    TokenIds,
    add_engine_options,
    decode_step_seconds,
    describe,
    make_engine,
    prefill_seconds,
    random_tokens,
)
from tqdm import tqdm

from jradix import Engine

BATCHES = (1, 16)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    context_len: int = 256  # the mean over the measured decode steps
    num_steps: int = 32
    prompt_len: int = 1024
    stream_bytes: int = 1 << 28
    matmul_size: int = 2048


QUICK = Sizes(context_len=48, num_steps=8, prompt_len=128, stream_bytes=1 << 22, matmul_size=256)


@dataclass(frozen=True, slots=True)
class Work:
    """What the model cannot avoid to do."""

    weight_bytes: int  # read by every step
    kv_bytes: int  # of one token
    prefill_flops: float  # of a prompt of `Sizes.prompt_len`

    @classmethod
    def of(cls, engine: Engine, prompt_len: int) -> "Work":
        config = engine.model_config
        parameters = engine.runner.parameters
        num_weights = sum(array.size for array in parameters)
        itemsize = parameters[0].dtype.itemsize
        head = config.vocab_size * config.hidden_size
        in_layers = num_weights - head * (1 if config.tie_word_embeddings else 2)
        pairs = prompt_len * (prompt_len + 1) / 2
        attention = 4.0 * config.layers * config.q_heads * config.head_dim * pairs
        return cls(
            weight_bytes=(in_layers + head) * itemsize,
            kv_bytes=2 * config.layers * config.kv_heads * config.head_dim * itemsize,
            prefill_flops=2.0 * (in_layers * prompt_len + head) + attention,
        )


class Machine:
    """Measures what this machine can do at most, with arrays that are made once."""

    def __init__(self, sizes: Sizes, dtype: str) -> None:
        # Two axes, and the long one summed last: XLA gives each core some of the rows.
        self._stream = jnp.ones((64, sizes.stream_bytes // 256), jnp.float32)
        self._square = jnp.ones((sizes.matmul_size, sizes.matmul_size), dtype)
        self._sum = jax.jit(lambda x: x.sum(axis=1))
        self._copy = jax.jit(jnp.negative)
        self._matmul = jax.jit(jnp.matmul)

    def read_bandwidth(self) -> float:
        return self._stream.nbytes / seconds(lambda: self._sum(self._stream))

    def copy_bandwidth(self) -> float:
        return 2 * self._stream.nbytes / seconds(lambda: self._copy(self._stream))

    def matmul_flops(self) -> float:
        return 2 * self._square.shape[0] ** 3 / seconds(lambda: self._matmul(self._square, self._square))


def seconds(run: Callable[[], jax.Array]) -> float:
    start = time.perf_counter()
    run().block_until_ready()
    return time.perf_counter() - start


class Speeds:
    """Measures the engine: tokens/s, on prompts that it has never seen."""

    def __init__(self, engine: Engine, sizes: Sizes) -> None:
        self._engine, self._sizes = engine, sizes
        self._rng = np.random.default_rng(0)

    def decode(self, batch: int) -> float:
        prompt_len = self._sizes.context_len - self._sizes.num_steps // 2
        steps = decode_step_seconds(self._engine, self._prompts(batch, prompt_len), self._sizes.num_steps)
        self._engine.flush_cache()
        return batch * len(steps) / sum(steps)

    def prefill(self) -> float:
        taken = prefill_seconds(self._engine, self._prompts(1, self._sizes.prompt_len))
        self._engine.flush_cache()
        return self._sizes.prompt_len / taken

    def _prompts(self, count: int, prompt_len: int) -> list[TokenIds]:
        return [random_tokens(self._rng, self._engine.model_config.vocab_size, prompt_len) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: medians, and each repeat's value."""

    name: str
    value: float  # in `unit`
    unit: str
    samples: list[float]
    ms: float | None = None  # of one decode step, of the prefill
    utilisation: float | None = None  # share of the limit: MBU of decode, MFU of prefill


def measure(engine: Engine, sizes: Sizes, dtype: str, repeats: int) -> list[Row]:
    machine, speeds = Machine(sizes, dtype), Speeds(engine, sizes)
    quantities: dict[str, Callable[[], float]] = {
        "read": machine.read_bandwidth,
        "copy": machine.copy_bandwidth,
        "matmul": machine.matmul_flops,
        **{f"decode {batch}": partial(speeds.decode, batch) for batch in BATCHES},
        "prefill": speeds.prefill,
    }
    samples: dict[str, list[float]] = {name: [] for name in quantities}
    for quantity in tqdm(quantities.values(), desc="compiling", file=sys.stderr):
        quantity()
    num_compiled = engine.runner.num_compiled
    for name, quantity in tqdm([*quantities.items()] * repeats, desc="measuring", file=sys.stderr):
        samples[name].append(quantity())
    assert engine.runner.num_compiled == num_compiled, "something was compiled while it was timed"
    return report(samples, Work.of(engine, sizes.prompt_len), sizes)


def report(samples: dict[str, list[float]], work: Work, sizes: Sizes) -> list[Row]:
    medians = {name: median(values) for name, values in samples.items()}
    bandwidth = max(medians["read"], medians["copy"])
    limits = [
        Row(name, medians[name] / 1e9, unit, [value / 1e9 for value in samples[name]])
        for name, unit in (("read", "GB/s"), ("copy", "GB/s"), ("matmul", "GFLOP/s"))
    ]
    decodes: list[Row] = []
    for batch in BATCHES:
        name = f"decode {batch}"
        step_seconds = batch / medians[name]
        needed = work.weight_bytes + batch * sizes.context_len * work.kv_bytes
        utilisation = needed / step_seconds / bandwidth
        decodes.append(Row(name, medians[name], "tokens/s", samples[name], step_seconds * 1e3, utilisation))
    prefill_seconds = sizes.prompt_len / medians["prefill"]
    utilisation = work.prefill_flops / prefill_seconds / medians["matmul"]
    prefill = Row("prefill", medians["prefill"], "tokens/s", samples["prefill"], prefill_seconds * 1e3, utilisation)
    return [*limits, *decodes, prefill]


def format_table(rows: list[Row]) -> str:
    lines = [f"{'':<10} {'median':>10} {'':<9} {'lowest':>10} {'highest':>10} {'ms':>8}"]
    for row in rows:
        line = f"{row.name:<10} {row.value:10.1f} {row.unit:<9} {min(row.samples):10.1f} {max(row.samples):10.1f}"
        if row.ms is not None:
            kind = "MFU" if row.name == "prefill" else "MBU"
            line += f" {row.ms:8.1f}  {kind} {row.utilisation:.1%}"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a small version of everything, for tests")
    parser.add_argument("--json", type=Path, help="write the table's numbers here")
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else Sizes()
    longest = max(sizes.prompt_len, sizes.context_len + sizes.num_steps + 2 * max(BATCHES))
    engine = make_engine(options, max_total_tokens=max(BATCHES) * longest)
    rows = measure(engine, sizes, options.dtype, options.repeats)
    print(describe(options))
    print(f"decode at batch {' and '.join(map(str, BATCHES))}, context {sizes.context_len}; prompt {sizes.prompt_len}")
    print(format_table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
