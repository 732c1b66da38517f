"""The processes of a run: how they join and agree."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from functools import partial

import jax
import numpy as np
from jax.experimental import multihost_utils

from heinsen.errors import HeinsenError, exit_on_abort

PEER_TIMEOUT = 100  # seconds
_MAX_PEER_TIMEOUT = 24 * 3600
_PATIENCE = 10.0  # seconds until a process says that it waits for others
_N_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")  # the number of processes that srun or mpirun started
_GIVE_ADDRESS = "give --coordinator=HOST:PORT, --num_processes and --process_id"


class ProcessError(HeinsenError, ValueError):
    """The processes of a run are described wrongly, or do not find each other."""


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

    Raises ProcessError if the description is incomplete or wrong, or if the other processes cannot be reached.
    """
    if not 1 <= peer_timeout <= _MAX_PEER_TIMEOUT:
        raise ProcessError(f"--peer_timeout={peer_timeout}: expected seconds, from 1 to {_MAX_PEER_TIMEOUT}")
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ProcessError(f"{' and '.join(missing)} missing: give all of {', '.join(given)}, or none of them")
    if coordinator is None or num_processes is None or process_id is None:
        if not (_is_started_by_cluster() if from_cluster is None else from_cluster):
            return
        others, failure = "the other processes", "cannot find or reach the other processes of this run"
        remedy = f"Start it with srun or Open MPI 4, or {_GIVE_ADDRESS}"
    elif from_cluster:
        raise ProcessError("--distributed finds the other processes by itself: give no --coordinator with it")
    else:
        _check_address(coordinator, num_processes, process_id)
        if num_processes == 1:
            return
        others = f"process 0 at {coordinator}" if process_id else "the other processes"
        failure = f"process {process_id} of {num_processes} cannot join at {coordinator}"
        remedy = "Are all processes started, and is this the address of process 0, with a free port?"
    try:
        with _print_if_slow(f"waiting for {others} to join ..."):
            jax.distributed.initialize(coordinator, num_processes, process_id, heartbeat_timeout_seconds=peer_timeout)
    except (ValueError, RuntimeError) as error:
        raise ProcessError(f"{failure}: {error}. {remedy}") from error
    exit_on_abort(
        "another process of the run failed or was lost, or JAX failed in this one: the lines above say which. Restart "
        "all of them to resume the run"
    )
    # By default JAX gives a cluster's process one GPU, even where it is the only one on its node.
    slurm, mpi = os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""), os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if re.fullmatch(r"1(\(x\d+\))?", slurm) or mpi == "1":
        jax.config.update("jax_cuda_visible_devices", "all")
        jax.config.update("jax_rocm_visible_devices", "all")


def _is_started_by_cluster() -> bool:
    """Whether a launcher that JAX knows has started several processes. Raises ProcessError for one it does not know."""
    started = {name: int(os.environ.get(name) or 1) for name in (*_N_TASKS, "PMI_SIZE")}
    if max(started[name] for name in _N_TASKS) == 1 < started["PMI_SIZE"]:
        raise ProcessError(
            f"an MPI that JAX does not know has started {started['PMI_SIZE']} processes: {_GIVE_ADDRESS}"
        )
    return max(started.values()) > 1


def _check_address(coordinator: str, num_processes: int, process_id: int) -> None:
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise ProcessError(f"--process_id={process_id} must be in [0, --num_processes={num_processes})")
    host, _, port = coordinator.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ProcessError(f"--coordinator={coordinator}: expected HOST:PORT of process 0, with a port from 1 to 65535")


@contextlib.contextmanager
def _print_if_slow(text: str) -> Iterator[None]:
    """Print a text if the block takes long: JAX waits for other processes for minutes, and in silence."""
    timer = threading.Timer(_PATIENCE, partial(print, text, file=sys.stderr, flush=True))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def first_reason(reason: str | None) -> str | None:
    """Return the reason to stop of the first process that has one, in every process; each must call this."""
    if jax.process_count() == 1:
        return reason
    text = np.zeros(1024, np.uint8)
    encoded = np.frombuffer((reason or "").encode()[: len(text)], np.uint8)
    text[: len(encoded)] = encoded
    texts = [bytes(row[row > 0]).decode(errors="replace") for row in multihost_utils.process_allgather(text)]
    return next(filter(None, texts), None)
