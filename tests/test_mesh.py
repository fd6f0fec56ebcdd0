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
    default, all_of_it = mesh.pool_budget_bytes(None), mesh.pool_budget_bytes(0.999)
    assert 0 < default < all_of_it
    # other programs' memory comes and goes between the two readings
    assert default / all_of_it == pytest.approx(mesh.CPU_POOL_FRACTION, rel=0.5)
    assert mesh.pool_budget_bytes(1e-12) < 1024


def test_the_device_is_named() -> None:
    assert mesh.device_description().startswith(jax.devices()[0].platform)
