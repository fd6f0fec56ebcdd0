"""The decoder all families share: embedding, a loop over blocks, final norm and LM head."""

from functools import partial
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jradix.model.attention import AttentionInputs
from jradix.model.config import ModelConfig
from jradix.model.layers import Attention, MakeLayerParameter, Mlp, linear, rms_norm
from jradix.model.moe import ExpertParam, Experts
from jradix.model.rope import rope_tables

type LayerLoop = Literal["scan", "unroll"]


class MakeParameter(Protocol):
    """Gives the parameter `name`.

    `layers` is None for a parameter of no layer. For a range of several layers the result is stacked,
    `[len(layers), *shape]`; for a range of one it is `shape`.
    """

    def __call__(self, name: str, shape: tuple[int, ...], layers: range | None = None) -> jax.Array: ...


class Block(nnx.Module):
    """One layer, or a stack of equal layers whose parameters have a leading `layers` axis."""

    def __init__(self, config: ModelConfig, first_layer: int, make: MakeLayerParameter) -> None:
        self.first_layer, self.eps = first_layer, config.rms_norm_eps
        self.attention_norm = nnx.Param(make("attention_norm", (config.hidden_size,)))
        self.attention = Attention(config, config.windows[first_layer], make)
        self.mlp_norm = nnx.Param(make("mlp_norm", (config.hidden_size,)))
        self.mlp = Experts(config, make) if first_layer in config.moe_layers else Mlp(config, make)

    def __call__(
        self,
        x: jax.Array,
        pool: jax.Array,
        layer: jax.Array | int,
        inputs: AttentionInputs,
        rope: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """`x` `[tokens, hidden]` and the pool, before layer `layer` and after it."""
        attended, pool = self.attention(rms_norm(x, self.attention_norm, self.eps), pool, inputs, layer, rope)
        x = (x + attended).astype(x.dtype)
        normed = rms_norm(x, self.mlp_norm, self.eps)
        out = self.mlp(normed, layer - self.first_layer) if isinstance(self.mlp, Experts) else self.mlp(normed)
        return (x + out).astype(x.dtype), pool


class Transformer(nnx.Module):
    """A decoder-only language model over a paged KV pool.

    Args:
        config: what to compute.
        make: gives every parameter; see `weights` for those of a checkpoint and random ones.
        layer_loop: "unroll" makes one block a layer. "scan" stacks each run of equal layers into one block and scans
            over it: a fraction of the compile time, but XLA on CPU and GPU copies a layer's weights in each step.
    """

    def __init__(self, config: ModelConfig, make: MakeParameter, layer_loop: LayerLoop) -> None:
        self.config = config
        self.layer_groups = _layer_groups(config, layer_loop)
        table = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(make("embed", table))
        self.blocks = nnx.List(
            Block(config, layers.start, partial(make, layers=layers)) for layers in self.layer_groups
        )
        self.final_norm = nnx.Param(make("final_norm", (config.hidden_size,)))
        self.lm_head = None if config.tie_word_embeddings else nnx.Param(make("lm_head", table))

    def __call__(
        self, token_ids: jax.Array, pool: jax.Array, inputs: AttentionInputs, logits_at: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Run one step.

        Args:
            token_ids: int32 `[tokens]`.
            pool: the KV pool, see `layout.KVLayout`; donate it in the jitted step around this call.
            inputs: which pages the tokens read and write.
            logits_at: int32 `[n]`, the tokens to give logits of; indices past either end clamp.

        Returns:
            float32 logits `[n, vocab]`, the hidden states of all tokens `[tokens, hidden]`, of which `logits` makes
            logits, and the updated pool.
        """
        x = self.embed[...].at[token_ids].get(mode="clip")
        rope = rope_tables(inputs.positions, self.config.rope)
        for layers, block in zip(self.layer_groups, self.blocks, strict=True):
            if len(layers) == 1:
                x, pool = block(x, pool, layers.start, inputs, rope)
            else:
                x, pool = _scan(block, layers, x, pool, inputs, rope)
        return self.logits(x[jnp.clip(logits_at, 0, x.shape[0] - 1)]), x, pool

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Final norm and LM head: `[n, hidden]`, as the last layer leaves it, -> float32 `[n, vocab]`."""
        head = self.embed if self.lm_head is None else self.lm_head
        return linear(rms_norm(hidden, self.final_norm, self.config.rms_norm_eps), head[...])


def _layer_groups(config: ModelConfig, layer_loop: LayerLoop) -> tuple[range, ...]:
    """Consecutive layers that become one block: equal ones in a scan, each by itself otherwise."""
    if layer_loop not in ("scan", "unroll"):
        raise ValueError(f"layer_loop must be 'scan' or 'unroll', got {layer_loop!r}")
    kinds = [(config.windows[layer], layer in config.moe_layers) for layer in range(config.layers)]
    starts = [i for i in range(config.layers) if i == 0 or layer_loop == "unroll" or kinds[i] != kinds[i - 1]]
    return tuple(range(start, end) for start, end in zip(starts, [*starts[1:], config.layers], strict=True))


def _scan(
    block: Block,
    layers: range,
    x: jax.Array,
    pool: jax.Array,
    inputs: AttentionInputs,
    rope: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Run a stack of layers. The pool is carried: as a scanned-over input and output it would be copied whole."""
    graphdef, whole, sliced = nnx.split(block, ExpertParam, ...)

    def step(carry: tuple[jax.Array, jax.Array], xs: tuple[nnx.State, jax.Array]):
        params, layer = xs
        return nnx.merge(graphdef, whole, params)(*carry, layer, inputs, rope), None

    carry, _ = jax.lax.scan(step, (x, pool), (sliced, jnp.arange(layers.start, layers.stop, dtype=jnp.int32)))
    return carry
