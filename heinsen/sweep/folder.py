"""A sweep's folder: sweep.json (what is tried, which runs), a folder a run, sweep.csv; states, the table."""

import contextlib
import csv
import dataclasses
import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from heinsen.config import differences
from heinsen.files import write_atomically
from heinsen.sweep.job import LOCK_FILE, LOG_FILE, STOP_FILE, is_held, read_status, wait_for_lock
from heinsen.sweep.space import Definition, Point, SweepError, changes, folder_name, text_of
from heinsen.training.metrics import METRICS_FILE, read_metrics

SWEEP_FILE, CSV_FILE, REPORT_FILE, JOBS_FOLDER, SWEEP_LOCK = (
    "sweep.json",
    "sweep.csv",
    "report.html",
    "jobs",
    "sweep.lock",
)
FORMAT = 1
# In the order in which a run goes through them. "refused": the config forbids what a search has come upon.
STATES = ("waiting", "queued", "running", "interrupted", "crashed", "refused", "pruned", "finished")
ENDED = ("finished", "pruned", "refused")


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """One run: its point, and how long it is. `refused` says why the config forbids it."""

    point: Point
    total_steps: int
    tokens_per_step: int
    refused: str | None = None

    @property
    def name(self) -> str:
        return folder_name(self.point)


@dataclasses.dataclass(frozen=True)
class RunView:
    """What is known of a run now. Numbers are None until they are logged."""

    run: SweepRun
    state: str
    step: int
    tokens: int
    loss: float | None
    validation_loss: float | None
    bits_per_byte: float | None  # of the validation
    tokens_per_second: float | None
    seconds_left: float | None
    returncode: int | None
    seconds: float | None  # of the last job, so far
    validations: tuple[tuple[int, float], ...]  # (step, loss)

    @property
    def name(self) -> str:
        return self.run.name


