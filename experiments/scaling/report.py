"""report.md and scaling.png, from results.json. Axes: W widths, R lengths of text, L seeds, D documents."""

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from experiments.lanes import machines, not_run
from experiments.reports import (
    Difference,
    Results,
    explain_family,
    seed_interval,
    show_family,
    table,
    tuning_section,
)
from experiments.scaling import config
from experiments.scaling.law import Law
from heinsen.figures import make_figure

BASELINES = "gated softmax", "softmax", "linear"
DOUBLING = "doubling"


def report(results: Results) -> list[str]:
    """Return the lines of report.md."""
    cells = results["cells"]
    hours = sum(cell["seconds"] for cell in cells.values()) / 3600
    settings, cell = results["settings"], next(iter(cells.values()))
    return [
        "# Parameters and text apart",
        "",
        f"`python experiments/scaling/run.py`, {machines(cells)}: {hours:.1f} hours. Attentions with additions in "
        f"{cell['model']['n_layers']} layers of GPT-2's block, Muon, windows of {settings['sequence_length']:,}; each "
        f"cell's rate is tuned on {results['text'][-2]:,} tokens with one seed, then {len(cell['seeds'])} others. Nats "
        f"per token (a byte, or a document's end) of {round(sum(results['tokens'])):,} tokens of the test split: mean "
        "over seeds +- their standard deviation.",
        "",
        *not_run(results),
        *table(
            ["", "parameters", "rate", *(f"{n / 1e6:.2f}M tokens" for n in results["text"])],
            [row(results, name) for name in cells],
        ),
        "",
        *leads_section(results),
        *laws_section(results),
        "![Loss by text and parameters](scaling.png)",
        "",
        *tuning_section({name: each["tuning"] for name, each in cells.items()}, runs="runs on half of the text"),
    ]


def row(results: Results, name: str) -> list[str]:
    cell, each = results["cells"][name], losses(results, name)
    spread = [f"{seeds.mean():.4f} +- {seeds.std(ddof=1):.4f}" for seeds in each]
    return [name, f"{cell['parameters']:,}", f"{cell['learning_rate']:g}", *at_end(results, spread)]


def at_end(results: Results, columns: list[str]) -> list[str]:
    """Columns of all lengths of text, of which a cell may have the last only."""
    return [""] * (len(results["text"]) - len(columns)) + columns


def losses(results: Results, name: str) -> Float[np.ndarray, "R L"]:
    """Nats per token."""
    return np.sum(results["cells"][name]["document_nats"], axis=-1) / sum(results["tokens"])


def cells_of(results: Results, kind: str) -> dict[int, str]:
    """{width: name} of the cells of a kind that are done."""
    return {cell.width: name for name, cell in config.CELLS.items() if name in results["cells"] and cell.kind == kind}


def leads_section(results: Results) -> list[str]:
    """How far kinds are ahead of the baselines after them, and how that changes as text doubles and over widths."""
    lines, kinds = [], list(config.KINDS)
    heads = [f"{n / 1e6:.2f}M tokens" for n in results["text"]]
    for kind, baseline in ((x, y) for y in BASELINES for x in kinds[: kinds.index(y)]):
        family = differences(results, kind, baseline)
        if not family:
            continue
        shown, widths = show_family(family, "+.4f"), list(dict.fromkeys(width for width, _ in family))
        columns = [*range(len(heads)), DOUBLING]
        lines += [
            f"Nats per token by which {kind} is above {baseline}:",
            "",
            *table(
                ["width", *heads, "per doubling of text"],
                [[str(width), *(shown.get((width, each), "") for each in columns)] for width in widths],
            ),
            "",
            explain_family(family),
        ]
        if len(widths) > 1:
            over, n = over_widths(results, kind, baseline), len(widths)
            lines[-1] += (
                f" Mean over the widths on the most text: {over.value:+.4f} [{over.low:+.4f}, {over.high:+.4f}], by "
                f"Student's t over {n} widths, each tuned with one seed ({n - 1} degrees of freedom)."
            )
        lines += [""]
    return lines


def pairs_of(results: Results, kind: str, baseline: str) -> dict[int, tuple[str, str]]:
    """{width: (the cell of a kind, that of a baseline)} where both are done."""
    theirs = cells_of(results, baseline)
    return {width: (name, theirs[width]) for width, name in cells_of(results, kind).items() if width in theirs}


