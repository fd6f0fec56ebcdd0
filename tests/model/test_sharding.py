"""The rules by which parameters are split: on shapes and numbered elements, without a device."""

from typing import Any

import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jradix.model.config import FAMILIES, ModelConfig
from jradix.model.sharding import REPLICATED, SPLIT, TENSOR_AXIS, Sharding

HIDDEN, HEAD_DIM = 3, 2
GEOMETRIES = [(8, 4), (3, 3), (2, 2), (1, 4), (4, 8), (5, 1), (3, 5)]  # KV heads, query heads of each


def sharding_of(devices: int, kv_heads: int = 2, group: int = 2, vocab_size: int = 24) -> Sharding:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 10,
        "num_hidden_layers": 1,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,
    }
    mesh: Any = AbstractMesh((devices,), (TENSOR_AXIS,))
    return Sharding(ModelConfig.from_hf(fields), mesh)


def shards_of(sharding: Sharding, name: str, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Each device's part of a parameter whose elements are numbered from 1; 0 is padding."""
    parameter = np.arange(1, np.prod(shape) + 1).reshape(shape)
    split = sharding.split(name, shape)
    local = sharding.of(split, stacked=False).shard_shape(split.shape)
    shards = []
    for pieces in split.shards:
        shard = np.zeros(local, int)
        for target, source in pieces:
            place, found = (tuple(slice(at.start, at.stop) for at in box) for box in (target, source))
            assert not shard[place].any(), "two pieces of a shard overlap"
            shard[place] = parameter[found]
        shards.append(shard)
    return shards * sharding.devices if split.axis is None else shards


def elements(shards: list[np.ndarray]) -> list[int]:
    return sorted(int(x) for shard in shards for x in shard.flat if x)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize(
    ("name", "shape", "axis"),
    [
        ("gate_up", (2, 10, HIDDEN), 1),
        ("gate_up_bias", (2, 10), 1),
        ("down", (HIDDEN, 10), 1),
        ("expert_gate_up", (6, 2, 5, HIDDEN), 0),
        ("expert_gate_up_bias", (6, 2, 5), 0),
        ("expert_down", (6, HIDDEN, 5), 0),
    ],
)
def test_every_element_is_on_one_device_and_the_rest_is_zero(
    name: str, shape: tuple[int, ...], axis: int, devices: int
) -> None:
    shards = shards_of(sharding_of(devices), name, shape)
    assert elements(shards) == list(range(1, int(np.prod(shape)) + 1))
    assert {shard.shape for shard in shards} == {(*shape[:axis], -(-shape[axis] // devices), *shape[axis + 1 :])}


def test_what_makes_an_inner_value_and_what_uses_it_are_on_the_same_device() -> None:
    for devices in (2, 3, 4):
        sharding = sharding_of(devices)
        [gate_up, down] = (sharding.split(*args).shards for args in (("gate_up", (2, 10, 3)), ("down", (3, 10))))
        for make, use in zip(gate_up, down, strict=True):
            assert [piece.source[1] for piece in make] == [piece.source[1] for piece in use]
            assert [piece.target[1] for piece in make] == [piece.target[1] for piece in use]
    for devices in (2, 4):
        sharding = sharding_of(devices)
        shapes = {"expert_gate_up": (6, 2, 5, 3), "expert_gate_up_bias": (6, 2, 5), "expert_down": (6, 3, 5)}
        found = [
            [[piece.source[0] for piece in pieces] for pieces in sharding.split(name, shape).shards]
            for name, shape in shapes.items()
        ]
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize(("kv_heads", "group"), GEOMETRIES)
def test_each_query_head_is_in_one_place_beside_its_own_key_and_value(kv_heads: int, group: int, devices: int) -> None:
    """So what attention computes on all devices together, the sum of `o @ head` over places, is that of one device."""
    sharding = sharding_of(devices, kv_heads, group)
    qkv = shards_of(sharding, "qkv", (kv_heads, group + 2, HEAD_DIM, HIDDEN))
    bias = shards_of(sharding, "qkv_bias", (kv_heads, group + 2, HEAD_DIM))
    sinks = shards_of(sharding, "sinks", (kv_heads, group))
    o = shards_of(sharding, "o", (HIDDEN, kv_heads, group, HEAD_DIM))
    places = {shard.shape[:2] for shard in qkv}
    assert places == {(sharding.kv_heads_of_device, sharding.q_heads_of_device // sharding.kv_heads_of_device + 2)}
    seen = []
    for device in range(devices):
        for slot in range(sharding.kv_heads_of_device):
            heads = qkv[device][slot, :, 0, 0]  # the first element of each head tells which it is
            numbers = [int(first - 1) // (HEAD_DIM * HIDDEN) if first else None for first in heads]
            assert [int(x - 1) // HEAD_DIM if x else None for x in bias[device][slot, :, 0]] == numbers
            queries, key, value = numbers[:-2], numbers[-2], numbers[-1]
            real = [query for query in queries if query is not None]
            assert queries == real + [None] * (len(queries) - len(real))
            if key is None:
                assert value is None
                assert not real
                continue
            head = key // (group + 2)
            assert (key, value) == (head * (group + 2) + group, head * (group + 2) + group + 1)
            assert all(query // (group + 2) == head and query % (group + 2) < group for query in real)
            at = [head * group + query % (group + 2) for query in real]
            assert [int(x - 1) for x in sinks[device][slot][: len(at)]] == at
            assert [int(x - 1) // HEAD_DIM for x in o[device][0, slot, : len(at), 0]] == at
            assert not o[device][:, slot, len(at) :].any()
            seen += at
    assert sorted(seen) == list(range(kv_heads * group))


@pytest.mark.parametrize(
    ("kv_heads", "group", "devices", "copies", "slots", "slot_group"),
    [
        (8, 4, 8, 1, 8, 4),
        (8, 4, 2, 1, 8, 4),
        (3, 3, 2, 1, 4, 3),  # SmolLM2: a quarter of the slots is padding
        (3, 3, 4, 1, 4, 3),
        (3, 3, 8, 2, 8, 2),
        (4, 8, 8, 2, 8, 4),
        (1, 4, 8, 4, 8, 1),  # no more copies than query heads
        (8, 8, 16, 2, 16, 4),
    ],
)
def test_heads_are_copied_only_for_more_devices_than_heads(
    kv_heads: int, group: int, devices: int, copies: int, slots: int, slot_group: int
) -> None:
    heads = sharding_of(devices, kv_heads, group).heads
    assert (heads.copies, heads.slots, heads.group) == (copies, slots, slot_group)


def test_a_vocabulary_is_split_where_devices_divide_it() -> None:
    shape = (24, HIDDEN)
    for name in ("embed", "lm_head"):
        [first, *_] = shards = shards_of(sharding_of(8), name, shape)
        assert first.shape == (3, HIDDEN)
        assert elements(shards) == list(range(1, 24 * HIDDEN + 1))
        assert sharding_of(5).split(name, shape).axis is None
    assert sharding_of(8).logits.spec == sharding_of(8).pool.spec
    assert sharding_of(5).logits == sharding_of(5).replicated


def test_every_parameter_of_every_family_has_a_rule() -> None:
    names = {name for family in FAMILIES.values() for name in family.parts}
    assert names == SPLIT.keys() | REPLICATED
    assert not SPLIT.keys() & REPLICATED
