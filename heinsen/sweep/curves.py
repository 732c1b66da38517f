"""The logs of runs as curves and final figures, and the bands of loss to expect of a run."""

import csv
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from heinsen.config import ConfigError
from heinsen.errors import HeinsenError
from heinsen.models import abstract_params, count_params
from heinsen.sweep.display import align
from heinsen.training.config import TrainConfig
from heinsen.training.folder import RunError, load_run, load_tokenizer_name
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
        """Read a run folder. Raises CurveError."""
        try:
            config, tokenizer, entries = load_run(path), load_tokenizer_name(path), read_metrics(path)
        except (RunError, ConfigError) as error:
            raise CurveError(str(error)) from error
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

    def last(self, name: str) -> float | None:
        _, values = self.points(name)
        return float(values[-1]) if len(values) else None

    @property
    def tokens_per_second(self) -> float | None:
        """The median of the logged rates."""
        _, rates = self.points("tokens_per_second")
        return float(np.median(rates)) if len(rates) else None


class Axis(NamedTuple):
    """A horizontal axis: its label, and where on it a run was after so many tokens."""

    label: str
    locate: Callable[[RunLog, np.ndarray], np.ndarray]


def _hours(log: RunLog, tokens: np.ndarray) -> np.ndarray:
    """Hours of training steps by the logged rates: includes compilation, not validations and checkpoints."""
    seen, rates = log.points("tokens_per_second")
    hours = np.cumsum(np.diff(seen, prepend=0.0) / rates) / 3600
    return np.interp(tokens, np.concatenate([[0.0], seen]), np.concatenate([[0.0], hours]))


AXES = {
    "tokens": Axis("tokens", lambda log, tokens: tokens),
    "steps": Axis("steps", lambda log, tokens: tokens / (log.config.batch_size * log.config.sequence_length)),
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


class Curve(NamedTuple):
    """The points of a curve, and the validations to mark as points beside it, perhaps none."""

    x: np.ndarray
    y: np.ndarray
    marks_x: np.ndarray
    marks_y: np.ndarray


def make_curve(log: RunLog, axis: str, metric: str, smoothing: float = 0.0) -> Curve:
    """Return the curve of one of METRICS along one of AXES."""
    locate, names = AXES[axis].locate, METRICS[metric]
    tokens, values = log.points(names.curve)
    marks_tokens, marks = log.points(names.marks) if names.marks else (np.zeros(0), np.zeros(0))
    return Curve(locate(log, tokens), smooth(values, smoothing), locate(log, marks_tokens), marks)


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """Return the exponential running means (1 - w) sum_s w^(t-s) y[s] / (1 - w^(t+1)), which are unbiased at the start.

    A weight of 0 returns the values themselves.
    """
    total, mass, out = 0.0, 0.0, np.empty(len(values))
    for i, value in enumerate(values):
        total, mass = weight * total + (1 - weight) * value, weight * mass + (1 - weight)
        out[i] = total / mass
    return out


def thin(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `most` points of a curve, evenly chosen, including both ends."""
    if len(x) <= most:
        return x, y
    chosen = np.unique(np.linspace(0, len(x) - 1, most).round().astype(int))
    return x[chosen], y[chosen]


def final_table(logs: Sequence[RunLog]) -> list[str]:
    """Return the lines of a table with the last values of each run."""
    number = lambda x, form: "" if x is None else format(x, form)
    rows = [("run", "validation loss", "bits/byte", "loss", "tokens", "parameters", "tokens/s")]
    for log in logs:
        rows.append(
            (
                str(log.path),
                number(log.last("validation_loss"), ".4f"),
                number(log.last("validation_bits_per_byte"), ".4f"),
                number(log.last("loss"), ".4f"),
                f"{log.entries[-1]['tokens']:,}",
                f"{log.n_params:,}",
                number(log.tokens_per_second, ",.0f"),
            )
        )
    return align(rows, "<>>>>>>")


# ---- anchors -------------------------------------------------------------------------------------


class Anchor(NamedTuple):
    """The band of loss in which a run should be after so many tokens, and its source."""

    tokens: float
    low: float
    high: float
    source: str
    tokenizer: str = "gpt2"  # of the tokens


def read_anchors(path: Path) -> list[Anchor]:
    """Read a CSV file with the columns tokens, low, high, source, in order of tokens. Raises CurveError.

    A column tokenizer says of what tokens; default: gpt2.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        anchors = [
            Anchor(float(r["tokens"]), float(r["low"]), float(r["high"]), r["source"], r.get("tokenizer") or "gpt2")
            for r in rows
        ]
    except OSError as error:
        raise CurveError(f"--against={path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise CurveError(f"--against={path}: expected columns tokens, low, high, source ({error!r})") from error
    good = all(0 < a.tokens and 0 < a.low <= a.high < math.inf for a in anchors)
    if not anchors or not good or any(a.tokens >= b.tokens for a, b in zip(anchors, anchors[1:], strict=False)):
        raise CurveError(f"--against={path}: expected rows of increasing tokens, with 0 < low <= high")
    return anchors


def compare_with_anchors(anchors: Sequence[Anchor], tokens: np.ndarray, losses: np.ndarray) -> list[str]:
    """Return lines that say where a run's validation losses lie: at each anchor it has passed, and at its last one.

    Between anchors, and between validations, losses are interpolated linearly in the logarithm of the tokens.
    """
    if not len(tokens) or tokens[-1] < anchors[0].tokens:
        return [f"not yet at the first anchor, {anchors[0].tokens:.3g} tokens"]
    at = np.log([anchor.tokens for anchor in anchors])
    bounds = [anchor.low for anchor in anchors], [anchor.high for anchor in anchors]
    places = [a.tokens for a in anchors if tokens[0] <= a.tokens <= tokens[-1]]
    if tokens[-1] not in places and tokens[-1] <= anchors[-1].tokens:
        places.append(tokens[-1])
    lines = []
    for place in places:
        loss = np.interp(np.log(place), np.log(tokens), losses)
        low, high = (np.interp(np.log(place), at, bound) for bound in bounds)
        verdict = "within" if low <= loss <= high else "BELOW" if loss < low else "ABOVE"
        lines.append(f"{place:.3g} tokens: {loss:.3f}, {verdict} {low:.3f} to {high:.3f}")
    return lines
