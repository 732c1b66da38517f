"""report.md and recall.png, from results.json."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments.reports import Results, make_figure, table

Runs = Sequence[dict[str, Any]]  # of results.json


def report(results: Results) -> list[str]:
    """Return the lines of report.md."""
    grid, models, runs = results["grid"], results["models"], results["runs"]
    hours = sum(run.get("seconds", 0) for run in runs) / 3600
    pairs = ", ".join(f"{n} pairs in {grid['spread'] * n} tokens" for n in grid["pairs"])
    return [
        "# Multi-query associative recall",
        "",
        f"`python experiments/associative_recall/run.py`, {results['machine']}, jax {results['jax']}: {len(runs)} "
        f"runs, {hours:.1f} hours of training in all. The task of Zoology (Arora et al., 2023) with 8192 ids: {pairs}, "
        f"in turn; longer sequences are only tested. Two layers of {grid['n_heads']} heads, {grid['n_steps']:,} steps "
        f"at most, fewer once 99% are right; seeds {', '.join(map(str, grid['seeds']))}. Every contestant is tuned "
        "over the same learning rates, a grid that is not extended: the best rates of "
        f"{sum(each['rate'] in (min(grid['rates']), max(grid['rates'])) for each in models)} of the {len(models)} "
        "models are at an end of it.",
        "",
        "![Accuracy by the size of the state](recall.png)",
        "",
        "## Accuracy",
        "",
        "Right answers at the best learning rate, by the number of pairs. State: numbers per sequence after "
        f"{grid['spread'] * max(grid['pairs'])} tokens, in all layers; that of softmax grows with the tokens.",
        "",
        *accuracy_table(models),
        "",
        "## Learning rates",
        "",
        "Right answers on the lengths of training, by learning rate, from the lowest to the highest of the seeds.",
        "",
        *rate_table(grid["rates"], models),
    ]


def accuracy_table(models: Runs) -> list[str]:
    lengths = list(models[0]["accuracy"])
    head = ["", "width", "parameters", "state", "learning rate", "tokens", *(f"{n} pairs" for n in lengths)]
    rows = [
        [
            each["kind"], str(each["width"]), f"{each['parameters']:,}", f"{each['state']:,}", f"{each['rate']:g}",
            f"{each['tokens'] / 1e6:.1f}M", *(f"{each['accuracy'][n]:.1%}" for n in lengths),
        ]
        for each in models
    ]  # fmt: skip
    return table(head, rows)


def rate_table(rates: Sequence[float], models: Runs) -> list[str]:
    def cell(scores: Sequence[float], is_best: bool) -> str:
        low, high = f"{min(scores):.1%}", f"{max(scores):.1%}"
        text = low if low == high else f"{low} to {high}"
        return f"**{text}**" if is_best else text

    rows = [
        [each["kind"], str(each["width"]), *(cell(each["scores"][rate], rate == each["rate"]) for rate in rates)]
        for each in models
    ]
    return table(["", "width", *(f"{rate:g}" for rate in rates)], rows)


def draw(results: Results) -> Figure:
    """Draw the accuracy by the size of the state, one line per contestant and one panel per number of pairs."""
    grid, models = results["grid"], results["models"]
    lengths = list(models[0]["accuracy"])
    columns = min(3, len(lengths))
    n_rows = math.ceil(len(lengths) / columns)
    figure, panels = make_figure(
        n_rows, columns, figsize=(4 * columns, 3.5 * n_rows), squeeze=False, sharex=True, sharey=True
    )
    for axes in panels.flat[len(lengths) :]:
        axes.set_axis_off()
    for axes, n in zip(panels.flat, lengths, strict=False):
        for index, kind in enumerate(grid["kinds"]):
            own = sorted((each["state"], each["accuracy"][n]) for each in models if each["kind"] == kind)
            axes.plot(*zip(*own, strict=True), "o-", color=f"C{index}", ms=4, lw=1.2, label=kind)
        seen = "" if n in grid["pairs"] else ", not trained"
        axes.set(title=f"{n} pairs in {grid['spread'] * n} tokens{seen}", ylim=(-0.02, 1.02), xscale="log")
        axes.set(xlabel="numbers in the state", ylabel="right answers")
        axes.grid(alpha=0.3)
    return figure


FIGURES = {"recall.png": draw}
