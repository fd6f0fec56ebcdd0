"""Fills a model with the tensors of a checkpoint, or with random ones, shard by shard; and later with other ones."""

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from jradix.model.config import FAMILIES, ModelConfig
from jradix.model.family import Index, Part, Shape
from jradix.model.sharding import Box, Piece, Sharding, Split
from jradix.model.transformer import LayerLoop, Transformer

# Buffers that old checkpoints carry and that are computed here.
IGNORED_TENSORS: Final = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
ALIGNMENT: Final = 64  # bytes; XLA's CPU backend takes over a numpy array only if it is aligned so, else copies it


class Wanted(NamedTuple):
    """A shard to fill: its pieces of the parameter `name` of `shape`, of one layer, or of none if `layer` is None."""

    name: str
    shape: Shape
    axis: int
    pieces: tuple[Piece, ...]
    layer: int | None


type Fill = Callable[[np.ndarray, Wanted], None]
"""(shard, wanted): fills what is wanted of a shard of zeros."""


class TensorSource(Protocol):
    """A checkpoint opened for reading, under the tensor names of the Hugging Face format."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The parsed config.json."""
        ...

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dtype: npt.DTypeLike | None = None) -> np.ndarray:
        """The tensor as stored or as `dtype`, to copy from and let go; `ValueError` where it is stored as no float."""
        ...


