"""Launchers, which execute the runs of a sweep: on this machine, or as SLURM jobs through submitit.

A launcher is one class and one entry of LAUNCHERS.
"""

import abc
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import submitit

from heinsen.files import LockedError, write_atomically
from heinsen.quantities import count
from heinsen.sweep.folder import JOB_FILE, SweepFolder
from heinsen.sweep.job import SlurmTask, record_end, slurm_holds, slurm_job, start_run
from heinsen.sweep.runs import SweepRun
from heinsen.sweep.space import SweepError

T = TypeVar("T")
Command = Callable[[SweepRun, Path], list[str]]  # (run, its folder) -> what to execute

_UNLIMITED = 10_000


@dataclass(frozen=True)
class LaunchOptions:
    """How to execute the runs. The fields after `parallel` are for SLURM: the resources of each job."""

    parallel: int | None = None  # runs at a time; None: the launcher's default
    partition: str | None = None
    minutes: int = 24 * 60
    gpus_per_run: int = 0
    cpus_per_run: int = 1


class Launcher(abc.ABC):
    """Executes runs. Raises SweepError where it cannot."""

    runs_here: ClassVar[bool]  # whether the runs see this machine's files
    start_message: ClassVar[str]  # about a run that has been given to `start`
    stop_message: ClassVar[str]  # before `stop`

    @abc.abstractmethod
    def __init__(self, folder: SweepFolder, command: Command, options: LaunchOptions): ...

    @abc.abstractmethod
    def free(self) -> int:
        """Return how many runs may be started now."""

    @abc.abstractmethod
    def start(self, runs: Sequence[SweepRun]) -> None:
        """Start the runs, or submit them."""

    @abc.abstractmethod
    def active(self) -> set[str]:
        """Return the names of the runs that have been started and have not ended."""

    @abc.abstractmethod
    def cancel(self, name: str) -> None:
        """Ask an active run to save and exit."""

    @abc.abstractmethod
    def stop(self) -> str:
        """Let go of the runs because the sweep is interrupted; return a message about what becomes of them."""


class LocalLauncher(Launcher):
    """Executes runs on this machine, and divides its cores and GPUs among them.

    By default there is one run at a time for each GPU, or one if there are no GPUs.
    """

    runs_here = True
    start_message = "started"
    stop_message = "stopping: active runs save a checkpoint first ..."

    def __init__(self, folder: SweepFolder, command: Command, options: LaunchOptions):
        gpus = visible_gpus()
        parallel = options.parallel or max(len(gpus), 1)
        if gpus and parallel > len(gpus):
            raise SweepError(
                f"--parallel={parallel} is more than there are GPUs ({', '.join(gpus)}): runs would share their "
                f"memory. Give --parallel={len(gpus)} at most"
            )
        self._folder, self._command = folder, command
        cores: list[list[int]] = divide(usable_cores(), parallel) if parallel > 1 else [[]]
        self._slots = list(zip(cores, divide(gpus, parallel), strict=True))
        self._active: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}  # {run: (slot, process)}

    def free(self) -> int:
        return len(self._slots) - len(self.active())

    def start(self, runs: Sequence[SweepRun]) -> None:
        for run in runs:
            taken = {slot for slot, _ in self._active.values()}
            slot = next(i for i in range(len(self._slots)) if i not in taken)
            cores, gpus = self._slots[slot]
            where = self._folder.folder(run).absolute()
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
            try:
                process = start_run(self._command(run, where), where, cores, environment)
            except LockedError as error:
                raise SweepError(f"{where}: an earlier process of the run does not end ({error}): stop it") from error
            self._active[run.name] = slot, process

    def active(self) -> set[str]:
        for name, (_, process) in list(self._active.items()):
            if (code := process.poll()) is not None:
                record_end(self._folder.path / name, code)
                del self._active[name]
        return set(self._active)

    def cancel(self, name: str) -> None:
        if name in self._active:  # else it has just ended
            self._active[name][1].terminate()

    def stop(self) -> str:
        for name in self.active():
            self.cancel(name)
        while self.active():
            time.sleep(0.1)
        return "the runs have stopped; rerun the same command to resume"


