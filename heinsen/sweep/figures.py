"""The figures of a sweep's report."""

import itertools
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from heinsen.pages import Series
from heinsen.sweep.curves import smooth, thin
from heinsen.sweep.definition import Definition
from heinsen.sweep.effects import Effect, Result, grid_of, sort_key
from heinsen.sweep.runs import RunView
from heinsen.sweep.space import Range, Value, all_numbers, format_value
from heinsen.training.metrics import metric_points

Entries = list[dict[str, Any]]  # of a run's log

_POINTS = 300  # of a curve
_SMOOTHING = 0.9  # of the training loss, in long logs
_BLUE, _ORANGE = "#3b6ea5", "#c2410c"


def _scale(numbers: Sequence[int | float]) -> str:
    """Return the scale of an axis: log where positive numbers span a factor of 8, else linear."""
    return "log" if min(numbers) > 0 and max(numbers) / min(numbers) >= 8 else "linear"


# ---- marginal effects ----------------------------------------------------------------------------


def draw_effect(definition: Definition, effect: Effect, results: Sequence[Result]) -> Figure:
    """Draw the losses by the value of one field, and the mean of each group."""
    figure, axes = plt.subplots(figsize=(4.2, 3.0), layout="constrained")
    values = [result.point[effect.field] for result in results]
    losses = [result.loss for result in results]
    numbers, in_range = all_numbers(values), isinstance(definition.space.get(effect.field), Range)
    if numbers is None or (len(effect.groups) <= 12 and not in_range):
        _draw_by_name(axes, effect, values, losses)
    else:
        axes.plot(numbers, losses, "o", ms=4, alpha=0.6, color=_BLUE)
        axes.set_xscale(_scale(numbers))
        draw_means = _draw_means_of_parts if in_range else _draw_means_of_values
        draw_means(axes, effect, numbers)
    axes.set(xlabel=effect.field, ylabel="validation loss")
    axes.grid(alpha=0.3)
    return figure


def _draw_by_name(axes: Axes, effect: Effect, values: Sequence[Value], losses: Sequence[float]) -> None:
    names = [group.label for group in effect.groups]
    axes.plot([names.index(format_value(value)) for value in values], losses, "o", ms=4, alpha=0.5, color=_BLUE)
    axes.plot([group.mean for group in effect.groups], "-", color=_ORANGE, lw=1.5, marker="D", ms=5)
    crowded = len(names) > 6 or max(map(len, names)) > 10
    axes.set_xticks(range(len(names)), names, rotation=30 if crowded else 0, ha="right" if crowded else "center")
    axes.margins(x=0.15)


def _draw_means_of_parts(axes: Axes, effect: Effect, numbers: Sequence[int | float]) -> None:
    ordered, start = sorted(numbers), 0
    for group in effect.groups:
        part = ordered[start : start + len(group.losses)]
        start += len(group.losses)
        axes.plot([part[0], part[-1]], [group.mean] * 2, color=_ORANGE, lw=2)


def _draw_means_of_values(axes: Axes, effect: Effect, numbers: Sequence[int | float]) -> None:
    axes.plot(sorted(set(numbers)), [group.mean for group in effect.groups], "D-", color=_ORANGE, lw=1.5, ms=5)


# ---- several fields ------------------------------------------------------------------------------


def draw_heat_map(results: Sequence[Result], rows: str, columns: str) -> Figure:
    """Draw the mean loss of each pair of values of two fields."""
    ys, xs, means = grid_of(results, rows, columns)
    size = min(2.5 + 0.9 * len(xs), 12), min(1.4 + 0.6 * len(ys), 10)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    image = axes.imshow(means, cmap="viridis", aspect="auto")
    middle = (np.nanmin(means) + np.nanmax(means)) / 2
    if means.size <= 150:
        for i, j in itertools.product(range(len(ys)), range(len(xs))):
            empty = np.isnan(means[i, j])
            color = "0.4" if empty else "white" if means[i, j] < middle else "black"
            axes.text(j, i, "-" if empty else f"{means[i, j]:.3f}", ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(xs)), map(format_value, xs), rotation=30 if len(xs) > 6 else 0)
    axes.set_yticks(range(len(ys)), map(format_value, ys))
    axes.set(xlabel=columns, ylabel=rows)
    figure.colorbar(image, label="validation loss")
    return figure


