"""report.md and copying.png, from results.json."""

import numpy as np
from matplotlib.figure import Figure

from experiments.lanes import machines, not_run
from experiments.reports import Results, explain_family, show_family, table
from heinsen.figures import make_figure


def report(results: Results) -> list[str]:
    """Return the lines of report.md."""
    cells, n_bytes = results["cells"], results["bytes_per_step"]
    first, parameters = next(iter(cells)), [cell["parameters"] for cell in cells.values()]
    seconds = sum(cell["seconds"] for cell in cells.values())
    bits = {name: np.asarray(cell["bits_per_byte"]) for name, cell in cells.items()}
    above_first = {name: x - bits[first] for name, x in bits.items() if name != first}
    shown = show_family(above_first, "+.4f")
    return [
        "# Copying",
        "",
        f"`python experiments/copying/run.py`, {machines(cells)}: {seconds / 60:.1f} minutes. Models of "
        f"{min(parameters):,} to {max(parameters):,} parameters on {results['steps'] * n_bytes:,} bytes in windows of "
        f"{results['sequence_length']:,}, rate {results['learning_rate']:g}, "
        f"{len(cells[first]['seeds'])} seeds. Recalled bytes end a 4-gram that their window has had before, and "
        f"training text hardly has. A run copies from where its loss on them is below {results['threshold']:g} nats, "
        f"looked at every {results['every'] * n_bytes:,} bytes.",
        "",
        *not_run(results),
        *table(
            ["", "copies after, by seed", "nats on recalled bytes, by seed", "bits per byte", f"above {first}"],
            [
                [name, onsets(results, name), ", ".join(f"{x:.2f}" for x in cell["recalled"])]
                + [f"{bits[name].mean():.4f} +- {bits[name].std(ddof=1):.4f}", shown.get(name, "")]
                for name, cell in cells.items()
            ],
        ),
        "",
        explain_family(above_first),
        "",
        "![Loss on recalled bytes](copying.png)",
    ]


def onsets(results: Results, name: str) -> str:
    """How many bytes each seed had read when it was first seen to copy."""
    each_look = results["every"] * results["bytes_per_step"]
    copies = np.asarray(results["cells"][name]["recalled_meanwhile"]) < results["threshold"]
    return ", ".join(f"{each_look * (1 + seen.argmax()) / 1e6:.1f}M" if seen.any() else "never" for seen in copies)


def draw(results: Results) -> Figure:
    """Draw the loss on recalled bytes while the models are trained: a line for each seed."""
    each_look = results["every"] * results["bytes_per_step"] / 1e6
    figure, axes = make_figure(figsize=(8, 5))
    for color, (name, cell) in enumerate(results["cells"].items()):
        for losses in np.asarray(cell["recalled_meanwhile"]):
            axes.plot(each_look * np.arange(1, 1 + len(losses)), losses, color=f"C{color}", lw=1.2, label=name)
    axes.axhline(results["threshold"], color="0.5", lw=0.8, ls="--", label="copies")
    axes.set(xlabel="millions of bytes read", ylabel="nats per recalled byte, a line for each seed")
    axes.grid(alpha=0.3)
    return figure


FIGURES = {"copying.png": draw}
