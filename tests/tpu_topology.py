"""Compiles for a TPU on a machine that has none: libtpu holds the whole compiler, given the name of a topology."""

import os
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def tpu_mesh(topology: str, num_devices: int = 1) -> Mesh:
    """Devices of a topology such as "v5e:2x2" or "v6e:2x2", on one axis "tp". Skips the test without libtpu."""
    pytest.importorskip("libtpu")
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no chip is used, so another process may do the same
    devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    return Mesh(np.array(devices[:num_devices]), ("tp",))


def on(mesh: Mesh, tree: Any) -> Any:
    """The shapes and dtypes of a tree's arrays, replicated on `mesh`."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compile_for(mesh: Mesh, jitted: Any, *args: Any, **static: Any) -> jax.stages.Compiled:
    """The program of a jitted function for the mesh's devices; `args` come from `on`, `static` are static arguments."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # kernels ask which chip it is while they are traced
        return jitted.trace(*args, **static).lower(lowering_platforms=("tpu",)).compile()
