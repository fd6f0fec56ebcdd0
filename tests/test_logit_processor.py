"""Processors of callers: what they see of a row, that other rows never notice, and which are refused."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix.logit_processor import ProcessedRows, ProcessorRow, apply_processor, check_processor, packed_processor_rows

VOCAB = 50


def reveal(logits: jax.Array, row: ProcessorRow) -> jax.Array:
    """Writes what it sees of the row to the first logits."""
    seen = jnp.stack([row.position, row.num_output, row.last_token]).astype(jnp.float32)
    return logits.at[:11].set(jnp.concatenate([seen, row.params]))


def poison(logits: jax.Array, row: ProcessorRow) -> jax.Array:
    return logits * jnp.nan


def packed(rows: int) -> Any:
    return np.zeros((packed_processor_rows(), rows), np.int32)


def test_a_processor_sees_its_row_and_the_tokens_that_are_on_the_device_only() -> None:
    arrays = packed(3)
    rows: Any = ProcessedRows.unpack(arrays)
    rows.wanted[:] = 1
    rows.row.position[:], rows.row.num_output[:] = (10, 11, 12), (0, 1, 2)
    rows.row.last_token[:] = (33, -1, -3)  # the second and third were sampled by slots 0 and 2
    rows.row.params[1] = np.arange(8) / 4
    next_tokens = np.array([7, 8, 9, 0], np.int32)
    logits = np.ones((3, VOCAB), np.float32)
    found = np.asarray(jax.jit(partial(apply_processor, processor=reveal))(logits, next_tokens, arrays))
    assert found[:, :3].tolist() == [[10, 0, 33], [11, 1, 7], [12, 2, 9]]
    assert found[1, 3:11].tolist() == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]
    assert (found[:, 11:] == 1).all()


def test_a_processor_changes_no_row_that_did_not_ask() -> None:
    arrays = packed(4)
    rows: Any = ProcessedRows.unpack(arrays)
    rows.wanted[2] = 1
    logits = np.random.default_rng(0).normal(size=(4, VOCAB)).astype(np.float32)
    found = np.asarray(apply_processor(jnp.asarray(logits), jnp.zeros(3, jnp.int32), jnp.asarray(arrays), poison))
    assert np.isnan(found[2]).all()
    assert np.delete(found, 2, 0).tobytes() == np.delete(logits, 2, 0).tobytes()


def test_a_traceable_processor_passes() -> None:
    check_processor(reveal, VOCAB)
    check_processor(lambda logits, row: jnp.where(row.num_output > 3, logits, 2 * logits), VOCAB)


def wants_numbers(logits: jax.Array, row: ProcessorRow) -> jax.Array:
    return logits if row.position > 3 else -logits


def cannot_be_mapped(logits: jax.Array, row: ProcessorRow) -> jax.Array:
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(logits.shape, logits.dtype), logits)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda logits, row: logits[:-1], r"must return logits float32\[50\], it returned float32\[49\]"),
        (lambda logits, row: logits.astype(jnp.bfloat16), r"it returned bfloat16\[50\]"),
        (lambda logits, row: (logits, row.position), r"it returned \('float32\[50\]', 'int32\[\]'\)"),
        (lambda logits, row: None, "it returned None"),
        (lambda logits: logits, "jax can trace"),
        (wants_numbers, "wants_numbers.*jax can trace"),
        (cannot_be_mapped, "cannot_be_mapped.*jax can map over rows"),
        (17, "custom_logit_processor 17 must be a function"),
    ],
)
def test_what_is_no_processor_is_refused_with_the_reason(processor: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_processor(processor, VOCAB)
