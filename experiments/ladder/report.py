"""report.md and ladder.png, from results.json."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from experiments import reports
from experiments.reports import Losses, Results, interval, table
from experiments.scaling.law import Law

SOFTMAX = "softmax"
TOKENS_PER_BYTE = 0.29335  # GPT-2's tokens per byte of The Pile (Gao et al. 2020, section 3.1)


def report(results: Results) -> list[str]:
    """Return the lines of report.md."""
    size, largest = results["next"][0], max(results["runs"], key=lambda run: (run["n_params"], run["tokens"]))
    compare = {run["kind"]: run["loss"] for run in results["next"]}
    tuned = " and ".join(results["tuning"])
    return [
        "# A scaling ladder",
        "",
        f"**At {size['size']} ({size['n_params'] / 1e6:.1f}M parameters, {size['tokens']:,} bytes) the losses in nats "
        "per token, and their differences to softmax, are: "
        + "; ".join(
            f"{kind} {loss:.4f}" + ("" if kind == SOFTMAX else f" ({loss - compare[SOFTMAX]:+.4f})")
            for kind, loss in compare.items()
        )
        + ". This size is beyond those the laws were fitted to, and was predicted before it was trained: "
        + "; ".join(miss(results["prediction"][run["kind"]], run) for run in results["next"])
        + ". "
        + heading(results)
        + "**",
        "",
        f"`python experiments/ladder/run.py`, {results['machine']}, jax {results['jax']}. Models of equal size "
        f"(within 1%), up to {largest['n_params']:,} parameters, trained on equal numbers of bytes, which grow as the "
        f"root of the parameters, in windows of {results['settings']['sequence_length']}, one seed of each; "
        "L(N, D) = E + A / N^alpha + B / D^beta in nats per token (a byte, "
        f"or a document's end), with 95% intervals of a residual bootstrap. Learning rates are tuned at {tuned}, and "
        "are a power of the width between and beyond them. Softmax attention with the gated model's parts (a gated "
        "output and a short convolution) is not among the kinds: its seeds differ by 0.2 bits per byte "
        "([attribution](../attribution/report.md)), so that one seed of each would determine no law.",
        "",
        "The interval of a prediction is meant to hold 95% of new runs: it accounts for the uncertainty of the law and "
        "for the residuals. A coefficient whose interval is wide is not determined by so few sizes; the law between "
        "them may be all the same. The fit bounds E below by 0.0025: an E there means that these losses do not show "
        "yet where they end. No interval accounts for what the law leaves out: another form, learning rates that "
        "are not the best any more, more layers, other text.",
        "",
        *law_table(results),
        "",
        "![Losses, laws and residuals](ladder.png)",
        "",
        *farther_section(results),
        *rates_section(results),
        "## Runs",
        "",
        "Validation loss in nats per token, and its distance from the law; for the next size, from the prediction.",
        "",
        *run_table(results),
    ]


def heading(results: Results) -> str:
    """Return the sentence on where the curves of the kinds are heading."""
    near, far = results["farther"][0], results["farther"][-1]
    others = [kind for kind in results["laws"] if kind != SOFTMAX]
    say = lambda point: "; ".join(f"{kind} {interval(point['kinds'][kind]['above'], '+.3f')}" for kind in others)
    return (
        f"By the laws the differences to softmax are {say(near)} nats per byte at {near['n_params'] / 1e6:g}M "
        f"parameters and {near['tokens'] / 1e6:g}M bytes, and {say(far)} at the paper's size and number of tokens, "
        "where nothing here determines them."
    )


def farther_section(results: Results) -> list[str]:
    rows = []
    for point in results["farther"]:
        cells = [
            interval(found["loss"]) + ("" if kind == SOFTMAX else f"; {interval(found['above'], '+.3f')}")
            for kind, found in point["kinds"].items()
        ]
        rows.append([f"{point['n_params']:,.0f}", f"{point['tokens']:,.0f}", *cells])
    return [
        "## Where the laws lead",
        "",
        "Nats per token by the laws, and the difference to softmax, with 95% intervals. The last two rows are 125M "
        "parameters on 15e9 and on 300e9 tokens of GPT-2."
        + "".join(
            f" At the next size {run['kind']} was outside its interval already: its intervals here are too narrow."
            for run in results["next"]
            if not inside(results["prediction"][run["kind"]], run)
        ),
        "",
        *table(["parameters", "bytes", *results["laws"]], rows),
        "",
        f"In nats per GPT-2 token, of which The Pile has {TOKENS_PER_BYTE} per byte, the last two rows are "
        + ", and ".join(per_gpt2_token(point["kinds"]) for point in results["farther"][-2:])
        + ". Reported are 2.416 for a softmax GPT on 15e9 tokens (Poli et al. 2023) and 2.47 for the paper's model on "
        "300e9.",
        "",
    ]


def per_gpt2_token(kinds: dict[str, dict[str, list[float]]]) -> str:
    """Return the losses in nats per GPT-2 token with their intervals, in words."""
    values = {kind: [x / TOKENS_PER_BYTE for x in found["loss"]] for kind, found in kinds.items()}
    return ", ".join(f"{kind} {interval(found, '.2f')}" for kind, found in values.items())


def rates_section(results: Results) -> list[str]:
    """Return the tables of tuning, at the tuned sizes and at the one between them."""
    powers = "; ".join(f"{kind} {power:+.2f}" for kind, power in results["powers"].items())
    lines = []
    for size, tuning in results["tuning"].items():
        lines += reports.tuning_section(tuning, f"Learning rates at {size}")
    for size, checked in results["checked"].items():
        lines += [f"## The rule's learning rates at {size}", "", *checked_table(checked), ""]
    return [
        "## Learning rates",
        "",
        "The best ones, between those tried by a parabola, define a power of the width for each kind: "
        f"{powers} (-1 is the rule of the earlier ladder).",
        "",
        *(f"#{line}" if line.startswith("##") else line for line in lines),
    ]


def checked_table(checked: Mapping[str, Losses]) -> list[str]:
    """Return the losses with a rule's learning rate, half of it and twice as much."""
    rows = []
    for kind, losses in checked.items():
        best = reports.best_rate(losses)
        cells = (f"**{loss:.4f}**" if rate == best else f"{loss:.4f}" for rate, loss in sorted(losses.items()))
        rows.append([kind, f"{sorted(losses)[1]:g}", *cells])
    return table(["", "the rule's", "loss at half of it", "at the rule's", "at twice as much"], rows)


