"""The write kernel for TPUs, interpreted, against the scatter that other devices run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix.pallas import layout, tpu_write
from tests.pallas.tpu_cases import interpreted, waits_missed

HEADS, HEAD_DIM = 2, 64


def arrays(page_size: int, pages: list[int], offsets: list[int], dtype: Any = jnp.bfloat16) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    scale = 40 if jnp.dtype(dtype).itemsize == 1 else 1
    keys, values = jnp.asarray(rng.normal(scale=scale, size=(2, len(pages), HEADS, HEAD_DIM)), dtype)
    pool = jnp.asarray(rng.normal(scale=scale, size=(12, HEADS, page_size, 2 * HEAD_DIM)), dtype)
    return pool, keys, values, jnp.asarray(pages, jnp.int32), jnp.asarray(offsets, jnp.int32)


def assert_written(args: tuple[jax.Array, ...]) -> None:
    got = interpreted(tpu_write.write_tokens)(*args)
    assert got.dtype == args[0].dtype
    np.testing.assert_array_equal(got, layout.write_tokens(*args))


def chunk(first_page: int, page_size: int, first: int, count: int) -> tuple[list[int], list[int]]:
    """Pages and offsets of consecutive positions in consecutive pages."""
    at = range(first, first + count)
    return [first_page + i // page_size for i in at], [i % page_size for i in at]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buffers, and chunks of 32 tokens."""
    monkeypatch.setattr(tpu_write, "BUFFERS", 2)
    monkeypatch.setattr(tpu_write, "AHEAD", 1)
    monkeypatch.setattr(tpu_write, "CHUNK_BYTES", 32 * HEADS * 2 * HEAD_DIM * 4)


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn], ids=["f32", "bf16", "int8", "fp8"]
)
def test_decode_tokens_and_a_chunk_land_in_their_slots_and_nothing_else_changes(dtype: Any) -> None:
    pages, offsets = chunk(first_page=2, page_size=32, first=11, count=90)
    assert_written(arrays(32, [11, 0, *pages, 9], [31, 0, *offsets, 16], dtype))


def test_a_page_that_is_no_page_drops_the_write() -> None:
    assert_written(arrays(16, [-1, 3, 12, 2**31 - 1, -(2**31), 5, -1], [0, 1, 2, 15, 0, 7, 3]))


def test_tokens_that_no_page_takes_leave_the_pool_as_it_was() -> None:
    assert_written(arrays(16, [-1, -1], [0, 1]))


@pytest.mark.usefixtures("small")
def test_more_tiles_than_buffers_and_more_tokens_than_a_chunk() -> None:
    """The tile that one chunk ends in is the first of the next."""
    assert_written(arrays(64, *chunk(first_page=1, page_size=64, first=7, count=150)))


@pytest.mark.usefixtures("small")
def test_no_wait_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a buffer's last store before it is used again, for a load, and for the stores that a chunk ends with."""
    pool, *tokens = arrays(32, *chunk(first_page=1, page_size=32, first=7, count=100))

    def run(interpret: Any, more_pages: int) -> jax.Array:
        more = jnp.pad(pool, [(0, more_pages), (0, 0), (0, 0), (0, 0)])
        return tpu_write.write_tokens(more, *tokens, interpret=interpret)

    assert waits_missed(monkeypatch, run) == [True] * 3
