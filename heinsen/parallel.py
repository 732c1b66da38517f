"""The device mesh, and how parameters, batches and states are sharded over it.

The mesh axes, and what each one splits:

    data      sequences of the batch; parameters are replicated
    fsdp      sequences, too; parameters and optimizer state are split, and gathered where they are used
    tensor    attention heads, with the matching columns and rows of the matrices around them
    sequence  tokens of every sequence; devices pass on states of constant size (`scan_before`)

Axes are of type Auto: XLA inserts the communication that the shardings imply. Computations that are independent across
devices run on each device separately (`on_each_device`).
"""

import contextlib
import ctypes
import dataclasses
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from heinsen.errors import HeinsenError, exit_on_abort

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
    ("/gate/kernel", (None, None, "tensor")),  # [L, D, H]
    ("/gate/bias", (None, "tensor")),
    ("/gate/scale", (None, "tensor")),
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
    """Mesh of the devices, None: of all of all processes. Raises MeshError if their number or topology does not fit."""
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
    return jax.tree.map(lambda x: _place_rows(mesh, np.asarray(x), axis), batch)


def _place_rows(mesh: Mesh, x: np.ndarray, axis: int) -> jax.Array:
    # This process holds as many parts of the batch as its devices hold different ones.
    held = NamedSharding(mesh, PartitionSpec(BATCH)).addressable_devices_indices_map((n_batch_parts(mesh),))
    n_parts_here = len({part.start for (part,) in filter(None, held.values())})
    n_rows = x.shape[axis] // n_parts_here * n_batch_parts(mesh)
    rows = process_rows(mesh, n_rows)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        wanted = np.arange(n_rows)[index[axis]]
        return np.take(x, np.searchsorted(rows, wanted), axis=axis)

    shape = (*x.shape[:axis], n_rows, *x.shape[axis + 1 :])
    return jax.make_array_from_callback(shape, split_batch(mesh, axis), part)


def constrain(mesh: Mesh | None, x: jax.Array, *axes: MeshAxes) -> jax.Array:
    """Constrain x to be split over mesh axes, one entry per axis of x; no-op without a mesh or on one device."""
    if mesh is None or mesh.size == 1:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


def first_reason(reason: str | None) -> str | None:
    """Return the reason to stop of the first process that has one, in every process; each must call this."""
    if jax.process_count() == 1:
        return reason
    text = np.zeros(1024, np.uint8)
    encoded = np.frombuffer((reason or "").encode()[: len(text)], np.uint8)
    text[: len(encoded)] = encoded
    texts = [bytes(row[row > 0]).decode(errors="replace") for row in multihost_utils.process_allgather(text)]
    return next(filter(None, texts), None)


# ---- computation on each device separately -------------------------------------------------------


def on_each_device(mesh: Mesh | None, function: Callable[..., T], in_specs: Any, out_specs: Any) -> Callable[..., T]:
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


# ---- the machine ---------------------------------------------------------------------------------


def keep_host_memory() -> None:
    """Make glibc keep freed memory for the next step instead of returning it to the kernel, on a CPU backend.

    XLA allocates a step's temporaries anew each time, and fresh pages cost a third of a small model's step. No-op on
    other backends and C libraries.
    """
    if jax.default_backend() != "cpu":
        return
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)
        libc.mallopt(m_top_pad, 64 << 20)


