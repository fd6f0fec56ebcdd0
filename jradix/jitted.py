"""The functions that a runner compiles, jitted: what each computes, where its arguments lie, what is donated."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jradix.batch import StepArrays
from jradix.cache.pool import copy_pages
from jradix.config import StepShape
from jradix.logprobs import logprobs, prompt_logprobs
from jradix.model.parameters import Parameter
from jradix.model.sharding import Sharding
from jradix.model.transformer import Transformer
from jradix.pallas.ops import Kernels
from jradix.sampling import likeliest, sample
from jradix.sampling_batch import unpack_sampling


def jit(
    function: Callable[..., Any], inputs: Any, outputs: Any, donate: int | tuple[()] = (), **static: Any
) -> jax.stages.Wrapped:
    """Compiled for arguments and results that lie as said: left open, a donated one might come back elsewhere."""
    return jax.jit(function, in_shardings=inputs, out_shardings=outputs, donate_argnums=donate, **static)


def jit_forward(
    model: Transformer, pages_per_layer: int, kernels: Kernels, sharding: Sharding
) -> tuple[jax.stages.Wrapped, list[jax.Array]]:
    """The forward pass of a step, and its parameters, a flat list, because jax walks them on every launch.

    `(parameters, pool, next_tokens, arrays, shape) -> (logits, hidden, sample_slots, pool)`. The pool is donated. A
    token id `-1 - slot` is looked up in `next_tokens`. On several devices each of them runs the function on its shards,
    and nothing is sent but the sums that the model asks for.
    """
    graph, state = nnx.split(model)
    parameters, structure = jax.tree.flatten(state)
    everywhere = sharding.replicated
    inputs = ([parameter.sharding for parameter in parameters], sharding.pool, everywhere, everywhere)
    outputs = (sharding.logits, everywhere, everywhere, sharding.pool)

    def forward(
        parameters: list[jax.Array], pool: jax.Array, next_tokens: jax.Array, arrays: jax.Array, shape: StepShape
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        merged = nnx.merge(graph, jax.tree.unflatten(structure, parameters))
        step = StepArrays.unpack(arrays, shape, pages_per_layer, kernels)
        token_ids = jnp.where(step.token_ids >= 0, step.token_ids, next_tokens[-1 - step.token_ids])
        logits, hidden, pool = merged(token_ids, pool, step.attention, step.logits_at)
        return logits, hidden, step.sample_slots, pool

    def on_each_device(
        parameters: list[jax.Array], pool: jax.Array, next_tokens: jax.Array, arrays: jax.Array, shape: StepShape
    ) -> Any:
        specs = jax.tree.map(lambda place: place.spec, (inputs, outputs))
        local = jax.shard_map(
            partial(forward, shape=shape), mesh=sharding.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
        )
        return local(parameters, pool, next_tokens, arrays)

    function = forward if sharding.axis is None else on_each_device
    return jit(function, inputs, outputs, donate=1, static_argnums=4), parameters


def jit_copies(pages_per_layer: int, sharding: Sharding) -> jax.stages.Wrapped:
    """`copy_pages` with the pool donated."""
    copy = partial(copy_pages, pages_per_layer=pages_per_layer)
    return jit(copy, (sharding.pool, sharding.replicated), sharding.pool, donate=0)


def jit_prompt_logprobs(model: Transformer, block: int, sharding: Sharding) -> jax.stages.Wrapped:
    """Log-probabilities of prompt tokens, `block` of them at a time.

    `(parameters, hidden, tokens, given_ids) -> packed`, for `jit_forward`'s parameters and what `pick` gives; see
    `logprobs.prompt_logprobs` and `PromptLogprobInputs`.
    """
    graph, state = nnx.split(model)
    parameters, structure = jax.tree.flatten(state)
    everywhere = sharding.replicated

    def run(parameters: list[jax.Array], hidden: jax.Array, tokens: jax.Array, given_ids: jax.Array) -> jax.Array:
        merged = nnx.merge(graph, jax.tree.unflatten(structure, parameters))
        return prompt_logprobs(hidden, tokens[1], given_ids, merged.logits, block=block)

    inputs = ([parameter.sharding for parameter in parameters], everywhere, everywhere, everywhere)
    return jit(run, inputs, everywhere)


def jit_samples(parameters: list[jax.Array], named: Sequence[Parameter], sharding: Sharding) -> jax.stages.Wrapped:
    """`(parameters) -> numbers`: `Parameter.samples` of each, which all devices have then."""

    def samples(parameters: list[jax.Array]) -> list[jax.Array]:
        return [array[parameter.samples(sharding)] for parameter, array in zip(named, parameters, strict=True)]

    return jit(samples, ([parameter.sharding for parameter in parameters],), sharding.replicated)


def sample_and_store(
    logits: jax.Array, next_tokens: jax.Array, slots: jax.Array, sampling: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Sample a token a row and store it at the row's slot; rows that sample nothing have the last slot."""
    tokens = likeliest(logits) if sampling is None else sample(logits, unpack_sampling(sampling), greedy_only=False)
    return tokens, next_tokens.at[slots].set(tokens)


def packed_logprobs(logits: jax.Array, token_ids: jax.Array, given_ids: jax.Array) -> jax.Array:
    return logprobs(logits, token_ids, given_ids).packed()


def pick(hidden: jax.Array, tokens: jax.Array) -> jax.Array:
    """Hidden states of the step's tokens `tokens[0]`."""
    return hidden.at[tokens[0]].get(mode="clip")
