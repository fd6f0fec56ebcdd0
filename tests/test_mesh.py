"""What follows from the kind of device."""

import jax
import pytest

from jradix import mesh


def test_the_layer_loop_of_this_backend_is_one_that_models_know() -> None:
    assert mesh.default_layer_loop() in ("scan", "unroll")


def test_the_pool_may_take_a_share_of_the_free_memory() -> None:
    default, all_of_it = mesh.pool_budget_bytes(None), mesh.pool_budget_bytes(0.999)
    assert 0 < default < all_of_it
    # other programs' memory comes and goes between the two readings
    assert default / all_of_it == pytest.approx(mesh.CPU_POOL_FRACTION, rel=0.5)
    assert mesh.pool_budget_bytes(1e-12) < 1024


def test_the_device_is_named() -> None:
    assert mesh.device_description().startswith(jax.devices()[0].platform)
