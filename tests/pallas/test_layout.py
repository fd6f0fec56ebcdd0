"""Where tokens land in the pool and how pages are read back."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix.pallas import layout
from jradix.pallas.layout import KVLayout, read_pages, write_tokens

LAYOUT = KVLayout(layers=2, num_pages=5, page_size=4, kv_heads=3, head_dim=8)
JOINED = replace(LAYOUT, joined=True)
both_layouts = pytest.mark.parametrize("kv_layout", [LAYOUT, JOINED], ids=["split", "joined"])


@both_layouts
def test_what_is_written_at_a_slot_is_read_from_its_page(kv_layout: KVLayout) -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, 6, 3, 8)).astype(np.float32)
    pages, offsets = np.array([7, 7, 2, 9, 1, 1]), np.array([0, 3, 1, 2, 0, 1])
    pool = write_tokens(jnp.zeros(kv_layout.shape), *map(jnp.asarray, (keys, values, pages, offsets)))
    got_keys, got_values = read_pages(pool, jnp.asarray([[7, 2], [9, 1]]), head_dim=8)
    assert got_keys.shape == (2, 3, 8, 8)
    for token, (page, offset) in enumerate(zip(pages, offsets, strict=True)):
        row, at = {7: (0, 0), 2: (0, 4), 9: (1, 0), 1: (1, 4)}[int(page)]
        np.testing.assert_array_equal(got_keys[row, :, at + offset], keys[token])
        np.testing.assert_array_equal(got_values[row, :, at + offset], values[token])
    assert np.count_nonzero(np.asarray(pool)) == 6 * 3 * 2 * 8, "nothing else may change"


@both_layouts
@pytest.mark.parametrize("page", [10, -1, 2**31 - 1])
def test_a_write_to_a_page_outside_the_pool_is_dropped(page: int, kv_layout: KVLayout) -> None:
    token = jnp.ones((1, 3, 8))
    pool = write_tokens(jnp.zeros(kv_layout.shape), token, token, jnp.asarray([page]), jnp.asarray([0]))
    assert not np.asarray(pool).any()


def test_a_page_s_bytes_times_its_number_are_the_pool_s() -> None:
    pool = jax.eval_shape(lambda: jnp.zeros(LAYOUT.shape, jnp.bfloat16))
    assert LAYOUT.page_bytes(2) * LAYOUT.num_pages == pool.size * 2


def test_a_joined_page_is_as_large_as_the_tpu_makes_it() -> None:
    pages = [KVLayout(1, 1, 16, 1, head_dim, joined=True).page_bytes(2) for head_dim in (16, 64, 80, 128, 256)]
    assert pages == [16 * line * 2 for line in (128, 128, 256, 256, 512)]


@both_layouts
def test_page_ids_beyond_a_table_s_end_do_not_overflow_into_other_rows_reads(kv_layout: KVLayout) -> None:
    pool = jnp.arange(np.prod(kv_layout.shape), dtype=jnp.float32).reshape(kv_layout.shape)
    alone, _ = read_pages(pool, jnp.asarray([[3]]), head_dim=8)
    beside, _ = read_pages(pool, jnp.asarray([[3, 2**31 - 1, -1]]), head_dim=8)
    np.testing.assert_array_equal(beside[:, :, :4], alone)


@both_layouts
def test_what_a_tpu_runs_instead_gives_the_same_pool(kv_layout: KVLayout) -> None:
    rng = np.random.default_rng(0)
    line = (128,) if kv_layout.joined else (2, 8)
    pool, both = (jnp.asarray(rng.normal(size=shape)) for shape in (kv_layout.shape, (7, 3, *line)))
    pages, offsets = jnp.asarray([7, 7, 2, 10, -1, 2**31 - 1, 0]), jnp.asarray([0, 3, 1, 2, 0, 1, 3])
    stored = layout._store_one_by_one(pool, both, pages, offsets)
    np.testing.assert_array_equal(stored, layout._scatter(pool, both, pages, offsets))


def test_whole_pages_hold_the_same_as_runs() -> None:
    pool = jnp.asarray(np.random.default_rng(0).normal(size=LAYOUT.shape))
    table = jnp.asarray([[7, 2, -1], [0, 9, 2**31 - 1]])
    for whole, runs in zip(layout._read_whole_pages(pool, table), layout._read_runs(pool, table), strict=True):
        np.testing.assert_array_equal(whole[:, :, :8], runs[:, :, :8])
