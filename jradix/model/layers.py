"""The parts of a decoder block: norm, linear map, attention, gated MLP."""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jradix.model.attention import AttentionInputs, paged_attention
from jradix.model.config import ModelConfig
from jradix.model.quantized import QuantizedWeight
from jradix.model.rope import rotate
from jradix.pallas.scoring import Scoring


class MakeLayerParameter(Protocol):
    """Gives a parameter of the layer, or stack of layers, that is being built; `shape` is that of one layer."""

    def __call__(self, name: str, shape: tuple[int, ...]) -> jax.Array: ...


def rms_norm(x: jax.Array, weight: nnx.Param, eps: float, offset: float = 0.0) -> jax.Array:
    """`x` scaled to mean square 1 over its last axis, times `offset + weight`; computed in float32, typed like `x`."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * (offset + weight[...].astype(jnp.float32))).astype(x.dtype)


def linear(x: jax.Array, weight: jax.Array | QuantizedWeight, bias: nnx.Param | None = None) -> jax.Array:
    """`x` `[rows, *in]` times `weight` `[*out, *in]`, plus `bias` `[*out]`: float32 `[rows, *out]`.

    Weights are `[out, in]` because XLA's CPU matmul of a few bfloat16 rows reads them twice as fast that way, and
    both sides are flattened to matrices because it copies a weight of more axes before it multiplies (0.78 ms
    instead of 0.22 for 16 rows and 2 x 1536 x 576). A bfloat16 matmul of a single row misses its fast kernels
    (128 ms instead of 14 for 576 x 49152), so a lone row goes in twice. Float32 weights are multiplied in full
    float32 also on TPU and GPU. Of a quantised weight the values are multiplied and the outputs scaled, which gives
    what the dequantised weight would: the values are exact in bfloat16, and a scale belongs to an output.
    """
    values, scale = (
        (weight.values.astype(x.dtype), weight.scale) if isinstance(weight, QuantizedWeight) else (weight, None)
    )
    rows, num_in = x.shape[0], x.ndim - 1
    out_shape = values.shape[: values.ndim - num_in]
    x = x.reshape(rows, -1)
    if rows == 1 and x.dtype != jnp.float32:
        x = jnp.broadcast_to(x, (2, x.shape[1]))
    precision = jax.lax.Precision.HIGHEST if values.dtype == jnp.float32 else None
    out = jax.lax.dot_general(
        values.reshape(-1, x.shape[1]),
        x,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    ).T
    out = out[:rows].reshape(rows, *out_shape)
    out = out if scale is None else out * scale
    return out if bias is None else out + bias[...].astype(jnp.float32)


def add_partial_sums(partial: jax.Array, axis: str | None, dtype: jnp.dtype) -> jax.Array:
    """The sum over the devices of mesh axis `axis` of what each has, float32; what is sent is rounded to `dtype`.

    None means that there is one device, which has the sum already.
    """
    return partial if axis is None else jax.lax.psum(partial.astype(dtype), axis).astype(jnp.float32)


def linear_of_parts(
    x: jax.Array, weight: jax.Array | QuantizedWeight, bias: nnx.Param | None, axis: str | None
) -> jax.Array:
    """`linear` where each device of mesh axis `axis` has a part of the inputs, and all get the outputs."""
    out = add_partial_sums(linear(x, weight), axis, x.dtype)
    return out if bias is None else out + bias[...].astype(jnp.float32)


class Attention(nnx.Module):
    """Grouped-query attention over the KV pool; over a mesh axis, each device has some of the heads.

    Parameters:
        qkv: `[kv_heads, group + 2, head_dim, hidden]`, for each KV head its query heads, then its K, then its V: one
            matmul, and a shard of KV heads holds all that belongs to them.
        o: `[hidden, kv_heads * group * head_dim]`, though it is asked for with these apart, as it is split.
        q_norm, k_norm: `[head_dim]`, in families that normalise queries and keys.
        sinks: `[kv_heads, group]`, in families that have them.
    """

    def __init__(
        self, config: ModelConfig, window: int | None, make: MakeLayerParameter, axis: str | None = None
    ) -> None:
        group = config.q_heads // config.kv_heads
        heads = (config.kv_heads, group + 2, config.head_dim)
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.scale, self.window, self.soft_cap = scale, window, config.attention_soft_cap
        self.eps, self.norm_offset, self.axis = config.rms_norm_eps, config.norm_offset, axis
        self.qkv = nnx.Param(make("qkv", (*heads, config.hidden_size)))
        self.qkv_bias = nnx.Param(make("qkv_bias", heads)) if config.qkv_bias else None
        self.q_norm = nnx.Param(make("q_norm", (config.head_dim,))) if config.qk_norm else None
        self.k_norm = nnx.Param(make("k_norm", (config.head_dim,))) if config.qk_norm else None
        self.sinks = nnx.Param(make("sinks", (config.kv_heads, group))) if config.sinks else None
        self.o = nnx.Param(make("o", (config.hidden_size, config.kv_heads, group, config.head_dim)))
        self.o_bias = nnx.Param(make("o_bias", (config.hidden_size,))) if config.o_bias else None

    def __call__(
        self,
        x: jax.Array,
        pool: jax.Array,
        inputs: AttentionInputs,
        layer: jax.Array | int,
        rope: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """`x` `[tokens, hidden]` -> float32 `[tokens, hidden]` and the pool with the new keys and values."""
        qkv = linear(x, self.qkv[...], self.qkv_bias)  # [tokens, kv_heads, group + 2, head_dim]
        q, keys, values = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(q, self.q_norm, self.eps, self.norm_offset)
            keys = rms_norm(keys, self.k_norm, self.eps, self.norm_offset)
        q, keys = rotate(q, rope), rotate(keys, rope)
        tokens, kv_heads, group, head_dim = q.shape
        q = q.reshape(tokens, kv_heads * group, head_dim)
        scoring = Scoring(self.scale, self.window, self.soft_cap)
        sinks = None if self.sinks is None else self.sinks[...].reshape(-1)
        out, pool = paged_attention(pool, q, keys, values, inputs, layer, scoring, sinks, dtype=x.dtype)
        return linear_of_parts(out.reshape(tokens, -1), self.o[...], self.o_bias, self.axis), pool


class Mlp(nnx.Module):
    """The gated MLP of a dense layer: `gate_up` `[2, mlp, hidden]`, `down` `[hidden, mlp]`.

    Over a mesh axis, each device has some of the `mlp` inner values.
    """

    def __init__(self, config: ModelConfig, make: MakeLayerParameter, axis: str | None = None) -> None:
        self.axis = axis
        hidden, mlp = config.hidden_size, config.mlp_size
        self.activation = config.activation
        self.gate_up = nnx.Param(make("gate_up", (2, mlp, hidden)))
        self.gate_up_bias = nnx.Param(make("gate_up_bias", (2, mlp))) if config.mlp_bias else None
        self.down = nnx.Param(make("down", (hidden, mlp)))
        self.down_bias = nnx.Param(make("down_bias", (hidden,))) if config.mlp_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` `[tokens, hidden]` -> float32 `[tokens, hidden]`."""
        inner = self.activation(linear(x, self.gate_up[...], self.gate_up_bias)).astype(x.dtype)
        return linear_of_parts(inner, self.down[...], self.down_bias, self.axis)
