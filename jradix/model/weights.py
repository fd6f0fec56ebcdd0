"""Fills a model with the tensors of a checkpoint, or with random ones, shard by shard; and later with other ones."""

import math
import re
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import NamedSharding

from jradix.model.config import FAMILIES, ModelConfig
from jradix.model.family import Shape
from jradix.model.layer_parts import (
    LayerPart,
    LayerParts,
    ParameterSource,
    TensorSource,
    Wanted,
    parameter_name,
    parts_of_floats,
    parts_of_source,
    slices_at,
    tensor_name,
    whole_of,
)
from jradix.model.parameters import array_shape, blank_parameters
from jradix.model.quantized import FORMATS, INPUT_AXES, SCALE, QuantizedWeight
from jradix.model.sharding import Sharding, Split
from jradix.model.transformer import LayerLoop, Transformer

# Buffers that old checkpoints carry and that are computed here.
IGNORED_TENSORS: Final = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
ALIGNMENT: Final = 64  # bytes; XLA's CPU backend takes over a numpy array only if it is aligned so, else copies it


def load_transformer(
    config: ModelConfig,
    source: TensorSource,
    *,
    dtype: npt.DTypeLike,
    layer_loop: LayerLoop,
    sharding: Sharding | None = None,
    quantization: str | None = None,
) -> Transformer:
    """The model of a checkpoint, on the first device or as `sharding` says.

    Names and shapes are checked before anything is read. Then each shard is filled in one host buffer and put on its
    device: beyond the parameters, the host holds at most one shard and one tensor. Of several processes each reads
    what its own devices need.

    With `quantization`, a key of `quantized.FORMATS`, linear weights are quantised on the way: then the host holds one
    layer's parameter in float32 beside. A checkpoint that is stored quantised stays so.

    Raises:
        ValueError: tensors are missing, have wrong shapes or types, are not part of such a model, or are stored in
            another quantization than is asked for.
    """
    check_tensors(config, source, layer_loop)
    sharding = sharding or Sharding.on_one_device(config)
    make = _Maker(parts_of_source(config, source, dtype, quantization), sharding)
    return Transformer(config, make, layer_loop, sharding.axis)


def host_parameters(
    config: ModelConfig, source: TensorSource, *, dtype: npt.DTypeLike, quantization: str | None = None
) -> dict[str, np.ndarray]:
    """Every parameter of every layer, under its `parameter_name`, in host memory. Raises as `load_transformer`."""
    check_tensors(config, source, "unroll")
    layer_parts = parts_of_source(config, source, dtype, quantization)
    arrays: dict[str, np.ndarray] = {}

    def make(name: str, shape: Shape, layers: range | None = None) -> jax.Array:
        layer = None if layers is None else layers.start
        for part in layer_parts(name, shape):
            array = arrays[parameter_name(part.name, layer)] = np.empty(part.shape, part.dtype)
            part.fill(array, whole_of(part.name, part.shape, 0, layer))
        return jnp.zeros(())  # nobody computes with it

    Transformer(config, make, "unroll")
    return arrays


def replace_parameters(
    parameters: list[jax.Array],
    config: ModelConfig,
    source: TensorSource,
    *,
    dtype: npt.DTypeLike,
    layer_loop: LayerLoop,
    sharding: Sharding | None = None,
) -> None:
    """Put the tensors of a checkpoint in the place of a model's parameters, one after another.

    `parameters` is the flat list of such a model's state and is changed in place: what nobody else holds of the old
    ones is freed as it goes, so that the device never holds more than one parameter twice.

    They are quantised if these are.

    Raises:
        ValueError: as `load_transformer`; then nothing has changed. Any other error leaves some old and some new.
    """
    quantization = replaced_quantization(parameters, source)
    check_tensors(config, source, layer_loop)
    make = _Maker(parts_of_source(config, source, dtype, quantization), sharding or Sharding.on_one_device(config))
    place = 0
    for blank in blank_parameters(config, layer_loop):
        for array in jax.tree.leaves(make(blank.name, blank.param_shape, blank.layers)):
            parameters[place], place = array, place + 1
    assert place == len(parameters), "these are not the parameters of such a model"


