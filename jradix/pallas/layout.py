"""Where one token's keys and values lie inside the KV pool: the order of a page's axes, which only kernels repeat.

The pool is one flat array over the pages of all layers; layer `l`'s copy of page `p` is row `l * pages + p`, so nothing
below the model knows of layers. One copy brings keys and values of a page. A page is laid out in one of two ways:

- split, `[kv_heads, 2, page_size, head_dim]`: keys (index 0) and values (index 1) of a head are dense tiles, which a
  CPU gathers and multiplies as they lie.
- joined, `[kv_heads, page_size, line]`: a token's keys and values are the two halves of a line, padded so that lines
  are whole vectors of a TPU, which would pad a split pool of head_dim 64 to twice its size.
"""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp

KEY, VALUE = 0, 1


LANES = 128
"""Numbers of a TPU's vector."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The static shape of a KV pool. `num_pages` counts the null page 0, which is never handed out."""

    layers: int
    num_pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    joined: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        page = (self.page_size, line_len(self.head_dim)) if self.joined else (2, self.page_size, self.head_dim)
        return (self.layers * self.num_pages, self.kv_heads, *page)

    def page_bytes(self, itemsize: int) -> int:
        """Bytes of one page over all layers, padding included."""
        return prod(self.shape) // self.num_pages * itemsize


def line_len(head_dim: int) -> int:
    """Length of a joined pool's lines.

    Lines of whole vectors take no more memory, for a TPU pads shorter ones, and XLA keeps such an array as the kernels
    read it. Another it would rather lay out with the pages side by side, and copy all of it at every call.
    """
    return LANES if 2 * head_dim <= LANES else 2 * (-(-head_dim // LANES) * LANES)


def page_size_of(pool: jax.Array) -> int:
    return pool.shape[-2]


def kv_heads_of(pool: jax.Array) -> int:
    return pool.shape[1]


def is_joined(pool: jax.Array) -> bool:
    return pool.ndim == 4


def write_tokens(
    pool: jax.Array, keys: jax.Array, values: jax.Array, pages: jax.Array, offsets: jax.Array
) -> jax.Array:
    """The pool with one token's keys and values (`[tokens, kv_heads, head_dim]`) at each `(page, offset)`.

    Writes to a page id outside the pool are dropped. Jitted with the pool donated, this updates it in place.
    """
    lines = join(keys, values) if is_joined(pool) else jnp.stack([keys, values], axis=2)
    lines = lines.astype(pool.dtype)  # [tokens, kv_heads, line] or [tokens, kv_heads, 2, head_dim]
    # A TPU would copy the whole pool to scatter along its page_size axis, so there tokens are stored one by one.
    return jax.lax.platform_dependent(pool, lines, pages, offsets, tpu=_store_one_by_one, default=_scatter)


def join(keys: jax.Array, values: jax.Array) -> jax.Array:
    """Lines of a joined pool, `[..., line]`, of keys and values `[..., head_dim]`."""
    head_dim = keys.shape[-1]
    padding = [(0, 0)] * (keys.ndim - 1) + [(0, line_len(head_dim) // 2 - head_dim)]
    return jnp.concatenate([jnp.pad(keys, padding), jnp.pad(values, padding)], axis=-1)


def unjoin(lines: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values `[..., head_dim]` of lines `[..., line]`: what `join` was given."""
    half = lines.shape[-1] // 2
    return lines[..., :head_dim], lines[..., half : half + head_dim]


def _scatter(pool: jax.Array, lines: jax.Array, pages: jax.Array, offsets: jax.Array) -> jax.Array:
    pages = jnp.where(pages < 0, pool.shape[0], pages)  # to jax, -1 is the last page
    between = (slice(None),) * (pool.ndim - 3)
    return pool.at[(pages, *between, offsets)].set(lines, mode="drop")


def _store_one_by_one(pool: jax.Array, lines: jax.Array, pages: jax.Array, offsets: jax.Array) -> jax.Array:
    between = (0,) * (pool.ndim - 3)

    def store(token: jax.Array, pool: jax.Array) -> jax.Array:
        inside = (pages[token] >= 0) & (pages[token] < pool.shape[0])
        at = (jnp.where(inside, pages[token], 0), *between, offsets[token], 0)
        slot = jnp.expand_dims(lines[token], (0, -2))
        kept = jax.lax.dynamic_slice(pool, at, slot.shape)
        return jax.lax.dynamic_update_slice(pool, jnp.where(inside, slot, kept), at)

    return jax.lax.fori_loop(0, pages.shape[0], store, pool)


def read_pages(pool: jax.Array, pages: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values of `pages` `[rows, n]`, each `[rows, kv_heads, n * page_size, head_dim]`.

    Ids outside the pool are clamped to some page of it: the caller masks what it did not ask for. Compiled for a CPU,
    the gather of a split pool moves whole `[page_size * head_dim]` runs, with the head in the index, because there
    XLA's gather copies element by element unless the innermost axis is long. Elsewhere it moves pages as they lie:
    flattening the pool would make a TPU copy all of it into another layout.
    """
    if is_joined(pool):
        return _read_joined_pages(pool, pages, head_dim)
    return jax.lax.platform_dependent(pool, pages, cpu=_read_runs, default=_read_whole_pages)


def _read_joined_pages(pool: jax.Array, pages: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    rows, n = pages.shape
    _, heads, page_size, line = pool.shape
    lines = pool.at[pages].get(mode="clip").transpose(0, 2, 1, 3, 4).reshape(rows, heads, n * page_size, line)
    return unjoin(lines, head_dim)


def _read_runs(pool: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, n = pages.shape
    _, heads, _, page_size, head_dim = pool.shape
    runs = pool.reshape(-1, page_size * head_dim)
    index = (pages[:, None, :] * heads + jnp.arange(heads, dtype=pages.dtype)[None, :, None]) * 2

    def gather(which: int) -> jax.Array:
        return runs.at[index + which].get(mode="clip").reshape(rows, heads, n * page_size, head_dim)

    return gather(KEY), gather(VALUE)


def _read_whole_pages(pool: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, n = pages.shape
    _, heads, _, page_size, head_dim = pool.shape
    both = pool.at[pages].get(mode="clip").transpose(3, 0, 2, 1, 4, 5)  # [2, rows, heads, n, page_size, head_dim]
    both = both.reshape(2, rows, heads, n * page_size, head_dim)
    return both[KEY], both[VALUE]
