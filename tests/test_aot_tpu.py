"""The step compiled ahead of time for TPUs: what the chip would need, without one."""

from collections.abc import Callable
from math import prod
from pathlib import Path

import jax
import pytest

from jradix.config import StepShape
from jradix.runner import _abstract_arrays
from tests.test_runner import copied_shapes
from tests.tiny_engine import start, write_dummy_model
from tests.tpu_topology import compile_for, on, tpu_mesh

LAYERS = 4
GEOMETRY = {"num_hidden_layers": LAYERS, "hidden_size": 256, "head_dim": 128, "intermediate_size": 512}
PAGES = 2048  # of a layer


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_a_step_updates_the_pool_in_place(topology: str, tmp_path: Path, tiny_path: Callable[[str], Path]) -> None:
    """A 128 MiB pool in the carry of a scan over layers, as an engine on a TPU runs it."""
    mesh = tpu_mesh(topology)
    write_dummy_model(tiny_path("llama"), tmp_path, **GEOMETRY)
    options = {"load_format": "dummy", "dtype": "bfloat16", "layer_loop": "scan", "page_size": 16}
    runner = start(tmp_path, max_total_tokens=64, optimized=True, **options).runner
    pool = jax.ShapeDtypeStruct((LAYERS * PAGES, *runner.pool.shape[1:]), runner.pool.dtype)
    pool_bytes = prod(pool.shape) * pool.dtype.itemsize
    for shape in (StepShape(8, 0, 0, 16), StepShape(8, 32, 2, 16)):
        arrays = _abstract_arrays(shape, PAGES)
        program = compile_for(mesh, runner._forward, *on(mesh, (runner._parameters, pool, runner._next_tokens, arrays)))
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == pool_bytes
        assert memory.temp_size_in_bytes < pool_bytes / 8
        text = program.as_text()
        assert text is not None
        assert all(prod(sizes) < prod(pool.shape) / 8 for sizes in copied_shapes(text))
