"""Checks and measures jradix on a real GPU or TPU, in one visit of at most ten minutes.

    python scripts/device_check.py --json device.json
    python scripts/device_check.py --parts kernels attention --minutes 3
    python scripts/device_check.py --quick          # everything small, on any machine: for tests

Parts, in this order; one that fails is reported, and the next goes on. None begins after `--minutes`.

- *kernels*: the cases of the tests, at page sizes that the kernels take, against a softmax in float64; some with
  pools of 8 bits too. Every slot that no row owns holds NaN. The error must stay below the table `LARGEST_ERROR`.
- *limits*: bandwidth of a copy, FLOP/s of a matmul in bfloat16.
- *attention*: bytes of KV a second of decode rows at contexts of 1k and 8k, FLOP/s of prompts, and their share of the
  limits; of XLA's path as well, and of cuDNN's paged attention where jax exposes it; decode from pools of 8 bits too.
- *steps*: tokens a second of whole decode steps on random weights, at batches 1, 16, 64, 256 and context 1k.
- *prefix*: the four workloads of `bench_prefix.py` on random weights. Each runs once untimed, which compiles.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_engine import decode_step_seconds, random_tokens
from bench_prefix import QUICK_SCENARIOS, SCENARIOS, measure_scenario
from bench_raw import QUICK, Machine, Sizes
from known_models import geometry_of, hf_config, model_config

from jradix import Engine
from jradix.mesh import choose_kernels, device_description
from jradix.pallas import ops
from jradix.pallas.geometry import Geometry
from jradix.pallas.layout import KVLayout
from jradix.pallas.ops import XLA, Kernels
from jradix.pallas.scoring import Scoring

ROOT = Path(__file__).parents[1]

EIGHT_BITS = {"int8": "int8", "fp8": "float8_e4m3fn"}
"""Types of a pool, by the names that the tests give them."""
LARGEST_ERROR = {"float32": 2e-3, "bfloat16": 3e-2}
"""By dtype, for values of about 1. XLA's path multiplies float32 with fewer digits on a TPU or a GPU."""

MAX_PAGES = 1024
"""Of a row, at most."""
Row = dict[str, Any]
"""One line of a table: what was checked or measured, by name."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is."""

    limits: Sizes
    every_case: int = 1
    geometries: tuple[str, ...] = ("llama-3.1-8b", "qwen3-0.6b", "smollm2-135m")
    page_size: int = 64
    attention_rows: int = 64
    contexts: tuple[int, ...] = (1024, 8192)
    prompts: tuple[tuple[int, int, int], ...] = ((1, 2048, 0), (4, 512, 1024), (16, 128, 4096))
    """Rows, new tokens and cached tokens of each."""
    step_models: tuple[str, ...] = ("qwen3-0.6b", "qwen3-8b")
    batches: tuple[int, ...] = (1, 16, 64, 256)
    step_context: int = 1024
    num_steps: int = 32
    prefix_model: str = "qwen3-0.6b"
    scenarios: tuple[Any, ...] = SCENARIOS
    model_fields: tuple[tuple[str, Any], ...] = ()


FULL = Scale(limits=Sizes(stream_bytes=1 << 32, matmul_size=8192))
SMALL = Scale(
    limits=QUICK,
    every_case=31,
    geometries=("smollm2-135m",),
    page_size=16,
    attention_rows=2,
    contexts=(64,),
    prompts=((2, 16, 32),),
    step_models=("qwen3-0.6b",),
    batches=(2,),
    step_context=48,
    num_steps=3,
    scenarios=QUICK_SCENARIOS[:1],
    model_fields=(("num_hidden_layers", 1), ("vocab_size", 512), ("hidden_size", 64), ("intermediate_size", 128)),
)


def kernels(scale: Scale) -> Iterator[Row]:
    """Every case in both dtypes by this device's kernels, and some by XLA's path and with pools of 8 bits."""
    sys.path.append(str(ROOT))
    cases = import_module("tests.pallas.cases")
    for number, case in list(enumerate(cases.CASES))[:: scale.every_case]:
        narrow = [("bfloat16", to) for to in EIGHT_BITS if number % 8 == {"int8": 1, "fp8": 7}[to]]
        for dtype, to in [("float32", None), ("bfloat16", None), *narrow]:
            paged = replace(case, page_size=max(32 if to else 16, case.page_size))
            geometry = Geometry(case.q_heads, case.kv_heads, case.head_dim, paged.page_size, dtype, EIGHT_BITS.get(to))
            chosen = choose_kernels(geometry, MAX_PAGES)
            xla = replace(XLA, joined_pages=chosen.joined_pages)
            for by in ([chosen] if chosen.name != "xla" else []) + ([xla] if number % 5 == 0 or to else []):
                label = {"case": case.name, "dtype": dtype, "pool": to or dtype, "by": by.name, "passed": False}
                yield attempted(label, partial(check_case, cases, paged, dtype, by, to))
            if number == 0:
                label = {"case": "write of tokens", "dtype": dtype, "by": chosen.name, "passed": False}
                yield attempted(label, partial(check_write, cases, replace(paged, cached=(60,)), dtype, chosen))


