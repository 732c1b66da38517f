"""Plots of a run."""

from pathlib import Path

from heinsen.files import write_figure
from heinsen.training.metrics import metric_points, read_metrics


def plot_loss(workdir: Path) -> Path:
    """Plot training and validation loss over tokens from metrics.jsonl; return the path, WORKDIR/plots/loss.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    entries = read_metrics(workdir)
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, label, style in (("loss", "training", "-"), ("validation_loss", "validation", "o-")):
        points = metric_points(entries, name)
        if points:
            axes.plot(*zip(*points, strict=True), style, label=f"{label}: {points[-1][1]:.3f}", lw=1, ms=4)
            axes.legend()
    axes.set(title=workdir.name, xlabel="tokens", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    path = workdir / "plots" / "loss.png"
    write_figure(path, figure, dpi=120)
    plt.close(figure)
    return path
