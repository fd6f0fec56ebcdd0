"""Runs steps on the device: the one place that compiles, transfers, donates and reads back."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from jradix import mesh
from jradix.batch import StepArrays, packed_len, packed_sampling_rows, unpack_sampling
from jradix.cache.pool import allocate_pool, copy_pages
from jradix.config import Buckets, StepShape
from jradix.model.transformer import Transformer
from jradix.pallas.layout import KVLayout
from jradix.pallas.ops import Kernels
from jradix.sampling import sample


class UnplannedCompilationError(RuntimeError):
    """A step needed a program that the warm-up had not compiled, in an engine told to be strict about that."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on its way; `tokens` int32 `[rows]` is being copied to the host."""

    tokens: jax.Array


class Runner:
    """Owns the parameters, the KV pool and the vector of next tokens, and the compiled programs over them.

    A step is two launches: the forward pass, one program for each `StepShape`, and the sampler, one for each number of
    rows and kind (greedy or not). So the two multiply nothing: shapes x samplers would be several times as many
    programs. A third comes first where pages are to be copied. Tokens stay on the device: the sampler writes them to
    `next_tokens[slot]`, `[max_slots + 1]` int32, and the next forward pass reads them there, so the host may launch a
    step before it has seen the last one's tokens.

    Attributes:
        parameters: the model's, as a flat list.
        compiler_options: XLA's, for programs still to be compiled.
    """

    def __init__(
        self,
        model: Transformer,
        layout: KVLayout,
        kernels: Kernels,
        dtype: Any,
        buckets: Buckets,
        max_slots: int,
        *,
        strict: bool = False,
    ) -> None:
        self._forward, self.parameters = jit_forward(model, layout.num_pages, kernels)
        self._sample = jax.jit(_sample_and_store, donate_argnums=1)
        self.compiler_options = mesh.compiler_options()
        self._layout, self._dtype, self._buckets, self._max_slots = layout, dtype, buckets, max_slots
        self._strict, self._warm = strict, False
        self._forwards: dict[StepShape, jax.stages.Compiled] = {}
        self._samplers: dict[tuple[int, bool], jax.stages.Compiled] = {}
        self._copier: jax.stages.Compiled | None = None
        self._vocab_size = model.config.vocab_size
        self.reset()

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far."""
        return len(self._forwards) + len(self._samplers) + (self._copier is not None)

    @property
    def max_copies(self) -> int:
        """The most pages a step copies first: one for each row of prompt tokens."""
        return self._buckets.extend_rows[-1]

    @property
    def pool(self) -> jax.Array:
        return self._pool

    def reset(self) -> None:
        """A pool of zeros: at the start, and after a step that failed with the pool in its hands."""
        self._pool = allocate_pool(self._layout, self._dtype)
        self._next_tokens = jnp.zeros(self._max_slots + 1, jnp.int32)

    def close(self) -> None:
        """Give the parameters and the pool back; nothing can be launched any more."""
        del self.parameters, self._pool, self._next_tokens

    def replace_pool(self, pool: jax.Array) -> None:
        """Take another pool of the same shape; the old one is dropped."""
        assert (pool.shape, pool.dtype) == (self._pool.shape, self._pool.dtype)
        self._pool = pool

    def launch(
        self,
        shape: StepShape,
        arrays: npt.NDArray[np.int32],
        sampling: npt.NDArray[np.int32] | None,
        copies: npt.NDArray[np.int32] | None = None,
    ) -> LaunchedStep:
        """Dispatch a step and return at once.

        Args:
            shape: the bucket.
            arrays: what it computes, of `build_arrays`.
            sampling: of `build_sampling`; None if every row that samples is greedy.
            copies: pages to copy first, `[2, max_copies]`, see there.
        """
        forward = self._compiled_forward(shape)
        sampler = self._compiled_sampler(shape.rows, greedy=sampling is None)
        if copies is not None:
            self.copy_pages(copies)
        logits, slots, self._pool = forward(self.parameters, self._pool, self._next_tokens, arrays)
        tokens, self._next_tokens = sampler(logits, self._next_tokens, slots, sampling)
        tokens.copy_to_host_async()
        return LaunchedStep(tokens)

    def copy_pages(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy pages in all layers, `[2, max_copies]`, see `pool.copy_pages`."""
        self._pool = self._compiled_copier()(self._pool, copies)

    def collect(self, step: LaunchedStep) -> npt.NDArray[np.int32]:
        """The step's tokens `[rows]`, waiting for them if need be."""
        return np.asarray(step.tokens)

    def warm_up(self, progress: Callable[[Iterable[StepShape]], Iterable[StepShape]] = iter) -> float:
        """Compile every bucket; returns the seconds it took. Afterwards a strict runner compiles nothing more."""
        started = time.perf_counter()
        for shape in progress(self._buckets.shapes()):
            self._compiled_forward(shape)
            for greedy in (True, False):
                self._compiled_sampler(shape.rows, greedy=greedy)
        self._compiled_copier()
        self._warm = True
        return time.perf_counter() - started

    def compiled_forward(self, shape: StepShape) -> jax.stages.Compiled:
        """The program of one bucket, for looking at its memory and text."""
        return self._compiled_forward(shape)

    def _compiled_forward(self, shape: StepShape) -> jax.stages.Compiled:
        if shape not in self._forwards:
            self._refuse_if_strict(shape)
            arrays = jax.ShapeDtypeStruct((packed_len(shape),), jnp.int32)
            lowered = self._forward.lower(self.parameters, self._pool, self._next_tokens, arrays, shape=shape)
            self._forwards[shape] = lowered.compile(self.compiler_options)
        return self._forwards[shape]

    def _compiled_sampler(self, rows: int, *, greedy: bool) -> jax.stages.Compiled:
        if (rows, greedy) not in self._samplers:
            self._refuse_if_strict((rows, greedy))
            logits = jax.ShapeDtypeStruct((rows, self._vocab_size), jnp.float32)
            slots = jax.ShapeDtypeStruct((rows,), jnp.int32)
            sampling = None if greedy else jax.ShapeDtypeStruct((packed_sampling_rows(), rows), jnp.int32)
            lowered = self._sample.lower(logits, self._next_tokens, slots, sampling)
            self._samplers[rows, greedy] = lowered.compile(self.compiler_options)
        return self._samplers[rows, greedy]

    def _compiled_copier(self) -> jax.stages.Compiled:
        if self._copier is None:
            self._refuse_if_strict("the copy of pages")
            copies = jax.ShapeDtypeStruct((2, self.max_copies), jnp.int32)
            lowered = jit_copies(self._layout.num_pages).lower(self._pool, copies)
            self._copier = lowered.compile(self.compiler_options)
        return self._copier

    def _refuse_if_strict(self, program: object) -> None:
        if self._strict and self._warm:
            raise UnplannedCompilationError(f"{program} was not compiled by the warm-up")


