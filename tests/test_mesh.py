"""What follows from the kind of device."""

import jax
import pytest

from jradix import mesh


@pytest.mark.parametrize(
    ("platform", "device_kind", "loop"),
    [
        ("cpu", "cpu", "scan"),
        ("gpu", "NVIDIA H200", "unroll"),
        ("tpu", "TPU v6 lite", "scan"),
        ("tpu", "TPU7x", "unroll"),
    ],
)
def test_layers_are_scanned_where_their_weights_are_read_in_place(platform: str, device_kind: str, loop: str) -> None:
    assert mesh.layer_loop_for(platform, device_kind) == loop


def test_the_pool_may_take_a_share_of_the_free_memory() -> None:
    one = jax.devices()[:1]
    default, all_of_it = mesh.pool_budget_bytes(None, one), mesh.pool_budget_bytes(0.999, one)
    assert 0 < default < all_of_it
    # other programs' memory comes and goes between the two readings
    assert default / all_of_it == pytest.approx(mesh.CPU_POOL_FRACTION, rel=0.5)
    assert mesh.pool_budget_bytes(1e-12, one) < 1024


def test_the_device_is_named() -> None:
    assert mesh.device_description().startswith(jax.devices()[0].platform)


def test_devices_of_one_host_share_its_memory() -> None:
    alone, shared = mesh.pool_budget_bytes(0.5, jax.devices()[:1]), mesh.pool_budget_bytes(0.5, jax.devices()[:8])
    assert shared == pytest.approx(alone / 8, rel=0.3)


def test_more_devices_than_there_are_are_refused_with_both_numbers() -> None:
    assert mesh.tensor_mesh(8).size == 8
    assert list(mesh.tensor_mesh(2, jax.devices()[4:]).devices) == jax.devices()[4:6]
    with pytest.raises(ValueError, match=r"tp_size must be at most 8, the number of devices here, got 9"):
        mesh.tensor_mesh(9)
