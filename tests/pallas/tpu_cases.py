"""The shared cases as the TPU kernels take them, and how the kernels are interpreted."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from jradix.pallas.tpu_blocks import Blocks
from tests.pallas.cases import CASES, Inputs, as_decode

INTERPRET = pltpu.InterpretParams(detect_races=True, vector_clock_size=100)
"""A race raises, so does a read outside of a buffer; what was never written is NaN, and copies come at the last moment:
when something waits for them. With the default of 2 clocks all copies share one, and races between them go unseen."""
BLOCKS = Blocks(pages=2, tile_len=16, heads=1, vmem_bytes=1 << 24)
"""So small that many rows have several blocks."""

EXTEND_CASES = [replace(case, page_size=max(16, case.page_size)) for case in CASES]


DECODE_CASES = [as_decode(case) for case in EXTEND_CASES]


def interpreted(kernel: Callable, static_argnames: tuple[str, ...] = (), **bound: Any) -> Callable:
    """Jitted; the interpreted program runs once or twice, so that optimizing it takes longer than it saves."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    kernel = partial(kernel, **{"interpret": INTERPRET} | bound)
    return jax.jit(kernel, static_argnames=static_argnames, compiler_options=options)


def bucketed(inputs: Inputs) -> Inputs:
    """With padding as the engine adds it, and more pages of NaN: few shapes remain, each of which takes seconds."""

    def up(x: jax.Array, to: int, axis: int = 0, **how: Any) -> jax.Array:
        return jnp.pad(x, [(0, -x.shape[a] % to if a == axis else 0) for a in range(x.ndim)], **how)

    seq_lens = up(inputs.seq_lens, 5)
    return replace(
        inputs,
        q=up(inputs.q, 64),
        pool=up(inputs.pool, 32, constant_values=jnp.nan),
        page_table=up(up(inputs.page_table, 5), 8, axis=1, constant_values=-1),
        seq_lens=seq_lens,
        query_starts=jnp.pad(inputs.query_starts, (0, seq_lens.shape[0] - inputs.seq_lens.shape[0]), mode="edge"),
    )


def waits_missed(monkeypatch: pytest.MonkeyPatch, run: Callable[[pltpu.InterpretParams, int], Any]) -> list[bool]:
    """For each wait in a kernel's text, whether a race is seen when the kernel runs without that one.

    `run(interpret, attempt)` must use other shapes at every attempt, or it would find the kernel traced already.
    """
    copy_of, seen, left_out = pltpu.make_async_copy, 0, -1

    class Copy:
        def __init__(self, *refs: Any) -> None:
            self.refs = refs

        def start(self) -> None:
            copy_of(*self.refs).start()

        def wait(self) -> None:
            nonlocal seen
            if seen != left_out:
                copy_of(*self.refs).wait()
            seen += 1

    monkeypatch.setattr(pltpu, "make_async_copy", Copy)
    eager = replace(INTERPRET, dma_execution_mode="eager")  # or what nothing waits for never comes
    jax.block_until_ready(run(eager, 0))
    missed = []
    for left_out in range(seen):
        seen = 0
        try:
            jax.block_until_ready(run(eager, left_out + 1))
            missed.append(False)
        except jax.errors.JaxRuntimeError as error:
            missed.append("RACE DETECTED" in str(error))
            pltpu.reset_tpu_interpret_mode_state()
        assert seen, "not traced anew"
    return missed