def replaced_quantization(parameters: Sequence[jax.Array], source: TensorSource) -> str | None:
    """What these parameters are kept in, as others in their place will be.

    Raises:
        ValueError: those of a checkpoint are stored in something else, which is not turned back.
    """
    kept = next((name for name, dtype in FORMATS.items() if any(p.dtype == dtype for p in parameters)), None)
    stored = source.quantization if isinstance(source, ParameterSource) else None
    if stored not in (None, kept):
        raise ValueError(f"the weights are stored in {stored}, and the engine's are {kept or 'not quantised'}")
    return kept


def copy_transformer(model: Transformer, sharding: Sharding) -> Transformer:
    """The same model on as many other devices, those of `sharding`."""
    graph, state = nnx.split(model)

    def copy(array: jax.Array) -> jax.Array:
        assert isinstance(array.sharding, NamedSharding), array.sharding
        return jax.device_put(array, NamedSharding(sharding.mesh, array.sharding.spec))

    return nnx.merge(graph, jax.tree.map(copy, state))


def random_transformer(
    config: ModelConfig,
    *,
    dtype: npt.DTypeLike,
    layer_loop: LayerLoop,
    seed: int,
    sharding: Sharding | None = None,
    quantization: str | None = None,
) -> Transformer:
    """A model of random weights, for benchmarks: normal with variance 1 / fan-in, norms 1, biases 0.

    Equal arguments give equal weights, and both layer loops and any number of devices give the same model: each index
    along the axis that may be split has a random generator of its own.
    """

    def fill(shard: np.ndarray, wanted: Wanted) -> None:
        name, shape, axis, pieces, layer = wanted
        if name.endswith(("norm", "bias")):
            shard[...] = 1 - config.norm_offset if name.endswith("norm") else 0
            return
        fan_in = math.prod(shape[1:]) if name == "o" else shape[-1]
        drawn_shape = tuple(1 if place == axis else size for place, size in enumerate(shape))
        for target, source in pieces:
            for place, index in zip(target[axis], source[axis], strict=True):
                rng = np.random.default_rng([seed, zlib.crc32(name.encode()), 0 if layer is None else layer, index])
                drawn = rng.standard_normal(drawn_shape, np.float32) * np.float32(fan_in**-0.5)
                into = slices_at(target, axis, range(place, place + 1))
                shard[into] = drawn[slices_at(source, axis, range(1))]

    sharding = sharding or Sharding.on_one_device(config)
    make = _Maker(partial(parts_of_floats, fill=fill, dtype=np.dtype(dtype), quantization=quantization), sharding)
    return Transformer(config, make, layer_loop, sharding.axis)


def abstract_transformer(
    config: ModelConfig,
    *,
    dtype: npt.DTypeLike,
    layer_loop: LayerLoop,
    sharding: Sharding | None = None,
    quantization: str | None = None,
) -> Transformer:
    """A model of shapes without arrays, of any size: to compile steps for, not to run."""

    def no_fill(shard: np.ndarray, wanted: Wanted) -> None: ...

    def shape_only(name: str, shape: Shape, layers: range | None = None) -> Any:
        stack = () if layers is None or len(layers) == 1 else (len(layers),)
        arrays = []
        for part in parts_of_floats(name, shape, fill=no_fill, dtype=np.dtype(dtype), quantization=quantization):
            split = sharding.split(part.name, part.shape) if sharding else None
            place = sharding.of(split, stacked=bool(stack)) if sharding and split else None
            stacked = (*stack, *array_shape(part.name, split.shape if split else part.shape))
            arrays.append(jax.ShapeDtypeStruct(stacked, part.dtype, sharding=place))
        return _joined(arrays)

    return Transformer(config, shape_only, layer_loop, sharding.axis if sharding else None)


