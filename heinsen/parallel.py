"""The device mesh, and how parameters, batches and states lie on it.

The axes of the mesh, and what is split over each:

    data      sequences of the batch; parameters are repeated
    fsdp      sequences too; parameters and optimizer state are split, and gathered where they are used
    tensor    heads of the attention, with the columns and rows of the matrices that make and read them
    sequence  tokens of every sequence; devices hand on states of constant size (`scan_before`)

Axes are of type Auto: XLA places the communication that the shardings imply. Where a computation is independent
between devices (`on_each_device`), it runs on each by itself.
"""

import ctypes
import dataclasses
import math
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from heinsen.errors import HeinsenError

AXES = ("data", "fsdp", "tensor", "sequence")
BATCH = ("data", "fsdp")  # the axes of the mesh that split the sequences of a batch

# How parameters are split: by the end of their path, the axes of the mesh for each axis of the array. The optimizer's
# moments have the same paths. What is not named here is small and repeated everywhere.
_BOTH = ("fsdp", "tensor")
PARAMETER_RULES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("position/embedding", (None, None)),  # [n_positions, D], learned: small
    ("embedding", (_BOTH, None)),  # [vocab, D]; gathered whole once a step
    ("position/dense/kernel", (_BOTH, None)),  # [D, 2D], or [D, 4D] in two directions
    ("w1/kernel", (None, "fsdp", "tensor")),  # [L, D, H (2K + V)], head by head
    ("w1/bias", (None, "tensor")),
    ("w2/kernel", (None, "tensor", "fsdp")),  # [L, H V, 2D], head by head
    ("w3/kernel", (None, "tensor", "fsdp")),  # [L, D, D]
    ("attention_out/kernel", (None, "tensor", "fsdp")),  # [L, H V, D], head by head
    ("mlp_in/kernel", (None, "fsdp", "tensor")),  # [L, D, 4D]
    ("mlp_in/bias", (None, "tensor")),
    ("mlp_out/kernel", (None, "tensor", "fsdp")),  # [L, 4D, D]
)


class MeshError(HeinsenError, ValueError):
    """A mesh that does not fit the devices, the model or the batch."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh; -1 for one of them: all that the others leave."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            if size < 1 and size != -1:
                raise MeshError(f"mesh.{name} = {size}: it must be positive, or -1 for all devices that are left")
        if (free := [name for name, size in sizes.items() if size == -1]) and len(free) > 1:
            raise MeshError(f"mesh.{' and mesh.'.join(free)} are -1: only one axis can take the devices that are left")

    def sizes(self, n_devices: int) -> tuple[int, ...]:
        """Devices along data, fsdp, tensor, sequence. Raises MeshError if they are not n_devices."""
        sizes = [getattr(self, name) for name in AXES]
        given = math.prod(size for size in sizes if size != -1)
        shown = " x ".join(f"{name} {size}" for name, size in zip(AXES, sizes, strict=True))
        if -1 in sizes and n_devices % given == 0:
            sizes[sizes.index(-1)] = n_devices // given
        elif given != n_devices:
            verb = "do not divide" if -1 in sizes else f"need {given} devices: there are"
            raise MeshError(f"the mesh's axes {shown} {verb} {n_devices} devices: set --config.mesh.AXIS=N")
        return tuple(sizes)


def make_mesh(config: MeshConfig | None = None) -> Mesh:
    """All devices of all processes. Raises MeshError if the config does not fit their number."""
    sizes = (config or MeshConfig()).sizes(jax.device_count())
    try:
        devices = mesh_utils.create_device_mesh(sizes, allow_split_physical_axes=True)
    except (NotImplementedError, ValueError) as error:  # a TPU's torus that cannot be cut so
        shown = " x ".join(f"{name} {size}" for name, size in zip(AXES, sizes, strict=True))
        raise MeshError(f"a mesh of {shown} does not fit how the devices are connected: {error}") from error
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


# ---- placement -----------------------------------------------------------------------------------


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def split_batch(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """The sharding of an array whose `axis` is the batch."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, BATCH))


def n_batch_parts(mesh: Mesh) -> int:
    """Over how many devices sequences are divided."""
    return math.prod(mesh.shape[name] for name in BATCH)


def shardings(mesh: Mesh, abstract: Any) -> Any:
    """Where each array of a tree of parameters or optimizer state lies, by PARAMETER_RULES. Raises MeshError."""

    def sharding(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = next((spec for end, spec in PARAMETER_RULES if name.endswith(end) and len(spec) == x.ndim), ())
        for axis, names in enumerate(spec):
            if names is None:
                continue
            names = (names,) if isinstance(names, str) else names
            parts = math.prod(mesh.shape[n] for n in names)
            if x.shape[axis] % parts:
                axes = " x ".join(f"mesh.{n} {mesh.shape[n]}" for n in names)
                raise MeshError(f"axis {axis} of {name} {x.shape} does not divide into {parts} parts ({axes})")
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(sharding, abstract)


def with_shardings(abstract: Any, where: Any) -> Any:
    """The same shapes and dtypes, each with its sharding; `where` may be one for all."""
    if isinstance(where, Sharding):
        where = jax.tree.map(lambda _: where, abstract)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, where)


