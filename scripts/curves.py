"""The logs of runs as curves and final figures, and the bands of loss to expect of a run."""

import csv
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from heinsen.errors import HeinsenError
from heinsen.figures import smooth
from heinsen.models import abstract_params, count_params
from heinsen.sweep.runs import align, format_number
from heinsen.training.config import TrainConfig
from heinsen.training.folder import load_run, load_tokenizer_name
from heinsen.training.metrics import METRICS_FILE, metric_points, read_metrics
from heinsen.training.throughput import train_flops_per_token


class CurveError(HeinsenError, ValueError):
    """A run or a file of anchors that cannot be drawn."""


@dataclasses.dataclass(frozen=True)
class RunLog:
    """The config, the tokenizer's name and the log of a run folder."""

    path: Path
    config: TrainConfig
    tokenizer: str
    entries: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> "RunLog":
        """Read a run folder. Raises RunError, and CurveError if it has logged nothing."""
        config, tokenizer, entries = load_run(path), load_tokenizer_name(path), read_metrics(path)
        if not entries:
            raise CurveError(f"{path} has logged nothing yet: its {METRICS_FILE} holds no step")
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
    """The band of loss in which a run should be after so many tokens, and its source.

    With a label, it is a point beside the bands: the loss of one published run, low = high.
    """

    tokens: float
    low: float
    high: float
    source: str
    tokenizer: str = "gpt2"  # of the tokens
    label: str = ""


def read_anchors(path: Path) -> list[Anchor]:
    """Read a CSV file with the columns tokens, low, high, source, in order of tokens. Raises CurveError.

    A column tokenizer says of what tokens; default: gpt2. A column label names the points.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        anchors = []
        for row in rows:
            tokens, low, high = (float(row[name]) for name in ("tokens", "low", "high"))
            label = row.get("label") or ""
            anchors.append(Anchor(tokens, low, high, row["source"], row.get("tokenizer") or "gpt2", label))
    except OSError as error:
        raise CurveError(f"--against={path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise CurveError(f"--against={path}: expected columns tokens, low, high, source ({error!r})") from error
    good = all(0 < a.tokens and 0 < a.low <= a.high < math.inf for a in anchors)
    bands, points = bands_and_points(anchors)
    if not bands or not good or any(a.tokens >= b.tokens for a, b in zip(bands, bands[1:], strict=False)):
        raise CurveError(f"--against={path}: expected rows of increasing tokens, with 0 < low <= high")
    if uneven := [point.label for point in points if point.low != point.high]:
        raise CurveError(f"--against={path}: {uneven[0]!r} has a label, so it is a point: expected low = high")
    return anchors


def bands_and_points(anchors: Sequence[Anchor]) -> tuple[list[Anchor], list[Anchor]]:
    return [anchor for anchor in anchors if not anchor.label], [anchor for anchor in anchors if anchor.label]


def compare_with_anchors(anchors: Sequence[Anchor], tokens: np.ndarray, losses: np.ndarray) -> list[str]:
    """Return lines that say where a run's validation losses lie: at each anchor it has passed, and at its last one.

    Between anchors, and between validations, losses are interpolated linearly in the logarithm of the tokens.
    """
    bands, points = bands_and_points(anchors)
    if not len(tokens) or tokens[-1] < bands[0].tokens:
        return [f"not yet at the first anchor, {bands[0].tokens:.3g} tokens"]
    at = np.log([band.tokens for band in bands])
    bounds = [band.low for band in bands], [band.high for band in bands]
    passed = lambda anchors: [anchor for anchor in anchors if tokens[0] <= anchor.tokens <= tokens[-1]]
    loss_at = lambda place: np.interp(np.log(place), np.log(tokens), losses)
    places = [band.tokens for band in passed(bands)]
    if tokens[-1] not in places and tokens[-1] <= bands[-1].tokens:
        places.append(tokens[-1])
    lines = []
    for place in places:
        loss = loss_at(place)
        low, high = (np.interp(np.log(place), at, bound) for bound in bounds)
        verdict = "within" if low <= loss <= high else "BELOW" if loss < low else "ABOVE"
        lines.append(f"{place:.3g} tokens: {loss:.3f}, {verdict} {low:.3f} to {high:.3f}")
    for point in passed(points):
        loss = loss_at(point.tokens)
        side = f"{abs(loss - point.low):.3f} {'below' if loss < point.low else 'above'} {point.low:.3g}"
        lines.append(f"{point.tokens:.3g} tokens: {loss:.3f}, {side}, {point.label}")
    return lines
