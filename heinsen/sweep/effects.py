"""What the finished runs of a sweep say about each field: marginal effects, spread over seeds, means of pairs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heinsen.sweep.definition import Definition
from heinsen.sweep.runs import RunView, is_finite
from heinsen.sweep.space import SEED, Point, Range, Value, format_value, is_number

_BINS = 4  # for values drawn from a range


@dataclass(frozen=True)
class Result:
    """A finished run: its point and its validation loss."""

    point: Point
    loss: float


def results_of(views: Sequence[RunView]) -> list[Result]:
    """Return the results of the finished runs whose validation loss is finite."""
    return [
        Result(view.run.point, view.validation_loss)
        for view in views
        if view.state == "finished" and view.validation_loss is not None and is_finite(view.validation_loss)
    ]


@dataclass(frozen=True)
class Group:
    """The losses of the runs with one value of a field, or with values from one part of its range."""

    label: str
    losses: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)


@dataclass(frozen=True)
class Effect:
    """The marginal effect of a field: losses by its value, whatever the values of the other fields."""

    field: str
    groups: tuple[Group, ...]

    @property
    def size(self) -> float:
        """The difference between the best and the worst mean."""
        means = [group.mean for group in self.groups]
        return max(means) - min(means)


def swept_fields(views: Sequence[RunView]) -> list[str]:
    """Return the fields that have more than one value among the runs, the seed last."""
    values: dict[str, set[str]] = {}
    for view in views:
        for field, value in view.run.point.items():
            values.setdefault(field, set()).add(format_value(value))
    return sorted((field for field, found in values.items() if len(found) > 1), key=lambda field: field == SEED)


def find_effects(definition: Definition, fields: Sequence[str], results: Sequence[Result]) -> list[Effect]:
    """Return the effects of the fields, the largest first and that of the seed last."""
    effects = [effect for field in fields if (effect := effect_of(definition, field, results)) is not None]
    return sorted(effects, key=lambda effect: (effect.field == SEED, -effect.size))


def effect_of(definition: Definition, field: str, results: Sequence[Result]) -> Effect | None:
    """Return the effect of a field, or None if fewer than two of its values have finished runs.

    A range is divided into parts with equal numbers of runs.
    """
    ordered = sorted(results, key=lambda result: sort_key(result.point[field]))
    grouping = _group_by_part if isinstance(definition.space.get(field), Range) else _group_by_value
    groups = grouping(field, ordered)
    return Effect(field, groups) if len(groups) > 1 else None


def _group_by_part(field: str, ordered: Sequence[Result]) -> tuple[Group, ...]:
    groups = []
    for indices in np.array_split(np.arange(len(ordered)), min(_BINS, max(len(ordered) // 2, 1))):
        part = indices.tolist()
        low, high = (ordered[i].point[field] for i in (part[0], part[-1]))
        groups.append(Group(f"{low:.3g} to {high:.3g}", tuple(ordered[i].loss for i in part)))
    return tuple(groups)


def _group_by_value(field: str, ordered: Sequence[Result]) -> tuple[Group, ...]:
    losses: dict[str, list[float]] = {}
    for result in ordered:
        losses.setdefault(format_value(result.point[field]), []).append(result.loss)
    return tuple(Group(value, tuple(each)) for value, each in losses.items())


def seed_spread(results: Sequence[Result]) -> tuple[float, int] | None:
    """Return the pooled standard deviation of the loss among runs that differ only in their seed, and its degrees of
    freedom; None if no runs do."""
    alike: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for result in results:
        settings = tuple(sorted((f, format_value(x)) for f, x in result.point.items() if f != SEED))
        alike.setdefault(settings, []).append(result.loss)
    groups = [losses for losses in alike.values() if len(losses) > 1]
    freedom = sum(len(losses) - 1 for losses in groups)
    if not freedom:
        return None
    return math.sqrt(sum((len(losses) - 1) * statistics.variance(losses) for losses in groups) / freedom), freedom


def grid_of(results: Sequence[Result], rows: str, columns: str) -> tuple[list[Value], list[Value], np.ndarray]:
    """Return the values of two fields and the mean loss of each pair of them, NaN where no run has finished."""
    values = lambda field: sorted({result.point[field] for result in results}, key=sort_key)
    ys, xs = values(rows), values(columns)
    sums, counts = np.zeros((2, len(ys), len(xs)))
    for result in results:
        place = ys.index(result.point[rows]), xs.index(result.point[columns])
        sums[place] += result.loss
        counts[place] += 1
    return ys, xs, np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def sort_key(value: Value) -> tuple[int, Value, str]:
    """Return a key that sorts numbers by size, before all other values."""
    return (0, value, "") if is_number(value) else (1, 0, format_value(value))
