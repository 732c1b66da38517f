"""Launchers, which execute the runs of a sweep through submitit: on this machine, or as SLURM jobs.

A launcher is one class and one entry of LAUNCHERS.
"""

import abc
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import heinsen.files
import heinsen.sweep.job
from heinsen.sweep.folder import JOBS_FOLDER, LockToken, SweepFolder
from heinsen.sweep.job import TrainingJob
from heinsen.sweep.machine import divide, usable_cores, visible_gpus
from heinsen.sweep.runs import SweepRun
from heinsen.sweep.slurm import slurm_queue
from heinsen.sweep.space import SweepError

Command = Callable[[SweepRun, Path], list[str]]  # (run, its folder) -> what to execute

_TEN_YEARS = 10 * 365 * 24 * 60  # minutes: submitit requires a limit
_UNLIMITED = 10_000
_QUEUE_SECONDS = 2.0  # between two looks at the queue, to spare SLURM's controller


@dataclass(frozen=True)
class LaunchOptions:
    """How to execute the runs. The fields after `parallel` are for SLURM: the resources of each job."""

    parallel: int | None = None  # runs at a time; None: the launcher's default
    partition: str | None = None
    minutes: int = 24 * 60
    gpus_per_run: int = 0
    cpus_per_run: int = 1


class Launcher(abc.ABC):
    """Executes runs. `lock` is what the jobs of a sweep watch, so as not to outlive it."""

    runs_here: ClassVar[bool]  # whether the runs see this machine's files
    start_message: ClassVar[str]  # about a run that has been given to `start`
    stop_message: ClassVar[str]  # before `stop`

    @abc.abstractmethod
    def __init__(self, folder: SweepFolder, command: Command, lock: LockToken, options: LaunchOptions): ...

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
    def stop(self) -> str:
        """Let go of the runs because the sweep is interrupted; return a message about what becomes of them."""