def draw_parallel(fields: Sequence[str], results: Sequence[Result]) -> Figure:
    """Draw each run as a line across one vertical axis for each field, and the loss on the right.

    The loss is clipped where a few runs are far worse than the rest.
    """
    losses = np.array([result.loss for result in results])
    columns = [_heights([result.point[field] for result in results]) for field in fields]
    columns.append(_loss_heights(losses))
    figure, axes = plt.subplots(figsize=(min(3 + 1.9 * len(fields), 13), 4), layout="constrained")
    lines = np.stack([heights for heights, _ in columns], axis=1)
    for i in np.argsort(-losses):
        axes.plot(lines[i], color=plt.get_cmap("viridis")(lines[i, -1]), lw=1.3, alpha=0.75)
    axes.plot(lines[int(losses.argmin())], color=_ORANGE, lw=2.5)
    box = dict(facecolor="white", edgecolor="none", alpha=0.85, pad=1)
    for i, (_, ticks) in enumerate(columns):
        axes.axvline(i, color="0.3", lw=1)
        for y, label in ticks:
            axes.annotate(label, (i, y), xytext=(4, 3), textcoords="offset points", fontsize=8, color="0.2", bbox=box)
    axes.set_xticks(range(len(columns)), [*fields, "validation loss"])
    axes.set_yticks([])
    axes.set_xlim(-0.1, len(fields) + 0.45)
    axes.set_ylim(-0.05, 1.1)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


Heights = tuple[np.ndarray, list[tuple[float, str]]]  # from 0 to 1, and (height, label) of the ticks


def _loss_heights(losses: np.ndarray) -> Heights:
    usual = np.quantile(losses, 0.9)
    low, high = losses.min(), min(losses.max(), usual + (usual - losses.min()))
    return np.clip((losses - low) / ((high - low) or 1.0), 0, 1), [(0.0, f"{low:.3f}"), (1.0, f"{high:.3f}")]


def _heights(values: Sequence[Value]) -> Heights:
    distinct = sorted({format_value(v): v for v in values}.values(), key=sort_key)
    numbers = all_numbers(values)
    if numbers is None or len(distinct) <= 6:
        heights = {format_value(value): i / max(len(distinct) - 1, 1) for i, value in enumerate(distinct)}
        return np.array([heights[format_value(value)] for value in values]), [(y, text) for text, y in heights.items()]
    places = np.log(numbers) if _scale(numbers) == "log" else np.asarray(numbers, float)
    low, high = places.min(), places.max()
    return (places - low) / (high - low), [(0.0, format_value(distinct[0])), (1.0, format_value(distinct[-1]))]


# ---- curves --------------------------------------------------------------------------------------


def curves(logs: Sequence[tuple[RunView, Entries]], name: str) -> list[Series]:
    """Return a metric of runs by tokens, given the best first; the training loss is smoothed."""
    found = []
    for i, (view, entries) in enumerate(logs):
        points = metric_points(entries, name)
        if not points:
            continue
        x, y = np.array(points, float).T
        y = smooth(y, min(_SMOOTHING, 1 - 10 / max(len(y), 10)) if name == "loss" else 0.0)
        x, y = thin(x, y, _POINTS)
        color = matplotlib.colors.to_hex(plt.get_cmap("viridis")(0.85 * i / max(len(logs) - 1, 1)))
        dash = (6, 4) if view.state in ("crashed", "pruned") else ()
        has_dots = name != "loss" or len(x) == 1  # validations, and what is no line
        found.append(Series(view.name, x.tolist(), y.tolist(), color, 2.5 if i == 0 else 1.3, dash, has_dots))
    return found
