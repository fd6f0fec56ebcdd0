"""Runs steps on the device: the one place that compiles, transfers, donates and reads back."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from jradix import mesh
from jradix.batch import packed_len
from jradix.cache.pool import allocate_pool, put_pages, take_pages
from jradix.config import Buckets, StepShape
from jradix.features import Features
from jradix.jitted import (
    jit,
    jit_calibration,
    jit_copies,
    jit_forward,
    jit_samples,
    sample_and_store,
)
from jradix.logit_processor import (
    LogitProcessor,
    check_can_be_sent,
)
from jradix.logprobs import Logprobs
from jradix.mirror import Mirror, mirrored
from jradix.model.kv_calibration import calibration_ids, scales_shape
from jradix.model.parameters import list_parameters
from jradix.model.quantized import FORMATS
from jradix.model.quantized_kv import is_quantized
from jradix.model.sharding import Sharding
from jradix.model.transformer import Transformer
from jradix.pallas.layout import KVLayout
from jradix.pallas.ops import Kernels
from jradix.programs import Programs
from jradix.sampling_batch import SamplingInputs, packed_sampling_rows

TRANSFER_BYTES = 64 << 20
"""The most that one launch moves between pool and host, unless a page is larger: so that steps go on."""


@dataclass(frozen=True, slots=True)
class _LaunchedForward:
    """A forward pass on its way: f32 logits `[rows, vocab]`, hidden states `[tokens, hidden]`, slots int32 `[rows]`."""

    shape: StepShape
    logits: jax.Array
    hidden: jax.Array
    slots: jax.Array


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on its way to the host.

    Attributes:
        tokens: int32 `[rows]`.
        logprobs: of the sampled tokens, as `Logprobs.packed` gives them, if a row asked for them.
        prompt_logprobs: of prompt tokens, likewise.
        hidden: `[tokens, hidden]`, if a row asked for it.
    """

    tokens: jax.Array
    logprobs: jax.Array | None = None
    prompt_logprobs: jax.Array | None = None
    hidden: jax.Array | None = None


class Collected(NamedTuple):
    """A step's results on the host, see `LaunchedStep`."""

    tokens: npt.NDArray[np.int32]
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    hidden: npt.NDArray[Any] | None