class SlurmLauncher(Launcher):
    """Submits runs to SLURM as job arrays, of which `parallel` jobs run at a time.

    By default SLURM decides how many. The points of an adaptive search are submitted `parallel` (by default one) at a
    time, each after the results that it depends on.
    """

    runs_here = False
    start_message = "submitted"
    stop_message = "no longer watching the runs"

    def __init__(self, folder: SweepFolder, command: Command, options: LaunchOptions):
        if shutil.which("sbatch") is None:
            raise SweepError("--launcher=slurm: SLURM is not installed here (no sbatch): use --launcher=local")
        self._folder, self._command, self._parallel = folder, command, options.parallel
        # submitit requeues a job whenever it reaches its time limit.
        self._executor = submitit.AutoExecutor(folder.jobs_folder, cluster="slurm", slurm_max_num_timeout=_UNLIMITED)
        optional: dict[str, Any] = {"slurm_partition": options.partition, "gpus_per_node": options.gpus_per_run}
        self._executor.update_parameters(
            name=f"sweep-{folder.path.absolute().name}",
            timeout_min=options.minutes,
            tasks_per_node=1,
            cpus_per_task=options.cpus_per_run,
            stderr_to_stdout=True,
            slurm_array_parallelism=options.parallel or _UNLIMITED,
            slurm_additional_parameters={"requeue": True},  # also after a node has failed
            **{name: value for name, value in optional.items() if value},
        )
        self._jobs = {run.name: job for run in folder.runs if (job := folder.job_id(run))}

    def free(self) -> int:
        if self._folder.definition.strategy.adaptive:
            return (self._parallel or 1) - len(self.active())
        return len(self._folder.runs)  # all at once: they form one array

    def start(self, runs: Sequence[SweepRun]) -> None:
        folders = [self._folder.folder(run).absolute() for run in runs]
        tasks = [SlurmTask(self._command(run, where), where) for run, where in zip(runs, folders, strict=True)]
        try:
            jobs = self._executor.submit_array(tasks)
        except submitit.core.utils.FailedJobError as error:  # with what sbatch said
            raise SweepError(f"SLURM rejects the runs: {str(error).strip()}") from error
        for run, where, job in zip(runs, folders, jobs, strict=True):
            where.mkdir(parents=True, exist_ok=True)
            write_atomically(where / JOB_FILE, job.job_id + "\n")
            self._jobs[run.name] = job.job_id

    def active(self) -> set[str]:
        return {name for name, job in self._jobs.items() if slurm_holds(self._folder.jobs_folder, job)}

    def cancel(self, name: str) -> None:
        slurm_job(self._folder.jobs_folder, self._jobs[name]).cancel(check=False)

    def stop(self) -> str:
        return f"SLURM still holds {count(len(self.active()), 'run')}; rerun the same command to watch them again"


LAUNCHERS: dict[str, type[Launcher]] = {"local": LocalLauncher, "slurm": SlurmLauncher}


def find_launcher(name: str) -> type[Launcher]:
    """Return the launcher that --launcher names. Raises SweepError."""
    if name not in LAUNCHERS:
        raise SweepError(f"--launcher={name}: choose {' or '.join(LAUNCHERS)}")
    return LAUNCHERS[name]


# ---- this machine --------------------------------------------------------------------------------


def usable_cores() -> list[int]:
    """Return the numbers of the CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def visible_gpus() -> list[str]:
    """Return the names of this machine's GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))]


def divide(items: Sequence[T], parts: int) -> list[list[T]]:
    """Return consecutive parts whose sizes differ by at most one. Fewer items than parts are reused in turn."""
    if len(items) < parts:
        return [[items[i % len(items)]] for i in range(parts)] if items else [[] for _ in range(parts)]
    ends = [len(items) * i // parts for i in range(parts + 1)]
    return [list(items[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
