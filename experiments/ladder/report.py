"""report.md, results.json and ladder.png, from the runs and what was fitted to them."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from experiments import tools
from experiments.ladder.law import Law
from experiments.tools import table
from heinsen.files import write_atomically

Laws = Mapping[str, tuple[Law, list[Law], np.ndarray]]  # of each kind: the best, the bootstrap's, the residuals


def write(out: Path, runs: list[dict], laws: Laws, prediction: dict[str, dict], found: list[dict]) -> None:
    """prediction: {kind: loss and interval} for the next size; found: its runs."""
    results = dict(
        machine=tools.machine(),
        jax=jax.__version__,
        runs=[run | {"expected": float(laws[run["kind"]][0](run["n_params"], run["tokens"]))} for run in runs],
        laws={kind: coefficients(best, others) for kind, (best, others, _) in laws.items()},
        residuals={kind: float(np.std(residuals)) for kind, (_, _, residuals) in laws.items()},
        prediction=prediction,
        next=found,
    )
    write_atomically(out / "results.json", json.dumps(results, indent=1) + "\n")
    plot(out / "ladder.png", results, laws)
    (out / "report.md").write_text("\n".join(report(results)) + "\n")
    print((out / "report.md").read_text())
    print(f"written: {out / 'report.md'}, results.json, ladder.png")


def coefficients(best: Law, others: list[Law]) -> dict[str, list[float]]:
    """{coefficient: [value, low, high]}, 95% of the bootstrap."""
    rows = np.array([dataclasses.astuple(law) for law in others])
    low, high = np.percentile(rows, [2.5, 97.5], axis=0)
    names = [field.name for field in dataclasses.fields(Law)]
    values = zip(dataclasses.astuple(best), low.tolist(), high.tolist(), strict=True)
    found = {name: list(each) for name, each in zip(names, values, strict=True)}
    found["E"] = [math.exp(x) for x in found.pop("log_e")]
    return found


def report(results: dict) -> list[str]:
    kinds = list(results["laws"])
    interval = lambda of: f"{of[0]:.3f} [{of[1]:.3f}, {of[2]:.3f}]"
    return [
        "# A scaling ladder",
        "",
        f"`python experiments/ladder/run.py`, {results['machine']}, jax {results['jax']}. The paper's model on bytes, "
        "with its own attention and with others in its place, one seed of each; L(N, D) = E + A / N^alpha + B / D^beta "
        "in nats a token (a byte, or a document's end), with 95% intervals of a residual bootstrap. Learning rates are "
        "tuned at width 128, and times 128 / width.",
        "",
        f"**The next size, {results['next'][0]['size']} ({results['next'][0]['n_params']:,} parameters, "
        f"{results['next'][0]['tokens']:,} tokens), predicted before it was trained:** "
        + " ".join(miss(results["prediction"][run["kind"]], run) for run in results["next"]),
        "",
        "The interval is meant to hold 95% of new runs: the law's own uncertainty and the residuals. A coefficient "
        "whose interval is wide is not known from so few sizes; the law between them may be known all the same.",
        "",
        *table(
            ["", "E", "alpha", "beta", "log A", "log B", "residuals (standard deviation)"],
            [
                [
                    kind,
                    *(interval(results["laws"][kind][name]) for name in ("E", "alpha", "beta", "log_a", "log_b")),
                    f"{100 * results['residuals'][kind]:.2f}%",
                ]
                for kind in kinds
            ],
        ),
        "",
        "![Losses, laws and residuals](ladder.png)",
        "",
        "## Runs",
        "",
        "Validation loss in nats a token, and how far it is from the law; of the next size, from the prediction.",
        "",
        *table(
            [
                "layers x width",
                "parameters",
                "tokens",
                "learning rates",
                *(f"{kind}: loss, residual, bits a byte" for kind in kinds),
            ],
            [
                [
                    key[0],
                    f"{key[1]:,}",
                    f"{key[2]:,}",
                    ", ".join(f"{rate:.3g}" for rate in sorted({run["learning_rate"] for run in by_kind.values()})),
                    *(cell(by_kind[kind]) if kind in by_kind else "" for kind in kinds),
                ]
                for key, by_kind in together(results).items()
            ],
        ),
    ]


def of_kind(runs: list[dict], kind: str) -> list[dict]:
    return [run for run in runs if run["kind"] == kind]


def miss(prediction: dict, run: dict) -> str:
    inside = "inside" if prediction["low"] <= run["loss"] <= prediction["high"] else "outside"
    return (
        f"{run['kind']} {prediction['loss']:.4f} [{prediction['low']:.4f}, {prediction['high']:.4f}], found "
        f"{run['loss']:.4f}: a miss of {100 * (run['loss'] / prediction['loss'] - 1):+.2f}%, {inside} the interval."
    )


def together(results: dict) -> dict[tuple, dict[str, dict]]:
    """{(size, parameters, tokens): {kind: run}}, smallest first."""
    of_next = [run | {"expected": results["prediction"][run["kind"]]["loss"]} for run in results["next"]]
    found: dict[tuple, dict[str, dict]] = {}
    for run in sorted([*results["runs"], *of_next], key=lambda run: (run["n_params"], run["tokens"])):
        found.setdefault((run["size"], run["n_params"], run["tokens"]), {})[run["kind"]] = run
    return found


def cell(run: dict) -> str:
    return f"{run['loss']:.4f}, {100 * (run['loss'] / run['expected'] - 1):+.2f}%, {run['bits_per_byte']:.4f}"


def plot(path: Path, results: dict, laws: Laws) -> None:
    """Losses by parameters with the law's bands, each number of bytes a parameter a curve; and the residuals."""
    fig, (axes, below) = tools.figure(2, 1, figsize=(8, 8), sharex=True, height_ratios=[3, 1])
    ratio_of = lambda run: round(run["tokens"] / run["n_params"], 1)
    marks = dict(zip(sorted({ratio_of(run) for run in results["runs"]}), "osD^v*", strict=False))
    n = np.geomspace(
        *(run["n_params"] for run in (min(results["runs"], key=lambda r: r["n_params"]), results["next"][0]))
    )
    for index, (kind, (best, others, _)) in enumerate(laws.items()):
        color = f"C{index}"
        for ratio, mark in marks.items():
            runs = [run for run in of_kind(results["runs"], kind) if ratio_of(run) == ratio]
            label = f"{kind}, {ratio:g} tokens a parameter"
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
        xscale="log", yscale="log", ylabel="validation loss (nats a token)", title="The next size was predicted first"
    )
    axes.yaxis.set_major_formatter("{x:.1f}")
    axes.yaxis.set_minor_formatter("{x:.1f}")
    below.axhline(0, color="0.5", lw=0.8)
    below.set(xlabel="parameters", ylabel="loss above the law (%)")
    for each in (axes, below):
        each.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    tools.save(fig, path)