def attempted(label: Row, measure: Callable[[], Row]) -> Row:
    """The row, or what went wrong: one refusal of a compiler must not cost the visit the rows after it."""
    try:
        return label | measure()
    except Exception as error:
        return label | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def check_case(cases: ModuleType, case: Any, dtype: str, implementation: Kernels, to: str | None = None) -> Row:
    """One of the cases of the tests' module `cases`, with a pool of `dtype` or narrowed `to` one of 8 bits."""
    inputs = cases.make_inputs(case, jnp.dtype(dtype))
    inputs = cases.narrowed(inputs, to) if to else inputs
    pool = inputs.joined_pool() if implementation.joined_pages else inputs.pool
    arrays = (pool, inputs.page_table, inputs.seq_lens)
    want = cases.dense_attention(case, inputs)
    extend = jax.jit(partial(ops.extend_attention, scoring=inputs.scoring, kernels=implementation))
    got = extend(inputs.q, *arrays, inputs.query_starts, sinks=inputs.sinks)
    error = np.abs(np.asarray(got, np.float64) - want).max()
    if set(case.new) == {1}:  # then token r belongs to row r
        decode = jax.jit(partial(ops.decode_attention, scoring=inputs.scoring, kernels=implementation))
        got = decode(inputs.q[: len(case.new)], *arrays, sinks=inputs.sinks)
        error = max(error, np.abs(np.asarray(got, np.float64) - want[: len(case.new)]).max())
    error /= cases.NARROW[to] if to else 1
    passed = bool(error <= LARGEST_ERROR[dtype])  # NaN is not
    return {"largest error": float(error), "passed": passed}


def check_write(cases: ModuleType, case: Any, dtype: str, implementation: Kernels) -> Row:
    """Tokens written to slots of a pool, one of them outside of it: every other slot keeps what it had."""
    inputs = cases.make_inputs(case, jnp.dtype(dtype), poison=False)
    pool = inputs.joined_pool() if implementation.joined_pages else inputs.pool
    keys, values = jax.random.normal(jax.random.key(2), (2, 20, case.kv_heads, case.head_dim), dtype)
    offsets = jnp.asarray([*range(case.page_size - 12, case.page_size), *range(6), 3, 0], jnp.int32)
    pages = jnp.asarray([2] * 12 + [1] * 6 + [0, -1], jnp.int32)
    arrays = (keys, values, pages, offsets)
    got = jax.jit(partial(ops.write_kv, kernels=implementation))(pool, *arrays)
    want = jax.jit(ops.write_kv)(pool, *arrays)
    error = float(jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32)).max())
    return {"largest error": error, "passed": not error}


def limits(scale: Scale) -> Iterator[Row]:
    machine = Machine(scale.limits, "bfloat16")
    for name, measured, unit in (
        ("copy", machine.copy_bandwidth, "GB/s"),
        ("read", machine.read_bandwidth, "GB/s"),
        ("matmul", machine.matmul_flops, "GFLOP/s"),
    ):
        measured()
        yield {"limit": name, "value": median(measured() for _ in range(5)) / 1e9, "unit": unit}


def attention(scale: Scale) -> Iterator[Row]:
    for name in scale.geometries:
        geometry = geometry_of(model_config(name), scale.page_size)
        chosen = choose_kernels(geometry, MAX_PAGES)
        xla = replace(XLA, joined_pages=chosen.joined_pages)
        for by in [chosen, xla] if chosen.name != "xla" else [xla]:
            label = {"model": name, "by": by.name}
            for context in scale.contexts:
                yield attempted(label, partial(measure_decode, scale, geometry, by, context))
            for prompt in scale.prompts:
                yield attempted(label, partial(measure_prompt, geometry, by, *prompt))
        for pool in EIGHT_BITS.values():
            narrow = geometry._replace(kv_dtype=pool)
            by = choose_kernels(narrow, MAX_PAGES)
            label = {"model": name, "by": by.name, "pool": pool}
            yield attempted(label, partial(measure_decode, scale, narrow, by, scale.contexts[-1]))
        for context in scale.contexts if jax.default_backend() == "gpu" else ():
            yield attempted({"model": name, "by": "cudnn"}, partial(measure_cudnn, scale, geometry, context))