def process_rows(mesh: Mesh, n_rows: int) -> np.ndarray:
    """Rows of a batch of n_rows that devices of this process hold: sorted, each once."""
    held = split_batch(mesh).addressable_devices_indices_map((n_rows,))
    return np.unique(np.concatenate([np.arange(n_rows)[index] for index in held.values()]))


def place_batch(mesh: Mesh, batch: dict[str, np.ndarray], axis: int = 0) -> dict[str, jax.Array]:
    """This process's `process_rows` of a batch, placed on the mesh as part of the whole; `axis` is the batch.

    Axes of the mesh other than the batch's hold copies.
    """
    sharding = split_batch(mesh, axis)

    def place(x):
        # As many parts here as there are different ones on this process's devices.
        spread = NamedSharding(mesh, PartitionSpec(BATCH)).addressable_devices_indices_map((n_batch_parts(mesh),))
        n_rows = x.shape[axis] // len({index[0].start for index in spread.values()}) * n_batch_parts(mesh)
        rows = process_rows(mesh, n_rows)

        def part(index):
            wanted = np.arange(n_rows)[index[axis]]
            return np.take(x, np.searchsorted(rows, wanted), axis=axis)

        return jax.make_array_from_callback((*x.shape[:axis], n_rows, *x.shape[axis + 1 :]), sharding, part)

    return {name: place(np.asarray(x)) for name, x in batch.items()}


def constrain(mesh: Mesh | None, x: jax.Array, *axes: Any) -> jax.Array:
    """x with its axes split over those axes of the mesh; without a mesh, or on one device, x itself."""
    if mesh is None or mesh.size == 1:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


# ---- computation on each device by itself --------------------------------------------------------


def on_each_device(mesh: Mesh | None, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`function` of the parts that each device holds, made of the whole arrays by the specs (`jax.shard_map`).

    Outputs must be split over every axis of the mesh that has more than one device, or be the same on all of it.
    """
    # check_vma would ask every loop inside for casts of what it begins with.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def scan_before(combine: Callable[[Any, Any], Any], x: Any, first: Any, axis: str) -> Any:
    """What the associative `combine(earlier, later)` makes of the x of all devices before this one along a mesh axis.

    `first` for the device that has none before it. For `on_each_device`: with n devices, at most 1 + ceil(log2(n - 1))
    messages of the size of x from each. Differentiable.
    """
    n, i = lax.axis_size(axis), lax.axis_index(axis)

    def earlier(x, by):  # zeros come where there is none
        return jax.tree.map(lambda x: lax.ppermute(x, axis, [(j, j + by) for j in range(n - by)]), x)

    def pick(condition, x, y):
        return jax.tree.map(lambda x, y: jnp.where(condition, x, y), x, y)

    total = pick(i >= 1, earlier(x, 1), first)
    by = 1
    while by < n - 1:
        # `first` would be combined once more where it stands for what is before the first device.
        total = pick(i >= 1 + by, combine(earlier(total, by), total), total)
        by *= 2
    return total


# ---- the machine ---------------------------------------------------------------------------------


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


def join_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    from_cluster: bool | None = None,
) -> None:
    """Make this process one of several that compute together; to be called before anything asks for devices.

    Either from the three numbers, or, `from_cluster`, as the cluster's environment says (SLURM, Open MPI 4, TPU pods;
    by `jax.distributed.initialize`). None: if srun or mpirun has started several of us. Raises MeshError.
    """
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise MeshError(f"{' and '.join(missing)} missing: give all of {', '.join(given)}, or none of them")
    remedy = "give --coordinator=HOST:PORT, --num_processes and --process_id"
    if missing:
        started = {name: int(os.environ.get(name) or 1) for name in (*_TASKS, "PMI_SIZE")}
        if from_cluster is None and max(started[name] for name in _TASKS) == 1 < started["PMI_SIZE"]:
            raise MeshError(f"an MPI that JAX does not know has started {started['PMI_SIZE']} processes: {remedy}")
        if from_cluster or (from_cluster is None and max(started.values()) > 1):
            try:
                jax.distributed.initialize()
            except (ValueError, RuntimeError) as error:
                raise MeshError(
                    f"the other processes of this run cannot be found or reached: {error}. Start it by srun or Open "
                    f"MPI 4, or {remedy}"
                ) from error
            _use_all_local_devices()
        return
    if from_cluster:
        raise MeshError("--distributed looks for the other processes by itself: give no --coordinator with it")
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise MeshError(f"--process_id={process_id} must be in [0, --num_processes={num_processes})")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise MeshError(f"--coordinator={coordinator}: expected HOST:PORT of process 0")
    if num_processes == 1:
        return
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id)
    except (ValueError, RuntimeError) as error:
        raise MeshError(
            f"process {process_id} of {num_processes} cannot join at {coordinator}: {error}. Are all of them "
            "started, and is the address that of process 0, with a free port?"
        ) from error
    _use_all_local_devices()


_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")  # how many processes srun or mpirun has started


def _use_all_local_devices() -> None:
    """Where a cluster runs one process a node. JAX gives each task one GPU, whatever their number on the node."""
    slurm, mpi = os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""), os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if re.fullmatch(r"1(\(x\d+\))?", slurm) or mpi == "1":
        jax.config.update("jax_cuda_visible_devices", "all")
        jax.config.update("jax_rocm_visible_devices", "all")