def differences(results: Results, kind: str, baseline: str) -> dict[tuple[int, int | str], Float[np.ndarray, " L"]]:
    """{(width, place of a length of text, or DOUBLING): how far each seed of a kind is above that of a baseline}.

    DOUBLING: how much that changes as text doubles, by least squares.
    """
    found: dict[tuple[int, int | str], Float[np.ndarray, " L"]] = {}
    for width, names in pairs_of(results, kind, baseline).items():
        own, other = (losses(results, name) for name in names)
        first = len(results["text"]) - len(own)  # a cell may have the last lengths only
        found |= {(width, first + place): above for place, above in enumerate(own - other)}
        if len(own) > 1:
            found[width, DOUBLING] = np.polyfit(np.log2(results["text"]), own - other, 1)[0]
    return found


def over_widths(results: Results, kind: str, baseline: str) -> Difference:
    """The mean difference over widths on the most text, as if each width were drawn at random."""
    last = lambda name: losses(results, name)[-1].mean()
    pairs = pairs_of(results, kind, baseline).values()
    return seed_interval(np.array([last(ours) - last(theirs) for ours, theirs in pairs]))


def laws_section(results: Results) -> list[str]:
    """The laws, and what they predict."""
    if not results["laws"]:
        return []
    rows = []
    for kind, law in results["laws"].items():
        name, (value, low, high) = f"{kind}, {config.NEXT_WIDTH}", law["prediction"]
        found = f"{losses(results, name)[-1].mean():.4f}" if name in results["cells"] else "not trained yet"
        c = {name: best for name, (best, *_) in law["coefficients"].items()}
        rows.append(
            [
                kind,
                f"{c['alpha']:.3f}",
                f"{c['beta']:.3f}",
                f"{np.exp(c['log_e']):.3f}",
                ", ".join(law["on_bound"]) or "none",
                f"{100 * law['residuals']:.2f}%",
                f"{value:.4f} [{low:.4f}, {high:.4f}]",
                f"{high - low:.3f}",
                f"{law['coverage']:.0%}",
                found,
            ]
        )
    head = ["", "alpha", "beta", "E", "on a bound", "residuals", f"predicted at width {config.NEXT_WIDTH}"]
    head += ["width of the interval", "coverage", "found"]
    return [
        "L(N, D) = E + A / N^alpha + B / D^beta in nats per token, N parameters and D tokens of text, fitted to the "
        f"means over seeds of widths {', '.join(map(str, config.WIDTHS))}. Predicted: the mean loss of the next width "
        f"on {max(results['text']):,} tokens, with an interval of a residual bootstrap that was meant for 95%, and its "
        "width; coverage is the share of simulated experiments, with this law and such residuals, whose interval holds "
        "the new mean. An interval much wider than the differences between kinds does not test a law. One with a "
        "coefficient on a bound of the fit says nothing beyond its runs and this prediction.",
        "",
        *table(head, rows),
        "",
    ]


def draw(results: Results) -> Figure:
    """Draw the loss by text: a panel for each kind, a color for each width, dots for seeds, lines for the law."""
    kinds = [kind for kind in config.KINDS if cells_of(results, kind)]
    figure, panels = make_figure(1, len(kinds), figsize=(1 + 3.6 * len(kinds), 4.5), sharey=True, squeeze=False)
    along = np.geomspace(min(results["text"]), max(results["text"]))
    for panel, kind in zip(panels.flat, kinds, strict=True):
        found = results["laws"].get(kind)
        law = found and Law(*(value for value, *_ in found["coefficients"].values()))
        for width, name in cells_of(results, kind).items():
            color = f"C{(*config.WIDTHS, config.NEXT_WIDTH).index(width)}"
            for seeds in losses(results, name).T:
                text = results["text"][-len(seeds) :]
                panel.plot(text, seeds, ".", color=color, ms=5, label=f"width {width}")
            if law:
                panel.plot(along, law(results["cells"][name]["parameters"], along), color=color, lw=1)
        if found:
            value, low, high = found["prediction"]
            panel.errorbar(max(along), value, [[value - low], [high - value]], fmt="_", color="0.3", capsize=3)
        panel.set(xscale="log", yscale="log", title=kind, xlabel="tokens of text")
        panel.set_xticks(results["text"], [f"{n / 1e6:.1f}M" for n in results["text"]])
        panel.tick_params(axis="x", which="minor", labelbottom=False)
        panel.yaxis.set_major_formatter("{x:.1f}")
        panel.yaxis.set_minor_formatter("{x:.1f}")
        panel.grid(alpha=0.3, which="both")
    panels[0, 0].set_ylabel("nats per token")
    return figure


FIGURES = {"scaling.png": draw}
