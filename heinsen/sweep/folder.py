"""The folder of a sweep: sweep.json (the definition and the runs), one folder for each run, sweep.csv."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from heinsen.config import complete, differences
from heinsen.files import LockedError, hold_lock, is_held, seal, unseal, write_atomically
from heinsen.sweep.definition import Definition, changes
from heinsen.sweep.job import LOCK_FILE, LOG_FILE, STATUS_FILE, STOP_FILE, read_status
from heinsen.sweep.runs import ENDED, STATES, Progress, RunView, SweepRun
from heinsen.sweep.slurm import queued_state, slurm_queue
from heinsen.sweep.space import SweepError, format_value
from heinsen.training.config import TrainConfig
from heinsen.training.metrics import METRICS_FILE, read_metrics

SWEEP_FILE, CSV_FILE, REPORT_FILE = "sweep.json", "sweep.csv", "report.html"
SWEEP_LOCK, JOBS_FOLDER = "sweep.lock", "jobs"
JOB_FILE = "job"  # in a run's folder: its SLURM job id
FORMAT = 1

LockToken = tuple[str, str]  # the lock file of a sweep, and what the command that holds it has written there

# The columns of sweep.csv after the settings.
_MEASURED = (
    *("state", "step", "total_steps", "tokens", "loss", "validation_loss", "bits_per_byte"),
    *("tokens_per_second", "seconds"),
)


class SweepFolder:
    """Reads and writes the folder of a sweep. Use `open_or_create` or `load` to obtain one."""

    def __init__(self, path: Path, definition: Definition, runs: Sequence[SweepRun]):
        self.path, self.definition, self.runs = path, definition, list(runs)
        self._progress: dict[
            str, tuple[tuple[int, int] | None, Progress]
        ] = {}  # {run: (age and size of its log, contents)}

    @classmethod
    def load(cls, path: Path) -> "SweepFolder":
        """Read an existing sweep. Raises SweepError."""
        file = path / SWEEP_FILE
        if not file.is_file():
            raise SweepError(f"{path} holds no sweep: it has no {SWEEP_FILE}; give the --workdir of scripts/sweep.py")
        try:
            mapping = unseal(json.loads(file.read_bytes()))
            if mapping["format"] == FORMAT:
                runs = [SweepRun(**run) for run in mapping["runs"]]
                return cls(path, Definition.from_json(mapping["definition"]), runs)
        except (SweepError, AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
            raise SweepError(f"{file} is damaged ({error!r}): restore it, or give another --workdir") from error
        raise SweepError(f"{file} has format {mapping['format']}, this program reads {FORMAT}")

    @classmethod
    def open_or_create(cls, path: Path, definition: Definition, runs: Sequence[SweepRun]) -> "SweepFolder":
        """Resume the sweep in the folder, or create it. Raises SweepError if the folder holds something else."""
        if (path / SWEEP_FILE).exists():
            old = cls.load(path)
            _check_same_sweep(path, old.definition, definition)
            runs = runs or old.runs
        elif path.exists() and (not path.is_dir() or any(each.name != SWEEP_LOCK for each in path.iterdir())):
            raise SweepError(f"{path} exists and holds no sweep: give another --workdir")
        folder = cls(path, definition, runs)
        folder.save()
        return folder

    def save(self) -> None:
        """Write sweep.json. Raises SweepError."""
        runs = [dataclasses.asdict(run) for run in self.runs]
        mapping = dict(format=FORMAT, definition=self.definition.to_json(), runs=runs)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / SWEEP_FILE, json.dumps(seal(mapping), indent=1) + "\n")
        except OSError as error:
            raise SweepError(
                f"{self.path} cannot be written: {error}. Give another --workdir, or free space"
            ) from error

    @contextlib.contextmanager
    def lock(self) -> Iterator[LockToken]:
        """Hold the folder's lock, as only one sweep command can; yields what its jobs watch. Raises SweepError."""
        path = self.path / SWEEP_LOCK
        try:
            with hold_lock(path) as lock:
                yield str(path.absolute()), lock.token
        except LockedError as error:
            raise SweepError(
                f"another command is running the sweep in {self.path} ({error}); --status shows its progress"
            ) from error

    def add(self, run: SweepRun) -> None:
        """Add a run that a search has proposed. A run that the sweep already has is not added again."""
        if all(other.name != run.name for other in self.runs):
            self.runs.append(run)
            self.save()

    def folder(self, run: SweepRun) -> Path:
        return self.path / run.name

    def prune(self, run: SweepRun) -> None:
        """Ask a run to stop for good."""
        (self.folder(run) / STOP_FILE).touch()

    def job_id(self, run: SweepRun) -> str | None:
        """Return the id of the run's last SLURM job."""
        try:
            return (self.folder(run) / JOB_FILE).read_text().strip()
        except OSError:
            return None

    def write_job_id(self, run: SweepRun, job_id: str) -> None:
        write_atomically(self.folder(run) / JOB_FILE, job_id + "\n")

    def last_lines(self, run: SweepRun, count: int = 8) -> list[str]:
        """Return the last lines of what the run has printed."""
        try:
            with (self.folder(run) / LOG_FILE).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        return [line for line in lines if line.strip()][-count:]

    def views(self) -> list[RunView]:
        """Return a view of each run, in order. Raises SweepError if a status.json is damaged."""
        statuses = [self._read_status(run) for run in self.runs]  # before the queue: a job may end in between
        jobs = [self.job_id(run) for run in self.runs]
        queue = (slurm_queue() or {}) if any(jobs) else {}
        return [
            self._view(run, status, queued_state(queue, job))
            for run, status, job in zip(self.runs, statuses, jobs, strict=True)
        ]

    def is_going_on(self, views: Sequence[RunView]) -> bool:
        """Return whether runs may still end or, by a search, be added."""
        is_whole = not self.definition.strategy.adaptive or len(views) >= (self.definition.trials or 0)
        return not is_whole or any(view.state not in (*ENDED, "crashed") for view in views)

    def view(self, run: SweepRun) -> RunView:
        """Return a view of a run that SLURM does not hold. Raises SweepError if its status.json is damaged."""
        return self._view(run, self._read_status(run), None)

    def _read_status(self, run: SweepRun) -> dict[str, Any]:
        path = self.folder(run) / STATUS_FILE
        try:
            status = read_status(path.parent)
        except (OSError, ValueError, RecursionError) as error:
            raise _damaged_status(path, error) from error
        if status.get("state", "waiting") not in STATES:
            raise _damaged_status(path, f"state {status['state']!r}")
        return status

    def _view(self, run: SweepRun, status: dict[str, Any], queued: str | None) -> RunView:
        state = status.get("state", "waiting")
        if run.refused is not None:
            state = "refused"
        elif state not in ENDED and queued is not None:
            state = queued
        elif state == "running" and not is_held(self.folder(run) / LOCK_FILE):
            state = "interrupted"  # it was killed together with its job
        progress = self._read_progress(run)
        rate = progress.tokens_per_second
        tokens_left = (run.total_steps - progress.step) * run.tokens_per_step
        started = status.get("started")
        return RunView(
            run=run,
            state=state,
            seconds_left=tokens_left / rate if state == "running" and rate else None,
            returncode=status.get("returncode"),
            seconds=None if started is None else (status.get("ended") or time.time()) - started,
            **{field.name: getattr(progress, field.name) for field in dataclasses.fields(progress)},
        )

    def _read_progress(self, run: SweepRun) -> Progress:
        """Return the contents of the run's metrics.jsonl, which is read again only after it has changed."""
        try:
            found = (self.folder(run) / METRICS_FILE).stat()
            version = found.st_mtime_ns, found.st_size
        except OSError:
            version = None
        if run.name not in self._progress or self._progress[run.name][0] != version:
            # The report warns of damaged lines; here each look at a run in progress would.
            entries = [] if version is None else read_metrics(self.folder(run), warn=lambda _: None)
            self._progress[run.name] = version, _latest(entries)
        return self._progress[run.name][1]

    def write_csv(self, views: Sequence[RunView]) -> Path:
        """Write sweep.csv: one line for each run, its settings first."""
        fields = list(dict.fromkeys(field for view in views for field in view.run.point))
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["run", *fields, *_MEASURED])
        for view in views:
            settings = [format_value(view.run.point[field]) if field in view.run.point else "" for field in fields]
            measured = [getattr(view.run if name == "total_steps" else view, name) for name in _MEASURED]
            writer.writerow([view.name, *settings, *("" if x is None else x for x in measured)])
        path = self.path / CSV_FILE
        write_atomically(path, text.getvalue())
        return path


def _damaged_status(path: Path, problem: object) -> SweepError:
    return SweepError(f"{path} is damaged ({problem}): delete it and resume the sweep, which then asks the run again")


def _check_same_sweep(path: Path, old: Definition, new: Definition) -> None:
    bases = complete(TrainConfig, old.base), complete(TrainConfig, new.base)  # an earlier version wrote fewer fields
    in_base = [line.replace("in the run", "in the folder") for line in differences(*bases)]
    if lines := [*changes(old, new), *in_base]:
        raise SweepError(
            f"{path} holds another sweep:\n  " + "\n  ".join(lines) + "\nGive another --workdir, or rerun the command "
            "of that sweep to resume it."
        )


def _latest(entries: Sequence[dict[str, Any]]) -> Progress:
    last = lambda name: next((e[name] for e in reversed(entries) if e.get(name) is not None), None)
    validations = [(e["step"], e["validation_loss"]) for e in entries if e.get("validation_loss") is not None]
    return Progress(
        step=last("step") or 0,
        tokens=last("tokens") or 0,
        loss=last("loss"),
        validation_loss=last("validation_loss"),
        bits_per_byte=last("validation_bits_per_byte"),
        tokens_per_second=last("tokens_per_second"),
        validations=tuple(validations),
    )