def jit_forward(
    model: Transformer, pages_per_layer: int, kernels: Kernels
) -> tuple[jax.stages.Wrapped, list[jax.Array]]:
    """The forward pass of a step, and its parameters, a flat list, because jax walks them on every launch.

    `(parameters, pool, next_tokens, arrays, *, shape) -> (logits, sample_slots, pool)`. The pool is donated. A token id
    `-1 - slot` is looked up in `next_tokens`.
    """
    graph, state = nnx.split(model)
    parameters, structure = jax.tree.flatten(state)

    def forward(
        parameters: list[jax.Array], pool: jax.Array, next_tokens: jax.Array, arrays: jax.Array, *, shape: StepShape
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        merged = nnx.merge(graph, jax.tree.unflatten(structure, parameters))
        step = StepArrays.unpack(arrays, shape, pages_per_layer, kernels)
        token_ids = jnp.where(step.token_ids >= 0, step.token_ids, next_tokens[-1 - step.token_ids])
        logits, pool = merged(token_ids, pool, step.attention, step.logits_at)
        return logits, step.sample_slots, pool

    return jax.jit(forward, donate_argnums=1, static_argnames="shape"), parameters


def jit_copies(pages_per_layer: int) -> jax.stages.Wrapped:
    """`copy_pages` with the pool donated."""
    return jax.jit(partial(copy_pages, pages_per_layer=pages_per_layer), donate_argnums=0)


def wait_for(model: Transformer) -> None:
    """Return once every parameter is on the device."""
    jax.block_until_ready(nnx.state(model))


def _sample_and_store(
    logits: jax.Array, next_tokens: jax.Array, slots: jax.Array, sampling: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Sample a token a row and store it at the row's slot; rows that sample nothing have the last slot."""
    if sampling is None:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        tokens = sample(logits, unpack_sampling(sampling), greedy_only=False)
    return tokens, next_tokens.at[slots].set(tokens)
