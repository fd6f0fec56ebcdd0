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
from jradix.jitted import (
    jit,
    jit_copies,
    jit_forward,
    jit_prompt_logprobs,
    jit_samples,
    packed_logprobs,
    pick,
    sample_and_store,
)
from jradix.logit_processor import (
    MAX_PROCESSORS,
    LogitProcessor,
    apply_processor,
    check_can_be_sent,
    check_processor,
    packed_processor_rows,
)
from jradix.logits import add_bias, apply_mask, mask_words, penalize, set_counts, token_counts
from jradix.logprobs import LOGPROB_WIDTHS, PROMPT_BLOCK, Logprobs
from jradix.mirror import Mirror, mirrored
from jradix.model.parameters import list_parameters
from jradix.model.quantized import FORMATS
from jradix.model.sharding import Sharding
from jradix.model.transformer import Transformer
from jradix.pallas.layout import KVLayout
from jradix.pallas.ops import Kernels
from jradix.programs import Programs
from jradix.sampling_batch import CountedTokens, SamplingInputs, packed_sampling_rows
from jradix.sampling_params import MAX_BIASES

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
    """Owns the parameters, the KV pool, the vector of next tokens, penalty counts, and the compiled programs over them.

    A step is two launches: the forward pass, one program for each `StepShape`, and the sampler, one for each number of
    rows and kind (greedy or not). So the two multiply nothing: shapes x samplers would be several times as many
    programs. A third comes first where pages are to be copied. Tokens stay on the device: the sampler writes them to
    `next_tokens[slot]`, `[max_slots + 1]` int32, and the next forward pass reads them there, so the host may launch a
    step before it has seen the last one's tokens.

    What only some requests ask for is launched between the two, or after them, where a row of the step asks. Each
    feature is a program of its own for each number of rows, compiled when it is first needed. If the buckets have R
    numbers of rows, and T of tokens among those with prompt tokens, that is at most R * (3 + processors + widths) + 5 +
    T + widths more: penalties, biases, mask, each processor and log-probabilities for each of LOGPROB_WIDTHS; counts
    made and set; pages read and written; parameters sampled; hidden states of prompt tokens picked out, and their
    log-probabilities for each width.

    On several devices each program runs on all of them. Parameters, pool, logits and counts are split, as `sharding`
    says; the rest, and so what comes back to the host, every device has. Where the devices belong to several processes
    each has a runner, and all make the same mirrored calls in the same order.

    Attributes:
        parameters: the model's, as a flat list.
        sharding: how the model is split over devices.
        mirror: what tells calls to the runners of other processes.
        programs: all that is compiled.
        max_prompt_logprobs: entries for prompt tokens in `PromptLogprobInputs`: all of a step's.
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
        strict: bool = False,
        mirror: Mirror | None = None,
    ) -> None:
        everywhere, logits = sharding.replicated, sharding.logits
        counts = logits  # [max_slots + 1, vocab]
        self.sharding, self.mirror = sharding, mirror or Mirror()
        self._forward, self.parameters = jit_forward(model, layout.num_pages, kernels, sharding)
        self._copy_pages = jit_copies(layout.num_pages, sharding)
        self._sample = jit(
            sample_and_store, (logits, everywhere, everywhere, everywhere), (everywhere, everywhere), donate=1
        )
        self._content_shape = (layout.layers, model.config.kv_heads, 2, layout.page_size, layout.head_dim)
        read = partial(take_pages, layout=layout, kv_heads=model.config.kv_heads, copies=sharding.heads.copies)
        write = partial(put_pages, layout=layout, copies=sharding.heads.copies)
        self._read_pages = jit(read, (sharding.pool, everywhere), everywhere)
        self._write_pages = jit(write, (sharding.pool, everywhere, everywhere), sharding.pool, donate=0)
        self._counts_shape = _int32(max_slots + 1, model.config.vocab_size)
        self._no_counts = jit(partial(jnp.zeros, self._counts_shape.shape, jnp.int32), (), counts)
        self._set_counts = jit(set_counts, (counts, everywhere, everywhere), counts, donate=0)
        self._penalize = jit(penalize, (logits, counts, everywhere, everywhere), (logits, counts), donate=1)
        self._add_bias = jit(add_bias, (logits, everywhere), logits)
        self._apply_mask = jit(apply_mask, (logits, everywhere), logits)
        self._processors: dict[LogitProcessor, jax.stages.Wrapped] = {}
        self._logprobs = jit(packed_logprobs, (logits, everywhere, everywhere), everywhere)
        self._pick = jit(pick, (everywhere, everywhere), everywhere)
        block = min(PROMPT_BLOCK, buckets.extend_tokens[-1])
        self.max_prompt_logprobs = -(-buckets.extend_tokens[-1] // block) * block
        self._prompt_logprobs = jit_prompt_logprobs(model, block, sharding)
        self.programs = Programs(mesh.compiler_options(), self.mirror)
        self._layout, self._dtype, self._buckets, self._max_slots = layout, dtype, buckets, max_slots
        quantized = any(parameter.dtype in FORMATS.values() for parameter in self.parameters)
        self._named = list_parameters(model.config, model.layer_loop, quantized=quantized)
        self._samples = jit_samples(self.parameters, self._named, sharding)
        self._strict, self._vocab_size, self._hidden_size = strict, model.config.vocab_size, model.config.hidden_size
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
        self._pool = allocate_pool(self._layout, self._dtype, self.sharding.pool)
        self._next_tokens = jnp.zeros(self._max_slots + 1, jnp.int32, device=self.sharding.replicated)
        self._counts: jax.Array | None = None

    def close(self) -> None:
        """Give the parameters, the pool and the counts back; nothing can be launched any more."""
        del self.parameters, self._pool, self._next_tokens, self._counts, self._launched

    def replace_pool(self, pool: jax.Array) -> None:
        """Take another pool of the same shape; the old one is dropped."""
        assert (pool.shape, pool.dtype) == (self._pool.shape, self._pool.dtype)
        self._pool = pool

    def register_processor(self, processor: LogitProcessor) -> None:
        """Admit a logit processor; it may come again.

        Raises:
            ValueError: it is not hashable, jax cannot trace it to logits, the engine has MAX_PROCESSORS others, it
                comes after the warm-up of a strict runner, which compiles those it knows by then, or it cannot be sent
                to other processes.
        """
        try:
            known = processor in self._processors
        except TypeError as error:
            raise ValueError(f"custom_logit_processor must be hashable, got {processor!r}") from error
        if known:
            return
        if len(self._processors) == MAX_PROCESSORS:
            raise ValueError(
                f"an engine compiles at most {MAX_PROCESSORS} different functions for custom_logit_processor, and has "
                "them: pass one of them again, and what differs between requests as custom_params"
            )
        if self.programs.sealed:
            raise ValueError(
                f"custom_logit_processor {processor!r} came after the warm-up, and with strict_compile nothing is "
                "compiled then: give it to Engine.register_processor first"
            )
        check_processor(processor, self._vocab_size)
        if self.mirror.has_others:
            check_can_be_sent(processor)
        self.add_processor(processor)

    @mirrored
    def add_processor(self, processor: LogitProcessor) -> None:
        """Admit a logit processor that `register_processor` has checked."""
        logits, everywhere = self.sharding.logits, self.sharding.replicated
        process = partial(apply_processor, processor=processor)
        self._processors[processor] = jit(process, (logits, everywhere, everywhere), logits)

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
        args = (self._adjusted(forward, inputs), self._next_tokens, forward.slots, inputs.sampling)
        tokens, self._next_tokens = self.programs.launch(name, self._sample, *args)
        step = LaunchedStep(
            tokens,
            self._sampled_logprobs(forward, tokens, inputs),
            self._prompt_token_logprobs(forward, inputs),
            forward.hidden if inputs.hidden_states else None,
        )
        for result in (step.tokens, step.logprobs, step.prompt_logprobs, step.hidden):
            if result is not None:
                result.copy_to_host_async()
        return step

    @mirrored
    def set_counts(self, tokens: CountedTokens) -> None:
        """Set what penalties know of a slot: the tokens that the host has seen."""
        if self._counts is None:
            self._counts = self.programs.launch(("no counts",), self._no_counts)
        counts = token_counts(tokens.prompt_ids, tokens.output_ids, self._vocab_size)
        args = (self._counts, np.int32(tokens.slot), counts)
        self._counts = self.programs.launch(("set counts",), self._set_counts, *args)

    @mirrored
    def copy_pages(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy pages in all layers, `[2, max_copies]`, see `pool.copy_pages`."""
        self._pool = self.programs.launch(("copy of pages",), self._copy_pages, self._pool, copies)

    @property
    def transfer_pages(self) -> int:
        """The most pages that `read_pages` gives at a time."""
        page_bytes = prod(self._content_shape) * jnp.dtype(self._dtype).itemsize
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
        """Let `replace` change the parameters in place."""
        replace(self.parameters, self.sharding)

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
        for rows in self._row_counts():
            for sampling in (None, _int32(packed_sampling_rows(), rows)):
                args = (self._logits(rows), self._next_tokens, _int32(rows), sampling)
                self.programs.compile(("sampler", rows, sampling is None), self._sample, *args)
        self.programs.compile(("copy of pages",), self._copy_pages, self._pool, _int32(2, self.max_copies))
        if self._strict:
            self._compile_features()
            self.programs.sealed = True

    @mirrored
    def compiled_forward(self, shape: StepShape) -> jax.stages.Compiled:
        """The program of one bucket."""
        arrays = _int32(packed_len(shape))
        return self.programs.compile(("forward", shape), self._forward, *self._state(), arrays, shape)

    def _compile_features(self) -> None:
        """Whatever a request may ask for: the names and shapes that the methods below launch."""
        compiled, counts = self.programs.compile, self._counts_shape
        pages = _int32(self.transfer_pages)
        content = jax.ShapeDtypeStruct((self.transfer_pages, *self._content_shape), self._dtype)
        compiled(("read pages",), self._read_pages, self._pool, pages)
        compiled(("write pages",), self._write_pages, self._pool, pages, content)
        compiled(("samples of parameters",), self._samples, self.parameters)
        compiled(("no counts",), self._no_counts)
        compiled(("set counts",), self._set_counts, counts, _int32(), _int32(self._vocab_size))
        for rows in self._row_counts():
            logits = self._logits(rows)
            words = jax.ShapeDtypeStruct((rows, mask_words(self._vocab_size)), jnp.uint32)
            compiled(("penalties", rows), self._penalize, logits, counts, self._next_tokens, _int32(5, rows))
            compiled(("biases", rows), self._add_bias, logits, _int32(2, rows, MAX_BIASES))
            compiled(("mask", rows), self._apply_mask, logits, words)
            for processor, jitted in self._processors.items():
                packed = _int32(packed_processor_rows(), rows)
                compiled(("processor", processor, rows), jitted, logits, self._next_tokens, packed)
            for width in LOGPROB_WIDTHS:
                compiled(("logprobs", rows, width), self._logprobs, logits, _int32(rows), _int32(rows, width))
        size = self.max_prompt_logprobs
        for tokens in sorted({shape.tokens for shape in self._buckets.shapes() if shape.extend_tokens}):
            compiled(("prompt tokens", tokens), self._pick, self._hidden(tokens), _int32(2, size))
        for width in LOGPROB_WIDTHS:
            args = (self.parameters, self._hidden(size), _int32(2, size), _int32(size, width))
            compiled(("prompt logprobs", width), self._prompt_logprobs, *args)

    def _adjusted(self, forward: _LaunchedForward, inputs: SamplingInputs) -> jax.Array:
        """The logits to sample from; those of the model, which log-probabilities are of, stay what they are."""
        logits, rows, launch = forward.logits, forward.shape.rows, self.programs.launch
        if inputs.penalties is not None:
            for tokens in inputs.penalties.counted:
                self.set_counts(tokens)
            args = (logits, self._counts, self._next_tokens, inputs.penalties.packed)
            logits, self._counts = launch(("penalties", rows), self._penalize, *args)
        if inputs.bias is not None:
            logits = launch(("biases", rows), self._add_bias, logits, inputs.bias)
        for processor, packed in inputs.processors:
            jitted = self._processors[processor]
            logits = launch(("processor", processor, rows), jitted, logits, self._next_tokens, packed)
        if inputs.mask is not None:
            logits = launch(("mask", rows), self._apply_mask, logits, inputs.mask)
        return logits

    def _sampled_logprobs(
        self, forward: _LaunchedForward, tokens: jax.Array, inputs: SamplingInputs
    ) -> jax.Array | None:
        if inputs.given_ids is None:
            return None
        name = ("logprobs", *inputs.given_ids.shape)
        return self.programs.launch(name, self._logprobs, forward.logits, tokens, inputs.given_ids)

    def _prompt_token_logprobs(self, forward: _LaunchedForward, inputs: SamplingInputs) -> jax.Array | None:
        asked = inputs.prompt_logprobs
        if asked is None:
            return None
        picker = ("prompt tokens", forward.shape.tokens)
        hidden = self.programs.launch(picker, self._pick, forward.hidden, asked.tokens)
        name = ("prompt logprobs", asked.given_ids.shape[1])
        args = (self.parameters, hidden, asked.tokens, asked.given_ids)
        return self.programs.launch(name, self._prompt_logprobs, *args)

    def _state(self) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        return self.parameters, self._pool, self._next_tokens

    def _row_counts(self) -> list[int]:
        return sorted({shape.rows for shape in self._buckets.shapes()})

    def _logits(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self._vocab_size), jnp.float32)

    def _hidden(self, tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((tokens, self._hidden_size), self._dtype)


def wait_for(model: Transformer) -> None:
    """Return once every parameter is on the device."""
    jax.block_until_ready(nnx.state(model))


def _bytes_per_device(array: jax.Array) -> int:
    return prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _int32(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.int32)
