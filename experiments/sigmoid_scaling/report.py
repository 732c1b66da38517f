"""The report and its figure, from results.json."""

from typing import Any

import numpy as np

from experiments.reports import Results, make_figure, table
from experiments.sigmoid_scaling.forms import norms_by_law


def report(results: Results) -> list[str]:
    """Return the lines of report.md."""
    first = results["fitted_long"][0]
    off_all, off_long = results["growth_of_fluctuation"]
    fit = lambda found: "" if found is None else f"{found[0]:.4f} +- {found[1]:.4f}"
    law = lambda x, digits: "" if x is None else f"{x:.{digits}f}"
    rows = [
        [
            row["form"],
            fit(row["growth"]),
            fit(row["growth_of_long"]),
            law(row["growth_predicted"], 2),
            f"{row['doubling']:.6f}",
            law(row["doubling_predicted"], 6),
            "" if row["doubling_departure"] is None else f"{row['doubling_departure']:.0e}",
            fit(row["convergence"]),
        ]
        for row in results["forms"]
    ]
    head = ["", "growth, all n", f"n >= {first}", "law", "doubling", "law", "departure", "convergence"]
    return [
        "# How sigmoid attention scales with the number of keys",
        "",
        f"`python experiments/sigmoid_scaling/run.py`, {results['machine']}, jax {results['jax']}, float64: "
        f"{results['heads']} heads of {results['features']}, {results['queries']} queries, {results['sequences']} "
        f"sequences of n = {results['lengths'][0]} to {results['lengths'][-1]:,} keys, drawn from "
        f"{results['population']:,} random tokens. Growth: the exponent of the output's norm in n. Doubling: the ratio "
        "of norms where every token is there twice, and how far single outputs depart from its law. Convergence: the "
        "exponent of the distance to the limit (law: -0.5). +- standard error.",
        "",
        *table(head, rows),
        "",
        f"Below n* = {results['crossover']:.1f} keys the fluctuation of independent tokens dominates their mean; it "
        f"accounts for {off_all:+.4f} in the exponents of all n, {off_long:+.4f} in those of n >= {first}.",
        "",
        "![Norms by the number of keys](norms.png)",
    ]


def plot_norms(results: Results) -> Any:
    """Norms against n. Lines are laws of independent tokens, dotted their limits n^(1 - alpha) |I|."""
    lengths, size = results["lengths"], results["norm_of_integral"]
    n, forms = np.array(lengths, float), results["forms"]
    figure, axes = make_figure(figsize=(7, 5))
    for i, row in enumerate(forms):
        alpha, color = row["alpha"], f"C{i}"
        axes.loglog(n, row["norms"], "o" if alpha is not None else "x", color=color, markersize=4, label=row["form"])
        if alpha is not None:
            axes.loglog(n, norms_by_law(lengths, alpha, size**2, results["variance_of_one"]), color=color, linewidth=1)
            axes.loglog(n, n ** (1 - alpha) * size, ":", color=color, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="keys n", ylabel="norm of the output", title="Norms grow as n^(1 - alpha)")
    return figure


FIGURES = {"norms.png": plot_norms}
