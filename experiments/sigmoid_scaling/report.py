"""The table and the figure of the study, from its results.json."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from experiments.sigmoid_scaling.forms import norms_by_law
from heinsen.figures import pyplot
from heinsen.files import write_figure

Study = Mapping[str, Any]  # from `measure.study`


def format_fit(fit: Sequence[float] | None) -> str:
    return "-" if fit is None else f"{fit[0]:.4f} +- {fit[1]:.4f}"


def format_concisely(fit: Sequence[float]) -> str:
    """Return the fit as 0.9974(8), with the error in units of the last digit."""
    digits = max(0, -math.floor(math.log10(fit[1]))) if fit[1] > 0 else 4
    return f"{fit[0]:.{digits}f}({round(fit[1] * 10**digits)})"


def table(found: Study) -> list[str]:
    """Return the lines of the table of one study."""
    long = found["fitted_long"]
    header = (
        f"{'':<22}{'growth, all n':>20}{f'growth, n >= {long[0]}':>21}{'law':>8}{'doubling':>11}{'law':>9}"
        f"{'departure':>11}{'convergence':>20}"
    )
    off_all, off_long = found["growth_of_fluctuation"]
    lines = [
        f"{found['tokens']}: {found['population']:,} to draw from; |I| = {found['norm_of_integral']:.3f}, n* = "
        f"{found['crossover']:.1f}: expected growth of independent tokens {off_all:+.4f} off its law, {off_long:+.4f} "
        f"for n >= {long[0]}",
        header,
    ]
    for row in found["results"]:
        law = "-" if row["doubling_predicted"] is None else f"{row['doubling_predicted']:.6f}"
        departure = "-" if row["doubling_departure"] is None else f"{row['doubling_departure']:.0e}"
        lines.append(
            f"{row['form']:<22}{format_fit(row['growth']):>20}{format_fit(row['growth_of_long']):>21}"
            f"{row['growth_predicted']:>8.2f}{row['doubling']:>11.6f}{law:>9}{departure:>11}"
            f"{format_fit(row['convergence']):>20}"
        )
    return lines


def plot(studies: Sequence[Study], path: Path) -> None:
    """Draw norms against n, convergence at alpha = 1, and doubling ratios against alpha.

    Lines are laws: for the norms sqrt(E |y|^2) of independent tokens, and dotted its limit n^(1 - alpha) |I|.
    """
    plt = pyplot()
    by_tokens = {found["tokens"]: found for found in studies}
    shown = [by_tokens[name] for name in ("random tokens", "text, in order") if name in by_tokens]
    n_panels = len(shown) + 2
    shape = (2, 2) if n_panels == 4 else (1, n_panels)
    style = {
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": 7,
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(*shape, figsize=(3.6 * shape[1], 2.9 * shape[0]), squeeze=False)
        *growth, convergence, doubling = axes.flat
        for axis, found in zip(growth, shown, strict=True):
            plot_growth(axis, found)
        plot_convergence(convergence, studies)
        plot_doubling(doubling, studies)
        for letter, axis in zip("abcd", axes.flat, strict=False):
            axis.set_title(f"({letter}) {axis.get_title()}", loc="left", fontsize=8)
            axis.set_title("")
        figure.tight_layout()
        write_figure(path, figure, dpi=200)
        plt.close(figure)


def plot_growth(axis: Axes, found: Study) -> None:
    lengths, square = found["lengths"], found["norm_of_integral"] ** 2
    n, sigmoids = np.array(lengths, float), [row for row in found["results"] if row["alpha"] is not None]
    colors = pyplot().get_cmap("viridis")(np.linspace(0, 0.9, len(sigmoids)))
    for row, color in zip(sigmoids, colors, strict=True):
        law = norms_by_law(lengths, row["alpha"], square, found["variance_of_one"])
        axis.loglog(n, law, color=color, linewidth=1)
        axis.loglog(n, n ** (1 - row["alpha"]) * square**0.5, ":", color=color, linewidth=1)
        label = rf"$\alpha$ = {row['alpha']:g}: {format_concisely(row['growth_of_long'])}"
        axis.loglog(n, row["norms"], "o", color=color, markersize=3, label=label)
    for name, marker in (("softmax", "s"), ("heinsen", "^")):
        row = next(row for row in found["results"] if row["form"] == name)
        label = f"{name}: {format_concisely(row['growth_of_long'])}"
        axis.loglog(n, row["norms"], marker, color="0.45", markersize=3, markerfacecolor="none", label=label)
    axis.set_xscale("log", base=2)
    axis.minorticks_off()
    axis.set_ylim(top=axis.get_ylim()[1] * 3e4)  # room for the legend
    axis.legend(
        title=rf"fitted exponent of $n \geq {found['fitted_long'][0]}$",
        title_fontsize=7,
        alignment="left",
        ncol=2,
        loc="upper left",
        handlelength=0.8,
        columnspacing=0.8,
    )
    axis.set(xlabel="keys $n$", ylabel=r"$\|y\|$", title=f"output norm, {found['tokens']}")


def plot_convergence(axis: Axes, studies: Sequence[Study]) -> None:
    for found, marker in zip(studies, "os^", strict=False):
        row = next((row for row in found["results"] if row["alpha"] == 1), None)
        if row is None:
            continue
        n, errors = np.array(found["lengths"], float), np.array(row["errors"]) / found["norm_of_integral"]
        label = f"{found['tokens']}: {format_concisely(row['convergence'])}"
        (line,) = axis.loglog(n, errors, marker, markersize=3, label=label)
        if not found["tokens"].endswith("in order"):
            axis.loglog(n, np.sqrt(found["crossover"] / n), color=line.get_color(), linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=axis.get_ylim()[0] / 6)  # room for the legend
    axis.legend(loc="lower left", title="fitted exponent of all $n$", title_fontsize=7, alignment="left")
    axis.set(xlabel="keys $n$", ylabel=r"$\|y - I\| \, / \, \|I\|$", title=r"convergence at $\alpha = 1$")


def plot_doubling(axis: Axes, studies: Sequence[Study]) -> None:
    alphas = [row["alpha"] for row in studies[0]["results"] if row["alpha"] is not None]
    grid = np.linspace(min(alphas), max(alphas), 100)
    axis.plot(grid, 2 ** (1 - grid), color="0.2", linewidth=1, label=r"$2^{1 - \alpha}$")
    for found, marker, size in zip(studies, "os^", (3, 5.5, 8), strict=False):
        rows = [row for row in found["results"] if row["alpha"] is not None]
        points = [row["alpha"] for row in rows], [row["doubling"] for row in rows]
        axis.plot(*points, marker, markersize=size, markerfacecolor="none", label=found["tokens"])
    for name, line in (("softmax", dict(color="0.8", linewidth=3)), ("heinsen", dict(color="0.2", linestyle=":"))):
        ratio = next(row["doubling"] for row in studies[0]["results"] if row["form"] == name)
        axis.axhline(ratio, zorder=0, label=name, **line)
    axis.legend(loc="upper right")
    axis.set(xlabel=r"$\alpha$", ylabel=r"$\|\hat y\| \, / \, \|y\|$", title="every token doubled")