def random_pool(geometry: Geometry, num_pages: int, implementation: Kernels) -> jax.Array:
    shape = KVLayout(
        1, num_pages, geometry.page_size, geometry.kv_heads, geometry.head_dim, implementation.joined_pages
    ).shape
    numbers = jax.random.normal(jax.random.key(0), shape, geometry.dtype)
    return numbers if geometry.kv_dtype is None else (24 * numbers).astype(geometry.kv_dtype)


def scattered_table(rows: int, pages: int) -> jax.Array:
    order = np.random.default_rng(0).permutation(rows * pages) + 1
    return jnp.asarray(order.reshape(rows, pages), jnp.int32)


def measure_decode(scale: Scale, geometry: Geometry, implementation: Kernels, context: int) -> Row:
    rows, pages = scale.attention_rows, context // geometry.page_size
    pool = random_pool(geometry, rows * pages + 1, implementation)
    q = jax.random.normal(jax.random.key(1), (rows, geometry.q_heads, geometry.head_dim), geometry.dtype)
    scoring = Scoring(geometry.head_dim**-0.5)
    attend = jax.jit(partial(ops.decode_attention, scoring=scoring, kernels=implementation))
    taken = seconds_of(attend, q, pool, scattered_table(rows, pages), jnp.full(rows, context, jnp.int32))
    return {
        "what": f"decode {rows} x {context}",
        "us": taken * 1e6,
        "GB/s": decode_bytes(geometry, rows, context) / taken / 1e9,
    }


def decode_bytes(geometry: Geometry, rows: int, context: int) -> int:
    return rows * context * 2 * geometry.kv_heads * geometry.head_dim * geometry.pool_itemsize


