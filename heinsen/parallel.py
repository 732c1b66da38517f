"""The device mesh, and how parameters, batches and states are sharded over it.

The mesh axes, and what each one splits:

    data      sequences of the batch; parameters are replicated
    fsdp      sequences, too; parameters and optimizer state are split, and gathered where they are used
    tensor    attention heads, with the matching columns and rows of the matrices around them
    sequence  tokens of every sequence; devices pass on states of constant size (`scan_before`)

Axes are of type Auto: XLA inserts the communication that the shardings imply. Computations that are independent across
devices run on each device separately (`on_each_device`).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from heinsen.errors import HeinsenError

T = TypeVar("T")

AXES = ("data", "fsdp", "tensor", "sequence")
BATCH = ("data", "fsdp")  # the mesh axes that split the sequences of a batch

MeshAxes = str | tuple[str, ...] | None  # the mesh axes that split one array axis; None: it is not split

# The sharding of parameters: the end of a parameter's path, and the mesh axes for each of its axes. The optimizer's
# moments have the same paths. Parameters that no rule names are small and replicated.
_BOTH = ("fsdp", "tensor")
PARAMETER_RULES: tuple[tuple[str, tuple[MeshAxes, ...]], ...] = (
    ("position/embedding", (None, None)),  # [n_positions, D], learned: small
    ("embedding", (_BOTH, None)),  # [vocab, D]; gathered once per step
    ("position/dense/kernel", (_BOTH, None)),  # [D, 2D], or [D, 4D] in two directions
    ("w1/kernel", (None, "fsdp", "tensor")),  # [L, D, H (2K + V)], head by head
    ("w1/bias", (None, "tensor")),
    ("convolution/taps", (None, "tensor", None, None)),  # [L, H, N, 2K + V]
    ("feature_map/kernel", (None, None, "tensor", None, None)),  # [L, 2, H, K, F]
    ("feature_map/bias", (None, None, "tensor", None, None)),  # [L, 2, H, 1, F]
    ("/gate/kernel", (None, None, "tensor")),  # [L, D, H]
    ("/gate/bias", (None, "tensor")),
    ("/gate/scale", (None, "tensor")),
    ("/gate_after/kernel", (None, None, "tensor")),  # as those of `gate`, of models that see both directions
    ("/gate_after/bias", (None, "tensor")),
    ("/gate_after/scale", (None, "tensor")),
    ("strength/kernel", (None, None, "tensor")),  # [L, D, H]
    ("strength/bias", (None, "tensor")),
    ("output_gate/kernel", (None, "fsdp", "tensor")),  # [L, D, H V], head by head
    ("output_gate/bias", (None, "tensor")),
    ("w2/kernel", (None, "tensor", "fsdp")),  # [L, H V, 2D], head by head
    ("w3/kernel", (None, "tensor", "fsdp")),  # [L, D, D]
    ("attention_out/kernel", (None, "tensor", "fsdp")),  # [L, H V, D], head by head
    ("mlp_in/kernel", (None, "fsdp", "tensor")),  # [L, D, 4D]
    ("mlp_in/bias", (None, "tensor")),
    ("mlp_out/kernel", (None, "tensor", "fsdp")),  # [L, 4D, D]
)


class MeshError(HeinsenError, ValueError):
    """The mesh does not fit the devices, the model or the batch."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each mesh axis. One axis may be -1: it takes all remaining devices."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            if size < 1 and size != -1:
                raise MeshError(f"mesh.{name} = {size}: it must be positive, or -1 for all remaining devices")
        if (free := [name for name, size in sizes.items() if size == -1]) and len(free) > 1:
            raise MeshError(f"mesh.{' and mesh.'.join(free)} are -1: only one axis can take the remaining devices")

    def sizes(self, n_devices: int) -> tuple[int, ...]:
        """Number of devices along each of AXES. Raises MeshError if their product is not n_devices."""
        sizes = [self.data, self.fsdp, self.tensor, self.sequence]
        given = math.prod(size for size in sizes if size != -1)
        shown = _format_sizes(sizes)
        if -1 in sizes and n_devices % given == 0:
            sizes[sizes.index(-1)] = n_devices // given
        elif given != n_devices:
            verb = "do not divide" if -1 in sizes else f"need {given} devices: there are"
            raise MeshError(f"the mesh's axes {shown} {verb} {n_devices} devices: set --config.mesh.AXIS=N")
        return tuple(sizes)