def _joined(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else QuantizedWeight(*arrays)


class _Maker:
    """Makes each shard of each parameter in a host buffer of its own, filled layer by layer."""

    def __init__(self, layer_parts: LayerParts, sharding: Sharding) -> None:
        self._layer_parts, self._sharding = layer_parts, sharding

    def __call__(self, name: str, shape: Shape, layers: range | None = None) -> Any:
        return _joined([self._array(part, layers) for part in self._layer_parts(name, shape)])

    def _array(self, part: LayerPart, layers: range | None) -> jax.Array:
        split = self._sharding.split(part.name, part.shape)
        stacked = layers is not None and len(layers) > 1
        stack = (len(layers),) if layers is not None and stacked else ()
        whole_shape = (*stack, *array_shape(part.name, split.shape))
        sharding = self._sharding.of(split, stacked)
        shards: list[jax.Array] = []
        shard = None
        for number, device in self._sharding.local_devices():
            if shard is None or split.axis is not None:
                del shard
                shard = self._filled(sharding.shard_shape((*stack, *split.shape)), part, split, number, layers)
                shard = shard.reshape(sharding.shard_shape(whole_shape))
            shards.append(jax.block_until_ready(jax.device_put(shard, device)))  # then the buffer may go
        return jax.make_array_from_single_device_arrays(whole_shape, sharding, shards)

    def _filled(
        self, shard_shape: Shape, part: LayerPart, split: Split, number: int, layers: range | None
    ) -> np.ndarray:
        """The shard `number`, of one layer, or stacked of several."""
        buffer = _aligned_zeros(shard_shape, part.dtype)
        pieces = split.shards[0 if split.axis is None else number]
        views = [buffer] if layers is None or len(layers) == 1 else buffer
        for view, layer in zip(views, [None] if layers is None else layers, strict=True):
            part.fill(view, Wanted(part.name, part.shape, split.axis or 0, pieces, layer))
        return buffer


def _aligned_zeros(shape: Shape, dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def check_tensors(config: ModelConfig, source: TensorSource, layer_loop: LayerLoop) -> None:
    """Raises `ValueError` unless the checkpoint has exactly the tensors that the model is made of."""
    expected = _expected_tensors(config, source, layer_loop)
    names = source.names()
    missing = sorted(expected.keys() - names)
    wrong = [
        f"{name} (expected {list(shape)}, got {list(source.shape(name))})"
        for name, shape in sorted(expected.items())
        if name in names and tuple(source.shape(name)) != shape
    ]
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()  # some checkpoints store the copy
    unknown = sorted(n for n in names - expected.keys() - tied if not IGNORED_TENSORS.fullmatch(n))
    problems = [
        f"{what}: {', '.join(found[:8])}" + (f" and {len(found) - 8} more" if len(found) > 8 else "")
        for what, found in (("missing", missing), ("wrong shape", wrong), ("not part of the model", unknown))
        if found
    ]
    if problems:
        raise ValueError(
            f"the checkpoint's tensors do not fit its config ({config.architecture}); " + "; ".join(problems)
        )


def _expected_tensors(config: ModelConfig, source: TensorSource, layer_loop: LayerLoop) -> dict[str, Shape]:
    """Name and shape of every tensor of the model, found by building it without any weights."""
    expected: dict[str, Shape] = {}
    parts_of = FAMILIES[config.architecture].parts
    parameters = source if isinstance(source, ParameterSource) else None

    def note(name: str, shape: Shape, layers: range | None = None) -> jax.Array:
        for layer in [None] if layers is None else layers:
            if parameters is None:
                expected.update((tensor_name(part, layer), part.shape) for part in parts_of[name](shape))
                continue
            expected[parameter_name(name, layer)] = shape
            if parameters.quantization is not None and name in INPUT_AXES:
                expected[parameter_name(name + SCALE, layer)] = shape[: -INPUT_AXES[name]]
        return jnp.zeros(())  # nobody computes with it

    Transformer(config, note, layer_loop)
    return expected
