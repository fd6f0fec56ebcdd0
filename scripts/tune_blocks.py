"""Times the attention kernels with other block sizes than the tables have, on the GPU or TPU at hand.

    python scripts/tune_blocks.py --models llama-3.1-8b qwen3-0.6b --page-sizes 16 64 --json tuned.json

For every model, page size and kind of step it tries the blocks around those that `tpu_blocks` or `gpu_blocks` choose,
as far as they fit the chip's memory, and prints the fastest first, with the time relative to the choice of the table.
Blocks that the compiler refuses are listed last. To keep what it finds, change the numbers in those files.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from device_check import MAX_PAGES, random_pool, scattered_table, seconds_of
from known_models import SMALL_MODELS, geometry_of, model_config
from tqdm import tqdm

from jradix.mesh import choose_kernels, device_description
from jradix.pallas import gpu_blocks, gpu_decode, gpu_extend, tpu_blocks, tpu_decode, tpu_extend
from jradix.pallas.geometry import Geometry
from jradix.pallas.ops import Kernels
from jradix.pallas.scoring import Scoring

KINDS = ("decode", "extend")
DECODE_ROWS, CONTEXT, PROMPT_LEN = 64, 2048, 2048


@dataclass(frozen=True, slots=True)
class Trial:
    """One choice of blocks: its time, or why there is none."""

    blocks: dict[str, int]
    us: float | None
    error: str = ""


def chosen_blocks(kernels: Kernels, kind: str, geometry: Geometry) -> Any:
    """What the tables choose."""
    if kernels.name == "tpu":
        choose = tpu_blocks.decode_blocks if kind == "decode" else tpu_blocks.extend_blocks
        return choose(kernels.chip, geometry)
    return (gpu_blocks.decode_blocks if kind == "decode" else gpu_blocks.extend_blocks)(geometry)


def candidates(kernels: Kernels, kind: str, geometry: Geometry) -> Iterator[Any]:
    """The chosen blocks first, then those around them that fit."""
    chosen = chosen_blocks(kernels, kind, geometry)
    yield chosen
    for blocks in _tpu_variants(chosen, kind, geometry) if kernels.name == "tpu" else _gpu_variants(chosen, geometry):
        if blocks != chosen:
            yield blocks


def _tpu_variants(chosen: Any, kind: str, geometry: Geometry) -> Iterator[Any]:
    pages = sorted({max(1, chosen.pages // 4), max(1, chosen.pages // 2), chosen.pages, 2 * chosen.pages})
    tiles = [1] if kind == "decode" else [chosen.tile_len // 2, chosen.tile_len, 2 * chosen.tile_len]
    heads = [h for h in range(1, geometry.kv_heads + 1) if geometry.kv_heads % h == 0]
    for num_pages, tile_len, at_once in itertools.product(pages, tiles, heads):
        blocks = replace(chosen, pages=num_pages, tile_len=tile_len, heads=at_once)
        if tpu_blocks.vmem_bytes(blocks, geometry) <= blocks.vmem_bytes:
            yield blocks


def _gpu_variants(chosen: Any, geometry: Geometry) -> Iterator[Any]:
    for warpgroups, block_len, stages in itertools.product((1, 2), (64, 128, 256), (2, 3, 4)):
        blocks = replace(chosen, warpgroups=warpgroups, block_len=block_len, stages=stages)
        if blocks.shared_bytes(geometry) <= gpu_blocks.SHARED_MEMORY and blocks.lines >= geometry.group:
            yield blocks


def timer(kernels: Kernels, kind: str, geometry: Geometry) -> Callable[[Any], float]:
    """Seconds of a step of that kind with some blocks."""
    rows = DECODE_ROWS if kind == "decode" else 1
    pages = -(-CONTEXT // geometry.page_size)
    pool = random_pool(geometry, rows * pages + 1, kernels)
    tokens = rows if kind == "decode" else PROMPT_LEN
    q = jax.random.normal(jax.random.key(1), (tokens, geometry.q_heads, geometry.head_dim), geometry.dtype)
    arrays = [q, pool, scattered_table(rows, pages), jnp.full(rows, CONTEXT, jnp.int32)]
    if kind == "extend":
        arrays.append(jnp.array([0, PROMPT_LEN], jnp.int32))
    attend = {
        ("tpu", "decode"): tpu_decode.decode_attention,
        ("tpu", "extend"): tpu_extend.extend_attention,
        ("gpu", "decode"): gpu_decode.decode_attention,
        ("gpu", "extend"): gpu_extend.extend_attention,
    }[kernels.name, kind]
    scoring = Scoring(geometry.head_dim**-0.5)
    return lambda blocks: seconds_of(jax.jit(partial(attend, scoring=scoring, blocks=blocks)), *arrays)


def tune(blocks: Iterator[Any], seconds: Callable[[Any], float]) -> list[Trial]:
    """Fastest first; those that failed last."""
    trials: list[Trial] = []
    for candidate in tqdm(list(blocks), desc="blocks", file=sys.stderr, leave=False):
        try:
            trials.append(Trial(asdict(candidate), 1e6 * seconds(candidate)))
        except Exception as error:  # a compiler refuses in many ways
            trials.append(Trial(asdict(candidate), None, f"{type(error).__name__}: {error}"[:200]))
    return sorted(trials, key=lambda trial: (trial.us is None, trial.us or 0.0))


def format_trials(title: str, trials: list[Trial], chosen: dict[str, int]) -> str:
    base = next((trial.us for trial in trials if trial.blocks == chosen), None)
    lines = [title]
    for trial in trials:
        time = f"{trial.us:9.1f} us" if trial.us is not None else f"failed: {trial.error}"
        ratio = f" {trial.us / base:5.2f}" if trial.us is not None and base else ""
        mark = "  <- the table's" if trial.blocks == chosen else ""
        lines.append(f"  {time}{ratio}  {', '.join(f'{name} {value}' for name, value in trial.blocks.items())}{mark}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 where there are no kernels to tune."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = list(SMALL_MODELS)
    parser.add_argument("--models", nargs="+", choices=models, default=models, help="default: all")
    parser.add_argument("--page-sizes", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=Path, help="write every trial here")
    options = parser.parse_args(arguments)
    if min(options.page_sizes) < 1:
        parser.error(f"--page-sizes must be at least 1, got {min(options.page_sizes)}")
    found: list[dict[str, Any]] = []
    for model, page_size, kind in itertools.product(options.models, options.page_sizes, options.kinds):
        geometry = geometry_of(model_config(model), page_size)
        kernels = choose_kernels(geometry, MAX_PAGES)
        if kernels.name == "xla":
            print(f"no kernels for {model}, pages of {page_size}: {'; '.join(kernels.reasons)}", file=sys.stderr)
            continue
        trials = tune(candidates(kernels, kind, geometry), timer(kernels, kind, geometry))
        title = f"{model}, pages of {page_size}, {kind}, on {device_description()}"
        print(format_trials(title, trials, asdict(chosen_blocks(kernels, kind, geometry))))
        found.append({"title": title, "trials": [asdict(trial) for trial in trials]})
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