def _format_sizes(sizes: Sequence[int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in zip(AXES, sizes, strict=True))


def make_mesh(config: MeshConfig | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh of the devices (None: all, of all processes). Raises MeshError if their number or topology does not fit."""
    devices = jax.devices() if devices is None else devices
    sizes = (config or MeshConfig()).sizes(len(devices))
    try:
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    except (NotImplementedError, ValueError) as error:  # a TPU torus that cannot be cut this way
        raise MeshError(f"the mesh {_format_sizes(sizes)} does not fit the devices' topology: {error}") from error
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


# ---- placement -----------------------------------------------------------------------------------


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of an array of which every device holds a copy."""
    return NamedSharding(mesh, PartitionSpec())


def split_batch(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Sharding of an array whose axis `axis` is the batch."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, BATCH))


def n_batch_parts(mesh: Mesh) -> int:
    """Number of parts into which a batch is split."""
    return math.prod(mesh.shape[name] for name in BATCH)


def shardings(mesh: Mesh, abstract: Any) -> Any:
    """Sharding of each array in a tree of parameters or optimizer state, by PARAMETER_RULES.

    Raises MeshError if an axis does not divide into its parts.
    """
    return jax.tree_util.tree_map_with_path(partial(_parameter_sharding, mesh), abstract)


def _parameter_sharding(mesh: Mesh, path: tuple[Any, ...], x: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    spec = next((spec for end, spec in PARAMETER_RULES if name.endswith(end) and len(spec) == x.ndim), ())
    for axis, names in enumerate(spec):
        names = (names,) if isinstance(names, str) else names or ()
        parts = math.prod(mesh.shape[n] for n in names)
        if x.shape[axis] % parts:
            axes = " x ".join(f"mesh.{n} {mesh.shape[n]}" for n in names)
            raise MeshError(f"axis {axis} of {name} {x.shape} does not divide into {parts} parts ({axes})")
    return NamedSharding(mesh, PartitionSpec(*spec))


def with_shardings(abstract: T, where: Any) -> T:
    """Attach shardings to a tree of abstract arrays; `where` is one sharding, or a tree of the same structure."""
    if isinstance(where, Sharding):
        where = jax.tree.map(lambda _: where, abstract)
    with_sharding = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    result: T = jax.tree.map(with_sharding, abstract, where)
    return result


def process_rows(mesh: Mesh, n_rows: int) -> np.ndarray:
    """Indices of the rows of a batch of n_rows that this process's devices hold, sorted and without duplicates."""
    held = split_batch(mesh).addressable_devices_indices_map((n_rows,))
    return np.unique(np.concatenate([np.arange(n_rows)[index] for index in held.values()]))


def place_batch(mesh: Mesh, batch: Any, axis: int = 0) -> Any:
    """Make global arrays on the mesh from this process's rows of a batch (`process_rows`); `axis` is the batch.

    A batch is an array or a tree of arrays. The mesh axes that do not split the batch hold copies.
    """
    placed: dict[str, jax.Array] = jax.make_array_from_process_local_data(split_batch(mesh, axis), batch)
    return placed


def constrain(mesh: Mesh | None, x: jax.Array, *axes: MeshAxes) -> jax.Array:
    """Constrain x to be split over mesh axes, one entry per axis of x; no-op without a mesh or on one device."""
    if mesh is None or mesh.size == 1:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


# ---- computation on each device separately -------------------------------------------------------


def on_each_device(mesh: Mesh, function: Callable[..., T], in_specs: Any, out_specs: Any) -> Callable[..., T]:
    """Map `function` over the devices: each call sees its device's parts of the arrays, by the specs (`jax.shard_map`).

    Outputs must be split over every mesh axis with more than one device, or be equal along it.
    """
    # check_vma would require casts of the initial carry of every loop inside.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def scan_before(combine: Callable[[T, T], T], x: T, first: T, axis: str) -> T:
    """Exclusive scan over the devices along a mesh axis: combine the x of all devices before this one.

    Args:
      combine: an associative function of (earlier, later).
      x: this device's element.
      first: the result on the first device, which has none before it.
      axis: the mesh axis. To be called inside `on_each_device`.

    Differentiable. With n devices each sends at most 1 + ceil(log2(n - 1)) messages of the size of x.
    """
    n, i = lax.axis_size(axis), lax.axis_index(axis)

    def shift(x: T, by: int) -> T:
        """The x of the device `by` places earlier; zeros where there is none."""
        received: T = jax.tree.map(lambda x: lax.ppermute(x, axis, [(j, j + by) for j in range(n - by)]), x)
        return received

    def select(condition: jax.Array, x: T, y: T) -> T:
        selected: T = jax.tree.map(lambda x, y: jnp.where(condition, x, y), x, y)
        return selected

    total = select(i >= 1, shift(x, 1), first)
    by = 1
    while by < n - 1:
        # Devices before 1 + by have combined everything: combining again would count `first` twice.
        total = select(i >= 1 + by, combine(shift(total, by), total), total)
        by *= 2
    return total