class LocalLauncher(Launcher):
    """Executes runs on this machine, and divides its cores and GPUs among them.

    By default there is one run at a time for each GPU, or one if there are no GPUs.
    """

    runs_here = True
    start_message = "started"
    stop_message = "stopping: active runs save a checkpoint first ..."

    def __init__(self, folder: SweepFolder, command: Command, lock: LockToken, options: LaunchOptions):
        gpus = visible_gpus()
        parallel = options.parallel or max(len(gpus), 1)
        if gpus and parallel > len(gpus):
            raise SweepError(
                f"--parallel={parallel} is more than there are GPUs ({', '.join(gpus)}): runs would share their "
                f"memory. Give --parallel={len(gpus)} at most"
            )
        self._folder, self._command, self._lock = folder, command, lock
        cores = divide(usable_cores(), parallel) if parallel > 1 else [None]
        self._slots = list(zip(cores, divide(gpus, parallel), strict=True))
        self._jobs: dict[str, tuple[int, Any]] = {}  # {active run: (its slot, submitit's job)}
        self._executor = _make_executor(folder, "local", timeout_min=_TEN_YEARS)

    def free(self) -> int:
        return len(self._slots) - len(self.active())

    def start(self, runs: Sequence[SweepRun]) -> None:
        for run in runs:
            taken = {slot for slot, _ in self._jobs.values()}
            slot = next(i for i in range(len(self._slots)) if i not in taken)
            cores, gpus = self._slots[slot]
            # submitit hides all GPUs from jobs that request none.
            visible = ",".join(gpus) if gpus else os.environ.get("CUDA_VISIBLE_DEVICES")
            where = self._folder.folder(run).absolute()
            environment = {"CUDA_VISIBLE_DEVICES": visible}
            job = TrainingJob(self._command(run, where), os.getcwd(), str(where), environment, cores, self._lock)
            with _ignoring_ctrl_c():
                self._jobs[run.name] = slot, self._executor.submit(job)

    def active(self) -> set[str]:
        self._jobs = {name: (slot, job) for name, (slot, job) in self._jobs.items() if not job.done()}
        return set(self._jobs)

    def stop(self) -> str:
        Path(self._lock[0]).write_text("")  # without the token, the jobs stop their runs, which save
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

    def __init__(self, folder: SweepFolder, command: Command, lock: LockToken, options: LaunchOptions):
        if shutil.which("sbatch") is None:
            raise SweepError("--launcher=slurm: SLURM is not installed here (no sbatch): use --launcher=local")
        self._folder, self._command, self._parallel = folder, command, options.parallel
        self._executor = _make_executor(
            folder,
            "slurm",
            slurm_max_num_timeout=_UNLIMITED,  # submitit requeues a job whenever it reaches its time limit
            slurm_array_parallelism=options.parallel or _UNLIMITED,
            slurm_additional_parameters={"requeue": True},  # also after a node has failed
            slurm_job_name=f"sweep-{folder.path.absolute().name}",
            cpus_per_task=options.cpus_per_run,
            nodes=1,
            tasks_per_node=1,
            timeout_min=options.minutes,
            **({} if options.partition is None else {"slurm_partition": options.partition}),
            **({"gpus_per_node": options.gpus_per_run} if options.gpus_per_run else {}),
        )
        self._jobs = {run.name: job for run in folder.runs if (job := folder.job_id(run))}
        self._active: set[str] = set()
        self._look()

    def free(self) -> int:
        if self._folder.definition.strategy.adaptive:
            return (self._parallel or 1) - len(self.active())
        return len(self._folder.runs)  # all at once: they form one array

    def start(self, runs: Sequence[SweepRun]) -> None:
        tasks = []
        for run in runs:
            where = self._folder.folder(run).absolute()
            where.mkdir(parents=True, exist_ok=True)
            tasks.append(TrainingJob(self._command(run, where), os.getcwd(), str(where), {}, None, None))
        try:
            submitted = self._executor.submit_array(tasks)
        except Exception as error:  # submitit passes on what sbatch said
            raise SweepError(f"SLURM rejects the runs: {str(error).strip()}") from error
        for run, job in zip(runs, submitted, strict=True):
            self._folder.write_job_id(run, job.job_id)
            self._jobs[run.name] = job.job_id
            self._active.add(run.name)
        self._looked = time.monotonic()

    def active(self) -> set[str]:
        if time.monotonic() - self._looked > _QUEUE_SECONDS:
            self._look()
        return self._active

    def stop(self) -> str:
        return f"SLURM still holds {len(self.active())} runs; rerun the same command to watch them again"

    def _look(self) -> None:
        """Update the set of active runs, unless SLURM's controller does not answer."""
        queue = slurm_queue()
        if queue is not None:
            self._active = {name for name, job in self._jobs.items() if job in queue}
        self._looked = time.monotonic()


LAUNCHERS: dict[str, type[Launcher]] = {"local": LocalLauncher, "slurm": SlurmLauncher}


def find_launcher(name: str) -> type[Launcher]:
    """Return the launcher that --launcher names. Raises SweepError."""
    if name not in LAUNCHERS:
        raise SweepError(f"--launcher={name}: choose {' or '.join(LAUNCHERS)}")
    return LAUNCHERS[name]


def _make_executor(folder: SweepFolder, cluster: str, **options: Any) -> Any:
    """Return submitit's executor. Raises SweepError."""
    try:
        import cloudpickle
        import submitit
    except ImportError as error:
        raise SweepError("sweeps need submitit: pip install -r requirements.txt") from error
    # By value: a job then needs nothing of this package, and starts without importing JAX.
    for module in (heinsen.sweep.job, heinsen.files):
        cloudpickle.register_pickle_by_value(module)
    path = folder.path.absolute() / JOBS_FOLDER
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SweepError(f"{path} cannot be created: {error}") from error
    limit = {name: options.pop(name) for name in ("slurm_max_num_timeout",) if name in options}
    executor = submitit.AutoExecutor(folder=path, cluster=cluster, **limit)
    executor.update_parameters(stderr_to_stdout=True, **options)
    return executor


@contextlib.contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    """Let the processes started in this block ignore a terminal's Ctrl-C, which is for this process."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
