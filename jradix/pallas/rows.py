"""Rows of a table by their ids, such as of an embedding, without a TPU copying the whole table."""

import jax
import jax.numpy as jnp

from jradix.pallas.layout import LANES


def take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows `[n, width]` of `[rows, width]`; ids past either end give some row of it.

    Where a row is not a number of whole vectors, XLA for a TPU keeps the table with rows side by side, which takes less
    padding, and copies all of it before it gathers. Read one by one, rows are taken from where they are.
    """
    if table.shape[1] % LANES == 0:
        return _gather(table, ids)
    return jax.lax.platform_dependent(table, ids, tpu=_one_by_one, default=_gather)


def _gather(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table.at[ids].get(mode="clip")


def _one_by_one(table: jax.Array, ids: jax.Array) -> jax.Array:
    ids = jnp.clip(ids, 0, len(table) - 1)

    def take(index: jax.Array, rows: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice(table, (ids[index], 0), (1, table.shape[1]))
        return jax.lax.dynamic_update_slice(rows, row, (index, 0))

    return jax.lax.fori_loop(0, len(ids), take, jnp.zeros((len(ids), table.shape[1]), table.dtype))
