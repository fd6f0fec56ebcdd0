"""A mixture of experts that reads only the experts its tokens chose, whatever their number.

`jax.lax.ragged_dot` would be the ready-made grouped matmul, but off the TPU XLA expands it to a dense product with
every expert. Here the chosen (token, expert) pairs are sorted by expert and cut into tiles of one expert each, and a
loop of as many steps as there are tiles multiplies each tile with its expert's weights, as block-sparse kernels do
(Gale et al., "MegaBlocks", 2022). No token is ever dropped.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jradix.model.config import ModelConfig
from jradix.model.layers import MakeLayerParameter, add_partial_sums, linear

MIN_TILE_LEN, MAX_TILE_LEN = 8, 128  # 8 rows are one register tile of a TPU; above 128 padding costs more than it saves


class ExpertParam(nnx.Param):
    """A parameter that a scan over layers keeps whole, `[layers, experts, ...]`.

    Slicing out one layer would copy all of its experts; the loop over tiles reads the few that it needs.
    """


class Experts(nnx.Module):
    """The MLP of a sparse layer; over a mesh axis, each device has some of the experts and computes the pairs of these.

    Parameters:
        router: `[experts, hidden]`.
        gate_up: `[experts, 2, mlp, hidden]`, `[layers, experts, ...]` when stacked.
        down: `[experts, hidden, mlp]`, likewise.
        router_bias, gate_up_bias, down_bias: without the last axis of these, in families that have them.
    """

    def __init__(self, config: ModelConfig, make: MakeLayerParameter, axis: str | None = None) -> None:
        self.axis = axis
        experts, mlp, hidden = config.experts, config.expert_mlp_size, config.hidden_size
        self.experts_per_token, self.normalize = config.experts_per_token, config.normalize_experts
        self.router = nnx.Param(make("router", (experts, hidden)))
        self.gate_up = ExpertParam(make("expert_gate_up", (experts, 2, mlp, hidden)))
        self.down = ExpertParam(make("expert_down", (experts, hidden, mlp)))
        bias = config.expert_bias
        self.router_bias = nnx.Param(make("router_bias", (experts,))) if bias else None
        self.gate_up_bias = nnx.Param(make("expert_gate_up_bias", (experts, 2, mlp))) if bias else None
        self.down_bias = nnx.Param(make("expert_down_bias", (experts, hidden))) if bias else None
        self.activation = config.activation

    def __call__(self, x: jax.Array, slot: jax.Array | int) -> jax.Array:
        """`x` `[tokens, hidden]` -> float32 `[tokens, hidden]`; `slot` is the layer's place in its stack."""
        scores = jax.nn.softmax(linear(x, self.router[...], self.router_bias), axis=-1)
        weights, chosen = jax.lax.top_k(scores, self.experts_per_token)  # both [tokens, experts_per_token]
        if self.normalize:
            weights /= weights.sum(axis=-1, keepdims=True)
        out = jnp.sum(self._outputs(x, chosen, slot) * weights[:, :, None], axis=1)
        out = add_partial_sums(out, self.axis, x.dtype)
        return out if self.down_bias is None else out + _mixed(self.down_bias[...], weights, chosen)

    def _outputs(self, x: jax.Array, chosen: jax.Array, slot: jax.Array | int) -> jax.Array:
        """Each chosen expert's output for its token, `[tokens, experts_per_token, hidden]`; 0 if not here."""
        gate_up, down = self.gate_up[...], self.down[...]
        if gate_up.ndim == 4:
            gate_up, down = gate_up[None], down[None]
        tokens, experts = x.shape[0], gate_up.shape[1]
        if self.axis is not None:
            chosen -= jax.lax.axis_index(self.axis) * experts
        tile_len = _tile_len(chosen.size, len(self.router[...]))
        place, tile_expert, num_tiles = _tile(chosen.reshape(-1), experts, tile_len)
        # Places of no pair read token 0; nobody reads what comes of it.
        token = jnp.zeros(len(tile_expert) * tile_len, jnp.int32)
        token = token.at[place].set(jnp.arange(chosen.size, dtype=jnp.int32) // chosen.shape[1], mode="drop")

        def step(tile: jax.Array, out: jax.Array) -> jax.Array:
            start, expert = tile * tile_len, tile_expert[tile]
            rows = x[jax.lax.dynamic_slice_in_dim(token, start, tile_len)]
            inner = linear(rows, gate_up[slot, expert])
            if self.gate_up_bias is not None:
                inner += self.gate_up_bias[...][expert].astype(jnp.float32)
            inner = self.activation(inner).astype(x.dtype)
            outputs = linear(inner, down[slot, expert]).astype(x.dtype)  # in float32 they take twice the memory
            return jax.lax.dynamic_update_slice_in_dim(out, outputs, start, axis=0)

        out = jnp.zeros((len(token), x.shape[1]), x.dtype)
        out = jax.lax.fori_loop(0, num_tiles, step, out)
        return out.at[place].get(mode="fill", fill_value=0).reshape(tokens, -1, x.shape[1])


def _mixed(per_expert: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    """Sum of rows of `[experts, hidden]` by the weights of the `chosen` ones: float32 `[tokens, hidden]`."""
    dense = jnp.zeros((len(weights), len(per_expert)), jnp.float32)
    dense = dense.at[jnp.arange(len(weights))[:, None], chosen].set(weights)
    return jnp.dot(dense, per_expert.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def _tile_len(pairs: int, experts: int) -> int:
    """The power of two nearest above an expert's fair share of the pairs."""
    return min(MAX_TILE_LEN, max(MIN_TILE_LEN, 1 << (pairs // experts).bit_length()))


def _tile(expert: jax.Array, experts: int, tile_len: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where each pair goes when pairs are grouped by `expert` `[pairs]` and each group starts a new tile.

    Pairs of an expert outside `[0, experts)` go nowhere.

    Returns:
        `[pairs]` place of each pair, `tile * tile_len + row`, past the last tile for nowhere; `[max_tiles]` expert of
        each tile; the number of tiles.
    """
    pairs = expert.size
    max_tiles = pairs // tile_len + min(experts, pairs)  # each expert may leave one tile part empty
    expert = jnp.where((expert >= 0) & (expert < experts), expert, experts)
    order = jnp.argsort(expert)
    counts = jnp.zeros(experts, jnp.int32).at[expert].add(1, mode="drop")
    tile_ends = jnp.cumsum(-(-counts // tile_len), dtype=jnp.int32)
    tile_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), tile_ends[:-1]])
    grouped = expert[order]
    rank = jnp.arange(pairs, dtype=jnp.int32) - (jnp.cumsum(counts, dtype=jnp.int32) - counts)[grouped]
    place = jnp.where(grouped < experts, tile_starts[grouped] * tile_len + rank, max_tiles * tile_len)
    place = jnp.zeros(pairs, jnp.int32).at[order].set(place)
    tile_expert = jnp.searchsorted(tile_ends, jnp.arange(max_tiles, dtype=jnp.int32), side="right")
    return place, tile_expert.astype(jnp.int32), tile_ends[-1]
