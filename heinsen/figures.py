"""Figures as all programs draw them: into files, with one legend that covers nothing."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from heinsen.files import atomic_writer


def pyplot() -> Any:
    """Return matplotlib.pyplot, which needs no display then."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def make_figure(*arguments: Any, **options: Any) -> tuple[Any, Any]:
    """Return (figure, axes) of constrained layout; arguments are those of `pyplot().subplots`."""
    return pyplot().subplots(*arguments, layout="constrained", **options)


def save_figure(path: Path, figure: Any) -> None:
    """Give a figure its legend, write it with `atomic_writer` in the format of the path's suffix, and close it.

    Raises OSError.
    """
    place_legend(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writer(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix("."), dpi=120)
    pyplot().close(figure)


def place_legend(figure: Any) -> None:
    """Put one legend below all panels of a figure of constrained layout, with each label once: as wide as fits."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    for n_rows in range(1, len(entries) + 1):
        options = dict(loc="outside lower center", ncols=-(-len(entries) // n_rows), fontsize="small")
        legend = figure.legend(entries.values(), entries.keys(), **options)
        if n_rows == len(entries) or legend.get_window_extent().width <= 0.98 * figure.bbox.width:
            break
        legend.remove()


def count_tokens(axis: Any) -> None:
    """Label an axis of tokens, linear or logarithmic, by 200k, 4M and the like."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """Return the exponential running means (1 - w) sum_s w^(t-s) y[s] / (1 - w^(t+1)), which are unbiased at the start.

    w is the weight, but at most 1 - 20 / n for n values: a mean over more than a twentieth of a falling curve would lie
    visibly above it. A weight of 0 returns the values themselves.
    """
    weight = min(weight, max(0.0, 1 - 20 / max(len(values), 1)))
    total, mass, out = 0.0, 0.0, np.empty(len(values))
    for i, value in enumerate(values):
        total, mass = weight * total + (1 - weight) * value, weight * mass + (1 - weight)
        out[i] = total / mass
    return out


def set_title(figure: Any, title: str) -> None:
    """Give a figure a title, in lines that are no wider than the figure: the names of runs are long."""
    figure.suptitle("\n".join(textwrap.wrap(title, int(8.5 * figure.get_figwidth()))))