class SweepFolder:
    """Reads and writes a sweep's folder. `open_or_create` and `load` make one."""

    def __init__(self, path: Path, definition: Definition, runs: Sequence[SweepRun]):
        self.path, self.definition, self.runs = path, definition, list(runs)
        self._seen: dict[str, tuple[Any, dict[str, Any]]] = {}  # of each run: the log's age and size, what it says

    @classmethod
    def load(cls, path: Path) -> "SweepFolder":
        """Raises SweepError."""
        file = path / SWEEP_FILE
        if not file.is_file():
            raise SweepError(f"{path} holds no sweep: it has no {SWEEP_FILE}; give the --workdir of scripts/sweep.py")
        try:
            mapping = json.loads(file.read_text())
            if mapping["format"] != FORMAT:
                raise SweepError(f"{file} has format {mapping['format']}, this program reads {FORMAT}")
            runs = [SweepRun(**run) for run in mapping["runs"]]
            return cls(path, Definition.from_json(mapping["definition"]), runs)
        except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise SweepError(f"{file} is damaged ({error!r}): restore it, or give another --workdir") from error

    @classmethod
    def open_or_create(cls, path: Path, definition: Definition, runs: Sequence[SweepRun]) -> "SweepFolder":
        """The sweep in the folder if it is this one, or a new one. Raises SweepError with what differs."""
        if not (path / SWEEP_FILE).exists():
            if path.exists() and (not path.is_dir() or any(each.name != SWEEP_LOCK for each in path.iterdir())):
                raise SweepError(f"{path} is there already and holds no sweep: give another --workdir")
            folder = cls(path, definition, runs)
            folder.save()
            return folder
        old = cls.load(path)
        lines = [*changes(old.definition, definition)]
        lines += [
            line.replace("in the run", "in the folder") for line in differences(old.definition.base, definition.base)
        ]
        if lines:
            raise SweepError(
                f"{path} holds another sweep:\n  " + "\n  ".join(lines) + "\nGive another --workdir, or the command "
                "of the sweep there to go on with it."
            )
        folder = cls(path, definition, runs or old.runs)
        folder.save()
        return folder

    def save(self) -> None:
        """Write sweep.json. Raises SweepError."""
        mapping = dict(
            format=FORMAT, definition=self.definition.to_json(), runs=[dataclasses.asdict(run) for run in self.runs]
        )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / SWEEP_FILE, json.dumps(mapping, indent=1) + "\n")
        except OSError as error:
            raise SweepError(f"{self.path} cannot be written: {error}. Give another --workdir, or make room") from error

    @contextlib.contextmanager
    def lock(self) -> Iterator[tuple[str, str]]:
        """Be the one sweep command of this folder; gives (lock file, token) for the jobs. Raises SweepError."""
        path, token = self.path / SWEEP_LOCK, secrets.token_hex(8)
        with path.open("a+") as file:
            if not wait_for_lock(file, 2.0):  # runs of a killed sweep look at it for a moment
                raise SweepError(f"another command is running the sweep in {self.path}; --status shows how it gets on")
            file.truncate(0)
            file.write(token + "\n")
            file.flush()
            yield str(path.absolute()), token

    def add(self, run: SweepRun) -> None:
        """Of a search: one more run. The same point again is the same run."""
        if all(other.name != run.name for other in self.runs):
            self.runs.append(run)
            self.save()

    def folder(self, run: SweepRun) -> Path:
        return self.path / run.name

    def prune(self, run: SweepRun) -> None:
        """Ask a run to stop for good."""
        (self.folder(run) / STOP_FILE).touch()

    def last_lines(self, run: SweepRun, count: int = 8) -> list[str]:
        """Of the run's log."""
        try:
            with (self.folder(run) / LOG_FILE).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        return [line for line in lines if line.strip()][-count:]

    def views(self) -> list[RunView]:
        """Of every run, in order."""
        statuses = [read_status(self.folder(run)) for run in self.runs]
        jobs = {name: file_text(self.folder(run) / "job") for run in self.runs if (name := run.name)}
        queue = (slurm_queue() or {}) if any(jobs.values()) else {}
        return [
            self._view(run, status, _in_queue(queue, jobs[run.name]))
            for run, status in zip(self.runs, statuses, strict=True)
        ]

    def view(self, run: SweepRun) -> RunView:
        """Of one run that SLURM does not have."""
        return self._view(run, read_status(self.folder(run)), None)

    def _view(self, run: SweepRun, status: dict[str, Any], queued: str | None) -> RunView:
        folder, now = self.folder(run), time.time()
        state = status.get("state", "waiting")
        if run.refused is not None:
            state = "refused"
        elif state not in ENDED and queued is not None:
            state = queued
        elif state == "running" and not is_held(folder / LOCK_FILE):
            state = "interrupted"  # killed, with its job
        logged = self._logged(run)
        rate, left = logged["tokens_per_second"], (run.total_steps - logged["step"]) * run.tokens_per_step
        started = status.get("started")
        return RunView(
            run=run,
            state=state,
            seconds_left=left / rate if state == "running" and rate else None,
            returncode=status.get("returncode"),
            seconds=None if started is None else (status.get("ended") or now) - started,
            **logged,
        )

    def _logged(self, run: SweepRun) -> dict[str, Any]:
        """What the run's metrics.jsonl says; read again only when it has changed."""
        try:
            found = (self.folder(run) / METRICS_FILE).stat()
            age = found.st_mtime_ns, found.st_size
        except OSError:
            age = None
        if run.name not in self._seen or self._seen[run.name][0] != age:
            entries = [] if age is None else read_metrics(self.folder(run))
            last = lambda name: next((e[name] for e in reversed(entries) if e.get(name) is not None), None)
            validations = [(e["step"], e["validation_loss"]) for e in entries if e.get("validation_loss") is not None]
            logged = dict(
                step=last("step") or 0,
                tokens=last("tokens") or 0,
                loss=last("loss"),
                validation_loss=last("validation_loss"),
                bits_per_byte=last("validation_bits_per_byte"),
                tokens_per_second=last("tokens_per_second"),
                validations=tuple(validations),
            )
            self._seen[run.name] = age, logged
        return self._seen[run.name][1]

    def write_csv(self, views: Sequence[RunView]) -> Path:
        """sweep.csv: a line a run, its settings first."""
        fields = list(dict.fromkeys(field for view in views for field in view.run.point))
        measured = ["state", "step", "total_steps", "tokens", "loss", "validation_loss", "bits_per_byte"]
        measured += ["tokens_per_second", "seconds"]
        path = self.path / CSV_FILE
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["run", *fields, *measured])
            for view in views:
                settings = [text_of(view.run.point[field]) if field in view.run.point else "" for field in fields]
                numbers = [getattr(view.run if name == "total_steps" else view, name) for name in measured]
                writer.writerow([view.name, *settings, *("" if x is None else x for x in numbers)])
        os.replace(temporary, path)
        return path


