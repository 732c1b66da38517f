"""report.md, results.json and ladder.png, from the runs and the laws fitted to them."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from experiments import tools
from experiments.ladder.law import Law
from experiments.tools import table

Laws = Mapping[str, tuple[Law, list[Law], np.ndarray]]  # {kind: (law, laws of the bootstrap, residuals)}


def write(out: Path, runs: list[dict], laws: Laws, prediction: dict[str, dict], found: list[dict]) -> str:
    """Write the report and its figure, and return it.

    prediction: {kind: loss and interval} for the next size; found: its runs.
    """
    results = dict(
        machine=tools.describe_machine(),
        jax=jax.__version__,
        runs=[run | {"expected": float(laws[run["kind"]][0](run["n_params"], run["tokens"]))} for run in runs],
        laws={kind: coefficients(best, others) for kind, (best, others, _) in laws.items()},
        residuals={kind: float(np.std(residuals)) for kind, (_, _, residuals) in laws.items()},
        prediction=prediction,
        next=found,
    )
    plot(out / "ladder.png", results, laws)
    text = tools.write_report(out, results, report(results))
    return f"{text}\nwritten: {out / 'report.md'}, results.json, ladder.png"


def coefficients(best: Law, others: list[Law]) -> dict[str, list[float]]:
    """Return {coefficient: [value, low, high]} with 95% intervals of the bootstrap."""
    rows = np.array([dataclasses.astuple(law) for law in others])
    low, high = np.percentile(rows, [2.5, 97.5], axis=0)
    names = [field.name for field in dataclasses.fields(Law)]
    values = zip(dataclasses.astuple(best), low.tolist(), high.tolist(), strict=True)
    found = {name: list(each) for name, each in zip(names, values, strict=True)}
    found["E"] = [math.exp(x) for x in found.pop("log_e")]
    return found


def report(results: dict) -> list[str]:
    """Return the lines of report.md."""
    size = results["next"][0]
    return [
        "# A scaling ladder",
        "",
        f"`python experiments/ladder/run.py`, {results['machine']}, jax {results['jax']}. The paper's model on bytes, "
        "with its own attention and with others in its place, one seed of each; L(N, D) = E + A / N^alpha + B / D^beta "
        "in nats per token (a byte, or a document's end), with 95% intervals of a residual bootstrap. Learning rates "
        "are tuned at width 128, and multiplied by 128 / width.",
        "",
        f"**The next size, {size['size']} ({size['n_params']:,} parameters, {size['tokens']:,} tokens), predicted "
        "before it was trained:** "
        + " ".join(miss(results["prediction"][run["kind"]], run) for run in results["next"]),
        "",
        "The interval is meant to hold 95% of new runs: it accounts for the uncertainty of the law and for the "
        "residuals. A coefficient whose interval is wide is not determined by so few sizes; the law between them may "
        "be all the same.",
        "",
        *law_table(results),
        "",
        "![Losses, laws and residuals](ladder.png)",
        "",
        "## Runs",
        "",
        "Validation loss in nats per token, and its distance from the law; for the next size, from the prediction.",
        "",
        *run_table(results),
    ]


def law_table(results: dict) -> list[str]:
    interval = lambda values: "{:.3f} [{:.3f}, {:.3f}]".format(*values)
    names = ("E", "alpha", "beta", "log_a", "log_b")
    rows = [
        [kind, *(interval(law[name]) for name in names), f"{100 * results['residuals'][kind]:.2f}%"]
        for kind, law in results["laws"].items()
    ]
    return table(["", "E", "alpha", "beta", "log A", "log B", "residuals (standard deviation)"], rows)


def run_table(results: dict) -> list[str]:
    kinds = list(results["laws"])
    columns = [f"{kind}: loss, residual, bits per byte" for kind in kinds]
    rows = []
    for (size, n_params, tokens), by_kind in group_by_size(results).items():
        rates = sorted({run["learning_rate"] for run in by_kind.values()})
        cells = [cell(by_kind[kind]) if kind in by_kind else "" for kind in kinds]
        rows.append([size, f"{n_params:,}", f"{tokens:,}", ", ".join(f"{rate:.3g}" for rate in rates), *cells])
    return table(["layers x width", "parameters", "tokens", "learning rates", *columns], rows)


def of_kind(runs: list[dict], kind: str) -> list[dict]:
    return [run for run in runs if run["kind"] == kind]


def miss(prediction: dict, run: dict) -> str:
    inside = "inside" if prediction["low"] <= run["loss"] <= prediction["high"] else "outside"
    return (
        f"{run['kind']} {prediction['loss']:.4f} [{prediction['low']:.4f}, {prediction['high']:.4f}], found "
        f"{run['loss']:.4f}: a miss of {100 * (run['loss'] / prediction['loss'] - 1):+.2f}%, {inside} the interval."
    )


def group_by_size(results: dict) -> dict[tuple[str, int, int], dict[str, dict]]:
    """Return {(size, parameters, tokens): {kind: run}}, smallest first."""
    next_runs = [run | {"expected": results["prediction"][run["kind"]]["loss"]} for run in results["next"]]
    found: dict[tuple[str, int, int], dict[str, dict]] = {}
    for run in sorted([*results["runs"], *next_runs], key=lambda run: (run["n_params"], run["tokens"])):
        found.setdefault((run["size"], run["n_params"], run["tokens"]), {})[run["kind"]] = run
    return found


def cell(run: dict) -> str:
    return f"{run['loss']:.4f}, {100 * (run['loss'] / run['expected'] - 1):+.2f}%, {run['bits_per_byte']:.4f}"


def plot(path: Path, results: dict, laws: Laws) -> None:
    """Draw losses by parameters with the bands of the law, one curve per number of tokens per parameter; residuals."""
    figure, (axes, below) = tools.make_figure(2, 1, figsize=(8, 8), sharex=True, height_ratios=[3, 1])
    ratio_of = lambda run: round(run["tokens"] / run["n_params"], 1)
    marks = dict(zip(sorted({ratio_of(run) for run in results["runs"]}), "osD^v*", strict=False))
    n = np.geomspace(
        *(run["n_params"] for run in (min(results["runs"], key=lambda r: r["n_params"]), results["next"][0]))
    )
    for index, (kind, (best, others, _)) in enumerate(laws.items()):
        color = f"C{index}"
        for ratio, mark in marks.items():
            runs = [run for run in of_kind(results["runs"], kind) if ratio_of(run) == ratio]
            label = f"{kind}, {ratio:g} tokens per parameter"
            axes.plot([r["n_params"] for r in runs], [r["loss"] for r in runs], mark, color=color, ms=5, label=label)
            axes.plot(n, best(n, ratio * n), "-", color=color, lw=1)
            residuals = [100 * (r["loss"] / r["expected"] - 1) for r in runs]
            below.plot([r["n_params"] for r in runs], residuals, mark, color=color, ms=5)
        ratio = ratio_of(results["next"][0])
        bands = np.percentile([law(n, ratio * n) for law in others], [2.5, 97.5], axis=0)
        axes.fill_between(n, *bands, color=color, alpha=0.15, lw=0)
        (run,), guess = of_kind(results["next"], kind), results["prediction"][kind]
        error = [[guess["loss"] - guess["low"]], [guess["high"] - guess["loss"]]]
        axes.errorbar(run["n_params"], guess["loss"], error, color=color, capsize=4, lw=1)
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
    axes.legend(fontsize=8)
    tools.save_figure(figure, path)
