"""How many pages fit, the one array that holds them, and copies inside it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix.cache.pool import allocate_pool, copy_pages, pages_that_fit, put_pages, take_pages
from jradix.pallas.layout import KVLayout


@pytest.mark.parametrize(("budget", "pages"), [(200, 1), (299, 1), (300, 2), (1099, 9), (1100, 10), (10**6, 10)])
def test_the_null_page_is_paid_for_and_no_more_is_taken_than_can_be_used(budget: int, pages: int) -> None:
    assert pages_that_fit(100, budget, at_most=10) == pages


@pytest.mark.parametrize("budget", [-5, 0, 100, 199])
def test_too_little_memory_for_one_page_is_refused_with_the_numbers(budget: int) -> None:
    message = rf"at least 200 bytes .*one of 100 bytes\), {max(0, budget)} are available: raise mem_fraction_static"
    with pytest.raises(ValueError, match=message):
        pages_that_fit(100, budget, at_most=10)


def test_a_pool_whose_runs_int32_cannot_number_is_refused_and_one_page_less_is_not() -> None:
    """The last run, as `read_pages` numbers it in int32, is the one that int64 finds. Nothing is allocated."""
    layout = KVLayout(layers=32, num_pages=2**31 // (32 * 8 * 2), page_size=1, kv_heads=8, head_dim=64)
    with pytest.raises(ValueError, match="4194304 pages of 32 layers and 8 KV heads are 2147483648 runs"):
        allocate_pool(layout, jnp.dtype(jnp.bfloat16))
    largest = replace(layout, num_pages=layout.num_pages - 1)
    pool = jax.eval_shape(partial(allocate_pool, largest, jnp.dtype(jnp.bfloat16)))
    last_page = jnp.asarray(pool.shape[0] - 1, jnp.int32)
    assert int((last_page * 8 + 7) * 2 + 1) == pool.shape[0] * 8 * 2 - 1 < 2**31


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_pool_has_the_bytes_of_its_pages(dtype: jnp.dtype) -> None:
    layout = KVLayout(layers=3, num_pages=5, page_size=4, kv_heads=2, head_dim=8)
    pool = allocate_pool(layout, dtype)
    assert pool.dtype == dtype
    assert pool.nbytes == 5 * layout.page_bytes(jnp.dtype(dtype).itemsize)
    assert not pool.any()


def test_pages_are_copied_in_all_layers_one_after_another() -> None:
    pages_per_layer, layers = 6, 3
    before = np.arange(layers * pages_per_layer, dtype=np.float32).reshape(-1, 1, 1, 1, 1)
    copied = np.asarray(copy_pages(jnp.asarray(before), jnp.array([[5, 2, 4, 3], [1, 5, 0, 0]]), pages_per_layer))
    expected = before.reshape(layers, pages_per_layer).copy()
    expected[:, 1] = expected[:, 5]
    expected[:, 5] = expected[:, 2]
    assert copied.reshape(layers, pages_per_layer).tolist() == expected.tolist()


POOLS = {
    "one device": (2, False, 1),
    "copies": (4, False, 2),
    "copies and padding": (8, True, 3),
    "padding": (3, False, 1),
    "joined": (2, True, 1),
}
"""KV heads of a pool, whether it is joined, and copies of each of the model's two heads."""


@pytest.mark.parametrize("source", POOLS)
@pytest.mark.parametrize("target", POOLS)
def test_pages_that_were_taken_can_be_put_into_a_pool_of_another_size_and_on_other_devices(
    source: str, target: str
) -> None:
    """What a pool holds is what the model computes: copies are equal, and padding, which is left out here, is not."""
    model_pages = np.random.default_rng(0).normal(size=(3, 6, 2, 2, 4, 8)).astype(np.float32)  # [layers, pages, ...]

    def pool_of(name: str, content: np.ndarray, padding: float) -> tuple[KVLayout, np.ndarray]:
        heads, joined, copies = POOLS[name]
        layers, num_pages = content.shape[:2]
        layout = KVLayout(layers, num_pages, page_size=4, kv_heads=heads, head_dim=8, joined=joined)
        pool = np.full((layers, num_pages, *layout.shape[1:]), padding, np.float32)
        for slot in range(2 * copies):
            head = content[:, :, slot // copies]
            if joined:
                pool[:, :, slot] = 0
                pool[:, :, slot, :, :8], pool[:, :, slot, :, 64:72] = head[:, :, 0], head[:, :, 1]
            else:
                pool[:, :, slot] = head
        return layout, pool.reshape(layout.shape)

    layout, pool = pool_of(source, model_pages, padding=np.nan)
    taken = take_pages(jnp.asarray(pool), jnp.array([5, 2, 3]), layout, kv_heads=2, copies=POOLS[source][2])
    assert np.array_equal(taken, model_pages[:, [5, 2, 3]].swapaxes(0, 1))
    moved = np.zeros((3, 9, *model_pages.shape[2:]), np.float32)
    moved[:, [8, 1]] = model_pages[:, [5, 2]]
    layout, expected = pool_of(target, moved, padding=0)
    put = put_pages(jnp.zeros(layout.shape), jnp.array([8, 1, 0]), taken, layout, copies=POOLS[target][2])
    assert np.array_equal(put, expected)


@pytest.mark.parametrize("which", ["copy", "put"])
def test_copying_and_putting_pages_update_the_pool_in_place(which: str) -> None:
    layout = KVLayout(layers=3, num_pages=4096, page_size=16, kv_heads=2, head_dim=16)
    pool = jnp.zeros(layout.shape)
    if which == "copy":
        function, args = partial(copy_pages, pages_per_layer=4096), (jnp.zeros((2, 8), jnp.int32),)
    else:
        function = partial(put_pages, layout=layout, copies=1)
        args = jnp.zeros(8, jnp.int32), jnp.zeros((8, 3, *pool.shape[1:]))
    program = jax.jit(function, donate_argnums=0).lower(pool, *args).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 8
