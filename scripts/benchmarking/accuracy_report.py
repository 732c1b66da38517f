"""Table and figure of the accuracy benchmark, from its results.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from heinsen.figures import place_legend
from heinsen.files import write_figure
from scripts.benchmarking.measure import describe_versions

Summary = Mapping[str, Any]
Row = Mapping[str, Any]


def kind(values: str, gated: bool) -> str:
    return f"{values} values{', forget gate' if gated else ''}"


def report(summary: Summary) -> list[str]:
    """Return the lines of the report: a row per implementation and case."""
    lines = [
        f"causal, H={summary['heads']} K=V={summary['features']}; {summary['device']}; {describe_versions()}",
        "errors against float64: log y absolute; y and gradients relative to the largest",
        f"{'implementation':<14} {'values':<24} {'sigma':>5} {'T':>6} {'output':>8} {'allowed':>8} "
        f"{'gradient':>8} {'allowed':>8} {'worst by':<10}",
    ]
    for row in summary["rows"]:
        name, error = worst_gradient(row)
        lines.append(
            f"{row['implementation']:<14} {kind(row['values'], row['gated']):<24} {row['sigma']:>5g} "
            f"{row['tokens']:>6} {_number(row['errors']['y']):>8} {row['tolerances']['y']:>8.0e} "
            f"{_number(error):>8} {row['tolerances'][name]:>8.0e} {name:<10} {'pass' if row['passed'] else 'FAIL'}"
        )
    return [*lines, *_left_out(summary), verdict(summary)]


def _left_out(summary: Summary) -> list[str]:
    return [
        f"{'FAIL' if r['failed'] else 'left out'}: {r['implementation']}, {kind(r['values'], r['gated'])}, "
        f"T = {r['tokens']}: {r['why']}"
        for r in summary["left_out"]
    ]


def verdict(summary: Summary) -> str:
    """Return one line: how many rows pass, and how many there are not."""
    rows, left_out = summary["rows"], summary["left_out"]
    text = f"{sum(row['passed'] for row in rows)} of {len(rows)} rows within their tolerances"
    if failed := sum(r["failed"] for r in left_out):
        text += f"; {failed} failed to run"
    if rest := len(left_out) - sum(r["failed"] for r in left_out):
        text += f"; {rest} left out"
    return text


def worst_gradient(row: Row) -> tuple[str, float | None]:
    """Return the input whose gradient has the largest error, with the error; None: it is not finite."""
    gradients = [(name, error) for name, error in row["errors"].items() if name != "y"]
    return max(gradients, key=lambda each: float("inf") if each[1] is None else each[1])


def _number(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"


def plot(summary: Summary, path: Path) -> Path:
    """Draw errors relative to their tolerances by sigma: the largest over lengths, with a panel per kind of values."""
    rows = summary["rows"]
    kinds = list(dict.fromkeys((row["values"], row["gated"]) for row in rows))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    n_panels = max(1, len(kinds))
    figure, axes = plt.subplots(
        1, n_panels, figsize=(4 * n_panels, 4.5), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (values, gated) in zip(axes[0], kinds, strict=False):
        for i, name in enumerate(names):
            which = dict(implementation=name, values=values, gated=gated)
            chosen = [row for row in rows if which.items() <= row.items()]
            for gradient, style in ((False, "o-"), (True, "s--")):
                found: dict[float, float] = {}
                for row in chosen:
                    found[row["sigma"]] = max(found.get(row["sigma"], 0.0), _ratio(row, gradient))
                label = f"{name}, {'gradients' if gradient else 'output'}"
                axis.plot(found.keys(), found.values(), style, color=f"C{i}", label=label)
        axis.axhline(1.0, color="black", linewidth=1)
        axis.set(xscale="log", yscale="log", xlabel="sigma of the inputs", title=kind(values, gated))
        sigmas = sorted({row["sigma"] for row in rows})
        axis.set_xticks(sigmas, [f"{sigma:g}" for sigma in sigmas])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("error / tolerance")
    place_legend(figure)
    figure.suptitle(f"accuracy against float64: {summary['device']}")
    write_figure(path, figure, dpi=120)
    plt.close(figure)
    return path


def _ratio(row: Row, gradient: bool) -> float:
    """Return an error relative to its tolerance; NaN, which is not drawn, if it is not finite."""
    name, error = worst_gradient(row) if gradient else ("y", row["errors"]["y"])
    return float("nan") if error is None else error / row["tolerances"][name]
