"""What an attention kernel has to fit: the sizes that its tiles are made of."""

from typing import NamedTuple


class Geometry(NamedTuple):
    """Sizes of one model's attention over one pool; `dtype` is the name of the queries' and the pool's."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
