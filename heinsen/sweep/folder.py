"""The folder of a sweep: sweep.json (the definition and the runs), one folder for each run, sweep.csv."""

import contextlib
import csv
import dataclasses
import io
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from heinsen.config import comparable, differences
from heinsen.files import LockedError, hold_lock, seal, unseal, write_atomically
from heinsen.sweep.definition import Definition, changes
from heinsen.sweep.job import LOG_FILE, STATUS_FILE, is_alive, read_status, slurm_holds
from heinsen.sweep.runs import ENDED, SETTLED, RunView, SweepRun
from heinsen.sweep.space import SweepError, format_value
from heinsen.training.config import TrainConfig
from heinsen.training.metrics import METRICS_FILE, read_metrics

SWEEP_FILE, CSV_FILE, REPORT_FILE = "sweep.json", "sweep.csv", "report.html"
LOCK_FILE, JOBS_FOLDER = "sweep.lock", "jobs"
JOB_FILE, PRUNED_FILE = "job", "pruned"  # in a run's folder: its SLURM job id; a mark that the search has given it up
FORMAT = 1

# The columns of sweep.csv after the settings.
_MEASURED = (
    *("state", "step", "total_steps", "tokens", "loss", "validation_loss", "bits_per_byte"),
    *("tokens_per_second", "seconds"),
)


class SweepFolder:
    """Reads and writes the folder of a sweep. Use `open_or_create` or `load` to obtain one."""

    def __init__(self, path: Path, definition: Definition, runs: Sequence[SweepRun]):
        self.path, self.definition, self.runs = path, definition, list(runs)
        self._logs: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}  # {run: (age and size, latest values)}

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
        """Resume the sweep in the folder, or create it.

        Raises SweepError if the folder holds something else, or another command is running its sweep.
        """
        if (path / SWEEP_FILE).exists():
            old = cls.load(path)
            before, now = (comparable(TrainConfig, each.base) for each in (old.definition, definition))
            digests = old.definition.data_digest, definition.data_digest
            if None not in digests:  # they decide, not the path
                before["data"]["path"] = now["data"]["path"]
            base = differences(before, now)
            lines = changes(old.definition, definition) + [x.replace("in the run", "in the folder") for x in base]
            if lines:
                raise SweepError(
                    f"{path} holds another sweep:\n  " + "\n  ".join(lines) + "\nGive another --workdir, or rerun the "
                    "command of that sweep to resume it."
                )
            if None not in digests and digests[0] != digests[1]:
                raise SweepError(
                    f"{path} holds a sweep on other data: what lies at {now['data']['path']} now is not what its runs "
                    f"read (digest {digests[1]} instead of {digests[0]}). Give the path of their data, or another "
                    "--workdir."
                )
            definition = dataclasses.replace(definition, data_digest=digests[1] or digests[0])
            folder = cls(path, definition, runs)
            with folder.lock():
                folder.runs = folder.runs or cls.load(path).runs
                folder.save()
            return folder
        if path.exists() and (not path.is_dir() or any(each.name != LOCK_FILE for each in path.iterdir())):
            raise SweepError(f"{path} exists and holds no sweep: give another --workdir")
        folder = cls(path, definition, runs)
        folder.save()
        return folder

    def save(self) -> None:
        """Write sweep.json. Raises OSError, which names the file."""
        runs = [dataclasses.asdict(run) for run in self.runs]
        mapping = dict(format=FORMAT, definition=self.definition.to_json(), runs=runs)
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / SWEEP_FILE, json.dumps(seal(mapping), indent=1) + "\n")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder's lock, as only one sweep command can. Raises SweepError."""
        try:
            with hold_lock(self.path / LOCK_FILE):
                yield
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

    def mark_pruned(self, run: SweepRun) -> None:
        """Mark a run that the search gives up: once it is interrupted, its state is "pruned"."""
        (self.folder(run) / PRUNED_FILE).touch()

    def job_id(self, run: SweepRun) -> str | None:
        """Return the id of the run's last SLURM job."""
        file = self.folder(run) / JOB_FILE
        return file.read_text().strip() if file.exists() else None

    def last_lines(self, run: SweepRun, count: int = 8) -> list[str]:
        """Return the last lines of what the run has printed."""
        file = self.folder(run) / LOG_FILE
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        return [line for line in lines if line.strip()][-count:]

    def is_going_on(self, views: Sequence[RunView]) -> bool:
        """Return whether runs may still end or, by a search, be added."""
        is_whole = not self.definition.strategy.adaptive or len(views) >= (self.definition.trials or 0)
        return not is_whole or any(view.state not in SETTLED for view in views)

    def views(self) -> list[RunView]:
        """Return a view of each run, in order. Raises SweepError if a status.json is damaged."""
        return [self.view(run) for run in self.runs]

    def view(self, run: SweepRun) -> RunView:
        """Return what is known of a run. Raises SweepError if its status.json is damaged."""
        folder = self.folder(run)
        try:
            status = read_status(folder)
        except (OSError, ValueError, RecursionError) as error:
            raise SweepError(
                f"{folder / STATUS_FILE} is damaged ({error}): delete it and resume the sweep, which then asks the run "
                "again"
            ) from error
        started, ended = status.get("started"), status.get("ended")
        return RunView(
            run,
            self._state(run, status.get("state", "waiting")),
            returncode=status.get("returncode"),
            seconds=None if started is None else (ended or time.time()) - started,
            **self._latest(run),
        )

    def _state(self, run: SweepRun, recorded: str) -> str:
        """Return the state of a run, given the one in its status.json, which a job that is killed does not update."""
        folder = self.folder(run)
        if run.refused is not None:
            return "refused"
        if recorded == "running" and is_alive(folder):
            return "running"
        if recorded not in ENDED and (job := self.job_id(run)) and slurm_holds(self.jobs_folder, job):
            return "queued"
        if recorded in ("running", "interrupted"):
            return "pruned" if (folder / PRUNED_FILE).exists() else "interrupted"
        return recorded

    @property
    def jobs_folder(self) -> Path:
        """Folder of submitit's files."""
        return self.path.absolute() / JOBS_FOLDER

    def _latest(self, run: SweepRun) -> dict[str, Any]:
        """Return the latest values in the run's metrics.jsonl, which is read again only after it has changed."""
        file = self.folder(run) / METRICS_FILE
        if not file.exists():
            return {}
        version = file.stat().st_mtime_ns, file.stat().st_size
        if run.name not in self._logs or self._logs[run.name][0] != version:
            # The report warns of damaged lines; here each look at a run in progress would.
            entries = read_metrics(file.parent, warn=lambda _: None)
            last = {name: value for entry in entries for name, value in entry.items() if value is not None}
            validations = [(e["step"], e["validation_loss"]) for e in entries if e.get("validation_loss") is not None]
            self._logs[run.name] = (
                version,
                dict(
                    step=last.get("step", 0),
                    tokens=last.get("tokens", 0),
                    loss=last.get("loss"),
                    validation_loss=last.get("validation_loss"),
                    bits_per_byte=last.get("validation_bits_per_byte"),
                    tokens_per_second=last.get("tokens_per_second"),
                    validations=tuple(validations),
                ),
            )
        return self._logs[run.name][1]

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