class Runner:
    """Owns the parameters, the KV pool, the vector of next tokens, and the compiled programs over them.

    A step is two launches: the forward pass, one program for each `StepShape`, and the sampler, one for each number of
    rows and kind (greedy or not). So the two multiply nothing: shapes x samplers would be several times as many
    programs. A third comes first where pages are to be copied. Tokens stay on the device: the sampler writes them to
    `next_tokens[slot]`, `[max_slots + 1]` int32, and the next forward pass reads them there, so the host may launch a
    step before it has seen the last one's tokens.

    What only some requests ask for is launched between the two, or after them, where a row of the step asks: see
    `Features`. Four programs more read and write pages, and look at parameters and at the scales of an 8-bit pool.

    On several devices each program runs on all of them. Parameters, pool, logits and counts are split, as `sharding`
    says; the rest, and so what comes back to the host, every device has. Where the devices belong to several processes
    each has a runner, and all make the same mirrored calls in the same order.

    Attributes:
        parameters: the model's, as a flat list.
        kv_scales: of the pool, see `quantized_kv`; None unless it has 8 bits.
        sharding: how the model is split over devices.
        mirror: what tells calls to the runners of other processes.
        programs: all that is compiled.
        features: what is launched for the requests that ask for it.
    """

    def __init__(
        self,
        model: Transformer,
        sharding: Sharding,
        layout: KVLayout,
        kernels: Kernels,
        dtype: Any,
        buckets: Buckets,
        max_slots: int,
        *,
        kv_dtype: Any = None,
        strict: bool = False,
        mirror: Mirror | None = None,
    ) -> None:
        """dtype: of what the model computes. kv_dtype: of the pool; None if it is the same."""
        everywhere, logits = sharding.replicated, sharding.logits
        self.sharding, self.mirror = sharding, mirror or Mirror()
        kv_dtype = jnp.dtype(dtype if kv_dtype is None else kv_dtype)
        self.kv_scales: jax.Array | None = None
        if is_quantized(kv_dtype):
            self.kv_scales = jnp.ones(scales_shape(layout), jnp.float32, device=sharding.kv_scales)
        self._forward, parameters = jit_forward(model, layout.num_pages, kernels, sharding, self.kv_scales)
        self.parameters = parameters if self.kv_scales is None else parameters[:-1]
        self._calibrate = jit_calibration(model, kv_dtype, sharding)
        self._calibration_ids = calibration_ids(model.config)
        self._whole_scales = jit(lambda scales: scales, (sharding.kv_scales,), everywhere)
        self._copy_pages = jit_copies(layout.num_pages, sharding)
        self._sample = jit(
            sample_and_store, (logits, everywhere, everywhere, everywhere), (everywhere, everywhere), donate=1
        )
        self._content_shape = (layout.layers, model.config.kv_heads, 2, layout.page_size, layout.head_dim)
        read = partial(take_pages, layout=layout, kv_heads=model.config.kv_heads, copies=sharding.heads.copies)
        write = partial(put_pages, layout=layout, copies=sharding.heads.copies)
        self._read_pages = jit(read, (sharding.pool, everywhere), everywhere)
        self._write_pages = jit(write, (sharding.pool, everywhere, everywhere), sharding.pool, donate=0)
        self.programs = Programs(mesh.compiler_options(), self.mirror)
        self.features = Features(model, sharding, self.programs, dtype, buckets, max_slots)
        self._layout, self._buckets, self._max_slots = layout, buckets, max_slots
        quantized = any(parameter.dtype in FORMATS.values() for parameter in self.parameters)
        self._named = list_parameters(model.config, model.layer_loop, quantized=quantized)
        self._samples = jit_samples(self.parameters, self._named, sharding)
        self._strict, self._kv_dtype = strict, kv_dtype
        self._find_scales()
        self._start_afresh()

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far."""
        return len(self.programs.compiled)

    @property
    def max_copies(self) -> int:
        """The most pages a step copies first: one for each row of prompt tokens."""
        return self._buckets.extend_rows[-1]

    @property
    def pool(self) -> jax.Array:
        return self._pool

    @property
    def weight_bytes_per_device(self) -> int:
        return sum(map(_bytes_per_device, self.parameters))

    @property
    def pool_bytes_per_device(self) -> int:
        return _bytes_per_device(self._pool)

    @mirrored
    def reset(self) -> None:
        """Start afresh after a step that failed with the pool and the counts in its hands."""
        self._start_afresh()

    def _start_afresh(self) -> None:
        """A pool of zeros and no counts."""
        self._launched: _LaunchedForward | None = None  # until its sampling is launched
        self._pool = allocate_pool(self._layout, self._kv_dtype, self.sharding.pool)
        self._next_tokens = jnp.zeros(self._max_slots + 1, jnp.int32, device=self.sharding.replicated)
        self.features.forget_counts()

    def close(self) -> None:
        """Give the parameters, the pool and the counts back; nothing can be launched any more."""
        del self.parameters, self.kv_scales, self._pool, self._next_tokens, self._launched
        self.features.forget_counts()

    def _find_scales(self) -> None:
        """Those of the pool for the weights as they are, see `kv_calibration`; what it holds is void then."""
        if self.kv_scales is not None:
            self.kv_scales = self._calibrate(self.parameters, self._calibration_ids)

    def replace_pool(self, pool: jax.Array) -> None:
        """Take another pool of the same shape; the old one is dropped."""
        assert (pool.shape, pool.dtype) == (self._pool.shape, self._pool.dtype)
        self._pool = pool

    def register_processor(self, processor: LogitProcessor) -> None:
        """Admit a logit processor; it may come again.

        Raises:
            ValueError: as `Features.is_new`, or it cannot be sent to other processes.
        """
        if self.features.is_new(processor):
            if self.mirror.has_others:
                check_can_be_sent(processor)
            self.add_processor(processor)

    @mirrored
    def add_processor(self, processor: LogitProcessor) -> None:
        """Admit a logit processor that `register_processor` has checked."""
        self.features.add_processor(processor)

    @mirrored
    def launch_forward(
        self, shape: StepShape, arrays: npt.NDArray[np.int32], copies: npt.NDArray[np.int32] | None = None
    ) -> None:
        """Dispatch a forward pass and return at once; `launch_sampling` comes next.

        Args:
            shape: the bucket.
            arrays: what it computes, of `build_arrays`.
            copies: pages to copy first, `[2, max_copies]`, see there.
        """
        forward = self.programs.compile(("forward", shape), self._forward, *self._state(), arrays, shape)
        if copies is not None:
            self.copy_pages(copies)
        logits, hidden, slots, self._pool = forward(*self._state(), arrays)
        self._launched = _LaunchedForward(shape, logits, hidden, slots)

    @mirrored
    def launch_sampling(self, inputs: SamplingInputs) -> LaunchedStep:
        """Dispatch the sampling of the last forward pass and all that is asked about it, and return at once."""
        forward, self._launched = self._launched, None
        assert forward is not None, "no forward pass has been launched that was not sampled from"
        name = ("sampler", forward.shape.rows, inputs.sampling is None)
        adjusted = self.features.adjust(forward.logits, self._next_tokens, inputs)
        args = (adjusted, self._next_tokens, forward.slots, inputs.sampling)
        tokens, self._next_tokens = self.programs.launch(name, self._sample, *args)
        step = LaunchedStep(
            tokens,
            self.features.sampled_logprobs(forward.logits, tokens, inputs.given_ids),
            self.features.prompt_logprobs(self.parameters, forward.hidden, inputs.prompt_logprobs),
            forward.hidden if inputs.hidden_states else None,
        )
        for result in (step.tokens, step.logprobs, step.prompt_logprobs, step.hidden):
            if result is not None:
                result.copy_to_host_async()
        return step

    @mirrored
    def copy_pages(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy pages in all layers, `[2, max_copies]`, see `pool.copy_pages`."""
        self._pool = self.programs.launch(("copy of pages",), self._copy_pages, self._pool, copies)

    @property
    def transfer_pages(self) -> int:
        """The most pages that `read_pages` gives at a time."""
        page_bytes = prod(self._content_shape) * self._kv_dtype.itemsize
        return max(1, min(self._layout.num_pages - 1, TRANSFER_BYTES // page_bytes))

    @mirrored
    def read_pages(self, pages: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
        """The content of at most `transfer_pages` pages, as `pool.take_pages` has it, after all steps so far."""
        content = self.programs.launch(("read pages",), self._read_pages, self._pool, self._padded(pages))
        return np.asarray(content)[: len(pages)]

    @mirrored
    def write_pages(self, pages: npt.NDArray[np.int32], content: npt.NDArray[Any]) -> None:
        """Give pages, any number, what `read_pages` gave, of any mesh, before all steps launched from now on."""
        for start in range(0, len(pages), self.transfer_pages):
            part = slice(start, start + self.transfer_pages)
            args = (self._pool, self._padded(pages[part]), self._padded(content[part]))
            self._pool = self.programs.launch(("write pages",), self._write_pages, *args)

    def _padded(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        padded = np.zeros((self.transfer_pages, *values.shape[1:]), values.dtype)
        padded[: len(values)] = values
        return padded

    @mirrored
    def replace_parameters(self, replace: Callable[[list[jax.Array], Sharding], None]) -> None:
        """Let `replace` change the parameters in place; the scales of the pool are then found anew."""
        replace(self.parameters, self.sharding)
        self._find_scales()

    @mirrored
    def fingerprint(self) -> str:
        """A checksum of some numbers of every parameter: it tells other weights, not every change.

        The same weights have the same on any mesh and in both layer loops.
        """
        numbers: dict[str, npt.NDArray[Any]] = {}
        samples = self.programs.launch(("samples of parameters",), self._samples, self.parameters)
        for parameter, sampled in zip(self._named, map(np.asarray, samples), strict=True):
            numbers |= zip(parameter.layer_names, sampled, strict=True)
        checksum = 0
        for name in sorted(numbers):
            checksum = crc32(numbers[name].tobytes(), crc32(f"{name} {numbers[name].dtype}".encode(), checksum))
        return f"{checksum:08x}"

    @mirrored
    def scales_fingerprint(self) -> str | None:
        """A checksum of the pool's scales, the same on any mesh where they are the same; None if it has none."""
        if self.kv_scales is None:
            return None
        scales = self.programs.launch(("whole scales",), self._whole_scales, self.kv_scales)
        copies = self.sharding.heads.copies
        each_head = np.asarray(scales)[:, : self.sharding.config.kv_heads * copies : copies]
        return f"{crc32(each_head.tobytes()):08x}"

    def collect(self, step: LaunchedStep) -> Collected:
        """The step's results, waiting for them if need be."""
        return Collected(
            np.asarray(step.tokens),
            None if step.logprobs is None else Logprobs.unpack(np.asarray(step.logprobs)),
            None if step.prompt_logprobs is None else Logprobs.unpack(np.asarray(step.prompt_logprobs)),
            None if step.hidden is None else np.asarray(step.hidden),
        )

    def warm_up(self, progress: Callable[[Iterable[StepShape]], Iterable[StepShape]] = iter) -> float:
        """Compile every bucket; returns the seconds it took.

        A strict runner compiles all features too, and nothing more afterwards.
        """
        started = time.perf_counter()
        for shape in progress(self._buckets.shapes()):
            self.compiled_forward(shape)
        self.compile_others()
        return time.perf_counter() - started

    @mirrored
    def compile_others(self) -> None:
        """Compile what `warm_up` does beside the forward pass."""
        for rows in self._buckets.row_counts():
            for sampling in (None, _int32(packed_sampling_rows(), rows)):
                args = (self.features.logits(rows), self._next_tokens, _int32(rows), sampling)
                self.programs.compile(("sampler", rows, sampling is None), self._sample, *args)
        self.programs.compile(("copy of pages",), self._copy_pages, self._pool, _int32(2, self.max_copies))
        if self._strict:
            self._compile_transfers()
            self.features.compile(self.parameters, self._next_tokens)
            self.programs.sealed = True

    @mirrored
    def compiled_forward(self, shape: StepShape) -> jax.stages.Compiled:
        """The program of one bucket."""
        arrays = _int32(packed_len(shape))
        return self.programs.compile(("forward", shape), self._forward, *self._state(), arrays, shape)

    def _compile_transfers(self) -> None:
        """What reads and writes pages, and looks at parameters and scales."""
        compiled, pages = self.programs.compile, _int32(self.transfer_pages)
        content = jax.ShapeDtypeStruct((self.transfer_pages, *self._content_shape), self._kv_dtype)
        compiled(("read pages",), self._read_pages, self._pool, pages)
        compiled(("write pages",), self._write_pages, self._pool, pages, content)
        compiled(("samples of parameters",), self._samples, self.parameters)
        if self.kv_scales is not None:
            compiled(("whole scales",), self._whole_scales, self.kv_scales)

    def _state(self) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        parameters = self.parameters if self.kv_scales is None else [*self.parameters, self.kv_scales]
        return parameters, self._pool, self._next_tokens


def wait_for(model: Transformer) -> None:
    """Return once every parameter is on the device."""
    jax.block_until_ready(nnx.state(model))


def _bytes_per_device(array: jax.Array) -> int:
    return prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _int32(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.int32)
