"""What only some requests ask for, a program for each: penalties, biases, masks, processors, log-probabilities."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jradix.config import Buckets
from jradix.jitted import jit, jit_prompt_logprobs, packed_logprobs, pick
from jradix.logit_processor import (
    MAX_PROCESSORS,
    LogitProcessor,
    apply_processor,
    check_processor,
    packed_processor_rows,
)
from jradix.logits import add_bias, apply_mask, mask_words, penalize, set_counts, token_counts
from jradix.logprobs import LOGPROB_WIDTHS, PROMPT_BLOCK
from jradix.model.sharding import Sharding
from jradix.model.transformer import Transformer
from jradix.programs import Programs
from jradix.sampling_batch import CountedTokens, PromptLogprobInputs, SamplingInputs
from jradix.sampling_params import MAX_BIASES


class Features:
    """Launches what the rows of a step ask for between its forward pass and its sampler, and after these.

    Each feature is a program of its own for each number of rows, compiled when it is first needed. If the buckets have
    R numbers of rows, and T of tokens among those with prompt tokens, that is at most R * (3 + processors + widths) + 2
    + T + widths: penalties, biases, mask, each processor and log-probabilities for each of LOGPROB_WIDTHS; counts made
    and set; hidden states of prompt tokens picked out, and their log-probabilities for each width.

    A part of a runner: whatever launches or changes something here is called by one of its mirrored methods.

    Attributes:
        counts: how often each slot's request has each token, int32 `[max_slots + 1, vocab]`, donated by what changes
            them; None until a request has penalties.
        processors: the logit processors that were added.
        max_prompt_logprobs: entries for prompt tokens in `PromptLogprobInputs`: all of a step's.
    """

    def __init__(
        self,
        model: Transformer,
        sharding: Sharding,
        programs: Programs,
        dtype: Any,
        buckets: Buckets,
        max_slots: int,
    ) -> None:
        """dtype: of hidden states."""
        everywhere, logits = sharding.replicated, sharding.logits
        counts = logits  # both have a column for each token
        self.counts_shape = _int32(max_slots + 1, model.config.vocab_size)
        self._no_counts = jit(partial(jnp.zeros, self.counts_shape.shape, jnp.int32), (), counts)
        self._set_counts = jit(set_counts, (counts, everywhere, everywhere), counts, donate=0)
        self.penalize = jit(penalize, (logits, counts, everywhere, everywhere), (logits, counts), donate=1)
        self.add_bias = jit(add_bias, (logits, everywhere), logits)
        self._apply_mask = jit(apply_mask, (logits, everywhere), logits)
        self.processors: dict[LogitProcessor, jax.stages.Wrapped] = {}
        self._logprobs = jit(packed_logprobs, (logits, everywhere, everywhere), everywhere)
        self._pick = jit(pick, (everywhere, everywhere), everywhere)
        block = min(PROMPT_BLOCK, buckets.extend_tokens[-1])
        self.max_prompt_logprobs = -(-buckets.extend_tokens[-1] // block) * block
        self._prompt_logprobs = jit_prompt_logprobs(model, block, sharding)
        self._programs, self._sharding, self._buckets, self._dtype = programs, sharding, buckets, dtype
        self._vocab_size, self._hidden_size = model.config.vocab_size, model.config.hidden_size
        self.counts: jax.Array | None = None

    def forget_counts(self) -> None:
        """At the end, and after a step that failed with them in its hands."""
        self.counts = None

    def is_new(self, processor: LogitProcessor) -> bool:
        """Whether a logit processor is still to be added.

        Raises:
            ValueError: it is not hashable, or it cannot be added: jax cannot trace it to logits, there are
                MAX_PROCESSORS others, or no program may be compiled any more.
        """
        try:
            if processor in self.processors:
                return False
        except TypeError as error:
            raise ValueError(f"custom_logit_processor must be hashable, got {processor!r}") from error
        if len(self.processors) == MAX_PROCESSORS:
            raise ValueError(
                f"an engine compiles at most {MAX_PROCESSORS} different functions for custom_logit_processor, and has "
                "them: pass one of them again, and what differs between requests as custom_params"
            )
        if self._programs.sealed:
            raise ValueError(
                f"custom_logit_processor {processor!r} came after the warm-up, and with strict_compile nothing is "
                "compiled then: give it to Engine.register_processor first"
            )
        check_processor(processor, self._vocab_size)
        return True

    def add_processor(self, processor: LogitProcessor) -> None:
        """Take a logit processor, one that `is_new`."""
        logits, everywhere = self._sharding.logits, self._sharding.replicated
        process = partial(apply_processor, processor=processor)
        self.processors[processor] = jit(process, (logits, everywhere, everywhere), logits)

    def adjust(self, logits: jax.Array, next_tokens: jax.Array, inputs: SamplingInputs) -> jax.Array:
        """The logits to sample from; those of the model, which log-probabilities are of, stay what they are."""
        rows, launch = logits.shape[0], self._programs.launch
        if inputs.penalties is not None:
            for tokens in inputs.penalties.counted:
                self._count(tokens)
            args = (logits, self.counts, next_tokens, inputs.penalties.packed)
            logits, self.counts = launch(("penalties", rows), self.penalize, *args)
        if inputs.bias is not None:
            logits = launch(("biases", rows), self.add_bias, logits, inputs.bias)
        for processor, packed in inputs.processors:
            jitted = self.processors[processor]
            logits = launch(("processor", processor, rows), jitted, logits, next_tokens, packed)
        if inputs.mask is not None:
            logits = launch(("mask", rows), self._apply_mask, logits, inputs.mask)
        return logits

    def _count(self, tokens: CountedTokens) -> None:
        """Set what penalties know of a slot: the tokens that the host has seen."""
        if self.counts is None:
            self.counts = self._programs.launch(("no counts",), self._no_counts)
        counts = token_counts(tokens.prompt_ids, tokens.output_ids, self._vocab_size)
        args = (self.counts, np.int32(tokens.slot), counts)
        self.counts = self._programs.launch(("set counts",), self._set_counts, *args)

    def sampled_logprobs(
        self, logits: jax.Array, tokens: jax.Array, given_ids: npt.NDArray[np.int32] | None
    ) -> jax.Array | None:
        """Of the sampled tokens, as `Logprobs.packed` gives them; None if no row asks for them."""
        if given_ids is None:
            return None
        return self._programs.launch(("logprobs", *given_ids.shape), self._logprobs, logits, tokens, given_ids)

    def prompt_logprobs(
        self, parameters: list[jax.Array], hidden: jax.Array, asked: PromptLogprobInputs | None
    ) -> jax.Array | None:
        """Of prompt tokens, likewise."""
        if asked is None:
            return None
        picked = self._programs.launch(("prompt tokens", hidden.shape[0]), self._pick, hidden, asked.tokens)
        name = ("prompt logprobs", asked.given_ids.shape[1])
        args = (parameters, picked, asked.tokens, asked.given_ids)
        return self._programs.launch(name, self._prompt_logprobs, *args)

    def compile(self, parameters: list[jax.Array], next_tokens: jax.Array) -> None:
        """Compile whatever a request may ask for: the names and shapes that the methods above launch."""
        compiled, counts = self._programs.compile, self.counts_shape
        compiled(("no counts",), self._no_counts)
        compiled(("set counts",), self._set_counts, counts, _int32(), _int32(self._vocab_size))
        for rows in self._buckets.row_counts():
            logits = self.logits(rows)
            words = jax.ShapeDtypeStruct((rows, mask_words(self._vocab_size)), jnp.uint32)
            compiled(("penalties", rows), self.penalize, logits, counts, next_tokens, _int32(5, rows))
            compiled(("biases", rows), self.add_bias, logits, _int32(2, rows, MAX_BIASES))
            compiled(("mask", rows), self._apply_mask, logits, words)
            for processor, jitted in self.processors.items():
                packed = _int32(packed_processor_rows(), rows)
                compiled(("processor", processor, rows), jitted, logits, next_tokens, packed)
            for width in LOGPROB_WIDTHS:
                compiled(("logprobs", rows, width), self._logprobs, logits, _int32(rows), _int32(rows, width))
        size = self.max_prompt_logprobs
        for tokens in sorted({shape.tokens for shape in self._buckets.shapes() if shape.extend_tokens}):
            compiled(("prompt tokens", tokens), self._pick, self._hidden(tokens), _int32(2, size))
        for width in LOGPROB_WIDTHS:
            args = (parameters, self._hidden(size), _int32(2, size), _int32(size, width))
            compiled(("prompt logprobs", width), self._prompt_logprobs, *args)

    def logits(self, rows: int) -> jax.ShapeDtypeStruct:
        """The shape of so many rows' logits."""
        return jax.ShapeDtypeStruct((rows, self._vocab_size), jnp.float32)

    def _hidden(self, tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((tokens, self._hidden_size), self._dtype)


def _int32(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.int32)