def measure_prompt(geometry: Geometry, implementation: Kernels, rows: int, new: int, cached: int) -> Row:
    pages = -(-(new + cached) // geometry.page_size)
    pool = random_pool(geometry, rows * pages + 1, implementation)
    q = jax.random.normal(jax.random.key(1), (rows * new, geometry.q_heads, geometry.head_dim), geometry.dtype)
    starts = jnp.arange(rows + 1, dtype=jnp.int32) * new
    scoring = Scoring(geometry.head_dim**-0.5)
    attend = jax.jit(partial(ops.extend_attention, scoring=scoring, kernels=implementation))
    lens = jnp.full(rows, new + cached, jnp.int32)
    taken = seconds_of(attend, q, pool, scattered_table(rows, pages), lens, starts)
    pairs = rows * (new * cached + new * (new + 1) / 2)
    flops = 4.0 * geometry.q_heads * geometry.head_dim * pairs
    return {"what": f"extend {rows} x {new} on {cached}", "us": taken * 1e6, "TFLOP/s": flops / taken / 1e12}


def measure_cudnn(scale: Scale, geometry: Geometry, context: int) -> Row:
    """Decode by cuDNN, which takes keys and values from pools of their own."""
    from jax._src.cudnn.fused_attention_stablehlo import paged_attention

    rows, pages = scale.attention_rows, context // geometry.page_size
    shape = (rows * pages, geometry.page_size, geometry.kv_heads, geometry.head_dim)
    keys, values = jax.random.normal(jax.random.key(0), (2, *shape), geometry.dtype)
    q = jax.random.normal(jax.random.key(1), (rows, 1, geometry.q_heads, geometry.head_dim), geometry.dtype)
    table = (scattered_table(rows, pages) - 1).reshape(rows, 1, pages, 1)
    lens = jnp.full(rows, context, jnp.int32)
    attend = jax.jit(partial(paged_attention, scale=geometry.head_dim**-0.5))
    taken = seconds_of(attend, q, keys, values, jnp.ones(rows, jnp.int32), lens, table, table)
    return {
        "what": f"decode {rows} x {context}",
        "us": taken * 1e6,
        "GB/s": decode_bytes(geometry, rows, context) / taken / 1e9,
    }


def seconds_of(jitted: Callable[..., Any], *arguments: jax.Array) -> float:
    """Seconds of one call when the device has the next one queued already: median of five runs of ten."""
    jax.block_until_ready(jitted(*arguments))
    runs: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([jitted(*arguments) for _ in range(10)])
        runs.append((time.perf_counter() - start) / 10)
    return median(runs)


def dummy_engine(scale: Scale, name: str, **fields: Any) -> Engine:
    """An engine of random weights, which compiles what it needs when it needs it."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(hf_config(name, **dict(scale.model_fields))))
        return Engine(
            model_path=directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            page_size=scale.page_size,
            chunked_prefill_size=2048,
            **fields,
        )


def steps(scale: Scale) -> Iterator[Row]:
    longest = scale.step_context + 2 * scale.num_steps + max(scale.batches)
    for name in scale.step_models:
        engine = dummy_engine(
            scale,
            name,
            context_length=-(-longest // scale.page_size) * scale.page_size,
            max_running_requests=max(scale.batches),
            max_total_tokens=max(scale.batches) * (longest + scale.page_size),
        )
        rng = np.random.default_rng(0)
        for batch in scale.batches:
            prompt_len = scale.step_context - scale.num_steps // 2
            prompts = [random_tokens(rng, engine.model_config.vocab_size, prompt_len) for _ in range(batch)]
            decode_step_seconds(engine, prompts, scale.num_steps)  # compiles
            taken = median(decode_step_seconds(engine, prompts, scale.num_steps))
            engine.flush_cache()
            yield {"model": name, "batch": batch, "ms": taken * 1e3, "tokens/s": batch / taken}


def prefix(scale: Scale) -> Iterator[Row]:
    scenarios = scale.scenarios
    longest = max(scenario.longest for scenario in scenarios) + 2 * scale.page_size
    engine = dummy_engine(
        scale,
        scale.prefix_model,
        context_length=-(-longest // scale.page_size) * scale.page_size,
        max_running_requests=max(scenario.concurrency for scenario in scenarios),
        max_total_tokens=max(scenario.concurrency for scenario in scenarios) * (longest + scale.page_size),
    )
    for scenario in scenarios:
        measure = partial(measure_scenario, engine, scenario, repeats=1, one_by_one=False, seed=0, advance=lambda: None)
        measure()  # compiles
        result = measure()
        yield {
            "scenario": scenario.name,
            "off_s": result.off_s,
            "on_s": result.on_s,
            "ratio": result.ratio,
            "predicted": result.predicted_ratio,
            "cached": result.cached_tokens,
            "ideal": result.ideal_cached_tokens,
        }


PARTS: dict[str, Callable[[Scale], Iterator[Row]]] = {
    "kernels": kernels,
    "limits": limits,
    "attention": attention,
    "steps": steps,
    "prefix": prefix,
}


def run_parts(names: list[str], scale: Scale, minutes: float) -> dict[str, Any]:
    """The rows of each part as far as it came, and what ended it early."""
    started = time.monotonic()
    found: dict[str, Any] = {}
    for name in names:
        if time.monotonic() - started > 60 * minutes:
            found[name] = {"rows": [], "error": f"not begun: {minutes} minutes were over"}
            continue
        part: dict[str, Any] = {"rows": []}
        found[name] = part
        begun = time.monotonic()
        try:
            for row in PARTS[name](scale):
                part["rows"].append(row)
                if time.monotonic() - started > 60 * minutes:
                    part["error"] = f"stopped: {minutes} minutes were over"
                    break
        except Exception as error:  # whatever it is: a visit is short, and the other parts want their turn
            traceback.print_exc()
            part["error"] = f"{type(error).__name__}: {error}"[:500]
        part["seconds"] = time.monotonic() - begun
    return found


def add_shares(parts: dict[str, Any]) -> None:
    """Add to what was measured of attention its share of the limits, if both were."""
    limits = {row["limit"]: row["value"] for row in parts.get("limits", {}).get("rows", [])}
    for row in parts.get("attention", {}).get("rows", []):
        if "GB/s" in row and "copy" in limits:
            row["of copy"] = row["GB/s"] / limits["copy"]
        if "TFLOP/s" in row and "matmul" in limits:
            row["of matmul"] = row["TFLOP/s"] * 1e3 / limits["matmul"]


def where_and_when() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    versions = {name: version(name) for name in ("jax", "jaxlib", "flax")}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": now, "device": device_description(), **versions, "commit": commit.stdout.strip()}


def format_report(report: dict[str, Any]) -> str:
    lines = [", ".join(f"{name} {value}" for name, value in report["where"].items())]
    for name, part in report["parts"].items():
        lines += ["", f"{name} ({part.get('seconds', 0):.0f} s)"]
        lines += ["  " + "  ".join(f"{key} {shown(value)}" for key, value in row.items()) for row in part["rows"]]
        if "error" in part:
            lines.append(f"  ENDED EARLY: {part['error']}")
    return "\n".join(lines)


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if something failed, ended early, or a kernel's error was too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=9, help="begin nothing new after so long")
    parser.add_argument("--quick", action="store_true", help="a small version of everything, for tests")
    parser.add_argument("--json", type=Path, help="write everything here")
    options = parser.parse_args(arguments)
    parts = run_parts(options.parts, SMALL if options.quick else FULL, options.minutes)
    add_shares(parts)
    report = {"where": where_and_when(), "parts": parts}
    print(format_report(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    rows = [row for part in parts.values() for row in part["rows"]]
    wrong = any("error" in row or not row.get("passed", True) for row in rows)
    return 1 if wrong or any("error" in part for part in parts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
