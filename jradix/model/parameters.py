"""Which parameters a model has, in the order of its flat state, and where some numbers of each lie on any mesh."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import jax
import numpy as np
import numpy.typing as npt
from flax import nnx

from jradix.model.config import ModelConfig
from jradix.model.family import Shape
from jradix.model.layer_parts import parameter_name
from jradix.model.quantized import INPUT_AXES, SCALE
from jradix.model.sharding import Sharding
from jradix.model.transformer import LayerLoop, Transformer

SAMPLES: Final = 64
"""Numbers of each layer's parameter that stand for it in a fingerprint."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One array of a model's flat state.

    Attributes:
        shape: in one layer, on one device, as checkpoints have it; see `array_shape`.
        layers: those that it is of, stacked if they are several; None if it is of no layer.
    """

    name: str
    shape: Shape
    layers: range | None

    @property
    def layer_names(self) -> list[str]:
        """One for each layer, by which checkpoints of parameters know it."""
        return [parameter_name(self.name, layer) for layer in (self.layers or [None])]

    def samples(self, sharding: Sharding) -> tuple[npt.NDArray[np.int64], ...]:
        """Where numbers spread evenly over each layer's parameter lie in the array: an index for each axis.

        Together they pick `[layers, SAMPLES]`. They are the same numbers on any mesh: copies and padding are left out.
        """
        split = sharding.split(self.name, self.shape)
        flat = np.linspace(0, prod(self.shape) - 1, SAMPLES).astype(np.int64)
        found = np.full((len(self.shape), SAMPLES), -1)
        wanted = np.stack(np.unravel_index(flat, self.shape))
        for number, shard in enumerate(split.shards):
            for target, source in shard:
                lows, highs = (np.array([[run[end] for run in source]]).T for end in (0, -1))
                inside = ((wanted >= lows) & (wanted <= highs)).all(axis=0)
                place = wanted + np.array([[run.start for run in target]]).T - lows
                if split.axis is not None:
                    place[split.axis] += number * (split.shape[split.axis] // len(split.shards))
                found[:, inside] = place[:, inside]
        assert (found >= 0).all(), f"some numbers of {self.name} are on no device"
        array = array_shape(self.name, split.shape)
        found = np.stack(np.unravel_index(np.ravel_multi_index(tuple(found), split.shape), array))
        if self.layers is None or len(self.layers) == 1:
            return tuple(found[:, None])
        return np.arange(len(self.layers))[:, None], *found[:, None]


def array_shape(name: str, shape: Shape) -> Shape:
    """Of the array that holds a parameter of `shape`, or a shard of it: the heads and channels of `o` are one axis.

    A TPU keeps an array in tiles of its last two axes. A few query heads of 128 channels do not fill a tile of 8 rows,
    nor one of 32 in 8 bits, and XLA would bring them into such tiles in every step, before it multiplies.
    """
    return (shape[0], prod(shape[1:])) if name == "o" else shape


def list_parameters(config: ModelConfig, layer_loop: LayerLoop, *, quantized: bool) -> list[Parameter]:
    """Those of such a model, a quantised one's values and scales apart."""
    found: list[Parameter] = []
    for blank in blank_parameters(config, layer_loop):
        found.append(Parameter(blank.name, blank.param_shape, blank.layers))
        if quantized and blank.name in INPUT_AXES:
            scales = blank.param_shape[: -INPUT_AXES[blank.name]]
            found.append(Parameter(blank.name + SCALE, scales, blank.layers))
    return found


def blank_parameters(config: ModelConfig, layer_loop: LayerLoop) -> "Iterator[BlankParameter]":
    """What stands for each parameter of such a model, in the order of its flat state."""
    make_blank: Any = BlankParameter
    yield from jax.tree.leaves(nnx.state(Transformer(config, make_blank, layer_loop)))


class BlankParameter(jax.ShapeDtypeStruct):
    """Stands for a parameter in a model without any, and remembers which one it is."""

    def __init__(self, name: str, shape: Shape, layers: range | None = None) -> None:
        super().__init__(shape, np.float32)
        self.name, self.param_shape, self.layers = name, shape, layers
