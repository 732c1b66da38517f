"""report.md and recall.png, from results.json."""

import numpy as np
from matplotlib.figure import Figure

from experiments.lanes import machines, not_run
from experiments.reports import Results, make_figure, table


def report(results: Results) -> list[str]:
    """Return the lines of report.md."""
    cells, pairs, settings = results["cells"], results["pairs"], results["settings"]
    runs = sum(len(runs) for cell in cells.values() for runs in cell["runs"].values())
    hours = sum(cell["seconds"] for cell in cells.values()) / 3600
    return [
        "# Recall by the size of the state",
        "",
        f"`python experiments/recall_by_state/run.py`, {machines(cells)}: {runs} runs, "
        f"{hours:.2f} hours. Associative recall of {', '.join(map(str, pairs))} pairs in turn, "
        f"{results['steps']:,} steps of {settings['batch_size']} sequences where a row names no other number; 4 layers "
        "with a gated output and a convolution; Muon with "
        f"{settings['optimizer']['muon_multiple']:g} times Adam's rate. Right answers at the best rate, "
        f"{results['tests']} sequences of each number of pairs: the mean of the seeds, and each seed. State: numbers "
        "per sequence, in all layers.",
        "",
        *not_run(results),
        *table(
            ["", "parameters", "state", "rate", *(f"{n} pairs" for n in pairs), f"{pairs[-1]} pairs by seed"],
            [row(results, name) for name in cells],
        ),
        "",
        "![Right answers by the learning rate](recall.png)",
        "",
        "## Learning rates",
        "",
        f"Right answers of {pairs[-1]} pairs, of each seed.",
        "",
        *rate_table(results),
    ]


def row(results: Results, name: str) -> list[str]:
    cell = results["cells"][name]
    right = np.array([run["right"] for run in cell["runs"][cell["learning_rate"]]])
    return [
        name,
        f"{cell['parameters']:,}",
        f"{cell['state_numbers']:,}",
        f"{cell['learning_rate']:g}",
        *(f"{x:.1%}" for x in right.mean(0)),
        ", ".join(f"{x:.1%}" for x in right[:, -1]),
    ]


def rate_table(results: Results) -> list[str]:
    cells = results["cells"]
    rates = sorted({rate for cell in cells.values() for rate in cell["runs"]})
    cell_of = lambda runs: ", ".join(f"{run['right'][-1]:.1%}" for run in runs)
    rows = [[name, *(cell_of(cell["runs"].get(rate, [])) for rate in rates)] for name, cell in cells.items()]
    return table(["", *(f"{rate:g}" for rate in rates)], rows)


def draw(results: Results) -> Figure:
    """Draw the right answers of the most pairs by the learning rate, a line for the mean and a dot for each seed."""
    figure, axes = make_figure(figsize=(8, 5))
    for i, (name, cell) in enumerate(results["cells"].items()):
        rates = sorted(cell["runs"])
        right = np.array([[run["right"][-1] for run in cell["runs"][rate]] for rate in rates])
        axes.plot(rates, right.mean(1), color=f"C{i % 10}", ls="-" if i < 10 else "--", lw=1.2, label=name)
        axes.plot(rates, right, "o", color=f"C{i % 10}", ms=3, alpha=0.6)
    axes.axhline(0.9, color="0.6", lw=0.8, ls=":", label="90%")
    axes.set(xscale="log", xlabel="learning rate", ylabel=f"right answers of {results['pairs'][-1]} pairs")
    rates = sorted({rate for cell in results["cells"].values() for rate in cell["runs"]})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set(ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    return figure


FIGURES = {"recall.png": draw}
