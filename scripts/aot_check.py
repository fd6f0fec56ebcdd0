"""Compiles every step program of a model for TPUs and an H200, on a machine with neither, and checks what they need.

    python scripts/aot_check.py                                   # some programs of each model for each TPU
    python scripts/aot_check.py --targets h200 --all-buckets      # needs jax's CUDA plug-in: pip install jradix[cuda]
    python scripts/aot_check.py --models llama-3.1-8b --targets v6e --json aot.json
    python scripts/aot_check.py --kv-cache-dtype int8 --quantization int8
    python scripts/aot_check.py --devices 4 8 --models llama-3.1-70b --targets v6e tpu7x
    python scripts/aot_check.py --devices 8 --models llama-3.1-70b --targets h200 --compiled-layers 4

A line a program: seconds to compile, bytes of arguments, of arguments that results take over (*aliased*), and of
temporaries, all of one device, and the number of all-reduces. A program fails if the KV pool is not aliased, if it
copies an array as large as a 16th of the pool, if its temporaries exceed 5% of the pool, or if devices send each other
more than two sums a layer and one for the embedding.

The pool takes what the weights leave of 85% of the memory. A model that would take more than four fifths of that is
compiled with as many layers as take half of it, which the table says; layers are alike, so only time and memory change.
With --compiled-layers weights and pool are still those of all layers, but the program runs only so many of them: where
layers are not scanned, the time to compile a large model grows with them, and temporaries little.

The estimates are no measurements. A decode step of 64 rows at context 1024 must read all weights and the rows' KV:
their bytes over the memory's bandwidth. Prefill of 2048 tokens must do their multiplications: over the peak FLOP/s.
Both are of the whole model on one device, the maker's figures, and nothing lost.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, get_args

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from known_models import KNOWN_MODELS, SMALL_MODELS, model_config
from tqdm import tqdm

from jradix.aot import TARGETS, Target, collectives, copied_shapes
from jradix.batch import packed_len
from jradix.cache.pool import pages_that_fit
from jradix.config import Buckets, EngineConfig, StepShape
from jradix.jitted import jit_copies, jit_forward
from jradix.mesh import ACCELERATOR_FRACTION, layer_loop_for
from jradix.model.config import ModelConfig
from jradix.model.kv_calibration import scales_shape
from jradix.model.quantized_kv import is_quantized
from jradix.model.sharding import TENSOR_AXIS, Sharding
from jradix.model.transformer import Transformer
from jradix.model.weights import abstract_transformer
from jradix.pallas.geometry import Geometry
from jradix.pallas.layout import KVLayout
from jradix.pallas.ops import Kernels, choose
from jradix.startup import QUANTIZATIONS, kv_dtype_of

DTYPE = jnp.dtype(jnp.bfloat16)
MAX_TEMPORARY = 0.05  # of the pool
MAX_COPY = 1 / 16  # of the pool
LARGEST_WEIGHTS = 0.8  # of the memory for weights and pool
BFLOAT16 = EngineConfig(model_path="")


@dataclass(frozen=True, slots=True)
class Plan:
    """What an engine on some devices of a target would run."""

    target: Target
    config: ModelConfig
    devices: int
    kernels: Kernels
    layout: KVLayout
    compiled_layers: int
    buckets: Buckets
    quantization: str | None
    kv_dtype: jnp.dtype

    @classmethod
    def of(
        cls, target: Target, name: str, engine: EngineConfig, devices: int = 1, compiled_layers: int | None = None
    ) -> "Plan":
        config, quantization = model_config(name), QUANTIZATIONS[engine.quantization]
        context_length = engine.context_length or config.max_position_embeddings
        buckets = Buckets.of(engine, context_length)
        memory = int(target.memory_bytes * ACCELERATOR_FRACTION)
        if weight_bytes(config, devices, quantization) > memory * LARGEST_WEIGHTS:
            while weight_bytes(config, devices, quantization) > memory / 2:
                config = model_config(name, config.layers - 1)
        sharding = abstract_sharding(config, devices)
        heads = (sharding.q_heads_of_device, sharding.kv_heads_of_device)
        kv_dtype = kv_dtype_of(engine)
        geometry = Geometry(*heads, config.head_dim, engine.page_size, DTYPE.name, kv_dtype.name)
        kernels = choose(target.platform, target.device, geometry, buckets.max_pages[-1])
        page = KVLayout(
            config.layers, 1, engine.page_size, sharding.heads.slots, config.head_dim, joined=kernels.joined_pages
        )
        at_most = engine.max_running_requests * -(-context_length // engine.page_size)
        budget = memory - weight_bytes(config, devices, quantization)
        pages = pages_that_fit(page.page_bytes(kv_dtype.itemsize) // devices, budget, at_most) + 1
        layout = replace(page, num_pages=pages)
        compiled_layers = min(config.layers, compiled_layers or config.layers)
        return cls(target, config, devices, kernels, layout, compiled_layers, buckets, quantization, kv_dtype)

    @property
    def layer_loop(self) -> Any:
        return layer_loop_for(self.target.platform, self.target.device)

    @property
    def pool_bytes(self) -> int:
        """Of one device."""
        return self.layout.page_bytes(self.kv_dtype.itemsize) * self.layout.num_pages // self.devices


def abstract_sharding(config: ModelConfig, devices: int) -> Sharding:
    """To know sizes, without a description of the devices."""
    mesh: Any = AbstractMesh((devices,), (TENSOR_AXIS,))
    return Sharding(config, mesh)


def weight_bytes(config: ModelConfig, devices: int = 1, quantization: str | None = None) -> int:
    """Of one device."""
    options: Any = {"dtype": DTYPE, "layer_loop": "unroll", "sharding": abstract_sharding(config, devices)}
    parameters = jax.tree.leaves(abstract_transformer(config, quantization=quantization, **options))
    return sum(prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in parameters)


@dataclass(frozen=True, slots=True)
class Line:
    """One program, compiled."""

    target: str
    model: str
    program: str
    kernels: str
    devices: int
    layers: int
    compiled_layers: int
    seconds: float
    argument_bytes: int
    alias_bytes: int
    temp_bytes: int
    pool_bytes: int
    all_reduces: int
    faults: list[str]


def compile_programs(plan: Plan, model: str, target: str, shapes: Sequence[StepShape]) -> Iterator[Line]:
    """The copy of pages, then a forward pass for each shape."""
    mesh = plan.target.mesh(plan.devices)
    sharding = Sharding(plan.config, mesh)
    options: Any = {"dtype": DTYPE, "layer_loop": plan.layer_loop, "quantization": plan.quantization}
    abstract = abstract_transformer(model_config(model, plan.compiled_layers), sharding=sharding, **options)
    scales: Any = None
    if is_quantized(plan.kv_dtype):
        scales = jax.ShapeDtypeStruct(scales_shape(plan.layout), jnp.float32, sharding=sharding.kv_scales)
    forward, parameters = jit_forward(abstract, plan.layout.num_pages, plan.kernels, sharding, scales)
    pool = jax.ShapeDtypeStruct(plan.layout.shape, plan.kv_dtype, sharding=sharding.pool)
    pool_size = prod(sharding.pool.shard_shape(pool.shape))
    slots = plan.buckets.decode_rows[-1]

    def line(program: str, allowed: Counter[str], jitted: Any, *args: Any, static: tuple[Any, ...] = ()) -> Line:
        layers = (plan.config.layers, plan.compiled_layers)
        head = (target, model, program, plan.kernels.name, plan.devices, *layers)
        start = time.perf_counter()
        try:
            compiled = plan.target.compile(jitted, *args, mesh=mesh, static=static)
        except jax.errors.JaxRuntimeError as error:
            reason = f"does not compile: {error}".splitlines()[0][:300]
            return Line(*head, time.perf_counter() - start, 0, 0, 0, plan.pool_bytes, 0, [reason])
        seconds = time.perf_counter() - start
        memory = compiled.memory_analysis()
        assert memory is not None
        numbers = (memory.argument_size_in_bytes, memory.alias_size_in_bytes, memory.temp_size_in_bytes)
        sent = collectives(compiled)
        faults = find_faults(numbers[1], numbers[2], plan.pool_bytes, pool_size, copied_shapes(compiled))
        faults += [f"{sent[kind]} of {kind}, expected {allowed[kind]}" for kind in sent if sent[kind] != allowed[kind]]
        return Line(*head, seconds, *numbers, plan.pool_bytes, sent["all-reduce"], faults)

    copies = jax.ShapeDtypeStruct((2, plan.buckets.extend_rows[-1]), jnp.int32)
    yield line("copy of pages", Counter(), jit_copies(plan.layout.num_pages, sharding), pool, copies)
    sums = sums_of(abstract)
    for shape in shapes:
        arrays = jax.ShapeDtypeStruct((packed_len(shape),), jnp.int32)
        next_tokens = jax.ShapeDtypeStruct((slots + 1,), jnp.int32)
        yield line(describe(shape), sums, forward, parameters, pool, next_tokens, arrays, static=(shape,))


def sums_of(model: Transformer) -> Counter[str]:
    """What devices may send each other: two sums a layer, those of a scanned layer once, and one for the embedding."""
    return Counter({"all-reduce": 0 if model.axis is None else 1 + 2 * len(model.blocks)})


def find_faults(
    alias_bytes: int, temp_bytes: int, pool_bytes: int, pool_size: int, copies: set[tuple[int, ...]]
) -> list[str]:
    """What is wrong with a program, in words."""
    faults: list[str] = []
    if alias_bytes < pool_bytes:
        faults.append(f"the pool is not updated in place: {alias_bytes} of {pool_bytes} bytes aliased")
    if temp_bytes > MAX_TEMPORARY * pool_bytes:
        faults.append(f"temporaries take {temp_bytes / pool_bytes:.1%} of the pool")
    faults += [f"a copy of shape {list(shape)}" for shape in copies if prod(shape) > MAX_COPY * pool_size]
    return faults


def some_of(shapes: Sequence[StepShape]) -> list[StepShape]:
    """The largest decode step, and the steps with most and with fewest prompt tokens beside decoding rows."""
    decode = [shape for shape in shapes if not shape.extend_rows]
    mixed = sorted((shape for shape in shapes if shape.extend_rows), key=lambda shape: (shape.tokens, shape.rows))
    return [decode[-1], mixed[0], mixed[-1]]


def describe(shape: StepShape) -> str:
    extend = f" + {shape.extend_tokens} tokens of {shape.extend_rows} rows" if shape.extend_rows else ""
    return f"{shape.decode_rows} decode rows{extend}, {shape.max_pages} pages a row"


@dataclass(frozen=True, slots=True)
class Estimate:
    """The least time of a step of the whole model on one device; see the top of this file."""

    target: str
    model: str
    decode_ms: float
    prefill_ms: float
    fits: bool


def estimate(
    target: str,
    model: str,
    engine: EngineConfig = BFLOAT16,
    rows: int = 64,
    context_len: int = 1024,
    prompt_len: int = 2048,
) -> Estimate:
    config, chip = model_config(model), TARGETS[target]
    embedding = config.vocab_size * config.hidden_size * DTYPE.itemsize
    weights = weight_bytes(config, quantization=QUANTIZATIONS[engine.quantization])
    read = weights if config.tie_word_embeddings else weights - embedding
    position = rows * 2 * config.kv_heads * config.head_dim * kv_dtype_of(engine).itemsize  # of a layer
    kv = position * sum(min(context_len, window or context_len) for window in config.windows)
    idle_experts = len(config.moe_layers) * (config.experts - config.experts_per_token)  # to one token
    multiplied = (weight_bytes(config) - embedding * (2 - config.tie_word_embeddings)) / DTYPE.itemsize
    multiplied -= 3 * idle_experts * config.hidden_size * config.expert_mlp_size
    pairs = sum(seen_pairs(prompt_len, window or prompt_len) for window in config.windows)
    flops = 2.0 * multiplied * prompt_len + 4.0 * config.q_heads * config.head_dim * pairs
    decode_ms = 1e3 * max((read + kv) / chip.bandwidth, 2.0 * multiplied * rows / chip.flops)
    fits = weights + position * context_len * config.layers < chip.memory_bytes
    return Estimate(target, model, decode_ms, 1e3 * flops / chip.flops, fits)


def seen_pairs(prompt_len: int, window: int) -> float:
    """Pairs of a query and a key that it sees."""
    window = min(window, prompt_len)
    return prompt_len * window - window * (window - 1) / 2


def format_lines(lines: Sequence[Line]) -> str:
    rows = [
        f"{'target':<7}{'devices':>7} {'model':<14}{'kernels':<9}{'layers':>8}{'s':>7}{'args':>10}{'aliased':>10}"
        f"{'temp':>9}{'sums':>6}  program"
    ]
    for line in lines:
        layers = f"{line.layers}" if line.compiled_layers == line.layers else f"{line.compiled_layers} of {line.layers}"
        sizes = [f"{size / 2**20:.0f} M" for size in (line.argument_bytes, line.alias_bytes, line.temp_bytes)]
        rows.append(
            f"{line.target:<7}{line.devices:>7} {line.model:<14}{line.kernels:<9}{layers:>8}{line.seconds:>7.1f}"
            f"{sizes[0]:>10}{sizes[1]:>10}{sizes[2]:>9}{line.all_reduces:>6}  {line.program}"
        )
        rows += [f"    FAILED: {fault}" for fault in line.faults]
    return "\n".join(rows)


def format_estimates(estimates: Sequence[Estimate]) -> str:
    rows = [f"{'estimate':<9}{'model':<14}{'decode, ms':>12}{'tokens/s':>10}{'prefill, ms':>13}{'tokens/s':>10}"]
    for entry in estimates:
        row = f"{entry.target:<9}{entry.model:<14}{entry.decode_ms:>12.2f}{64e3 / entry.decode_ms:>10.0f}"
        row += f"{entry.prefill_ms:>13.1f}{2048e3 / entry.prefill_ms:>10.0f}"
        rows.append(row + ("" if entry.fits else "  (more memory than one device has)"))
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if a program failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tpus = [name for name, target in TARGETS.items() if target.platform == "tpu"]
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=tpus, help="default: every TPU")
    small = list(SMALL_MODELS)
    parser.add_argument(
        "--models", nargs="+", choices=list(KNOWN_MODELS), default=small, help=f"default: {', '.join(small)}"
    )
    parser.add_argument(
        "--devices", nargs="+", type=int, choices=[1, 2, 4, 8], default=[1], help="that share each layer"
    )
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--context-length", type=int, default=8192)
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--chunked-prefill-size", type=int, default=2048)
    for name in ("quantization", "kv_cache_dtype"):
        [field] = (field for field in fields(EngineConfig) if field.name == name)
        choices = get_args(field.type)
        parser.add_argument(f"--{name.replace('_', '-')}", choices=choices, default="auto", help="as of an engine")
    parser.add_argument("--compiled-layers", type=int, help="fewer than the model has; weights and pool are of all")
    parser.add_argument("--all-buckets", action="store_true", help="every step program instead of three a model")
    parser.add_argument("--json", type=Path, help="write the table's numbers here")
    options = parser.parse_args(arguments)
    if "h200" in options.targets and find_spec("jax_plugins") is None:
        parser.error("h200 needs jax's CUDA plug-in: make aot-gpu installs it")
    limit = min(model_config(model).max_position_embeddings for model in options.models)
    if not 2 <= options.context_length <= limit:
        parser.error(f"--context-length must be from 2 to {limit}, these models' limit, got {options.context_length}")
    if options.compiled_layers is not None and options.compiled_layers < 1:
        parser.error(f"--compiled-layers must be at least 1, got {options.compiled_layers}")
    try:
        lines, estimates = check(options)
    except ValueError as error:
        parser.error(str(error))
    print(format_lines(lines), format_estimates(estimates), sep="\n\n")
    if options.json:
        found = {"programs": list(map(asdict, lines)), "estimates": list(map(asdict, estimates))}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(line.faults for line in lines) else 0


def check(options: argparse.Namespace) -> tuple[list[Line], list[Estimate]]:
    """Compile what the command line asks for. ValueError if no engine could be started so."""
    engine = EngineConfig(
        model_path="",
        page_size=options.page_size,
        context_length=options.context_length,
        max_running_requests=options.max_running_requests,
        chunked_prefill_size=options.chunked_prefill_size,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    pairs = [(target, model) for target in options.targets for model in options.models]
    cases = [(*pair, devices) for pair in pairs for devices in options.devices]
    lines: list[Line] = []
    for target, model, devices in tqdm(cases, desc="compiling", file=sys.stderr):
        plan = Plan.of(TARGETS[target], model, engine, devices, options.compiled_layers)
        shapes = plan.buckets.shapes()
        lines += compile_programs(plan, model, target, shapes if options.all_buckets else some_of(shapes))
    estimates = [estimate(target, model, engine) for target, model in pairs]
    return lines, estimates


if __name__ == "__main__":
    sys.exit(main())
