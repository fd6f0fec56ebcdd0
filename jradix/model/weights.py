"""Fills a model with the tensors of a checkpoint, or with random ones, tensor by tensor; and later with other ones."""

import math
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from jradix.model.config import FAMILIES, ModelConfig
from jradix.model.family import Part, Shape
from jradix.model.transformer import LayerLoop, Transformer

# Buffers that old checkpoints carry and that are computed here.
IGNORED_TENSORS: Final = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
ALIGNMENT: Final = 64  # bytes; XLA's CPU backend takes over a numpy array only if it is aligned so, else copies it


type Fill = Callable[[np.ndarray, str, int | None], None]
"""(view, name, layer): fills `view` with the parameter `name` of that layer; None where it belongs to no layer."""


class TensorSource(Protocol):
    """A checkpoint opened for reading, under the tensor names of the Hugging Face format."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The parsed config.json."""
        ...

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dtype: npt.DTypeLike | None = None) -> np.ndarray:
        """The tensor in memory of its own, as `dtype`; raises `ValueError` where what is stored is no float."""
        ...


class DevicePut(Protocol):
    """Puts a parameter on the device or, by its name, spreads it over a mesh.

    `stacked` says that `value` has a leading `layers` axis. The array may keep using `value`'s memory.
    """

    def __call__(self, value: np.ndarray, name: str, stacked: bool) -> jax.Array: ...


def load_transformer(
    config: ModelConfig,
    source: TensorSource,
    *,
    dtype: npt.DTypeLike,
    layer_loop: LayerLoop,
    device_put: DevicePut | None = None,
) -> Transformer:
    """The model of a checkpoint.

    Names and shapes are checked before anything is read. Then each parameter is filled in one host buffer and put on
    the device: beyond the parameters, the host holds at most one of them and one tensor.

    Raises:
        ValueError: tensors are missing, have wrong shapes or types, or are not part of such a model.
    """
    check_tensors(config, source, layer_loop)
    return Transformer(config, _maker_of(config, source, dtype, device_put), layer_loop)


def replace_parameters(
    parameters: list[jax.Array],
    config: ModelConfig,
    source: TensorSource,
    *,
    dtype: npt.DTypeLike,
    layer_loop: LayerLoop,
    device_put: DevicePut | None = None,
) -> None:
    """Put the tensors of a checkpoint in the place of a model's parameters, one after another.

    `parameters` is the flat list of such a model's state and is changed in place: what nobody else holds of the old
    ones is freed as it goes, so that the device never holds more than one parameter twice.

    Raises:
        ValueError: as `load_transformer`; then nothing has changed. Any other error leaves some old and some new.
    """
    check_tensors(config, source, layer_loop)
    make = _maker_of(config, source, dtype, device_put)
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
    device_put: DevicePut | None = None,
) -> Transformer:
    """A model of random weights, for benchmarks: normal with variance 1 / fan-in, norms 1, biases 0.

    Equal arguments give equal weights, and both layer loops give the same model.
    """

    def fill(view: np.ndarray, name: str, layer: int | None) -> None:
        if name.endswith(("norm", "bias")):
            view[...] = 1 - config.norm_offset if name.endswith("norm") else 0
            return
        rng = np.random.default_rng([seed, zlib.crc32(name.encode()), 0 if layer is None else layer])
        fan_in = math.prod(view.shape[1:]) if name == "o" else view.shape[-1]
        for row in view:  # a row at a time: the float32 draw of a whole parameter would take twice its memory
            row[...] = rng.standard_normal(row.shape, np.float32) * np.float32(fan_in**-0.5)

    return Transformer(config, _Maker(np.dtype(dtype), fill, device_put), layer_loop)


def abstract_transformer(config: ModelConfig, *, dtype: npt.DTypeLike, layer_loop: LayerLoop) -> Transformer:
    """A model of shapes without arrays, of any size: to compile steps for, not to run."""

    def shape_only(name: str, shape: Shape, layers: range | None = None) -> Any:
        del name
        stacked = shape if layers is None or len(layers) == 1 else (len(layers), *shape)
        return jax.ShapeDtypeStruct(stacked, dtype)

    return Transformer(config, shape_only, layer_loop)


def _maker_of(
    config: ModelConfig, source: TensorSource, dtype: npt.DTypeLike, device_put: DevicePut | None
) -> "_Maker":
    parts_of = FAMILIES[config.architecture].parts

    def fill(view: np.ndarray, name: str, layer: int | None) -> None:
        for part in parts_of[name](view.shape):
            _place(view, part, source.read(_full_name(part, layer), view.dtype))

    return _Maker(np.dtype(dtype), fill, device_put)


class _Maker:
    """Makes each parameter in a host buffer of its own, which `fill` fills layer by layer."""

    def __init__(self, dtype: np.dtype, fill: Fill, device_put: DevicePut | None) -> None:
        self._dtype, self._fill, self._put = dtype, fill, device_put or _put_on_default_device

    def __call__(self, name: str, shape: Shape, layers: range | None = None) -> jax.Array:
        if layers is None or len(layers) == 1:
            buffer = _aligned_empty(shape, self._dtype)
            self._fill(buffer, name, None if layers is None else layers.start)
            return self._put(buffer, name, stacked=False)
        buffer = _aligned_empty((len(layers), *shape), self._dtype)
        for view, layer in zip(buffer, layers, strict=True):
            self._fill(view, name, layer)
        return self._put(buffer, name, stacked=True)


def _put_on_default_device(value: np.ndarray, name: str, stacked: bool) -> jax.Array:
    del name, stacked
    return jax.device_put(value)


def _aligned_empty(shape: Shape, dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _full_name(part: Part, layer: int | None) -> str:
    return part.tensor if layer is None else f"model.layers.{layer}.{part.tensor}"


def _place(view: np.ndarray, part: Part, tensor: np.ndarray) -> None:
    """A function of its own, so that the tensor is gone before the next is read."""
    if part.axes is not None:
        tensor = tensor.transpose(part.axes)
    for source, target in part.places:
        place = view[target]
        place[...] = tensor[source].reshape(place.shape)


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
