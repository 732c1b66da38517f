"""The logs of runs as curves and final figures, and published losses to compare them with."""

import csv
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from heinsen.errors import InputError
from heinsen.figures import smooth
from heinsen.models import abstract_params, count_params
from heinsen.sweep.runs import align, format_number
from heinsen.training.config import TrainConfig
from heinsen.training.devices import train_flops_per_token
from heinsen.training.folder import load_run, load_tokenizer_name
from heinsen.training.metrics import METRICS_FILE, metric_points, read_metrics


@dataclasses.dataclass(frozen=True)
class RunLog:
    """The config, the tokenizer's name and the log of a run folder."""

    path: Path
    config: TrainConfig
    tokenizer: str
    entries: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> "RunLog":
        """Read a run folder. Raises RunError, and InputError if it has logged nothing."""
        config, tokenizer, entries = load_run(path), load_tokenizer_name(path), read_metrics(path)
        if not entries:
            raise InputError(f"{path} has logged nothing yet: its {METRICS_FILE} holds no step")
        return cls(path, config, tokenizer, entries)

    @property
    def n_params(self) -> int:
        return count_params(abstract_params(self.config.model))

    def points(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, values) of the metric `name`, finite values only."""
        array = np.array(metric_points(self.entries, name), np.float64).reshape(-1, 2)
        return array[:, 0], array[:, 1]


class Axis(NamedTuple):
    """A horizontal axis: its label, and where on it a run was after so many tokens."""

    label: str
    locate: Callable[[RunLog, np.ndarray], np.ndarray]


def _hours(log: RunLog, tokens: np.ndarray) -> np.ndarray:
    """Hours of training steps by the logged rates, without compilation, validations and checkpoints."""
    seen, rates = log.points("tokens_per_second")
    hours = np.cumsum(np.diff(seen, prepend=0.0) / rates) / 3600
    return np.interp(tokens, np.concatenate([[0.0], seen]), np.concatenate([[0.0], hours]))


AXES = {
    "tokens": Axis("tokens", lambda log, tokens: tokens),
    "steps": Axis("steps", lambda log, tokens: tokens / log.config.tokens_per_step),
    "flops": Axis("FLOPs (6 N per token)", lambda log, tokens: tokens * train_flops_per_token(log.n_params)),
    "time": Axis("hours of training", _hours),
}


class Metric(NamedTuple):
    """A metric to draw: its label, the logged name of its curve, and that of the validations to mark beside it."""

    label: str
    curve: str
    marks: str | None


METRICS = {
    "loss": Metric("loss (nats per token)", "loss", "validation_loss"),
    "validation_loss": Metric("validation loss (nats per token)", "validation_loss", None),
    "bits_per_byte": Metric("bits per byte", "bits_per_byte", "validation_bits_per_byte"),
}


def make_curve(log: RunLog, name: str, axis: str, smoothing: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return (x, y) of the metric `name` along one of AXES."""
    tokens, values = log.points(name)
    return AXES[axis].locate(log, tokens), smooth(values, smoothing)


def final_table(logs: Sequence[RunLog]) -> list[str]:
    """Return the lines of a table with the last values of each run."""
    rows = [["run", "validation loss", "bits/byte", "loss", "tokens", "parameters", "tokens/s"]]
    for log in logs:
        last = [log.points(name)[1][-1:] for name in ("validation_loss", "validation_bits_per_byte", "loss")]
        _, rates = log.points("tokens_per_second")
        rate = format_number(np.median(rates), ",.0f") if len(rates) else ""
        losses = (format_number(values[0]) if len(values) else "" for values in last)
        rows.append([str(log.path), *losses, f"{log.entries[-1]['tokens']:,}", f"{log.n_params:,}", rate])
    return align(rows, "<>>>>>>")


# ---- anchors -------------------------------------------------------------------------------------


class Anchor(NamedTuple):
    """A published loss: after how many tokens, the model that has it, and the source."""

    tokens: float
    loss: float
    label: str
    source: str
    tokenizer: str = "gpt2"  # of the tokens


def read_anchors(path: Path) -> list[Anchor]:
    """Read a CSV file with the columns tokens, loss, label, source. Raises InputError.

    A column tokenizer says of what tokens; default: gpt2.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        anchors = []
        for row in rows:
            tokens, loss = (float(row[name]) for name in ("tokens", "loss"))
            anchors.append(Anchor(tokens, loss, row["label"], row["source"], row.get("tokenizer") or "gpt2"))
    except OSError as error:
        raise InputError(f"--against={path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"--against={path}: expected columns tokens, loss, label, source ({error!r})") from error
    if not anchors or not all(0 < x < math.inf for anchor in anchors for x in anchor[:2]):
        raise InputError(f"--against={path}: expected rows with tokens and loss above 0")
    return anchors


def compare_with_anchors(anchors: Sequence[Anchor], tokens: np.ndarray, losses: np.ndarray) -> list[str]:
    """Return lines that compare a run's validation losses with each anchor that it has passed.

    Between validations, losses are interpolated linearly in the logarithm of the tokens.
    """
    lines = []
    for anchor in anchors:
        if len(tokens) and tokens[0] <= anchor.tokens <= tokens[-1]:
            loss = np.interp(np.log(anchor.tokens), np.log(tokens), losses)
            side = f"{abs(loss - anchor.loss):.3f} {'below' if loss < anchor.loss else 'above'} {anchor.loss:.4g}"
            lines.append(f"{anchor.tokens:.3g} tokens: {loss:.3f}, {side}, {anchor.label}")
    first = min(anchor.tokens for anchor in anchors)
    return lines or [f"no validation at an anchor yet: the first is {first:.3g} tokens"]
