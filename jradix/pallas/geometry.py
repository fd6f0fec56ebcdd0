"""What an attention kernel has to fit: the sizes that its tiles are made of."""

from typing import NamedTuple

import jax.numpy as jnp


class Geometry(NamedTuple):
    """Sizes of one model's attention over one pool; `dtype` is the name of the queries' and the pool's."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads
