"""Who executes the runs: submitit, on this machine or through SLURM; and the loop that keeps a sweep going."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from heinsen.sweep import job as job_module
from heinsen.sweep.folder import (
    JOBS_FOLDER,
    RunView,
    Screen,
    SweepFolder,
    SweepRun,
    file_text,
    slurm_queue,
    summary,
    table,
)
from heinsen.sweep.job import TrainingJob
from heinsen.sweep.search import Search
from heinsen.sweep.space import SweepError

LAUNCHERS = ("local", "slurm")
Command = Callable[[SweepRun, Path], list[str]]  # of a run and its folder: what to execute

_YEARS = 10 * 365 * 24 * 60  # minutes: submitit wants a limit
_LOOK_SECONDS = 0.2
_REDRAW_SECONDS = 1.0


class SweepInterrupted(Exception):
    """Ctrl-C or SIGTERM: the runs have stopped, or go on in SLURM's hands; the message tells which."""


class Launcher(Protocol):
    starting: str  # what is said of a run given to `start`
    stopping: str  # what is said before `end`

    def free(self) -> int:
        """How many runs may be started now."""

    def start(self, runs: Sequence[SweepRun]) -> None: ...

    def active(self) -> set[str]:
        """Names of the runs that have been started and have not ended."""

    def end(self) -> str:
        """The sweep is asked to stop: what becomes of the runs that are under way."""


def visible_gpus() -> list[str]:
    """Names of this machine's GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))]


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def divide(items: Sequence, parts: int) -> list[list]:
    """Consecutive parts that differ by one at most; with fewer items than parts each part has one, in turn."""
    if len(items) < parts:
        return [[items[i % len(items)]] for i in range(parts)] if items else [[] for _ in range(parts)]
    ends = [len(items) * i // parts for i in range(parts + 1)]
    return [list(items[a:b]) for a, b in zip(ends, ends[1:], strict=False)]


class LocalLauncher:
    """`parallel` runs at a time, cores and GPUs divided among them. None: one a GPU, or one."""

    starting = "started"
    stopping = "stopping: the runs that are under way save a checkpoint first ..."

    def __init__(self, folder: SweepFolder, command: Command, sweep: tuple[str, str], parallel: int | None = None):
        gpus = visible_gpus()
        parallel = parallel or max(len(gpus), 1)
        if gpus and parallel > len(gpus):
            raise SweepError(
                f"--parallel={parallel} is more than there are GPUs ({', '.join(gpus)}): runs would share their "
                f"memory. Give --parallel={len(gpus)} at most"
            )
        self._folder, self._command, self._sweep = folder, command, sweep
        cores = divide(usable_cores(), parallel) if parallel > 1 else [None]
        self._slots = list(zip(cores, divide(gpus, parallel), strict=True))
        self._jobs: dict[str, tuple[int, object]] = {}  # of each run under way: its slot and submitit's job
        self._executor = _executor(folder, "local", timeout_min=_YEARS)

    def free(self) -> int:
        return len(self._slots) - len(self.active())

    def start(self, runs: Sequence[SweepRun]) -> None:
        for run in runs:
            taken = {slot for slot, _ in self._jobs.values()}
            slot = next(i for i in range(len(self._slots)) if i not in taken)
            cores, gpus = self._slots[slot]
            # submitit hides all GPUs from jobs that ask it for none.
            visible = ",".join(gpus) if gpus else os.environ.get("CUDA_VISIBLE_DEVICES")
            where = self._folder.folder(run).absolute()
            task = TrainingJob(
                self._command(run, where),
                os.getcwd(),
                str(where),
                {"CUDA_VISIBLE_DEVICES": visible},
                cores,
                self._sweep,
            )
            with _ignoring_ctrl_c():
                self._jobs[run.name] = slot, self._executor.submit(task)

    def active(self) -> set[str]:
        self._jobs = {name: (slot, job) for name, (slot, job) in self._jobs.items() if not job.done()}
        return set(self._jobs)

    def end(self) -> str:
        Path(self._sweep[0]).write_text("")  # the token is gone: the jobs stop their runs, which save
        while self.active():
            time.sleep(0.1)
        return "the runs have stopped; the same command goes on"


class SlurmLauncher:
    """Hands all runs to SLURM at once, as an array of which `parallel` run at a time; None: as many as SLURM likes."""

    starting = "submitted"
    stopping = "stopping to look"

    def __init__(
        self,
        folder: SweepFolder,
        command: Command,
        parallel: int | None,
        partition: str | None,
        minutes: int,
        gpus_per_run: int,
        cpus_per_run: int,
    ):
        if shutil.which("sbatch") is None:
            raise SweepError("--launcher=slurm: SLURM is not installed here (no sbatch): use --launcher=local")
        self._folder, self._command, self._parallel = folder, command, parallel
        options = dict(
            slurm_array_parallelism=parallel or 10_000,
            slurm_additional_parameters={"requeue": True},  # also when a node fails
            slurm_job_name=f"sweep-{folder.path.absolute().name}",
            cpus_per_task=cpus_per_run,
            nodes=1,
            tasks_per_node=1,
            timeout_min=minutes,
        )
        if partition is not None:
            options["slurm_partition"] = partition
        if gpus_per_run:
            options["gpus_per_node"] = gpus_per_run
        # However often the time is over, submitit puts the job into the queue again.
        self._executor = _executor(folder, "slurm", slurm_max_num_timeout=10_000, **options)
        self._jobs = {run.name: job for run in folder.runs if (job := file_text(folder.folder(run) / "job"))}
        self._active: set[str] = set()
        self._active, self._looked = self._queued(), time.monotonic()

    def free(self) -> int:
        """All at once, to be one array; Optuna's trials `parallel` (1) at a time."""
        if self._folder.definition.search == "optuna":
            return (self._parallel or 1) - len(self.active())
        return len(self._folder.runs)

    def start(self, runs: Sequence[SweepRun]) -> None:
        tasks = []
        for run in runs:
            where = self._folder.folder(run).absolute()
            where.mkdir(parents=True, exist_ok=True)
            tasks.append(TrainingJob(self._command(run, where), os.getcwd(), str(where), {}, None, None))
        try:
            submitted = self._executor.submit_array(tasks)
        except Exception as error:  # submitit passes on what sbatch said
            raise SweepError(f"SLURM does not take the runs: {str(error).strip()}") from error
        for run, each in zip(runs, submitted, strict=True):
            (self._folder.folder(run) / "job").write_text(each.job_id + "\n")
            self._jobs[run.name] = each.job_id
            self._active.add(run.name)
        self._looked = time.monotonic()

    def active(self) -> set[str]:
        if time.monotonic() - self._looked > 2.0:  # for the sake of SLURM's controller
            self._active, self._looked = self._queued(), time.monotonic()
        return self._active

    def end(self) -> str:
        return f"{len(self.active())} runs are still in SLURM's hands; the same command looks after them again"

    def _queued(self) -> set[str]:
        queue = slurm_queue()
        if queue is None:  # its controller is busy or away: nothing has changed as far as we know
            return self._active
        return {name for name, job in self._jobs.items() if job in queue}


