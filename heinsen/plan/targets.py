"""Machines to plan for: their names, and their compilers, which run on any machine.

A GPU's compiler is told the chip by a description of it, a TPU's knows its slices. No such device has to be there.
"""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental import topologies

from heinsen import backend
from heinsen.chips import CHIPS, Chip
from heinsen.errors import HeinsenError

_GPUS_PER_HOST = 8
_GPU_SHARE = 0.75  # of a GPU's memory that JAX takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise

# Streaming multiprocessors, float32 units in each, shared memory (bytes) of each and of a block, L2 cache (bytes),
# clock (GHz), and CUDA's compute capability.
_GPU_CORES = {
    "a100": (108, 64, 167936, 166912, 41943040, 1.41, 8),
    "h100": (132, 128, 233472, 232448, 52428800, 1.98, 9),
    "h200": (132, 128, 233472, 232448, 52428800, 1.98, 9),
    "b200": (148, 128, 233472, 232448, 132644864, 1.965, 10),
}

# Shapes of slices, by the number in their name: of chips for v5e and v6e, of TensorCores (two per chip) for v4 and v5p.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {
    8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 512: "4x8x8", 1024: "8x8x8",
}  # fmt: skip
_SLICES = {"v4": _CUBES, "v5e": _FLAT, "v5p": _CUBES, "v6e": _FLAT}


class TargetError(HeinsenError, ValueError):
    """There is no such machine to plan for, or its compiler is missing."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine: its name, its chips, and how many JAX counts. topology: as their compiler names it."""

    name: str
    chip: Chip
    n_devices: int
    topology: str

    @property
    def memory(self) -> int:
        """Bytes of a device that JAX can use."""
        return int(_GPU_SHARE * self.chip.memory) if self.chip.platform == "gpu" else self.chip.memory

    def devices(self) -> list[jax.Device]:
        """Devices to compile for; nothing can be computed on them. Raises TargetError without their compiler."""
        _check_compiler(self.chip)
        _use_compilers_only()
        if self.chip.platform == "gpu":
            topology = topologies.get_topology_desc(
                platform="cuda", target_config=_describe_gpu(self.chip), topology=self.topology
            )
        else:
            shape = tuple(map(int, self.topology.split("x")))
            per_host = min(2, shape[0]), min(2, shape[1]), 1
            topology = topologies.get_topology_desc(
                platform="tpu",
                topology_name=f"{self.chip.name}:{self.topology}",
                chip_config_name="default" if len(shape) == 2 else "megacore",
                chips_per_host_bounds=per_host,
                num_slices=1,
            )
        return list(topology.devices)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Within the block, what is traced is for this machine."""
        with backend.compiling_for(self.chip.platform):
            yield


def find_target(name: str) -> Target:
    """Return the machine of a name: h100, h100-8, v5e-4, v5p-8. Raises TargetError."""
    match = re.fullmatch(r"(\w+?)(?:-(\d+))?", name)
    chip = CHIPS.get(match[1]) if match else None
    if match is None or chip is None:
        raise TargetError(f"--target={name}: there is no such machine. There are {_describe_names()}")
    number = int(match[2] or 1)
    if chip.platform == "gpu":
        hosts, rest = divmod(number, _GPUS_PER_HOST)
        if not 1 <= number <= _GPUS_PER_HOST and (rest or not hosts):
            raise TargetError(
                f"--target={name}: a host has up to {_GPUS_PER_HOST} GPUs, and several hosts {_GPUS_PER_HOST} each"
            )
        topology = f"1x1x{number}" if number <= _GPUS_PER_HOST else f"1x{hosts}x{_GPUS_PER_HOST}"
        return Target(name, chip, number, topology)
    slices = _SLICES[chip.name]
    if match[2] is None or number not in slices:
        raise TargetError(f"--target={name}: slices of {chip.name} are {_describe_slices(chip.name)}")
    n_devices = number // 2 if slices is _CUBES else number
    return Target(name, chip, n_devices, slices[number])


def _describe_names() -> str:
    gpus = ", ".join(chip.name for chip in CHIPS.values() if chip.platform == "gpu")
    tpus = ", ".join(f"{name}-N" for name in _SLICES)
    return f"{gpus} (one GPU), the same with -N (N GPUs), and {tpus} (docs/planning.md)"


def _describe_slices(name: str) -> str:
    unit = "TensorCores, two per chip" if _SLICES[name] is _CUBES else "chips"
    return ", ".join(f"{name}-{n}" for n in _SLICES[name]) + f" (the number counts {unit})"


def _check_compiler(chip: Chip) -> None:
    extra = f"plan-{chip.platform}"
    if chip.platform == "tpu":
        is_there, packages = importlib.util.find_spec("libtpu") is not None, ""
    else:
        plugins = [f"jax_cuda{version}_plugin" for version in (12, 13)]
        is_there = any(importlib.util.find_spec(name) is not None for name in plugins)
        packages = f" 'jax-cuda13-plugin=={jax.__version__}'"  # it has to have jax's version
    if not is_there:
        raise TargetError(
            f"a plan for {chip.name} needs its compiler, which is not installed: "
            f"pip install 'heinsen[{extra}]'{packages}"
        )


def _use_compilers_only() -> None:
    """Start no accelerator's runtime, and look for none: JAX computes on the CPU, if anything."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # without these two libtpu complains, for any target
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    jax.config.update("jax_platforms", "cpu")


def _describe_gpu(chip: Chip) -> str:
    """Return XLA's description of a GPU (GpuTargetConfigProto), as openxla/xla has them in target_config/specs."""
    cores, units, shared_per_core, shared_per_block, l2_cache, clock, capability = _GPU_CORES[chip.name]
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          shared_memory_per_block: 49152 shared_memory_per_core: {shared_per_core}
          shared_memory_per_block_optin: {shared_per_block}
          core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: {chip.bandwidth:.0f} l2_cache_size: {l2_cache} device_memory_size: {chip.memory}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          cuda_compute_capability {{ major: {capability} minor: 0 }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{chip.device_kind}"
    """
