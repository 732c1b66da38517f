"""Plots of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heinsen.figures import count_tokens, make_figure, pyplot, save_figure, set_title
from heinsen.training.metrics import metric_points, read_metrics


def plot_run(workdir: Path) -> list[Path]:
    """Plot a run from metrics.jsonl: loss and distances from a teacher, and time constants. Return the paths."""
    entries = read_metrics(workdir)
    paths = [_plot_loss(workdir, entries)]
    if any(name.startswith("time_constant/") for entry in entries for name in entry):
        paths.append(_plot_time_constants(workdir, entries))
    return paths


def _plot_loss(workdir: Path, entries: Sequence[Mapping[str, Any]]) -> Path:
    """Training and validation loss over tokens; above, in a conversion, each layer's distance from the teacher."""
    distances = sorted({name for entry in entries for name in entry if name.startswith("distance/")}, key=_numbers)
    panels = 2 if distances else 1
    figure, grid = make_figure(panels, figsize=(8, 2 + 3 * panels), sharex=True, squeeze=False)
    for i, name in enumerate(distances):
        color, label = pyplot().get_cmap("viridis")(i / len(distances)), name.split("/")[1].replace("_", " ")
        grid[0, 0].plot(*zip(*metric_points(entries, name), strict=True), ".-", color=color, lw=1, ms=3, label=label)
        grid[0, 0].set(ylabel="distance from the teacher's attention", yscale="log")
        grid[0, 0].grid(alpha=0.3)
    axes = grid[-1, 0]
    for name, label, style in (("loss", "training", "-"), ("validation_loss", "validation", "o-")):
        points = metric_points(entries, name)
        if points:
            axes.plot(*zip(*points, strict=True), style, label=f"{label}: {points[-1][1]:.3f}", lw=1, ms=4)
    count_tokens(axes.xaxis)
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    set_title(figure, workdir.name)
    axes.grid(alpha=0.3)
    path = workdir / "plots" / "loss.png"
    save_figure(path, figure)
    return path


def _plot_time_constants(workdir: Path, entries: Sequence[Mapping[str, Any]]) -> Path:
    """Every head's time constant over tokens, one panel for each layer."""
    names = sorted({name for entry in entries for name in entry if name.startswith("time_constant/")}, key=_numbers)
    layers = sorted({_numbers(name)[0] for name in names})
    n_columns = min(4, len(layers))
    n_rows = -(-len(layers) // n_columns)
    size = (max(6, 3 * n_columns), 1.5 + 2 * n_rows)
    figure, grid = make_figure(n_rows, n_columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    for i, (axes, layer) in enumerate(zip(grid.flat, layers, strict=False)):
        heads = [name for name in names if _numbers(name)[0] == layer]
        for j, name in enumerate(heads):
            color = pyplot().get_cmap("viridis")(j / max(1, len(heads) - 1))
            label = f"head {_numbers(name)[1]}"
            axes.plot(*zip(*metric_points(entries, name), strict=True), ".-", color=color, lw=1, ms=3, label=label)
        count_tokens(axes.xaxis)
        axes.set(title=f"layer {layer}", yscale="log")
        axes.grid(alpha=0.3)
        if i + n_columns >= len(layers):  # no panel below
            axes.set(xlabel="tokens")
            axes.tick_params(labelbottom=True)
    for axes in grid.flat[len(layers) :]:
        axes.remove()
    set_title(figure, f"{workdir.name}: time constants of the forget gate, by head")
    figure.supylabel("time constant (tokens)", fontsize="medium")
    path = workdir / "plots" / "time_constants.png"
    save_figure(path, figure)
    return path


def _numbers(name: str) -> tuple[int, ...]:
    """(layer, head) of time_constant/layer_0/head_3."""
    return tuple(int(part.rsplit("_", 1)[1]) for part in name.split("/")[1:])
