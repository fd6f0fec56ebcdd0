"""What fills one layer's parameter or a shard of it: tensors of a checkpoint, or parameters; quantised if asked for."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from jradix.model.config import FAMILIES, ModelConfig
from jradix.model.family import Index, Part, Shape
from jradix.model.quantized import FORMATS, INPUT_AXES, SCALE, quantize
from jradix.model.sharding import Box, Piece


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


@runtime_checkable
class ParameterSource(TensorSource, Protocol):
    """A checkpoint of the engine's own parameters, each layer's under the name that `parameter_name` gives it.

    Attributes:
        quantization: what the parameters are stored in, a key of `quantized.FORMATS`; None for floats.
    """

    quantization: str | None

    def read_into(self, target: np.ndarray, name: str, box: tuple[slice, ...]) -> None:
        """Fills `target` with a box of a parameter, converted to its dtype; reads no more than that."""
        ...


def parameter_name(name: str, layer: int | None) -> str:
    """The name of one layer's parameter, such as layers.3.qkv, in a checkpoint of parameters."""
    return name if layer is None else f"layers.{layer}.{name}"


def quantization_of(source: TensorSource, wanted: str | None) -> str | None:
    """What the weights of a checkpoint are to be kept in: as wanted, or as stored.

    Raises:
        ValueError: these differ.
    """
    stored = source.quantization if isinstance(source, ParameterSource) else None
    if stored is not None and wanted not in (None, stored):
        raise ValueError(f"quantization must be {stored!r}, in which the checkpoint is stored, got {wanted!r}")
    return stored or wanted


class LayerPart(NamedTuple):
    """An array that one layer's parameter is made of: the parameter itself, or its values and its scales."""

    name: str
    shape: Shape
    dtype: np.dtype
    fill: Fill


type LayerParts = Callable[[str, Shape], list[LayerPart]]
"""(name, shape): the arrays of a parameter, to be filled in this order, each in all layers before the next."""


def parts_of_source(
    config: ModelConfig, source: TensorSource, dtype: npt.DTypeLike, quantization: str | None
) -> LayerParts:
    quantization = quantization_of(source, quantization)
    parts_of = FAMILIES[config.architecture].parts

    def fill_from_tensors(shard: np.ndarray, wanted: Wanted) -> None:
        for part in parts_of[wanted.name](wanted.shape):
            overlaps = list(_overlaps(part, wanted))
            if overlaps:
                _copy(shard, overlaps, part.axes, source.read(tensor_name(part, wanted.layer), shard.dtype))

    if not isinstance(source, ParameterSource):
        return partial(parts_of_floats, fill=fill_from_tensors, dtype=np.dtype(dtype), quantization=quantization)
    parameters = source

    def fill_from_parameters(shard: np.ndarray, wanted: Wanted) -> None:
        for target, box in wanted.pieces:
            parameters.read_into(shard[slices_of(target)], parameter_name(wanted.name, wanted.layer), slices_of(box))

    stored = parameters.quantization
    parts = partial(parts_of_floats, fill=fill_from_parameters, dtype=np.dtype(dtype), quantization=quantization)
    if stored is None:
        return parts
    return lambda name, shape: [part._replace(fill=fill_from_parameters) for part in parts(name, shape)]


def parts_of_floats(name: str, shape: Shape, fill: Fill, dtype: np.dtype, quantization: str | None) -> list[LayerPart]:
    """The arrays of a parameter whose floats `fill` gives."""
    if quantization is None or name not in INPUT_AXES:
        return [LayerPart(name, shape, dtype, fill)]
    inputs = INPUT_AXES[name]
    scales: dict[int | None, np.ndarray] = {}  # of each layer, until they are put

    def fill_values(shard: np.ndarray, wanted: Wanted) -> None:
        """A channel's scale depends on all of its inputs, so that even for a shard the whole parameter is read."""
        weight = np.zeros(shape, np.float32)
        fill(weight, whole_of(name, shape, wanted.axis, wanted.layer))
        values, scales[wanted.layer] = quantize(weight, inputs, quantization)
        for target, source in wanted.pieces:
            shard[slices_of(target)] = values[slices_of(source)]

    def fill_scales(shard: np.ndarray, wanted: Wanted) -> None:
        for target, source in wanted.pieces:
            shard[slices_of(target)] = scales[wanted.layer][slices_of(source)]

    return [
        LayerPart(name, shape, FORMATS[quantization], fill_values),
        LayerPart(name + SCALE, shape[:-inputs], np.dtype(np.float32), fill_scales),
    ]


def whole_of(name: str, shape: Shape, axis: int, layer: int | None) -> Wanted:
    box = tuple(map(range, shape))
    return Wanted(name, shape, axis, (Piece(box, box),), layer)


def tensor_name(part: Part, layer: int | None) -> str:
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
        shard[slices_of(target)] = tensor[within].reshape(place_shape)[slices_of(source)]


def _box(index: Index, shape: Shape) -> Box:
    """What an index of ints and plain slices takes of each axis."""
    given = () if index is ... else index if isinstance(index, tuple) else (index,)
    filled = (*given, *[slice(None)] * (len(shape) - len(given)))
    return tuple(
        range(size)[at] if isinstance(at, slice) else range(at % size, at % size + 1)
        for at, size in zip(filled, shape, strict=True)
    )


def slices_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at.start, at.stop) for at in box)


def slices_at(box: Box, axis: int, place: range) -> tuple[slice, ...]:
    return slices_of((*box[:axis], place, *box[axis + 1 :]))


def _moved(at: range, by: int) -> range:
    return range(at.start + by, at.stop + by)
