"""Rows of a table: as numpy takes them, and on a TPU without a copy of the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix.aot import TARGETS, copied_shapes
from jradix.pallas.rows import _one_by_one, take_rows


@pytest.mark.parametrize("width", [128, 24])
@pytest.mark.parametrize("take", [take_rows, _one_by_one])
def test_rows_are_those_of_the_ids(take: object, width: int) -> None:
    assert callable(take)
    table = np.random.default_rng(0).normal(size=(50, width)).astype(np.float32)
    ids = np.array([3, 49, 0, 3, 17], np.int32)
    np.testing.assert_array_equal(take(jnp.asarray(table), jnp.asarray(ids)), table[ids])
    outside = take(jnp.asarray(table), jnp.array([50, 2**31 - 1], jnp.int32))
    np.testing.assert_array_equal(outside, table[[49, 49]])


@pytest.mark.parametrize("width", [2880, 4096])
def test_a_tpu_copies_no_table(width: int) -> None:
    pytest.importorskip("libtpu")
    table = jax.ShapeDtypeStruct((201_088, width), jnp.bfloat16)
    program = TARGETS["v6e"].compile(jax.jit(take_rows), table, jax.ShapeDtypeStruct((64,), jnp.int32))
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2**20
    assert not {shape for shape in copied_shapes(program) if max(shape, default=0) > width}
