"""report.md and the figures, from results.json."""

import statistics
from collections.abc import Collection, Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from experiments import reports
from experiments.reports import Results
from heinsen.figures import place_legend

CONTEXTS = 512, 65536  # tokens after which the size of the state is counted
QUESTIONS = {
    "parts": "What a gate is worth, and what helps beside it",
    "combined": "Parts together",
    "blocks": "The paper's block or GPT-2's, logarithms of values or values",
}
EARLIER = "signed_features=True", "qk_norm=True", "output=norm", "window=64"  # settings that heinsen no longer has
# The names in the figure of the sizes of states: the baselines, a gate, and the best parts beside it.
NAMED = {
    "paper's",
    "gate",
    "gate, convolution",
    "gate, output gate, convolution, no positions",
    "linear",
    "linear, gate",
    "linear, gate, output gate, convolution",
    "softmax",
    "softmax, GPT-2's block",
    "softmax, GPT-2's block, output gate, convolution",
}


# ---- words ----------------------------------------------------------------------------------------


def report(results: Results) -> list[str]:
    """Return the lines of report.md."""
    contests, window = results["contests"], results["settings"]["sequence_length"]
    references = contests["parts"]["bits_per_byte"] if "parts" in contests else {}
    return [
        "# Attention that forgets",
        "",
        f"`python experiments/forgetting/run.py`, {results['machine']}, jax {results['jax']}. Every contestant was "
        f"trained on the same {results['tokens']:,} bytes of the same text in windows of {window}, with as many "
        "parameters within 1%, the same optimizer and the best learning rate for it from one grid, which was extended "
        "if the best was at its end. Bits per byte are measured on the whole test split. +- is the standard deviation "
        "over seeds; in brackets are 95% intervals of the mean difference between runs with equal seeds (Student's t), "
        "not corrected for the number of comparisons. The parts that are combined were chosen by the same split. The "
        "state is how many numbers the layers keep of the text, after "
        f"{CONTEXTS[0]:,} and {CONTEXTS[1]:,} tokens. Signed features, a norm of queries and keys, a norm of the "
        "output and window layers did not help, and heinsen no longer has them: their rows are earlier ones.",
        "",
        "![Bits per byte by the size of the state](state_size.png)",
        "",
        "All contestants of the tables below. Names are those of the baselines, of a gate, and of the best parts.",
        "",
        *(line for name, found in contests.items() for line in contest_section(name, found, references)),
        *(
            line
            for name, found in contests.items()
            for line in reports.tuning_section(found["tuning"], f"Tuning: {QUESTIONS[name]}")
        ),
        *reports.sources_section(next(iter(contests.values()))["sources"]),
    ]


def contest_section(name: str, found: Mapping[str, Any], references: reports.Bits) -> list[str]:
    """Return the section of a contest, compared with the first of `references`, or of its own if there are none."""
    bits = found["bits_per_byte"]
    first = next(iter(references or bits))
    everyone = {**references, **bits}
    rows = [
        [
            each,
            reports.spread(bits[each]),
            "" if each == first else reports.versus(everyone, each, first),
            f"{found['parameters'][each]:,}",
            " / ".join(f"{n:,}" for n in found["state"][each]),
            f"{reports.best_rate(found['tuning'][each]):g}",
            describe(found["fields"][each]),
        ]
        for each in reports.ranked(bits)
    ]
    head = ["", "bits per byte", f"above {first}", "parameters", "state", "learning rate", "model"]
    return [f"## {QUESTIONS[name]}", "", *reports.table(head, rows), ""]


def describe(fields: Mapping[str, Any]) -> str:
    """Return the fields of a contestant's model in words."""
    settings = [f"{field}={value}" for field, value in fields.items()]
    return ", ".join(settings) + (" (earlier version)" if {*settings} & {*EARLIER} else "")


# ---- figures --------------------------------------------------------------------------------------


def draw_sizes(results: Results) -> Figure:
    """Draw the bits per byte by the size of the state, after as many tokens as are counted first; name `NAMED`."""
    figure, axes = reports.make_figure(figsize=(9, 6))
    points: dict[str, tuple[float, float]] = {}
    for index, (question, found) in enumerate(results["contests"].items()):
        means = {name: statistics.fmean(seeds.values()) for name, seeds in found["bits_per_byte"].items()}
        sizes = [found["state"][name][0] for name in means]
        axes.plot(sizes, list(means.values()), "o", color=f"C{index}", ms=5, label=QUESTIONS[question])
        points |= {name: (size, bits) for (name, bits), size in zip(means.items(), sizes, strict=True)}
    axes.set(xlabel=f"numbers in the state after {CONTEXTS[0]} tokens", ylabel="test (bits per byte)", xscale="log")
    smallest, largest = axes.get_xlim()
    axes.set_xlim(smallest, 4 * largest)  # room for names
    axes.grid(alpha=0.3)
    place_legend(figure)
    figure.canvas.draw()
    name_points(axes, points, NAMED & points.keys())
    return figure


def name_points(axes: Any, points: Mapping[str, tuple[float, float]], names: Collection[str]) -> None:
    """Write some points' names beside them, above the names and points that they would cover, with lines to them."""
    places = axes.transData.transform(list(points.values()))
    taken: list[Any] = [Bbox([place - 5, place + 5]) for place in places]

    def extent(label: Annotation) -> Any:
        label.get_window_extent()  # with its line; this places it
        return Text.get_window_extent(label)

    for name, point in sorted(((name, points[name]) for name in names), key=lambda item: item[1][1]):
        line = dict(arrowstyle="-", color="0.6", lw=0.5, shrinkA=0, shrinkB=3, relpos=(0, 0.5))
        label = axes.annotate(name, point, (9, -2), textcoords="offset points", fontsize=7, arrowprops=line)
        while any(extent(label).overlaps(other) for other in taken):
            label.set_position((9, label.get_position()[1] + 1))
        taken.append(extent(label))


FIGURES = {"state_size.png": draw_sizes}
