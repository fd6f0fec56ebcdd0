"""How many pages fit, and the one array that holds them."""

import jax.numpy as jnp
import pytest

from jradix.cache.pool import allocate_pool, pages_that_fit
from jradix.pallas.layout import KVLayout


@pytest.mark.parametrize(("budget", "pages"), [(200, 1), (299, 1), (300, 2), (1099, 9), (1100, 10), (10**6, 10)])
def test_the_null_page_is_paid_for_and_no_more_is_taken_than_can_be_used(budget: int, pages: int) -> None:
    assert pages_that_fit(100, budget, at_most=10) == pages


@pytest.mark.parametrize("budget", [-5, 0, 100, 199])
def test_too_little_memory_for_one_page_is_refused_with_the_numbers(budget: int) -> None:
    message = rf"at least 200 bytes .*one of 100 bytes\), {max(0, budget)} are available: raise mem_fraction_static"
    with pytest.raises(ValueError, match=message):
        pages_that_fit(100, budget, at_most=10)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_pool_has_the_bytes_of_its_pages(dtype: jnp.dtype) -> None:
    layout = KVLayout(layers=3, num_pages=5, page_size=4, kv_heads=2, head_dim=8)
    pool = allocate_pool(layout, dtype)
    assert pool.dtype == dtype
    assert pool.nbytes == 5 * layout.page_bytes(jnp.dtype(dtype).itemsize)
    assert not pool.any()
