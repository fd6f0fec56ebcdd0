"""The functions that a runner compiles, jitted: what each computes, where its arguments lie, what is donated."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jradix.batch import StepArrays
from jradix.cache.pool import copy_pages
from jradix.config import StepShape
from jradix.logprobs import logprobs, prompt_logprobs
from jradix.model.kv_calibration import calibrate
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
    model: Transformer,
    pages_per_layer: int,
    kernels: Kernels,
    sharding: Sharding,
    kv_scales: jax.Array | None = None,
) -> tuple[jax.stages.Wrapped, list[jax.Array]]:
    """The forward pass of a step, and its parameters, a flat list, because jax walks them on every launch.

    `(parameters, pool, next_tokens, arrays, shape) -> (logits, hidden, sample_slots, pool)`. The pool is donated. A
    token id `-1 - slot` is looked up in `next_tokens`. On several devices each of them runs the function on its shards,
    and nothing is sent but the sums that the model asks for. Last among the parameters are the pool's scales, if it has
    any.
    """
    graph, state = nnx.split(model)
    parameters, structure = jax.tree.flatten(state)
    if kv_scales is not None:
        parameters.append(kv_scales)
    everywhere = sharding.replicated
    inputs = ([parameter.sharding for parameter in parameters], sharding.pool, everywhere, everywhere)
    outputs = (sharding.logits, everywhere, everywhere, sharding.pool)

    def forward(
        parameters: list[jax.Array], pool: jax.Array, next_tokens: jax.Array, arrays: jax.Array, shape: StepShape
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        weights, kv_scales = parameters[: structure.num_leaves], parameters[structure.num_leaves :]
        merged = nnx.merge(graph, jax.tree.unflatten(structure, weights))
        step = StepArrays.unpack(arrays, shape, pages_per_layer, kernels)
        attention = replace(step.attention, kv_scales=kv_scales[0]) if kv_scales else step.attention
        token_ids = jnp.where(step.token_ids >= 0, step.token_ids, next_tokens[-1 - step.token_ids])
        logits, hidden, pool = merged(token_ids, pool, attention, step.logits_at)
        return logits, hidden, step.sample_slots, pool

    def on_each_device(
        parameters: list[jax.Array], pool: jax.Array, next_tokens: jax.Array, arrays: jax.Array, shape: StepShape
    ) -> Any:
        local = _on_each_device(partial(forward, shape=shape), inputs, outputs, sharding)
        return local(parameters, pool, next_tokens, arrays)

    function = forward if sharding.axis is None else on_each_device
    return jit(function, inputs, outputs, donate=1, static_argnums=4), parameters


def jit_calibration(model: Transformer, kv_dtype: Any, sharding: Sharding) -> jax.stages.Wrapped:
    """`(weights, token_ids) -> kv_scales`, see `calibrate`, for `jit_forward`'s parameters without scales."""
    graph, state = nnx.split(model)
    weights, structure = jax.tree.flatten(state)
    inputs = ([weight.sharding for weight in weights], sharding.replicated)

    def run(weights: list[jax.Array], token_ids: jax.Array) -> jax.Array:
        merged = nnx.merge(graph, jax.tree.unflatten(structure, weights))
        return calibrate(merged, token_ids, sharding.kv_heads_of_device, kv_dtype)

    function = run if sharding.axis is None else _on_each_device(run, inputs, sharding.kv_scales, sharding)
    return jit(function, inputs, sharding.kv_scales)


def _on_each_device(function: Callable[..., Any], inputs: Any, outputs: Any, sharding: Sharding) -> Callable[..., Any]:
    specs = jax.tree.map(lambda place: place.spec, (inputs, outputs))
    return jax.shard_map(function, mesh=sharding.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)


def jit_copies(pages_per_layer: int, sharding: Sharding) -> jax.stages.Wrapped:
    """`copy_pages` with the pool donated."""
    copy = partial(copy_pages, pages_per_layer=pages_per_layer)
    return jit(copy, (sharding.pool, sharding.replicated), sharding.pool, donate=0)


def jit_prompt_logprobs(model: Transformer, block: int, sharding: Sharding) -> jax.stages.Wrapped:
    """Log-probabilities of prompt tokens, `block` of them at a time.

    `(weights, hidden, tokens, given_ids) -> packed`, for `jit_forward`'s parameters without scales and what `pick`
    gives; see `logprobs.prompt_logprobs` and `PromptLogprobInputs`.
    """
    graph, state = nnx.split(model)
    weights, structure = jax.tree.flatten(state)
    everywhere = sharding.replicated

    def run(weights: list[jax.Array], hidden: jax.Array, tokens: jax.Array, given_ids: jax.Array) -> jax.Array:
        merged = nnx.merge(graph, jax.tree.unflatten(structure, weights))
        return prompt_logprobs(hidden, tokens[1], given_ids, merged.logits, block=block)

    inputs = ([weight.sharding for weight in weights], everywhere, everywhere, everywhere)
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
