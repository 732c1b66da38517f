"""What runs have logged, as curves to draw and figures to compare; and the bands of loss to expect of a run."""

import csv
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heinsen.config import ConfigError
from heinsen.errors import HeinsenError
from heinsen.models import abstract_params, count_params
from heinsen.training.metrics import METRICS_FILE, read_metrics
from heinsen.training.run import RunError, TrainConfig, load_run
from heinsen.training.throughput import train_flops_per_token

AXES = {"tokens": "tokens", "steps": "steps", "flops": "FLOPs (6 N a token)", "time": "hours of training"}
METRICS = {
    "loss": "loss (nats a token)",
    "validation_loss": "validation loss (nats a token)",
    "bits_per_byte": "bits a byte",
}
# What a metric's curve is drawn from, and the validations that go with it as points.
_NAMES = {
    "loss": ("loss", "validation_loss"),
    "validation_loss": ("validation_loss", None),
    "bits_per_byte": ("bits_per_byte", "validation_bits_per_byte"),
}


class CurveError(HeinsenError, ValueError):
    """A run or a file of anchors that cannot be drawn."""


@dataclasses.dataclass(frozen=True)
class RunLog:
    """A run folder's config and log."""

    path: Path
    config: TrainConfig
    entries: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> "RunLog":
        """Raises CurveError."""
        try:
            config = load_run(path)
        except (RunError, ConfigError) as error:
            raise CurveError(str(error)) from error
        entries = read_metrics(path)
        if not entries:
            raise CurveError(f"{path} has logged nothing yet: its {METRICS_FILE} holds no step")
        return cls(path, config, entries)

    @property
    def n_params(self) -> int:
        return count_params(abstract_params(self.config.model))

    def points(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, values) of what has been logged under `name`, finite numbers only."""
        found = [(e["tokens"], e[name]) for e in self.entries if e.get(name) is not None]
        array = np.array(found, np.float64).reshape(-1, 2)
        return array[:, 0], array[:, 1]

    def along(self, axis: str, tokens: np.ndarray) -> np.ndarray:
        """Numbers of tokens, as places on one of AXES.

        Time is that of the steps, by the logged rates: with compilation, without validations and checkpoints.
        """
        if axis == "tokens":
            return tokens
        if axis == "steps":
            return tokens / (self.config.batch_size * self.config.sequence_length)
        if axis == "flops":
            return tokens * train_flops_per_token(self.n_params)
        seen, rates = self.points("tokens_per_second")
        hours = np.cumsum(np.diff(seen, prepend=0.0) / rates) / 3600
        return np.interp(tokens, np.concatenate([[0.0], seen]), np.concatenate([[0.0], hours]))

    def last(self, name: str) -> float | None:
        _, values = self.points(name)
        return float(values[-1]) if len(values) else None

    @property
    def tokens_per_second(self) -> float | None:
        """The median of what has been logged."""
        _, rates = self.points("tokens_per_second")
        return float(np.median(rates)) if len(rates) else None


def curves(log: RunLog, axis: str, metric: str, smoothing: float = 0.0) -> tuple[np.ndarray, ...]:
    """(x, y) of a metric's curve, and (x, y) of the validations to draw as points on it, perhaps none."""
    line, marks = _NAMES[metric]
    tokens, values = log.points(line)
    at, validations = log.points(marks) if marks else (np.zeros(0), np.zeros(0))
    return log.along(axis, tokens), smooth(values, smoothing), log.along(axis, at), validations


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """Running means (1 - w) sum_s w^(t-s) y[s] / (1 - w^(t+1)), without a bias to the beginning; 0: as it is."""
    total, mass, out = 0.0, 0.0, np.empty(len(values))
    for i, value in enumerate(values):
        total, mass = weight * total + (1 - weight) * value, weight * mass + (1 - weight)
        out[i] = total / mass
    return out


def thin(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most so many points of a curve, evenly chosen, the ends among them."""
    if len(x) <= most:
        return x, y
    chosen = np.unique(np.linspace(0, len(x) - 1, most).round().astype(int))
    return x[chosen], y[chosen]


def final_table(logs: Sequence[RunLog]) -> list[str]:
    """Lines: of each run the last figures."""
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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = lambda row: "  ".join(f"{x:{'<' if i == 0 else '>'}{widths[i]}}" for i, x in enumerate(row)).rstrip()
    return [line(row) for row in rows]


# ---- anchors -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A band of loss in which a run should be after so many tokens, and where it comes from."""

    tokens: float
    low: float
    high: float
    source: str


def read_anchors(path: Path) -> list[Anchor]:
    """Rows of a CSV file: tokens, low, high, source; in order of tokens. Raises CurveError."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        anchors = [Anchor(float(r["tokens"]), float(r["low"]), float(r["high"]), r["source"]) for r in rows]
    except OSError as error:
        raise CurveError(f"--against={path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise CurveError(f"--against={path}: expected columns tokens, low, high, source ({error!r})") from error
    good = all(0 < a.tokens and 0 < a.low <= a.high < math.inf for a in anchors)
    if not anchors or not good or any(a.tokens >= b.tokens for a, b in zip(anchors, anchors[1:], strict=False)):
        raise CurveError(f"--against={path}: expected rows of growing tokens, with 0 < low <= high")
    return anchors


def against(anchors: Sequence[Anchor], tokens: np.ndarray, losses: np.ndarray) -> list[str]:
    """Lines that say where a run's validations lie: at each anchor it has passed, and at its last one.

    Between anchors, and between validations, losses go linearly with the logarithm of the tokens.
    """
    if not len(tokens) or tokens[-1] < anchors[0].tokens:
        return [f"not yet at the first anchor, {anchors[0].tokens:.3g} tokens"]
    at = np.log([anchor.tokens for anchor in anchors])
    places = [a.tokens for a in anchors if tokens[0] <= a.tokens <= tokens[-1]]
    if tokens[-1] not in places and tokens[-1] <= anchors[-1].tokens:
        places.append(tokens[-1])
    lines = []
    for place in places:
        loss = np.interp(np.log(place), np.log(tokens), losses)
        low, high = (np.interp(np.log(place), at, [getattr(a, end) for a in anchors]) for end in ("low", "high"))
        verdict = "within" if low <= loss <= high else "BELOW" if loss < low else "ABOVE"
        lines.append(f"{place:.3g} tokens: {loss:.3f}, {verdict} {low:.3f} to {high:.3f}")
    return lines