def _executor(folder: SweepFolder, cluster: str, **options):
    try:
        import cloudpickle
        import submitit
    except ImportError as error:
        raise SweepError("sweeps need submitit: pip install -r requirements.txt") from error
    # By value: a job then needs nothing of this repository, and starts without importing JAX.
    cloudpickle.register_pickle_by_value(job_module)
    path = folder.path.absolute() / JOBS_FOLDER
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SweepError(f"{path} cannot be made: {error}") from error
    limit = {name: options.pop(name) for name in ("slurm_max_num_timeout",) if name in options}
    executor = submitit.AutoExecutor(folder=path, cluster=cluster, **limit)
    executor.update_parameters(stderr_to_stdout=True, **options)
    return executor


@contextlib.contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    """Processes started meanwhile leave a terminal's Ctrl-C to this one."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# ---- the loop ------------------------------------------------------------------------------------


def drive(
    folder: SweepFolder, search: Search, launcher: Launcher, screen: Screen, retry: bool = False
) -> list[RunView]:
    """Start what `search` proposes as `launcher` has room, tell what happens, until all have ended.

    A run is started once, and not at all if it has finished; one that has crashed before only with `retry`. Raises
    SweepInterrupted on Ctrl-C and SIGTERM.
    """
    before = {view.name: view for view in folder.views()}
    skipped = [view for view in before.values() if view.state == "finished"]
    if skipped:
        screen.say(f"{len(skipped)} of {len(folder.runs)} runs have finished before")
    crashed = {view.name for view in before.values() if view.state == "crashed" and not retry}
    if crashed:
        screen.say(f"{len(crashed)} have crashed before and stay so; --retry starts them again: {', '.join(crashed)}")
    watched, drawn = set(launcher.active()), 0.0
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while True:
            active = launcher.active()
            for run in [run for run in folder.runs if run.name in watched - active]:
                watched.discard(run.name)
                view = next(view for view in folder.views() if view.name == run.name)
                _tell(folder, view, screen)
                search.ended(view)
                views = folder.views()
                folder.write_csv(views)
                screen.say(summary(views))
            room = launcher.free()
            fresh = search.propose(room, watched | crashed) if room > 0 else []
            for view in map(folder.view, fresh):
                if view.state == "refused":
                    screen.say(f"{view.name}: refused, {view.run.refused}")
            started = [run for run in fresh if run.refused is None]
            if started:
                launcher.start(started)
                watched |= {run.name for run in started}
                for run in started:
                    again = run.name in before and before[run.name].step > 0
                    screen.say(f"{run.name}: {launcher.starting}{', goes on' if again else ''}")
            if not watched and not fresh and search.done():
                break
            if search.wants_to_watch:
                for view in folder.views():
                    if view.state == "running" and search.gives_up(view):
                        folder.prune(view.run)
            if screen.live and time.monotonic() - drawn > _REDRAW_SECONDS:
                screen.draw(table(folder.views(), screen.height()))
                drawn = time.monotonic()
            if not fresh:
                time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt as interruption:
        screen.say(launcher.stopping)
        said = launcher.end()
        folder.write_csv(folder.views())
        raise SweepInterrupted(said) from interruption
    finally:
        signal.signal(signal.SIGTERM, previous)
    views = folder.views()
    folder.write_csv(views)
    return views


def _tell(folder: SweepFolder, view: RunView, screen: Screen) -> None:
    """What became of a run that has ended."""
    took = "" if view.seconds is None else f" in {view.seconds:.0f} s"
    if view.state == "finished":
        what = "no validation" if view.validation_loss is None else f"validation loss {view.validation_loss:.4f}"
        screen.say(f"{view.name}: finished{took}, {what}")
    elif view.state == "pruned":
        screen.say(f"{view.name}: pruned at step {view.step:,}{took}")
    else:
        code = view.returncode
        how = "its job is gone" if code is None else f"exit status {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        screen.say(f"{view.name}: {view.state}{took} at step {view.step:,}, {how}; its log ends:")
        for line in folder.last_lines(view.run):
            screen.say(f"    {line}")
