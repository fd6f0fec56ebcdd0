"""What an attention kernel has to fit: the sizes that its tiles are made of."""

from typing import NamedTuple

import jax.numpy as jnp


class Geometry(NamedTuple):
    """Sizes of one model's attention over one pool.

    dtype: the name of the queries'. kv_dtype: of the pool's; None if it is the same.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    kv_dtype: str | None = None

    @property
    def pool_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def pool_itemsize(self) -> int:
        return jnp.dtype(self.pool_dtype).itemsize

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads
