"""Plots of a run, and the page with all of its metrics."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from heinsen.figures import count_tokens, place_legend, pyplot
from heinsen.files import write_atomically, write_figure
from heinsen.pages import Series, render_chart, render_page
from heinsen.training.metrics import SAMPLE, metric_points, read_metrics


def plot_run(workdir: Path) -> list[Path]:
    """Plot a run from metrics.jsonl: the loss, the time constants of a forget gate, run.html. Return the paths."""
    entries = read_metrics(workdir)
    paths = [_plot_loss(workdir, entries), _write_page(workdir, entries)]
    if any(name.startswith("time_constant/") for entry in entries for name in entry):
        paths.append(_plot_time_constants(workdir, entries))
    return paths


def _plot_loss(workdir: Path, entries: Sequence[Mapping[str, Any]]) -> Path:
    """Training and validation loss over tokens."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, label, style in (("loss", "training", "-"), ("validation_loss", "validation", "o-")):
        points = metric_points(entries, name)
        if points:
            axes.plot(*zip(*points, strict=True), style, label=f"{label}: {points[-1][1]:.3f}", lw=1, ms=4)
    place_legend(figure)
    count_tokens(axes.xaxis)
    axes.set(title=workdir.name, xlabel="tokens", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    path = workdir / "plots" / "loss.png"
    write_figure(path, figure, dpi=120)
    plt.close(figure)
    return path


# Of run.html: (title, label of the vertical axis, whether that is logarithmic, names of metrics, or beginnings in */).
_CHARTS = (
    ("Loss", "nats per token", False, ("loss", "validation_loss")),
    ("Bits per byte", "bits per byte", False, ("bits_per_byte", "validation_bits_per_byte")),
    ("Validation loss by dataset", "nats per token", False, ("validation_loss/",)),
    ("Gradient norm", "norm before clipping", True, ("grad_norm",)),
    ("Parameter norm", "norm", False, ("param_norm",)),
    ("Learning rate", "learning rate", False, ("learning_rate",)),
    ("Throughput", "tokens/s", False, ("tokens_per_second",)),
    ("Model-FLOPs utilization, waiting for data", "share", False, ("mfu", "data_wait")),
    ("Skipped steps", "steps so far", False, ("skipped",)),
    ("Time constants of the forget gate by head", "tokens", True, ("time_constant/",)),
)


def _write_page(workdir: Path, entries: Sequence[Mapping[str, Any]]) -> Path:
    """Write run.html: a chart for each kind of metric that the run has logged."""
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    charts = []
    for title, label, is_log, wanted in _CHARTS:
        own = [name for name in names if name in wanted or any(w.endswith("/") and name.startswith(w) for w in wanted)]
        series = []
        for name, color in zip(own, _colors(len(own)), strict=True):
            if points := metric_points(entries, name):
                x, y = [x for x, _ in points], [y for _, y in points]
                series.append(Series(name.split("/", 1)[-1], x, y, color, points=len(points) < 60))
        if series:
            charts.append(render_chart(series, "tokens", label, title, is_log))
    note = (
        "The legends show the values under the mouse; a click on a name hides a line. Drag to zoom in, double click to "
        "see all again. The training loss is the mean since the last log."
    )
    title = f"Run {workdir.name}"
    body = f"<h1>{escape(title)}</h1><p class=note>{note}</p><div class=charts>{''.join(charts)}</div>"
    body += _render_samples(entries)
    path = workdir / "plots" / "run.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_page(title, body))
    return path


def _render_samples(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the samples, newest first, of which the newest is open; nothing where a run has none."""
    samples = [(entry["step"], entry[SAMPLE]) for entry in reversed(entries) if SAMPLE in entry]
    if not samples:
        return ""
    texts = [f"<summary>after step {step:,}</summary><pre class=text>{escape(text)}</pre>" for step, text in samples]
    return f"<h2>Samples</h2><details open>{'</details><details>'.join(texts)}</details>"


def _colors(n: int) -> list[str]:
    """Return different colors: of a few series the usual ones, of many a scale."""
    plt = pyplot()
    from matplotlib.colors import to_hex

    few = [f"C{i}" for i in range(n)] if n <= 4 else [plt.get_cmap("viridis")(0.9 * i / (n - 1)) for i in range(n)]
    return [to_hex(color) for color in few]


def _plot_time_constants(workdir: Path, entries: Sequence[Mapping[str, Any]]) -> Path:
    """Every head's time constant over tokens, one panel for each layer."""
    plt = pyplot()
    names = sorted({name for entry in entries for name in entry if name.startswith("time_constant/")}, key=_numbers)
    layers = sorted({_numbers(name)[0] for name in names})
    n_columns = min(4, len(layers))
    n_rows = -(-len(layers) // n_columns)
    figure, grid = plt.subplots(
        n_rows, n_columns, figsize=(3 * n_columns, 2.5 * n_rows), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes, layer in zip(grid.flat, layers, strict=False):
        own = [name for name in names if _numbers(name)[0] == layer]
        for j, name in enumerate(own):
            color = plt.get_cmap("viridis")(j / max(1, len(own) - 1))
            label = f"head {_numbers(name)[1]}"
            axes.plot(*zip(*metric_points(entries, name), strict=True), ".-", color=color, lw=1, ms=3, label=label)
        count_tokens(axes.xaxis)
        axes.set(title=f"layer {layer}", yscale="log")
        axes.grid(alpha=0.3)
    figure.suptitle(f"{workdir.name}: time constants of the forget gate, by head")
    for axes in grid[-1]:
        axes.set_xlabel("tokens")
    figure.supylabel("time constant (tokens)")
    place_legend(figure)
    path = workdir / "plots" / "time_constants.png"
    write_figure(path, figure, dpi=120)
    plt.close(figure)
    return path


def _numbers(name: str) -> tuple[int, ...]:
    """(layer, head) of time_constant/layer_0/head_3."""
    return tuple(int(part.rsplit("_", 1)[1]) for part in name.split("/")[1:])
