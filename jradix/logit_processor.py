"""Logit processors of callers: jax functions from a row's logits to its logits, checked when they are submitted."""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jradix.packing import viewed
from jradix.sampling_params import MAX_CUSTOM_PARAMS

MAX_PROCESSORS = 8
"""Different processors of one engine: each is compiled once for each number of rows."""


class ProcessorRow(NamedTuple):
    """What a processor knows of a row beside its logits."""

    position: Array  # int32: of the token that is being sampled, in its sequence
    num_output: Array  # int32: tokens sampled before it
    last_token: Array  # int32: the token before it, of the output or, for the first one, of the prompt
    params: Array  # f32 [MAX_CUSTOM_PARAMS]: the request's `custom_params`, and zeros


type LogitProcessor = Callable[[Array, ProcessorRow], Array]
"""`(logits f32 [vocab], row) -> f32 [vocab]`: traceable by jax and without side effects. It is mapped over rows."""


class ProcessedRows(NamedTuple):
    """The rows of a step as one processor meets them."""

    wanted: Array  # int32 [rows]: whether the row asks for the processor
    row: ProcessorRow  # a leading axis for the rows; a last token of -1 - slot stands for the slot's last sampled one

    @classmethod
    def unpack(cls, packed: Any) -> "ProcessedRows":
        """The rows in `packed`, int32 `[packed_processor_rows(), rows]`, of the host (views) or of the device."""
        wanted, position, num_output, last_token = packed[:4]
        params = viewed(packed[4:], np.float32).T
        return cls(wanted, ProcessorRow(position, num_output, last_token, params))


def packed_processor_rows() -> int:
    """Rows of the matrix that holds what a processor knows, a column for each row of the step."""
    return 4 + MAX_CUSTOM_PARAMS


def apply_processor(logits: Array, next_tokens: Array, packed: Array, processor: LogitProcessor) -> Array:
    """Processes the logits of the rows that ask for it, and leaves the others as they are.

    Args:
        logits: f32 [rows, vocab].
        next_tokens: int32 [max_slots + 1], the token that each slot sampled last.
        packed: int32 [packed_processor_rows(), rows], of `ProcessedRows.unpack`.
        processor: static.
    """
    rows = ProcessedRows.unpack(packed)
    last = rows.row.last_token
    row = rows.row._replace(last_token=jnp.where(last >= 0, last, next_tokens[-1 - last]))
    return jnp.where(rows.wanted[:, None] > 0, jax.vmap(processor)(logits, row), logits)


def check_processor(processor: LogitProcessor, vocab_size: int) -> None:
    """Raises ValueError unless jax can trace the processor to f32 `[vocab_size]`, also for rows. Compiles nothing."""
    name = f"custom_logit_processor {processor!r}"
    logits = jax.ShapeDtypeStruct((vocab_size,), jnp.float32)
    number: Any = jax.ShapeDtypeStruct((), jnp.int32)
    params: Any = jax.ShapeDtypeStruct((MAX_CUSTOM_PARAMS,), jnp.float32)
    try:
        found = jax.eval_shape(processor, logits, ProcessorRow(number, number, number, params))
    except Exception as error:
        raise ValueError(f"{name} must be a function that jax can trace; it raised {error!r}") from error
    if not isinstance(found, jax.ShapeDtypeStruct) or (found.shape, found.dtype) != (logits.shape, logits.dtype):
        returned = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", found)
        raise ValueError(f"{name} must return logits float32[{vocab_size}], it returned {returned}")
    # A step that cannot be traced would fail for everybody in it.
    next_tokens, packed = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1,), (packed_processor_rows(), 1)))
    rows = jax.ShapeDtypeStruct((1, vocab_size), jnp.float32)
    try:
        jax.eval_shape(partial(apply_processor, processor=processor), rows, next_tokens, packed)
    except Exception as error:
        raise ValueError(f"{name} must be a function that jax can map over rows; it raised {error!r}") from error


def check_can_be_sent(processor: LogitProcessor) -> None:
    """Raises ValueError unless other processes can have the processor too, and know it again when it is sent again."""
    try:
        copy = pickle.loads(pickle.dumps(processor))
    except Exception as error:
        raise ValueError(
            f"custom_logit_processor {processor!r} must be what pickle can send to the other processes, such as a "
            f"function of a module; it raised {error!r}"
        ) from error
    if copy != processor:
        raise ValueError(
            f"custom_logit_processor {processor!r} must equal its pickled copy, so that the other processes know it "
            "again: use a function of a module, or define __eq__ and __hash__"
        )
