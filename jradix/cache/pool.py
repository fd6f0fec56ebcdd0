"""The KV pool on the device: how many pages fit, and the one array that holds them."""

import jax
import jax.numpy as jnp

from jradix.pallas.layout import KEY, VALUE, KVLayout, join, unjoin


def pages_that_fit(page_bytes: int, budget_bytes: int, at_most: int) -> int:
    """Usable pages of a pool within `budget_bytes` of each device, the null page paid for.

    page_bytes: of one device's part of a page.

    Raises:
        ValueError: not even one page fits.
    """
    pages = budget_bytes // page_bytes - 1
    if pages < 1:
        raise ValueError(
            f"the KV pool needs at least {2 * page_bytes} bytes (the null page and one of {page_bytes} bytes), "
            f"{max(0, budget_bytes)} are available: raise mem_fraction_static, set max_total_tokens, or use a smaller "
            "page_size or model"
        )
    return min(pages, at_most)


def allocate_pool(layout: KVLayout, dtype: jnp.dtype, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
    """The pool, all zeros. Every step donates it and gets it back; nobody else may keep a reference.

    Raises:
        ValueError: the pool of one device has more runs of keys or values than int32 can number.
    """
    pages, kv_heads = (layout.shape if sharding is None else sharding.shard_shape(layout.shape))[:2]
    runs = pages * kv_heads * 2  # what `read_pages` indexes, with int32 as all of jax does
    if runs >= 2**31:
        raise ValueError(
            f"{layout.num_pages} pages of {layout.layers} layers and {kv_heads} KV heads are {runs} runs of "
            "keys and values, and an int32 numbers 2147483647: use a larger page_size or a smaller max_total_tokens"
        )
    return jnp.zeros(layout.shape, dtype, device=sharding)


def copy_pages(pool: jax.Array, copies: jax.Array, pages_per_layer: int) -> jax.Array:
    """The pool with whole pages copied in all layers, one after another; donate it.

    copies: int32 `[2, n]`, sources and targets; the first target 0 ends the list.
    """
    first = _first_pages(pool, pages_per_layer)

    def copy(index: jax.Array, pool: jax.Array) -> jax.Array:
        source, target = copies[0, index], copies[1, index]
        return pool.at[first + target].set(pool[first + source])

    return jax.lax.fori_loop(0, (copies[1] != 0).sum(), copy, pool)


def take_pages(pool: jax.Array, pages: jax.Array, layout: KVLayout, kv_heads: int, copies: int) -> jax.Array:
    """Whole pages of all layers, `[n, layers, kv_heads, 2, page_size, head_dim]`, as all pools of the model take them.

    Of each of the model's `kv_heads` the first of its `copies`, which lie next to each other; padding comes after them.
    """
    content = pool[pages[:, None] + _first_pages(pool, layout.num_pages)][:, :, : kv_heads * copies : copies]
    return jnp.stack(unjoin(content, layout.head_dim), axis=-3) if layout.joined else content


def put_pages(pool: jax.Array, pages: jax.Array, content: jax.Array, layout: KVLayout, copies: int) -> jax.Array:
    """The pool with what `take_pages` gave of any pool written to pages, up to the first page 0; donate it."""
    if layout.joined:
        content = join(content[:, :, :, KEY], content[:, :, :, VALUE])
    content = jnp.repeat(content, copies, axis=2)
    padding = layout.kv_heads - content.shape[2]
    content = jnp.pad(content, [(0, padding if axis == 2 else 0) for axis in range(content.ndim)])
    first = _first_pages(pool, layout.num_pages)

    def write(index: jax.Array, pool: jax.Array) -> jax.Array:
        return pool.at[first + pages[index]].set(content[index])

    return jax.lax.fori_loop(0, (pages != 0).sum(), write, pool)


def _first_pages(pool: jax.Array, pages_per_layer: int) -> jax.Array:
    return jnp.arange(pool.shape[0] // pages_per_layer, dtype=jnp.int32) * pages_per_layer
