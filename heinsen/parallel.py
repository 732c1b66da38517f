"""The device mesh and how arrays lie on it: parameters replicated, batches split over the `data` axis."""

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
