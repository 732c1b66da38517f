"""report.md and scaling.png, from results.json. Axes: W widths, R lengths of text, L seeds, D documents."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from experiments.lanes import machines, not_run
from experiments.reports import Results, bootstrap, interval, make_figure, paired_difference, table, tuning_section
from experiments.scaling import config
from experiments.scaling.law import Law

BASELINES = "gated softmax", "softmax", "linear"


def report(results: Results) -> list[str]:
    """Return the lines of report.md."""
    cells = results["cells"]
    hours = sum(cell["seconds"] for cell in cells.values()) / 3600
    settings, (_, cell) = results["settings"], next(iter(cells.items()))
    return [
        "# Parameters and text apart",
        "",
        f"`python experiments/scaling/run.py`, {machines(cells)}: {hours:.1f} hours. Attentions with parts in "
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
    """How far kinds are ahead of the baselines after them, and how that changes with parameters and with text."""
    lines, kinds = [], list(config.KINDS)
    for kind, baseline in ((x, y) for y in BASELINES for x in kinds[: kinds.index(y)]):
        pairs = pairs_of(results, kind, baseline)
        if not pairs:
            continue
        grid = {width: names for width, names in pairs.items() if width in config.WIDTHS and len(results["text"]) > 1}
        by_text = {width: interval(trend(results, [names])["text"], "+.4f") for width, names in grid.items()}
        rows = [[str(width), *differences(results, *pairs[width]), by_text.get(width, "")] for width in pairs]
        lines += [
            f"Nats per token by which {kind} is above {baseline}, with 95% intervals of a bootstrap over documents and "
            "seeds together:",
            "",
            *table(["width", *(f"{n / 1e6:.2f}M tokens" for n in results["text"]), "per doubling of text"], rows),
            "",
        ]
        if len(grid) > 1:
            both = trend(results, list(grid.values())).items()
            shown = (f"{interval(each, '+.4f')} per doubling of {what}" for what, each in both)
            lines += [f"Least squares over all of them: {', '.join(shown)}.", ""]
    return lines


def pairs_of(results: Results, kind: str, baseline: str) -> dict[int, tuple[str, str]]:
    """{width: (the cell of a kind, that of a baseline)} where both are done."""
    theirs = cells_of(results, baseline)
    return {width: (name, theirs[width]) for width, name in cells_of(results, kind).items() if width in theirs}


def differences(results: Results, ours: str, theirs: str) -> list[str]:
    """By length of text, with intervals."""
    own, other = (np.asarray(results["cells"][name]["document_nats"]) for name in (ours, theirs))
    tokens = np.asarray(results["tokens"])
    found = [interval(paired_difference(*each, tokens), "+.4f") for each in zip(own, other, strict=True)]
    return at_end(results, found)


def trend(results: Results, pairs: Sequence[tuple[str, str]]) -> dict[str, tuple[float, float, float]]:
    """The change of the difference with a doubling of parameters and of text, [value, low, high].

    Of one width the latter alone means something.
    """
    cells, tokens = results["cells"], np.asarray(results["tokens"])
    nats = [np.subtract(*(cells[name]["document_nats"] for name in names)) for names in pairs]
    above = np.stack(nats).reshape(-1, *np.shape(nats[0])[1:])  # [W R, L, D]
    n_params = [cells[theirs]["parameters"] for _, theirs in pairs]
    points = np.stack(np.meshgrid(np.log2(n_params), np.log2(results["text"]), indexing="ij"), -1).reshape(-1, 2)
    solve = np.linalg.pinv(np.column_stack([np.ones(len(points)), points]))[1:]

    def once(seeds: np.ndarray, documents: np.ndarray) -> np.ndarray:
        return solve @ (above[:, seeds][:, :, documents].sum((1, 2)) / len(seeds) / tokens[documents].sum())

    found = bootstrap(once, *above.shape[1:])
    return {what: tuple(each) for what, each in zip(("parameters", "text"), found.T.tolist(), strict=True)}


def laws_section(results: Results) -> list[str]:
    """The laws, and what they predict."""
    if not results["laws"]:
        return []
    rows = []
    for kind, law in results["laws"].items():
        c = law["coefficients"]
        name = f"{kind}, {config.NEXT_WIDTH}"
        found = f"{losses(results, name)[-1].mean():.4f}" if name in results["cells"] else "not trained yet"
        rows.append(
            [
                kind,
                interval(c["alpha"], ".3f"),
                interval(c["beta"], ".3f"),
                interval(np.exp(c["log_e"]), ".3f"),
                ", ".join(law["on_bound"]) or "none",
                f"{100 * law['residuals']:.2f}%",
                interval(law["prediction"], ".4f"),
                found,
            ]
        )
    head = ["", "alpha", "beta", "E", "on a bound", "residuals", f"predicted at width {config.NEXT_WIDTH}", "found"]
    return [
        "L(N, D) = E + A / N^alpha + B / D^beta in nats per token, N parameters and D tokens of text, fitted to the "
        f"means over seeds of widths {', '.join(map(str, config.WIDTHS))}, with 95% intervals of a residual bootstrap. "
        f"Predicted: the mean loss of the next width on {max(results['text']):,} tokens. A law with a coefficient on a "
        "bound of the fit says nothing beyond its runs and this prediction.",
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
            label = f"width {width}" if panel is panels[0, 0] else None
            for i, seeds in enumerate(losses(results, name).T):
                panel.plot(results["text"][-len(seeds) :], seeds, ".", color=color, ms=5, label=None if i else label)
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
