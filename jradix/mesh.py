"""The devices and what follows from their kind: defaults that differ between CPU, GPU and TPU stand here alone."""

import os
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jradix.model.sharding import TENSOR_AXIS, Device
from jradix.pallas.geometry import Geometry
from jradix.pallas.ops import Kernels, choose

CPU_POOL_FRACTION = 0.1  # of free host memory, which every other program shares
ACCELERATOR_FRACTION = 0.85  # of the device, for weights and pool; the rest is for the step's temporaries


def tensor_mesh(tp_size: int, devices: Sequence[Device] | None = None) -> Mesh:
    """The first of the devices of each process, by default of this one alone: `tp_size` in all, on one axis.

    Each process has equally many, side by side, as `tp_size` is a multiple of their number.

    Raises:
        ValueError: there are not so many.
    """
    of_process: dict[int, list[Device]] = {}
    for device in jax.local_devices() if devices is None else devices:
        of_process.setdefault(device.process_index, []).append(device)
    share, rest = divmod(tp_size, len(of_process))
    assert not rest, (tp_size, of_process.keys())
    fewest = min(map(len, of_process.values()))
    if share > fewest:
        limit = f"{fewest * len(of_process)}, the number of devices here"
        if len(of_process) > 1:
            limit = f"{fewest * len(of_process)}, as {len(of_process)} processes have at least {fewest} devices each"
        raise ValueError(f"tp_size must be at most {limit}, got {tp_size}{_hint()}")
    chosen = [device for rank in sorted(of_process) for device in of_process[rank][:share]]
    return Mesh(np.array(chosen), (TENSOR_AXIS,))


def replica_meshes(dp_size: int, tp_size: int, devices: Sequence[Device] | None = None) -> list[Mesh]:
    """For each of `dp_size` replicas the next `tp_size` of the devices, see `tensor_mesh`.

    Raises:
        ValueError: there are not so many.
    """
    if dp_size == 1:
        return [tensor_mesh(tp_size, devices)]
    devices = jax.local_devices() if devices is None else devices
    if dp_size * tp_size > len(devices):
        raise ValueError(
            f"dp_size * tp_size must be at most {len(devices)}, the number of devices here, got {dp_size} * {tp_size}"
            + _hint()
        )
    return [tensor_mesh(tp_size, devices[first : first + tp_size]) for first in range(0, dp_size * tp_size, tp_size)]


def default_layer_loop() -> Literal["scan", "unroll"]:
    """How to loop over layers on this device."""
    return layer_loop_for(jax.default_backend(), jax.devices()[0].device_kind)


def layer_loop_for(platform: str, device_kind: str) -> Literal["scan", "unroll"]:
    """How to loop over layers, given jax's names for a device.

    A scanned layer compiles in a fraction of the time, but GPU and CPU copy its weights out of the stack. On a GPU
    that is too much; on a CPU it costs about a tenth of a step, and compiling 30 layers one by one takes five times
    as long for each of dozens of programs. A TPU reads layers in place, but for the 7x, whose compiler first copies
    most of the stacked weights into other tiles: 12 GB in each step of an 8B model.
    """
    return "unroll" if platform == "gpu" or device_kind == "TPU7x" else "scan"


def compiler_options() -> dict[str, Any]:
    """XLA's options for step programs. Vectors of 512 bits, twice XLA's choice, take a sixth off attention on a CPU."""
    return {"xla_cpu_prefer_vector_width": 512} if jax.default_backend() == "cpu" else {}


def pool_budget_bytes(mem_fraction_static: float | None, devices: Sequence[Device]) -> int:
    """Bytes of each of the devices that the KV pool may take, now that the weights are there: what the fullest allows.

    Devices of other processes are not asked, and a CPU's share the memory of the host.
    """
    local = [device for device in devices if device.process_index == jax.process_index()]
    return min(_device_budget_bytes(mem_fraction_static, device, len(local)) for device in local)


def _device_budget_bytes(mem_fraction_static: float | None, device: Device, sharers: int) -> int:
    stats = None if device.platform == "cpu" else device.memory_stats()
    if stats is None or "bytes_limit" not in stats:
        return int((mem_fraction_static or CPU_POOL_FRACTION) * _free_host_bytes() / sharers)
    return int(stats["bytes_limit"] * (mem_fraction_static or ACCELERATOR_FRACTION)) - stats["bytes_in_use"]


def choose_kernels(geometry: Geometry, max_pages: int) -> Kernels:
    """What computes attention on this device, see `ops.choose`."""
    device = jax.devices()[0]
    name = device.compute_capability if jax.default_backend() == "gpu" else device.device_kind
    return choose(jax.default_backend(), name, geometry, max_pages)


def device_description() -> str:
    device = jax.devices()[0]
    kind = device.device_kind
    return kind if kind == device.platform else f"{device.platform} ({kind})"


def _hint() -> str:
    """How to have more devices."""
    is_cpu = jax.default_backend() == "cpu"
    return ": set XLA_FLAGS=--xla_force_host_platform_device_count=N to try it out" if is_cpu else ""


def _free_host_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