def file_text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


# ---- SLURM's queue -----------------------------------------------------------------------------


def slurm_queue() -> dict[str, str] | None:
    """{job id: its SLURM state} of this user's jobs, arrays task by task; None where SLURM does not answer."""
    if shutil.which("squeue") is None:
        return None
    command = ["squeue", "--noheader", "--array", "--me", "--format=%i %T"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        return None
    return dict(line.split(maxsplit=1) for line in result.stdout.splitlines() if " " in line)


def _in_queue(queue: dict[str, str], job: str | None) -> str | None:
    """The state of a run whose job SLURM still has."""
    state = None if job is None else queue.get(job)
    if state is None:
        return None
    waits = state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
    return "queued" if waits else "running"


# ---- the table -----------------------------------------------------------------------------------


def table(views: Sequence[RunView], height: int | None = None) -> list[str]:
    """Lines of `--status`; with `height` at most so many: then runs that are under way come before others."""
    number = lambda x: "" if x is None else f"{x:.4f}"
    rows = [("run", "state", "step", "loss", "validation", "tokens/s", "ETA")]
    shown, left_out = list(views), 0
    if height is not None and len(views) + 2 > height:
        order = ("running", "crashed", "interrupted", "queued", "waiting", "refused", "pruned", "finished")
        urgent = sorted(range(len(views)), key=lambda i: order.index(views[i].state))[: max(height - 3, 1)]
        shown, left_out = [views[i] for i in sorted(urgent)], len(views) - len(urgent)
    for view in shown:
        eta = "" if view.seconds_left is None else tqdm.format_interval(view.seconds_left)
        rate = "" if view.tokens_per_second is None else f"{view.tokens_per_second:,.0f}"
        steps = f"{view.step:,}/{view.run.total_steps:,}"
        row = (view.name, view.state, steps, number(view.loss), number(view.validation_loss), rate, eta)
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ("<", "<", ">", ">", ">", ">", ">")
    line = lambda row: "  ".join(f"{x:{side}{w}}" for x, side, w in zip(row, sides, widths, strict=True)).rstrip()
    lines = [line(row) for row in rows]
    if left_out:
        lines.append(f"... and {left_out} more")
    return [*lines, summary(views)]


def summary(views: Sequence[RunView]) -> str:
    """One line: how many runs are in which state, and the best of those finished."""
    counts = {state: sum(view.state == state for view in views) for state in STATES}
    text = f"{len(views)} runs: " + ", ".join(f"{n} {state}" for state, n in counts.items() if n)
    if best := best_of(views):
        so_far = "" if all(view.state in (*ENDED, "crashed") for view in views) else " so far"
        text += f"; best{so_far} {best.validation_loss:.4f} ({best.name})"
    return text


def best_of(views: Sequence[RunView]) -> RunView | None:
    """The finished run of the lowest validation loss."""
    done = [view for view in views if view.state == "finished" and is_number(view.validation_loss)]
    return min(done, key=lambda view: view.validation_loss, default=None)


def is_number(x: float | None) -> bool:
    return x is not None and math.isfinite(x)


class Screen:
    """Lines redrawn in place on a terminal; `say` prints above them. In a log file only what is said appears."""

    def __init__(self, stream=sys.stderr):
        self._stream, self._lines = stream, 0
        self.live = stream.isatty()

    def draw(self, lines: Sequence[str]) -> None:
        if self.live:
            width = shutil.get_terminal_size().columns
            self._clear()
            self._stream.write("".join(line[: width - 1] + "\n" for line in lines))
            self._stream.flush()
            self._lines = len(lines)

    def say(self, text: str) -> None:
        self._clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def height(self) -> int:
        return shutil.get_terminal_size().lines - 1

    def _clear(self) -> None:
        if self.live and self._lines:
            self._stream.write(f"\x1b[{self._lines}F\x1b[J")
            self._lines = 0
