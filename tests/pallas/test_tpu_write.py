"""The write kernel for TPUs, interpreted, against the scatter that other devices run."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jradix.pallas import layout, tpu_write

INTERPRET = pltpu.InterpretParams(detect_races=True)
HEADS, HEAD_DIM = 2, 64


def written(page_size: int, pages: list[int], offsets: list[int], dtype: Any = jnp.bfloat16) -> tuple[Any, Any]:
    """The pool after the kernel and after the scatter."""
    rng = np.random.default_rng(0)
    keys, values = jnp.asarray(rng.normal(size=(2, len(pages), HEADS, HEAD_DIM)), dtype)
    pool = jnp.asarray(rng.normal(size=(12, HEADS, page_size, 2 * HEAD_DIM)), dtype)
    args = (pool, keys, values, jnp.asarray(pages, jnp.int32), jnp.asarray(offsets, jnp.int32))
    return tpu_write.write_tokens(*args, interpret=INTERPRET), layout.write_tokens(*args)


def chunk(first_page: int, page_size: int, first: int, count: int) -> tuple[list[int], list[int]]:
    """Pages and offsets of consecutive positions in consecutive pages."""
    at = range(first, first + count)
    return [first_page + i // page_size for i in at], [i % page_size for i in at]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_decode_tokens_and_a_chunk_land_in_their_slots_and_nothing_else_changes(dtype: Any) -> None:
    pages, offsets = chunk(first_page=2, page_size=32, first=11, count=90)
    got, want = written(32, [11, 0, *pages, 9], [31, 0, *offsets, 16], dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)


def test_a_page_that_is_no_page_drops_the_write() -> None:
    got, want = written(16, [-1, 3, 12, 2**31 - 1, -(2**31), 5, -1], [0, 1, 2, 15, 0, 7, 3])
    np.testing.assert_array_equal(got, want)


def test_tokens_that_no_page_takes_leave_the_pool_as_it_was() -> None:
    got, want = written(16, [-1, -1], [0, 1])
    np.testing.assert_array_equal(got, want)


def test_more_tiles_than_buffers_and_more_tokens_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile that one chunk ends in is the first of the next."""
    monkeypatch.setattr(tpu_write, "CHUNK_BYTES", 32 * HEADS * 2 * HEAD_DIM * 4)  # of 32 tokens
    monkeypatch.setattr(tpu_write, "BUFFERS", 3)
    monkeypatch.setattr(tpu_write, "AHEAD", 2)
    got, want = written(64, *chunk(first_page=1, page_size=64, first=7, count=300))
    np.testing.assert_array_equal(got, want)
