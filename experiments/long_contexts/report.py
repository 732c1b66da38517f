"""report.md and contexts.png, from results.json. Axes: L seeds, D documents, P ranges of positions."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from experiments.lanes import machines, not_run
from experiments.reports import Results, explain_family, show_family, table
from heinsen.figures import make_figure

READINGS = {"windows": "windows", "sliding": "windows that slide by half", "stream": "stream"}


def n_ranges(n_windows: int) -> int:
    """How many ranges of positions there are in so many windows, a power of two: the first, up to 2, 4, 8, ..."""
    return n_windows.bit_length()


def report(results: Results) -> list[str]:
    """Return the lines of report.md."""
    cells, window = results["cells"], results["settings"]["sequence_length"]
    tokens = np.asarray(results["tokens"])
    hours = sum(cell["seconds"] for cell in cells.values()) / 3600
    head = ["", "read as", "state, bytes", *spans(results)]
    firsts = first_of_block(results)
    above = differences(results)
    shown = show_family(above, "+.3f")
    return [
        f"# Long contexts, {results['size']} parameters",
        "",
        f"`python experiments/long_contexts/run.py --size={results['size']}`, {machines(cells)}: {hours:.1f} hours. "
        f"Cells of experiments/attribution, trained in windows of {window:,} at their rates, "
        f"{len(next(iter(cells.values()))['seeds'])} seeds. Nats per byte by position in {len(tokens)} documents of "
        "the validation and test splits, mean over seeds. A window knows nothing of what is before it. Windows that "
        "slide by half are read for their second half, so that at least half a window is before each byte. A stream is "
        "read once, with the state of all before it.",
        "",
        *not_run(results),
        *table(head, [row(results, name, reading) for name, reading in readings(results)]),
        "",
        f"Bytes of state in float32. {', '.join(f'{n:,}' for n in np.count_nonzero(tokens, axis=0))} documents reach "
        "these positions.",
        "",
        f"Nats per byte above a cell of the same block as a stream ({'; '.join(dict.fromkeys(firsts.values()))}):",
        "",
        *table(
            head[:2] + head[3:],
            [
                [name, READINGS[reading], *(shown.get((name, reading, i), "") for i in range(tokens.shape[1]))]
                for name, reading in readings(results)
                if (name, reading) != (firsts[name], "stream")
            ],
        ),
        "",
        f"{explain_family(above)} Within the first window all ways are that of the stream.",
        "",
        "![Loss by position, of the cells with additions in GPT-2's block](contexts.png)",
    ]


def first_of_block(results: Results) -> dict[str, str]:
    """{cell: the first cell in its block}."""
    block = {name: cell["model"].get("block") for name, cell in results["cells"].items()}
    return {name: next(first for first in block if block[first] == block[name]) for name in block}


def readings(results: Results) -> Iterator[tuple[str, str]]:
    """All cells and ways of reading."""
    return ((name, reading) for name in results["cells"] for reading in READINGS)


def spans(results: Results) -> list[str]:
    window, n = results["settings"]["sequence_length"], len(results["tokens"][0])
    return [f"1 to {window:,}", *(f"{window * 2 ** (i - 1) + 1:,} to {window * 2**i:,}" for i in range(1, n))]


def row(results: Results, name: str, reading: str) -> list[str]:
    state = 4 * results["cells"][name]["state_numbers"][reading]
    means = [f"{x:.3f}" for x in losses(results, name, reading).mean(0)]
    return [name, READINGS[reading], f"{state:,}", *means, *[""] * (len(spans(results)) - len(means))]


def losses(results: Results, name: str, reading: str) -> Float[np.ndarray, "L P"]:
    """Nats per byte of each seed."""
    nats = np.asarray(results["cells"][name]["nats"][reading]).sum(1)
    return nats / np.asarray(results["tokens"]).sum(0)[: nats.shape[1]]


def differences(results: Results) -> dict[tuple[str, str, int], Float[np.ndarray, " L"]]:
    """{(cell, way of reading, range): how far each seed is above the first cell of the block, read as a stream}.

    Within the first window all ways of reading are that of the stream.
    """
    found = {}
    for name, first in first_of_block(results).items():
        stream = losses(results, first, "stream")
        for reading in READINGS:
            own = losses(results, name, reading)
            if name != first or reading != "stream":
                n = min(own.shape[1], stream.shape[1])
                found |= {(name, reading, i): own[:, i] - stream[:, i] for i in range(reading != "stream", n)}
    return found


def draw(results: Results) -> Figure:
    """Draw the loss by position in the cells of GPT-2's block, in windows that slide and as a stream."""
    figure, axes = make_figure(figsize=(8, 5))
    window = results["settings"]["sequence_length"]
    names = [name for name, cell in results["cells"].items() if cell["model"].get("block") == "gpt2"]
    for color, name in enumerate(names):
        for reading, style in (("sliding", "--"), ("stream", "-")):
            mean = losses(results, name, reading).mean(0)
            at, label = window * 2.0 ** np.arange(len(mean)), f"{name.partition(',')[0]}, {READINGS[reading]}"
            axes.plot(at, mean, style, marker=".", color=f"C{color}", lw=1.4, label=label)
    in_windows = [losses(results, name, "sliding").mean(0) for name in names]
    axes.set(xlabel="position, up to so many bytes", ylabel="nats per byte")
    axes.set(ylim=(min(map(np.min, in_windows)) - 0.1, max(map(np.max, in_windows)) + 0.3))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    return figure


FIGURES = {"contexts.png": draw}
