"""A run's metrics: metrics.jsonl, with the same numbers as TensorBoard events beside it, and Weights & Biases."""

import dataclasses
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from heinsen.errors import print_warning
from heinsen.files import write_atomically
from heinsen.training.config import TrainConfig
from heinsen.training.folder import RunError

METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb_id"
SAMPLE = "sample"  # the metric that is a text
_TOO_LARGE = {int: 2**63, float: math.inf}


class MetricsLog:
    """Log of a run's metrics: a JSON object per line with the step and its metrics, null for what is not finite.

    TensorBoard has them as train/NAME and validation/NAME. The metric "sample" is a text.

    Opening the log drops entries after `start_step`, which a killed run wrote after its last checkpoint.
    """

    def __init__(self, workdir: Path, start_step: int) -> None:
        path = workdir / METRICS_FILE
        entries = [entry for entry in read_metrics(workdir) if entry["step"] <= start_step]
        write_atomically(path, "".join(json.dumps(entry) + "\n" for entry in entries))
        self._file = path.open("a")
        self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=start_step + 1)

    def write(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        in_json = lambda x: x if isinstance(x, str) or math.isfinite(x) else None  # NaN is not JSON
        self._file.write(json.dumps({"step": step, **{name: in_json(x) for name, x in metrics.items()}}) + "\n")
        self._file.flush()
        kind = "validation" if "validation_loss" in metrics else "train"
        for name, value in metrics.items():
            tag = f"{kind}/{name.removeprefix('validation_')}"
            if isinstance(value, str):
                self._events.add_text(tag, value, step)
            elif tag != "validation/tokens" and math.isfinite(value):  # a step's own entry has the tokens
                self._events.add_scalar(tag, value, step)
        self._events.flush()

    def close(self) -> None:
        self._file.close()
        self._events.close()


class WandbLog:
    """A run in Weights & Biases that resuming continues; offline where its server cannot be reached.

    Raises RunError if wandb is not installed, or where it can record nothing.
    """

    def __init__(self, config: TrainConfig, workdir: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise RunError(
                "wandb_project is set, but wandb is not installed: pip install wandb, or leave it unset"
            ) from error
        self._is_lost = False
        options: dict[str, Any] = dict(
            project=config.wandb_project,
            name=workdir.name,
            id=_wandb_id(workdir),
            dir=str(workdir),
            config=dataclasses.asdict(config),
            resume="allow",
        )
        try:
            try:
                self._run = wandb.init(**options, settings=wandb.Settings(init_timeout=30, silent=True))
            except wandb.errors.Error as error:
                print_warning(f"Weights & Biases: {_first_line(error)}; recording offline in {workdir / 'wandb'}")
                wandb.teardown()  # or it waits for the server again
                self._run = wandb.init(**options, mode="offline", settings=wandb.Settings(silent=True))
        except Exception as error:  # it raises whatever its parts do
            what = f"{type(error).__name__}: {_first_line(error)}"
            raise RunError(
                f"wandb_project = {config.wandb_project!r}: {what}; correct it, or leave it unset"
            ) from error

    def write(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        if not self._is_lost:
            self._try(lambda: self._run.log(metrics, step=step), f"nothing is recorded there from step {step} on")

    def close(self) -> None:
        self._try(self._run.finish, "the end of the run may be missing there")

    def _try(self, call: Callable[[], object], otherwise: str) -> None:
        try:
            call()
        except Exception as error:  # it raises whatever its parts do; training goes on without it
            if not self._is_lost:
                what = f"{type(error).__name__}: {_first_line(error)}"
                print_warning(f"Weights & Biases: {what}; {otherwise}, but in {METRICS_FILE}")
            self._is_lost = True


def _wandb_id(workdir: Path) -> str:
    """The run's own, in its folder: a new run in the place of a removed one is another."""
    path = workdir / WANDB_ID_FILE
    if not path.exists():
        write_atomically(path, f"{secrets.token_hex(8)}\n")
    return path.read_text().strip()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def read_metrics(workdir: Path, warn: Callable[[str], object] = print_warning) -> list[dict[str, Any]]:
    """Return the entries of metrics.jsonl without lines that are damaged, or cut short by a kill.

    Args:
      warn: called with the number of damaged lines, if there are any.

    Raises:
      RunError: the file cannot be read.
    """
    path = workdir / METRICS_FILE
    try:
        *lines, _cut_short = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}. Restore it, or move it away") from error
    entries = [entry for line in lines if (entry := _parse(line)) is not None]
    if n_damaged := len(lines) - len(entries):
        warn(f"{path}: {n_damaged} of {len(lines)} lines are damaged and left out")
    return entries


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the entry of a line, or None if it cannot be one: a step, metrics that are finite or null, a sample."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or type(entry.get("step")) is not int or entry["step"] < 1:
        return None
    is_metric = lambda x: x is None or (type(x) in (int, float) and abs(x) < _TOO_LARGE[type(x)])
    is_value = lambda name, x: isinstance(x, str) if name == SAMPLE else is_metric(x)
    return entry if all(is_value(name, x) for name, x in entry.items()) else None


def metric_points(entries: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return (tokens, value) of each entry that has the metric, as a finite value."""
    is_point = lambda e: e.get("tokens") is not None and isinstance(e.get(name), int | float)
    return [(e["tokens"], e[name]) for e in entries if is_point(e)]
