"""The device mesh and how arrays lie on it: parameters replicated, batches split over the `data` axis."""

import ctypes

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def make_mesh() -> Mesh:
    """All devices of all processes along one `data` axis."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def split_batch(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """The sharding of an array whose `axis` is the batch."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))


def place_batch(mesh: Mesh, batch: dict[str, np.ndarray], axis: int = 0) -> dict[str, jax.Array]:
    """This process's share of a batch, placed on the mesh as part of the global batch; `axis` is the batch."""
    sharding = split_batch(mesh, axis)
    return {name: jax.make_array_from_process_local_data(sharding, x) for name, x in batch.items()}


def keep_host_memory() -> None:
    """On a CPU backend, have glibc keep freed memory for the next step rather than hand it back to the kernel.

    XLA allocates a step's temporaries anew each time; fresh pages cost a third of a small model's step. Does nothing on
    other backends and C libraries.
    """
    if jax.default_backend() != "cpu":
        return
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # of mallopt(3)
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)
        libc.mallopt(m_top_pad, 64 << 20)
    except (OSError, AttributeError):
        pass
