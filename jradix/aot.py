"""Compiles for devices that this machine does not have: TPUs through libtpu, an H200 through jax's CUDA plug-in.

Nothing runs. A compiler given the description of a chip produces the program that the chip would run, with the memory
it would need. Let neither plug-in look for a device: set JAX_PLATFORMS=cpu before jax is imported, and for TPUs
TPU_SKIP_MDS_QUERY=1.
"""

import os
import re
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from jradix.model.sharding import TENSOR_AXIS

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


COPIES = ("copy", "transpose")
MOVES = (*COPIES, "copy-done", "reshape")  # a reshape that a compiled program runs by itself is none for free
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


@dataclass(frozen=True, slots=True)
class Target:
    """A device to compile for.

    Attributes:
        topology: libtpu's name for a small arrangement of such chips; of GPUs any number may be described.
        large_topology: for one of 8 devices.
        device: what `ops.choose` asks for.
        memory_bytes: of one device.
        bandwidth: bytes a second between the device and its memory, by its maker.
        flops: bfloat16 operations a second, by its maker.
    """

    platform: Literal["tpu", "gpu"]
    topology: str
    large_topology: str
    device: str
    memory_bytes: float
    bandwidth: float
    flops: float

    def mesh(self, devices: int = 1) -> Mesh:
        """So many devices on the axis TENSOR_AXIS. Raises where the plug-in with the compiler is not installed."""
        if self.platform == "tpu":
            os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no chip is used, so another process may do the same
            topology = self.topology if devices <= 4 else self.large_topology
            described = topologies.get_topology_desc(topology_name=topology, platform="tpu")
        else:
            topology = f"1x1x{devices}"  # of one host
            described = topologies.get_topology_desc(
                topology_name=topology, platform="cuda", target_config=H200, topology=topology
            )
        assert len(described.devices) >= devices, f"{self} has {len(described.devices)} devices"
        return Mesh(np.array(described.devices[:devices]), (TENSOR_AXIS,))

    def compile(self, jitted: Any, *args: Any, mesh: Mesh | None = None, static: tuple[Any, ...] = ()) -> Compiled:
        """The program of a jitted function for a mesh of such devices, by default of one.

        args: trees of arrays, or of anything with a shape and a dtype; every device gets those without a sharding on
            the mesh. static: the function's static arguments, after these.
        """
        mesh = mesh or self.mesh()
        everywhere = NamedSharding(mesh, PartitionSpec())

        def placed(leaf: Any) -> jax.ShapeDtypeStruct:
            there = isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if there else everywhere)

        shapes = jax.tree.map(placed, args)
        platform = "cuda" if self.platform == "gpu" else "tpu"
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # kernels ask which chip it is while they are traced
            return jitted.trace(*shapes, *static).lower(lowering_platforms=(platform,)).compile()


def copied_shapes(program: Compiled) -> set[tuple[int, ...]]:
    """Shapes of the arrays that a compiled program writes as copies of others; see `copied_shapes_of_text`."""
    return copied_shapes_of_text(program.as_text() or "")


def copied_shapes_of_text(text: str) -> set[tuple[int, ...]]:
    """The same of a program's text. Sizes are sorted, for a copy in another order is one too.

    A copy is an instruction, or what a fusion writes. Not counted are copies into a TPU's VMEM, memory space 1, which
    are how it reads what it is about to use, and those inside a fusion that writes something else: they only say in
    which order the fusion reads an operand. So int8 weights, in tiles of 32 rows, become tiles of 8 for a matmul.
    """
    computations = _computations(text)

    def copies_in(fusion: str) -> set[tuple[int, ...]]:
        found: set[tuple[int, ...]] = set()
        for entry in computations[fusion]:
            if entry.operation in COPIES:
                found |= entry.shapes
            elif entry.fused:
                found |= copies_in(entry.fused)
        return found

    fusions = {entry.fused for entries in computations.values() for entry in entries}
    found: set[tuple[int, ...]] = set()
    for entry in (entry for name, entries in computations.items() if name not in fusions for entry in entries):
        if entry.operation in MOVES:
            found |= entry.shapes
        elif entry.fused:
            sizes = {prod(shape) for shape in copies_in(entry.fused)}  # a bitcast may give a copy another shape
            found |= {shape for shape in entry.shapes if prod(shape) in sizes}
    return found


@dataclass(frozen=True, slots=True)
class _Instruction:
    """The shapes of what it writes, but not of that in VMEM, and the computation that it runs if it is a fusion."""

    operation: str
    shapes: set[tuple[int, ...]]
    fused: str | None


def _computations(text: str) -> dict[str, list[_Instruction]]:
    """Those of a program's text: of each a line with its name, then a line for each instruction."""
    found: dict[str, list[_Instruction]] = {}
    instructions: list[_Instruction] = []
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            instructions = found[header[1]] = []
        elif parts := re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][\w-]*)\(", line):
            arrays = re.findall(r"\[([\d,]+)\](\{[^}]*\})?", parts[1])
            shapes = {tuple(sorted(map(int, sizes.split(",")))) for sizes, layout in arrays if "S(1)" not in layout}
            fused = re.search(r"\bcalls=%?([\w.-]+)", line) if parts[2] == "fusion" else None
            instructions.append(_Instruction(parts[2], shapes, fused and fused[1]))
    return found


def collectives(program: Compiled) -> Counter[str]:
    """How many of each kind of communication between devices a program has; those of a loop's body count once."""
    return Counter(re.findall(rf"\b({'|'.join(COLLECTIVES)})(?:-start)?\(", program.as_text() or ""))


TARGETS = {
    "v5e": Target("tpu", "v5e:2x2", "v5e:2x4", "TPU v5 lite", 16e9, 819e9, 197e12),
    "v5p": Target("tpu", "v5p:2x2x1", "v5p:2x2x2", "TPU v5", 95e9, 2765e9, 459e12),
    "v6e": Target("tpu", "v6e:2x2", "v6e:2x4", "TPU v6 lite", 32e9, 1640e9, 918e12),
    # A chip is two devices, each with half of its 192 GiB, 7.4 TB/s and 2.3 PFLOP/s.
    "tpu7x": Target("tpu", "tpu7x:2x2x1", "tpu7x:2x2x1", "TPU7x", 96e9, 3690e9, 1153e12),
    "h200": Target("gpu", "", "", "9.0", 141e9, 4800e9, 989e12),
}