def law_table(results: Results) -> list[str]:
    names = ("E", "alpha", "beta", "log_a", "log_b")
    rows = [
        [kind, *(interval(law[name]) for name in names), f"{100 * results['residuals'][kind]:.2f}%"]
        for kind, law in results["laws"].items()
    ]
    return table(["", "E", "alpha", "beta", "log A", "log B", "residuals (standard deviation, over n - 5)"], rows)


def run_table(results: Results) -> list[str]:
    """Return the table of all runs, of increasing size, the next size last."""
    kinds = list(results["laws"])
    next_runs = [run | {"expected": results["prediction"][run["kind"]]["loss"]} for run in results["next"]]
    steps: dict[tuple[str, int], dict[str, dict]] = {}
    for run in [*results["runs"], *next_runs]:
        steps.setdefault((run["size"], run["tokens"]), {})[run["kind"]] = run
    rows = [
        [
            size,
            " / ".join(f"{run['n_params']:,}" for run in by_kind.values()),
            f"{tokens:,}",
            " / ".join(f"{run['learning_rate']:.3g}" for run in by_kind.values()),
            *(cell(by_kind[kind]) for kind in kinds),
        ]
        for (size, tokens), by_kind in steps.items()
    ]
    columns = [f"{kind}: loss, residual, bits per byte" for kind in kinds]
    return table(["layers x width", "parameters", "tokens", "learning rates", *columns], rows)


def of_kind(runs: list[dict], kind: str) -> list[dict]:
    return [run for run in runs if run["kind"] == kind]


def inside(prediction: dict, run: dict) -> bool:
    return prediction["low"] <= run["loss"] <= prediction["high"]


def miss(prediction: dict, run: dict) -> str:
    where = "inside" if inside(prediction, run) else "outside"
    return (
        f"{run['kind']} {interval((prediction[name] for name in ('loss', 'low', 'high')), '.4f')}, found "
        f"{run['loss']:.4f}: a miss of {100 * (run['loss'] / prediction['loss'] - 1):+.2f}%, {where} the interval"
    )


def cell(run: dict) -> str:
    return f"{run['loss']:.4f}, {100 * (run['loss'] / run['expected'] - 1):+.2f}%, {run['bits_per_byte']:.4f}"


def draw(results: Results) -> Figure:
    """Draw losses by parameters with the bands of the law, one curve per budget; residuals."""
    laws = {kind: [Law(*law) for law in laws] for kind, laws in results["bootstrap"].items()}
    figure, (axes, below) = reports.make_figure(2, 1, figsize=(8, 8), sharex=True, height_ratios=[3, 1])
    marks = dict(zip(sorted({run["budget"] for run in results["runs"]}), "osD^v*", strict=False))
    n = np.geomspace(min(run["n_params"] for run in results["runs"]), results["next"][0]["n_params"])
    for index, (kind, (best, *others)) in enumerate(laws.items()):
        color = f"C{index}"
        for budget, mark in marks.items():
            runs = [run for run in of_kind(results["runs"], kind) if run["budget"] == budget]
            label = f"{kind}, {budget / 1e6:g}M bytes at the largest size"
            along = lambda n, run=runs[0]: run["tokens"] * (n / run["n_params"]) ** 0.5
            axes.plot([r["n_params"] for r in runs], [r["loss"] for r in runs], mark, color=color, ms=5, label=label)
            axes.plot(n, best(n, along(n)), "-", color=color, lw=1)
            residuals = [100 * (r["loss"] / r["expected"] - 1) for r in runs]
            below.plot([r["n_params"] for r in runs], residuals, mark, color=color, ms=5)
        (run,), guess = of_kind(results["next"], kind), results["prediction"][kind]
        bands = np.percentile([law(n, along(n)) for law in others], [2.5, 97.5], axis=0)
        axes.fill_between(n, *bands, color=color, alpha=0.15, lw=0)
        axes.plot([run["n_params"]] * 2, [guess["low"], guess["high"]], "_-", color=color, ms=8, lw=1)
        axes.plot(run["n_params"], guess["loss"], "o", color=color, ms=3)
        axes.plot(run["n_params"], run["loss"], "X", color=color, ms=9, mec="k", label=f"{kind}, the next size")
        below.plot(run["n_params"], 100 * (run["loss"] / guess["loss"] - 1), "X", color=color, ms=9, mec="k")
    axes.set(
        xscale="log",
        yscale="log",
        ylabel="validation loss (nats per token)",
        title="The next size was predicted before it was trained",
    )
    axes.yaxis.set_major_formatter("{x:.1f}")
    axes.yaxis.set_minor_formatter("{x:.1f}")
    below.axhline(0, color="0.5", lw=0.8)
    below.set(xlabel="parameters", ylabel="loss above the law (%)")
    for each in (axes, below):
        each.grid(alpha=0.3, which="both")
    return figure


FIGURES = {"ladder.png": draw}