def return_freed_memory() -> None:
    """Return to the kernel what glibc has kept (`keep_host_memory`). No-op with other C libraries."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


PEER_TIMEOUT = 100  # seconds
_MAX_PEER_TIMEOUT = 24 * 3600
_PATIENCE = 10.0  # seconds until a process says that it waits for others
_REMEDY = "give --coordinator=HOST:PORT, --num_processes and --process_id"


def join_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    from_cluster: bool | None = None,
    peer_timeout: int = PEER_TIMEOUT,
) -> None:
    """Connect this process to the others of the same run. Call it before anything asks for devices.

    Args:
      coordinator: HOST:PORT of process 0.
      num_processes: how many processes there are.
      process_id: which one this is, from 0.
      from_cluster: read these three from the cluster's environment instead (SLURM, Open MPI 4, TPU pods; by
        `jax.distributed.initialize`). None: only if srun or mpirun has started several processes.
      peer_timeout: seconds without a sign of life after which a process counts as lost. The others then exit with
        status 1 and a message, at the latest: most losses show at once, as a broken connection.

    Raises MeshError if the description is incomplete or wrong, or if the other processes cannot be reached.
    """
    if not 1 <= peer_timeout <= _MAX_PEER_TIMEOUT:
        raise MeshError(f"--peer_timeout={peer_timeout}: expected seconds, from 1 to {_MAX_PEER_TIMEOUT}")
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise MeshError(f"{' and '.join(missing)} missing: give all of {', '.join(given)}, or none of them")
    if coordinator is None or num_processes is None or process_id is None:
        if _started_by_cluster() if from_cluster is None else from_cluster:
            _join_by_environment(peer_timeout)
    elif from_cluster:
        raise MeshError("--distributed finds the other processes by itself: give no --coordinator with it")
    else:
        _join_by_address(coordinator, num_processes, process_id, peer_timeout)


_N_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")  # the number of processes that srun or mpirun started


def _started_by_cluster() -> bool:
    """Whether a launcher that JAX knows has started several processes. Raises MeshError for one it does not know."""
    started = {name: int(os.environ.get(name) or 1) for name in (*_N_TASKS, "PMI_SIZE")}
    if max(started[name] for name in _N_TASKS) == 1 < started["PMI_SIZE"]:
        raise MeshError(f"an MPI that JAX does not know has started {started['PMI_SIZE']} processes: {_REMEDY}")
    return max(started.values()) > 1


def _join_by_environment(peer_timeout: int) -> None:
    try:
        with _saying_that_it_waits("the other processes"):
            jax.distributed.initialize(heartbeat_timeout_seconds=peer_timeout)
    except (ValueError, RuntimeError) as error:
        raise MeshError(
            f"cannot find or reach the other processes of this run: {error}. Start it with srun or Open MPI 4, or "
            f"{_REMEDY}"
        ) from error
    _prepare_joined()


def _join_by_address(coordinator: str, num_processes: int, process_id: int, peer_timeout: int) -> None:
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise MeshError(f"--process_id={process_id} must be in [0, --num_processes={num_processes})")
    host, _, port = coordinator.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise MeshError(f"--coordinator={coordinator}: expected HOST:PORT of process 0, with a port from 1 to 65535")
    if num_processes == 1:
        return
    try:
        with _saying_that_it_waits(f"process 0 at {coordinator}" if process_id else "the other processes"):
            jax.distributed.initialize(coordinator, num_processes, process_id, heartbeat_timeout_seconds=peer_timeout)
    except (ValueError, RuntimeError) as error:
        raise MeshError(
            f"process {process_id} of {num_processes} cannot join at {coordinator}: {error}. Are all processes "
            "started, and is this the address of process 0, with a free port?"
        ) from error
    _prepare_joined()


@contextlib.contextmanager
def _saying_that_it_waits(others: str) -> Iterator[None]:
    """Print a line if the block takes long: JAX waits for minutes, and in silence."""
    say = partial(print, f"waiting for {others} to join ...", file=sys.stderr, flush=True)
    timer = threading.Timer(_PATIENCE, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _prepare_joined() -> None:
    exit_on_abort(
        "another process of the run failed or was lost, or JAX failed in this one: the lines above say which. Restart "
        "all of them to resume the run"
    )
    _use_all_local_devices()


def _use_all_local_devices() -> None:
    """Use all GPUs of the node if it runs a single process; by default JAX gives a cluster's task only one."""
    slurm, mpi = os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""), os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if re.fullmatch(r"1(\(x\d+\))?", slurm) or mpi == "1":
        jax.config.update("jax_cuda_visible_devices", "all")
        jax.config.update("jax_rocm_visible_devices", "all")