def load_transformer(
    config: ModelConfig,
    source: TensorSource,
    *,
    dtype: npt.DTypeLike,
    layer_loop: LayerLoop,
    sharding: Sharding | None = None,
) -> Transformer:
    """The model of a checkpoint, on the first device or as `sharding` says.

    Names and shapes are checked before anything is read. Then each shard is filled in one host buffer and put on its
    device: beyond the parameters, the host holds at most one shard and one tensor. Of several processes each reads
    what its own devices need.

    Raises:
        ValueError: tensors are missing, have wrong shapes or types, or are not part of such a model.
    """
    check_tensors(config, source, layer_loop)
    sharding = sharding or Sharding.on_one_device(config)
    return Transformer(config, _maker_of(config, source, dtype, sharding), layer_loop, sharding.axis)


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

    Raises:
        ValueError: as `load_transformer`; then nothing has changed. Any other error leaves some old and some new.
    """
    check_tensors(config, source, layer_loop)
    make = _maker_of(config, source, dtype, sharding or Sharding.on_one_device(config))
    make_blank: Any = _Blank
    blanks = jax.tree.leaves(nnx.state(Transformer(config, make_blank, layer_loop)))
    assert len(blanks) == len(parameters), "these are not the parameters of such a model"
    for place, blank in enumerate(blanks):
        parameters[place] = make(blank.name, blank.param_shape, blank.layers)


class _Blank(jax.ShapeDtypeStruct):
    """Stands for a parameter in a model without any, and remembers which one it is."""

    def __init__(self, name: str, shape: Shape, layers: range | None = None) -> None:
        super().__init__(shape, np.float32)
        self.name, self.param_shape, self.layers = name, shape, layers


def random_transformer(
    config: ModelConfig,
    *,
    dtype: npt.DTypeLike,
    layer_loop: LayerLoop,
    seed: int,
    sharding: Sharding | None = None,
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
                into = _at(target, axis, range(place, place + 1))
                shard[into] = drawn[_at(source, axis, range(1))]

    sharding = sharding or Sharding.on_one_device(config)
    return Transformer(config, _Maker(np.dtype(dtype), fill, sharding), layer_loop, sharding.axis)


def abstract_transformer(
    config: ModelConfig, *, dtype: npt.DTypeLike, layer_loop: LayerLoop, sharding: Sharding | None = None
) -> Transformer:
    """A model of shapes without arrays, of any size: to compile steps for, not to run."""

    def shape_only(name: str, shape: Shape, layers: range | None = None) -> Any:
        stack = () if layers is None or len(layers) == 1 else (len(layers),)
        if sharding is None:
            return jax.ShapeDtypeStruct((*stack, *shape), dtype)
        split = sharding.split(name, shape)
        return jax.ShapeDtypeStruct((*stack, *split.shape), dtype, sharding=sharding.of(split, stacked=bool(stack)))

    return Transformer(config, shape_only, layer_loop, sharding.axis if sharding else None)


def _maker_of(config: ModelConfig, source: TensorSource, dtype: npt.DTypeLike, sharding: Sharding) -> "_Maker":
    parts_of = FAMILIES[config.architecture].parts

    def fill(shard: np.ndarray, wanted: Wanted) -> None:
        for part in parts_of[wanted.name](wanted.shape):
            overlaps = list(_overlaps(part, wanted))
            if overlaps:
                _copy(shard, overlaps, part.axes, source.read(_full_name(part, wanted.layer), shard.dtype))

    return _Maker(np.dtype(dtype), fill, sharding)


class _Maker:
    """Makes each shard of each parameter in a host buffer of its own, which `fill` fills layer by layer."""

    def __init__(self, dtype: np.dtype, fill: Fill, sharding: Sharding) -> None:
        self._dtype, self._fill, self._sharding = dtype, fill, sharding

    def __call__(self, name: str, shape: Shape, layers: range | None = None) -> jax.Array:
        split = self._sharding.split(name, shape)
        stacked = layers is not None and len(layers) > 1
        whole_shape = (len(layers), *split.shape) if layers is not None and stacked else split.shape
        sharding = self._sharding.of(split, stacked)
        shards: list[jax.Array] = []
        shard = None
        for number, device in self._sharding.local_devices():
            if shard is None or split.axis is not None:
                del shard
                shard = self._filled(sharding.shard_shape(whole_shape), name, shape, split, number, layers)
            shards.append(jax.block_until_ready(jax.device_put(shard, device)))  # then the buffer may go
        return jax.make_array_from_single_device_arrays(whole_shape, sharding, shards)

    def _filled(
        self, shard_shape: Shape, name: str, shape: Shape, split: Split, number: int, layers: range | None
    ) -> np.ndarray:
        """The shard `number`, of one layer, or stacked of several."""
        buffer = _aligned_zeros(shard_shape, self._dtype)
        pieces = split.shards[0 if split.axis is None else number]
        views = [buffer] if layers is None or len(layers) == 1 else buffer
        for view, layer in zip(views, [None] if layers is None else layers, strict=True):
            self._fill(view, Wanted(name, shape, split.axis or 0, pieces, layer))
        return buffer


def _aligned_zeros(shape: Shape, dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _full_name(part: Part, layer: int | None) -> str:
    return part.tensor if layer is None else f"model.layers.{layer}.{part.tensor}"


class _Overlap(NamedTuple):
    """What one place of a part gives to one piece of a shard: `shard[target]` is `place[source]`."""

    within: Index  # of the place in the tensor
    place_shape: Shape
    source: Box
    target: Box


def _overlaps(part: Part, wanted: Wanted) -> Iterator[_Overlap]:
    for index, place in part.places:
        box = _box(place, wanted.shape)
        for piece in wanted.pieces:
            both = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, piece.source, strict=True)]
            if all(both):
                source = tuple(_moved(a, -b.start) for a, b in zip(both, box, strict=True))
                moves = [to.start - at.start for to, at in zip(piece.target, piece.source, strict=True)]
                target = tuple(map(_moved, both, moves))
                yield _Overlap(index, tuple(map(len, box)), source, target)


def _copy(shard: np.ndarray, overlaps: list[_Overlap], axes: tuple[int, ...] | None, tensor: np.ndarray) -> None:
    """A function of its own, so that the tensor is gone before the next is read."""
    if axes is not None:
        tensor = tensor.transpose(axes)
    for within, place_shape, source, target in overlaps:
        shard[_slices(target)] = tensor[within].reshape(place_shape)[_slices(source)]


def _box(index: Index, shape: Shape) -> Box:
    """What an index of ints and plain slices takes of each axis."""
    given = () if index is ... else index if isinstance(index, tuple) else (index,)
    filled = (*given, *[slice(None)] * (len(shape) - len(given)))
    return tuple(
        range(size)[at] if isinstance(at, slice) else range(at % size, at % size + 1)
        for at, size in zip(filled, shape, strict=True)
    )


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at.start, at.stop) for at in box)


def _at(box: Box, axis: int, place: range) -> tuple[slice, ...]:
    return _slices((*box[:axis], place, *box[axis + 1 :]))


def _moved(at: range, by: int) -> range:
    return range(at.start + by, at.stop + by)


def check_tensors(config: ModelConfig, source: TensorSource, layer_loop: LayerLoop) -> None:
    """Raises `ValueError` unless the checkpoint has exactly the tensors that the model is made of."""
    expected = _expected_tensors(config, layer_loop)
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


def _expected_tensors(config: ModelConfig, layer_loop: LayerLoop) -> dict[str, Shape]:
    """Name and shape of every tensor of the model, found by building it without any weights."""
    expected: dict[str, Shape] = {}
    parts_of = FAMILIES[config.architecture].parts

    def note(name: str, shape: Shape, layers: range | None = None) -> jax.Array:
        for layer in [None] if layers is None else layers:
            expected.update((_full_name(part, layer), part.shape) for part in parts_of[name](shape))
        return jnp.zeros(())  # nobody computes with it

    Transformer(config, note, layer_loop)
    return expected
