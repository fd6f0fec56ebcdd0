"""The decoder all families share: embedding, a loop over blocks, final norm and LM head."""

from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jradix.model.attention import AttentionInputs
from jradix.model.config import ModelConfig
from jradix.model.layers import Attention, MakeLayerParameter, Mlp, linear, rms_norm
from jradix.model.moe import ExpertParam, Experts
from jradix.model.rope import rope_tables
from jradix.pallas.rows import take_rows

type LayerLoop = Literal["scan", "unroll"]
type Ropes = tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""cos and sin of the layers without a window, then of those with one."""


class MakeParameter(Protocol):
    """Gives the parameter `name`.

    `layers` is None for a parameter of no layer. For a range of several layers, with any step, the result is stacked,
    `[len(layers), *shape]`; for a range of one it is `shape`.
    """

    def __call__(self, name: str, shape: tuple[int, ...], layers: range | None = None) -> jax.Array: ...


class Block(nnx.Module):
    """One layer, or a stack of equal layers whose parameters have a leading `layers` axis."""

    def __init__(self, config: ModelConfig, layers: range, make: MakeLayerParameter, axis: str | None = None) -> None:
        self.layers, self.windowed = layers, config.windows[layers.start] is not None
        self.eps, self.norm_offset = config.rms_norm_eps, config.norm_offset
        hidden = (config.hidden_size,)
        self.attention_norm = nnx.Param(make("attention_norm", hidden))
        self.attention = Attention(config, config.windows[layers.start], make, axis)
        self.attention_post_norm = nnx.Param(make("attention_post_norm", hidden)) if config.post_norms else None
        self.mlp_norm = nnx.Param(make("mlp_norm", hidden))
        self.mlp = Experts(config, make, axis) if layers.start in config.moe_layers else Mlp(config, make, axis)
        self.mlp_post_norm = nnx.Param(make("mlp_post_norm", hidden)) if config.post_norms else None

    def __call__(
        self,
        x: jax.Array,
        pool: jax.Array,
        layer: jax.Array | int,
        inputs: AttentionInputs,
        ropes: Ropes,
    ) -> tuple[jax.Array, jax.Array]:
        """`x` `[tokens, hidden]` and the pool, before layer `layer` and after it."""
        normed = self._norm(x, self.attention_norm)
        attended, pool = self.attention(normed, pool, inputs, layer, ropes[self.windowed])
        x = (x + self._norm(attended, self.attention_post_norm)).astype(x.dtype)
        normed = self._norm(x, self.mlp_norm)
        if isinstance(self.mlp, Experts):
            out = self.mlp(normed, (layer - self.layers.start) // self.layers.step)
        else:
            out = self.mlp(normed)
        return (x + self._norm(out, self.mlp_post_norm)).astype(x.dtype), pool

    def _norm(self, x: jax.Array, weight: nnx.Param | None) -> jax.Array:
        return x if weight is None else rms_norm(x, weight, self.eps, self.norm_offset)


class Transformer(nnx.Module):
    """A decoder-only language model over a paged KV pool.

    Args:
        config: what to compute.
        make: gives every parameter; see `weights` for those of a checkpoint and random ones.
        layer_loop: "unroll" makes one block a layer. "scan" makes one of all equal layers in a run of layers that
            repeats a pattern, and scans over it: a fraction of the compile time, but XLA on CPU and GPU copies a
            layer's weights in each step.
        axis: where each device of a mesh axis has a part of the parameters, as `sharding` says: its name. The call must
            then stand inside `jax.shard_map`.
    """

    def __init__(
        self, config: ModelConfig, make: MakeParameter, layer_loop: LayerLoop, axis: str | None = None
    ) -> None:
        self.config, self.axis = config, axis
        self.layer_loop: LayerLoop = layer_loop
        self.layer_groups = _layer_groups(config, layer_loop)
        table = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(make("embed", table))
        self.blocks = nnx.List(
            Block(config, layers, partial(make, layers=layers), axis) for group in self.layer_groups for layers in group
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
            float32 logits `[n, vocab]`, of this device's part of the vocabulary if the head is split, the hidden states
            of all tokens `[tokens, hidden]`, of which `logits` makes logits, and the updated pool.
        """
        x = self._embedded(token_ids)
        if self.config.embed_scale is not None:
            x *= jnp.asarray(self.config.embed_scale, x.dtype)
        rope = rope_tables(inputs.positions, self.config.rope)
        window_rope = self.config.window_rope
        ropes = (rope, rope if window_rope is None else rope_tables(inputs.positions, window_rope))
        blocks = iter(self.blocks)
        for group in self.layer_groups:
            x, pool = _run(list(islice(blocks, len(group))), x, pool, inputs, ropes)
        return self.logits(x[jnp.clip(logits_at, 0, x.shape[0] - 1)]), x, pool

    def _embedded(self, token_ids: jax.Array) -> jax.Array:
        """`[tokens, hidden]`. Of a split embedding each device looks up the ids that it has; the sum has them all."""
        embed, vocab_size = self.embed[...], self.config.vocab_size
        if len(embed) == vocab_size:
            return take_rows(embed, token_ids)
        assert self.axis is not None
        here = jnp.clip(token_ids, 0, vocab_size - 1) - jax.lax.axis_index(self.axis) * len(embed)
        found = take_rows(embed, here)
        return jax.lax.psum(jnp.where(((here >= 0) & (here < len(embed)))[:, None], found, 0), self.axis)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Final norm and LM head: `[n, hidden]`, as the last layer leaves it, -> float32 `[n, vocab]`."""
        config, head = self.config, self.embed if self.lm_head is None else self.lm_head
        logits = linear(rms_norm(hidden, self.final_norm, config.rms_norm_eps, config.norm_offset), head[...])
        cap = config.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _layer_groups(config: ModelConfig, layer_loop: LayerLoop) -> tuple[tuple[range, ...], ...]:
    """The layers in groups that run one after another, in a group the layers of each block.

    A group of several blocks repeats them in turn: block `i` is layer `i`, `i + blocks`, and so on of the group. In a
    scan there are as few blocks as can be, for these are what is compiled; otherwise each layer is one by itself.
    """
    if layer_loop not in ("scan", "unroll"):
        raise ValueError(f"layer_loop must be 'scan' or 'unroll', got {layer_loop!r}")
    kinds = [(config.windows[layer], layer in config.moe_layers) for layer in range(config.layers)]
    if layer_loop == "unroll":
        return tuple((range(layer, layer + 1),) for layer in range(len(kinds)))
    best: list[tuple[int, tuple[tuple[range, ...], ...]]] = [(0, ())]  # blocks and groups of the last layers
    for start in reversed(range(len(kinds))):
        choices = []
        for period in range(1, len(kinds) - start + 1):
            stop = start + period
            while kinds[stop : stop + period] == kinds[start : start + period]:
                stop += period
            blocks, groups = best[len(kinds) - stop]
            group = tuple(range(start + place, stop, period) for place in range(period))
            choices.append((blocks + period, (group, *groups)))
        best.append(min(choices, key=itemgetter(0)))
    return best[-1][1]


def _run(
    blocks: list[Block], x: jax.Array, pool: jax.Array, inputs: AttentionInputs, ropes: Ropes
) -> tuple[jax.Array, jax.Array]:
    """Run a group of layers. The pool is carried: as a scanned-over input and output it would be copied whole."""
    turns = len(blocks[0].layers)
    if turns == 1:
        for block in blocks:
            x, pool = block(x, pool, block.layers.start, inputs, ropes)
        return x, pool
    graphdefs, wholes, sliced = zip(*(nnx.split(block, ExpertParam, ...) for block in blocks), strict=True)

    def step(carry: tuple[jax.Array, jax.Array], xs: tuple[tuple[nnx.State, ...], jax.Array]):
        params, turn = xs
        for graphdef, whole, own in zip(graphdefs, wholes, params, strict=True):
            block = nnx.merge(graphdef, whole, own)
            carry = block(*carry, block.layers.start + turn * block.layers.step, inputs, ropes)
        return carry, None

    carry, _ = jax.lax.scan(step, (x, pool), (sliced, jnp.arange(turns, dtype=jnp.int32)))
    return carry
