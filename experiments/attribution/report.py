"""report.md and its figures, from results.json. Axes: S seeds."""

import math
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from experiments.lanes import machines, not_run
from experiments.reports import Results, explain_family, show_family, table, tuning_section
from heinsen.figures import make_figure

N_ONSETS = 4  # cells in the figure of the training loss


def report(results: Results) -> list[str]:
    """Return the lines of report.md."""
    cells, settings = results["cells"], results["settings"]
    n_bytes = results["steps"] * settings["batch_size"] * settings["sequence_length"]
    first, parameters = next(iter(cells)), [cell["parameters"] for cell in cells.values()]
    hours = sum(cell["seconds"] for cell in cells.values()) / 3600
    above_first = {name: difference(results, name, first) for name in cells if name != first}
    by_change = {(change, name): difference(results, changed, name) for change, name, changed in changes(list(cells))}
    shown, shown_by_change = (show_family(each, "+.4f") for each in (above_first, by_change))
    return [
        f"# One change at a time, {results['size']} parameters",
        "",
        f"`python experiments/attribution/run.py --size={results['size']}`, {machines(cells)}: {hours:.1f} hours. "
        f"Models of {min(parameters):,} to {max(parameters):,} parameters, on "
        f"{n_bytes:,} bytes of the corpus of scripts/build_corpus.py in windows of {settings['sequence_length']:,}; "
        "rates tuned on half of the bytes with one seed, then "
        f"{len(cells[first]['seeds'])} other seeds. Bits per byte of the whole test split, in windows: mean over seeds "
        "+- their standard deviation. Recalled: nats per byte of the last bytes of n-grams that their window has had "
        "before, and training text hardly has.",
        "",
        *not_run(results),
        *table(
            ["", "bits per byte", f"above {first}", "parameters", "state", "rate"]
            + [f"recalled, n = {n}" for n in results["n_grams"]],
            [row(results, name, shown.get(name, "")) for name in cells],
        ),
        "",
        f"{explain_family(above_first)} State: numbers per sequence after a window, in all layers.",
        "",
        "One change between two cells, in bits per byte:",
        "",
        *table(["change", "of", "difference"], [[*pair, text] for pair, text in shown_by_change.items()]),
        "",
        explain_family(by_change),
        "",
        "![Bits per byte](attribution.png)",
        "",
        "![Training loss by seed, of the cells whose seeds end farthest apart](onset.png)",
        "",
        *tuning_section({name: cell["tuning"] for name, cell in cells.items()}, runs="runs of half the bytes"),
    ]


def changes(cells: list[str]) -> list[tuple[str, str, str]]:
    """(change, cell, changed cell) of all pairs of cells with one change: another attention, or one thing more."""
    found = []
    attentions = list(dict.fromkeys(name.split(", ")[0] for name in cells))
    for changed in cells:
        attention, *others = changed.split(", ")
        for other in attentions[: attentions.index(attention)]:
            found.append((f"{attention} instead of {other}", ", ".join([other, *others]), changed))
        for other in others:
            found.append((f"+ {other}", ", ".join([attention, *(x for x in others if x != other)]), changed))
    return sorted(pair for pair in found if pair[1] in cells)


def row(results: Results, name: str, above_first: str) -> list[str]:
    cell, seeds = results["cells"][name], bits_per_byte(results, name)
    recalled = np.mean(cell["recalled_nats"], axis=0) / np.maximum(results["recalled"], 1)
    return [
        name,
        f"{seeds.mean():.4f} +- {seeds.std(ddof=1):.4f}",
        above_first,
        f"{cell['parameters']:,}",
        f"{cell['state_numbers']:,}",
        f"{cell['learning_rate']:g}",
        *(f"{x:.3f}" for x in recalled),
    ]


def bits_per_byte(results: Results, name: str) -> Float[np.ndarray, " S"]:
    """Of each seed."""
    nats = np.asarray(results["cells"][name]["document_nats"])
    return nats.sum(1) / math.log(2) / sum(results["documents"]["num_bytes"])


def difference(results: Results, name: str, first: str) -> Float[np.ndarray, " S"]:
    """How far one cell is above another, for each seed."""
    return bits_per_byte(results, name) - bits_per_byte(results, first)


def draw(results: Results) -> Figure:
    """Draw the bits per byte of each cell, a dot for each seed, the lowest mean at the top."""
    bits: dict[str, Any] = {name: bits_per_byte(results, name) for name in results["cells"]}
    names = sorted(bits, key=lambda name: -bits[name].mean())
    figure, axes = make_figure(figsize=(8, 1.5 + 0.3 * len(names)))
    for place, name in enumerate(names):
        axes.plot(bits[name], [place] * len(bits[name]), "o", color="C0", ms=4, alpha=0.5, label="a seed")
        axes.plot(bits[name].mean(), place, "|", color="C3", ms=14, label="mean")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="bits per byte of the test split", ylim=(-0.6, len(names) - 0.4))
    axes.grid(alpha=0.3)
    return figure


def draw_onset(results: Results) -> Figure:
    """Draw the training loss of the cells whose seeds end farthest apart: one that falls has learned to copy."""
    cells, settings = results["cells"], results["settings"]
    apart = sorted(cells, key=lambda name: -bits_per_byte(results, name).std())[:N_ONSETS]
    n_bytes = results["steps"] * settings["batch_size"] * settings["sequence_length"]
    figure, axes = make_figure(figsize=(8, 5))
    for color, name in enumerate(apart):
        blocks = np.asarray(cells[name]["training"]) / math.log(2)
        at = n_bytes / 1e6 * np.arange(1, blocks.shape[1] + 1) / blocks.shape[1]
        first = blocks.shape[1] // 4  # before, all seeds fall alike
        for losses in blocks:
            axes.plot(at[first:], losses[first:], color=f"C{color}", lw=1.2, label=name)
    axes.set(xlabel="millions of bytes read", ylabel="training loss in bits per byte, a line for each seed")
    axes.grid(alpha=0.3)
    return figure


FIGURES = {"attribution.png": draw, "onset.png": draw_onset}
