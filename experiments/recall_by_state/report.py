"""report.md and recall.png, from results.json."""

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.figure import Figure

from experiments.lanes import machines, not_run
from experiments.recall_by_state import config
from experiments.reports import Results, explain_family, show_family, table, tuning_section
from heinsen.figures import make_figure


def report(results: Results) -> list[str]:
    """Return the lines of report.md."""
    cells, pairs, settings = results["cells"], results["pairs"], results["settings"]
    hours = sum(cell["seconds"] for cell in cells.values()) / 3600
    return [
        "# Recall by the size of the state",
        "",
        f"`python experiments/recall_by_state/run.py`, {machines(cells)}: {hours:.2f} hours. Associative recall of "
        f"{', '.join(map(str, pairs))} pairs in turn, {results['steps']:,} steps of {settings['batch_size']} sequences "
        "where a row names no other number; 4 layers with a gated output and a convolution; Muon with "
        f"{settings['optimizer']['muon_multiple']:g} times Adam's rate, tuned with one seed, then three others"
        f"{tuned_with_all(results)}. Right answers of {results['tests']} sequences of each number of pairs: the mean "
        "of the seeds, and each seed. State: numbers per sequence, in all layers.",
        "",
        *not_run(results),
        *table(
            ["", "parameters", "state", "rate", *(f"{n} pairs" for n in pairs), f"{pairs[-1]} pairs by seed"],
            [row(results, name) for name in cells],
        ),
        "",
        *differences_section(results),
        "![Right answers by the size of the state](recall.png)",
        "",
        *tuning_section({name: cell["tuning"] for name, cell in cells.items()}, runs="the answers of whole runs"),
    ]


def tuned_with_all(results: Results) -> str:
    """The cells whose measured seeds include that of the tuning: an earlier plan tuned with all of them."""
    cells = results["cells"].items()
    names = [name for name, cell in cells if config.SEEDS[0] in (run["seed"] for run in cell["runs"])]
    return f" ({'; '.join(names)}: with the same three)" if names else ""


def right(results: Results, name: str) -> Float[np.ndarray, "seeds pairs"]:
    return np.array([run["right"] for run in results["cells"][name]["runs"]])


def differences_section(results: Results) -> list[str]:
    if not (family := differences(results)):
        return []
    return [
        f"Right answers of {results['pairs'][-1]} pairs above those of another cell, in percentage points:",
        "",
        *table(["", "above", "difference"], [[*key, text] for key, text in show_family(family, "+.1%").items()]),
        "",
        explain_family(family),
        "",
    ]


def differences(results: Results) -> dict[tuple[str, str], Float[np.ndarray, " seeds"]]:
    """{(cell, another): how much more of the most pairs each seed recalls}, of cells with the same seeds.

    The other is that of exponential features of the same shape, or for these and for changed settings that of the same
    kind without the change. Exponential features are also compared with linear attention as it was tuned anew, those
    with real values with both.
    """
    seeds = {name: [run["seed"] for run in cell["runs"]] for name, cell in results["cells"].items()}
    found, first = {}, next(iter(config.SHAPES))
    for name in seeds:
        kind, *_, last = name.split(", ")
        shape = last if last in config.SHAPES else first
        others = [f"{'exponential' if name in config.EQUAL else kind}, {shape}"]
        others += [f"linear, {shape}"] * ("real values" in name)
        others += [config.LINEAR_TUNED] * (name in (f"exponential, {first}", "exponential, real values"))
        for other in others:
            if name != other and seeds.get(other) == seeds[name]:
                found[name, other] = (right(results, name) - right(results, other))[:, -1]
    return found


def row(results: Results, name: str) -> list[str]:
    cell, found = results["cells"][name], right(results, name)
    return [
        name,
        f"{cell['parameters']:,}",
        f"{cell['state_numbers']:,}",
        f"{cell['learning_rate']:g}",
        *(f"{x:.1%}" for x in found.mean(0)),
        ", ".join(f"{x:.1%}" for x in found[:, -1]),
    ]


def draw(results: Results) -> Figure:
    """Draw the right answers of the most pairs by the state: a dot for each seed, a line for each kind's means."""
    figure, axes = make_figure(figsize=(8, 5))
    kinds: dict[str, dict[int, list[float]]] = {}
    for name, cell in results["cells"].items():
        kind = name.partition(",")[0] if name in config.EQUAL else name
        kinds.setdefault(kind, {}).setdefault(cell["state_numbers"], []).extend(right(results, name)[:, -1])
    dark_and_light = colormaps["tab20"].colors
    for color, (kind, found) in zip(dark_and_light[::2] + dark_and_light[1::2], kinds.items(), strict=False):
        states = sorted(found)
        axes.plot(states, [np.mean(found[n]) for n in states], "_-", ms=12, lw=1.2, color=color, label=kind)
        for n in states:
            axes.plot([n] * len(found[n]), found[n], "o", color=color, ms=3, alpha=0.6)
    axes.set(xscale="log", xlabel="numbers in the state", ylabel=f"right answers of {results['pairs'][-1]} pairs")
    ticks = (2_000, 5_000, 10_000, 20_000, 50_000)
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.minorticks_off()
    axes.set(ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    return figure


FIGURES = {"recall.png": draw}
