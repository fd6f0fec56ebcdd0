"""How a model is split over the devices that share each layer: the rule for each parameter, and what is padded.

Tensor parallelism as Megatron has it (Shoeybi et al., 2019): what makes heads, or the inner width of an MLP, is split
by these, and what brings them back to the hidden size is split the same way, so that a layer adds up partial sums
twice. Experts are shared out whole. All here is about shapes; `weights` fills the shards, `runner` computes with them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jradix.model.config import ModelConfig
from jradix.model.family import Shape
from jradix.model.quantized import SCALE

TENSOR_AXIS: Final = "tensor"
"""The mesh axis over which layers are split."""

BY_HEAD: Final[Mapping[str, int]] = {"qkv": 0, "qkv_bias": 0, "o": 1, "sinks": 0}
BY_MLP: Final[Mapping[str, int]] = {"gate_up": 1, "gate_up_bias": 1, "down": 1}
BY_EXPERT: Final[Mapping[str, int]] = {"expert_gate_up": 0, "expert_gate_up_bias": 0, "expert_down": 0}
BY_VOCABULARY: Final[Mapping[str, int]] = {"embed": 0, "lm_head": 0}
SPLIT: Final[Mapping[str, int]] = {**BY_HEAD, **BY_MLP, **BY_EXPERT, **BY_VOCABULARY}
"""Parameters of which each device has a part, and the axis (of one layer's parameter) that is split."""

REPLICATED: Final = frozenset(
    {
        *("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "final_norm", "q_norm", "k_norm"),
        *("o_bias", "down_bias", "expert_down_bias", "router", "router_bias"),
    }
)
"""Parameters that every device has whole: they are small, and biases are added after the partial sums."""

type Device = Any
"""`jax.Device`, which type checkers take for a variable."""

type Box = tuple[range, ...]
"""A range of each axis."""


class Piece(NamedTuple):
    """A part of a shard: `shard[target]` is `parameter[source]`."""

    target: Box
    source: Box


@dataclass(frozen=True, slots=True)
class Split:
    """How one layer's parameter is split.

    Attributes:
        axis: the one that is split; None if every device has the whole.
        shape: over all devices, padding included.
        shards: the pieces of each device's shard; what they leave out of it is zero. One shard for all without an axis.
    """

    axis: int | None
    shape: Shape
    shards: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Where KV heads, each with its query heads, lie on the devices.

    A device has `slots / devices` places for a KV head. Where there are more devices than KV heads, each of these has
    `copies` places, and its query heads are shared out among them. Places that are left over, and query heads that a
    group lacks, are padding: zeros that add nothing.

    Attributes:
        copies: places that hold the same KV head.
        slots: places over all devices.
        group: query heads of a place.
    """

    copies: int
    slots: int
    group: int

    @classmethod
    def of(cls, config: ModelConfig, devices: int) -> "HeadSplit":
        group = config.q_heads // config.kv_heads
        copies = min(group, max(1, devices // config.kv_heads))
        return cls(copies, _round_up(config.kv_heads * copies, devices), -(-group // copies))


class Sharding:
    """How one model lies on a mesh with the one axis TENSOR_AXIS; on one device it lies there whole, as it is.

    Attributes:
        heads: of attention and of the KV pool.
        splits_vocabulary: whether embedding, head and logits are split; they are whole if the devices do not divide
            the vocabulary.
        replicated: for arrays that every device has.
        pool: for the KV pool, split by head as `layout.KVLayout` has them.
        kv_scales: for the scales of a pool in 8 bits, `[layers, kv_heads, 2, head_dim]`.
        logits: for arrays `[n, vocab]`.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh) -> None:
        assert mesh.axis_names == (TENSOR_AXIS,), mesh
        self.config, self.mesh, self.devices = config, mesh, mesh.size
        self.heads = HeadSplit.of(config, mesh.size)
        self.splits_vocabulary = config.vocab_size % mesh.size == 0
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.pool = NamedSharding(mesh, PartitionSpec(None, TENSOR_AXIS))
        self.kv_scales = self.pool
        self.logits = self.pool if self.splits_vocabulary else self.replicated

    @classmethod
    def on_one_device(cls, config: ModelConfig) -> "Sharding":
        """All on the first device."""
        return cls(config, Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,)))

    @property
    def axis(self) -> str | None:
        """The mesh axis over which partial sums are added up; None on one device, which has no partial ones."""
        return TENSOR_AXIS if self.devices > 1 else None

    @property
    def kv_heads_of_device(self) -> int:
        return self.heads.slots // self.devices

    @property
    def q_heads_of_device(self) -> int:
        return self.kv_heads_of_device * self.heads.group

    @property
    def device_list(self) -> list[Device]:
        """In the order of the axis."""
        assert self.mesh.devices is not None
        return list(self.mesh.devices.flat)

    def split(self, name: str, shape: Shape) -> Split:
        """How the parameter `name`, of `shape` in one layer, is split; scales as the outputs they belong to."""
        name = name.removesuffix(SCALE)
        assert name in SPLIT or name in REPLICATED, f"{name} has no rule"
        by_input = name in SPLIT and SPLIT[name] >= len(shape)  # scales of a weight whose inputs are split
        if name not in SPLIT or by_input or (name in BY_VOCABULARY and not self.splits_vocabulary):
            everything = tuple(map(range, shape))
            return Split(None, shape, ((Piece(everything, everything),),))
        if name in BY_HEAD and self.heads.copies > 1:
            return self._copied_heads(shape, SPLIT[name])
        axis = SPLIT[name]
        size = _round_up(shape[axis], self.devices)
        shards = (self._run(shape, axis, device, size // self.devices) for device in range(self.devices))
        return Split(axis, _with(shape, axis, size), tuple(shards))

    def of(self, split: Split, stacked: bool) -> NamedSharding:
        """Where a parameter that is split so lies, or a stack of them, `[layers, ...]`."""
        if split.axis is None:
            return self.replicated
        return NamedSharding(self.mesh, PartitionSpec(*[None] * (split.axis + stacked), TENSOR_AXIS))

    def local_devices(self) -> Iterator[tuple[int, Device]]:
        """This process's devices of the mesh, each with its place on the axis."""
        here = jax.process_index()
        return ((place, device) for place, device in enumerate(self.device_list) if device.process_index == here)

    def _run(self, shape: Shape, axis: int, device: int, size: int) -> tuple[Piece, ...]:
        """The device's run of `size` along an axis, as far as there is one."""
        source = range(device * size, min((device + 1) * size, shape[axis]))
        if not source:
            return ()
        whole = tuple(map(range, shape))
        return (Piece(_with(whole, axis, range(len(source))), _with(whole, axis, source)),)

    def _copied_heads(self, shape: Shape, axis: int) -> Split:
        """KV heads lie along `axis`, and along the next one the query heads of each, then, in qkv, its key and value.

        Each device has one slot, or several: then the last ones may be padding.
        """
        heads, config = self.heads, self.config
        group, kv = config.q_heads // config.kv_heads, shape[axis + 1] - config.q_heads // config.kv_heads
        per_device = heads.slots // self.devices
        whole = tuple(map(range, shape))

        def piece(slot: int, target: range, source: range) -> Piece:
            head, place = slot // heads.copies, slot % per_device
            return Piece(
                _with(_with(whole, axis, range(place, place + 1)), axis + 1, target),
                _with(_with(whole, axis, range(head, head + 1)), axis + 1, source),
            )

        def pieces(slot: int) -> list[Piece]:
            if slot >= config.kv_heads * heads.copies:
                return []
            first = slot % heads.copies * heads.group
            queries = range(min(first, group), min(first + heads.group, group))
            both = ((range(len(queries)), queries), (range(heads.group, heads.group + kv), range(group, group + kv)))
            return [piece(slot, target, source) for target, source in both if source]

        shards = (
            tuple(found for slot in range(device * per_device, (device + 1) * per_device) for found in pieces(slot))
            for device in range(self.devices)
        )
        return Split(axis, _with(_with(shape, axis, heads.slots), axis + 1, heads.group + kv), tuple(shards))


def _with[T](values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
