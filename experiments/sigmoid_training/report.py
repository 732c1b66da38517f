"""report.md and the figures, from results.json."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments import reports
from experiments.reports import Losses, Results
from experiments.sigmoid_training import contexts
from experiments.sigmoid_training.contestants import FORMS, ONE, STEEPER, exchanged_scale

EXCHANGED = {
    ONE: f"{ONE}, initial outputs as with {STEEPER}",
    STEEPER: f"{STEEPER}, initial outputs as with {ONE}",
}

Norms = Mapping[str, Mapping[int, Sequence[float]]]  # {form: {n: RMS of each layer's attention over n tokens}}


# ---- words ----------------------------------------------------------------------------------------


def report(results: Results) -> list[str]:
    """Return the lines of report.md."""
    length = results["settings"]["sequence_length"]
    beyond, law = results["beyond"], results["law"]
    farthest = max(next(iter(law.values())))
    return [
        "# Sigmoid attention in trained models",
        "",
        f"**At {farthest // length} times the training length the attention's RMS is, by the law, "
        + ", ".join(f"{law_ratio(law[form]):.2f} times as large with {form}" for form in FORMS)
        + f"; measured, {grown(beyond['alike'])} in models trained at the same learning rate "
        f"({beyond['alike']['rates'][ONE]:g}), and {grown(beyond['best'])} at the best rate of each. "
        f"The loss over the last half of such a text is {worse(beyond['alike'])} nats per byte above that in windows, "
        f"and {worse(beyond['best'])} at the best rates. The lowest validation losses over learning rates are "
        + ", ".join(best_of(name, losses) for name, losses in results["rates"].items())
        + ".**",
        "",
        f"`python experiments/sigmoid_training/run.py`, {results['machine']}, jax {results['jax']}. Models of 0.46M "
        f"parameters (experiments/attribution), trained on {results['tokens']:,} bytes in windows of "
        f"{length}, one seed. Initial outputs are those of every layer's attention as W2 reads it; they are exchanged "
        f"by a factor in W2's initial values, {exchanged_scale(ONE):.3f} or {exchanged_scale(STEEPER):.3g}, the ratio "
        "by the law over a window; all else is as in the runs with their own scale.",
        "",
        *reports.tuning_section(results["rates"], "Learning rates", "all runs"),
        "![Validation loss by learning rate](rates.png)",
        "",
        "## Beyond the training length",
        "",
        "Models on long documents of the corpus's last training file, read from their start: loss in nats per byte by "
        f"position, and in parentheses the difference to windows of {length}; * where its 95% interval (over "
        "documents) excludes 0.",
        "",
        "RMS of the attention over the first n tokens of a document: of each layer over the training length, and "
        "relative to it, geometric mean over layers; in parentheses that of the law, for logits of 0 and equal values. "
        "A layer whose RMS is orders of magnitude below the others' adds nothing to the model.",
        "",
        "![Loss and norms beyond the training length](lengths.png)",
        "",
        "### The same learning rate for all",
        "",
        *contexts.positions_table(beyond["alike"]["positions"]),
        "",
        *norms_table(beyond["alike"]["norms"], law),
        "",
        "### The best learning rate of each",
        "",
        *contexts.positions_table(beyond["best"]["positions"]),
        "",
        *norms_table(beyond["best"]["norms"], law),
    ]


def mean_norm(layers: Sequence[float]) -> float:
    """Return the geometric mean over layers."""
    return math.exp(sum(math.log(x) for x in layers) / len(layers))


def law_ratio(law: Mapping[int, float]) -> float:
    """Return how many times as large the attention is at the largest length as at the training length, by the law."""
    return law[max(law)] / law[min(law)]


def grown(beyond: Mapping[str, Any]) -> str:
    """Return `law_ratio` as measured, for all forms."""
    ratios = [mean_norm(norms[max(norms)]) / mean_norm(norms[min(norms)]) for norms in beyond["norms"].values()]
    return ", ".join(f"{each:.2f}" for each in ratios)


def worse(beyond: Mapping[str, Any]) -> str:
    """Return how much higher the loss is over the last half of long texts than in windows, for all forms."""
    last = [found["ranges"][-1] for found in beyond["positions"].values()]
    return ", ".join(f"{each['difference']:+.3f}{contexts.significance(each)}" for each in last)


def best_of(name: str, losses: Losses) -> str:
    rate = reports.best_rate(losses)
    return f"{losses[rate]:.3f} ({name}, at {rate:g})"


def norms_table(measured: Norms, law: Mapping[str, Mapping[int, float]]) -> list[str]:
    lengths = list(next(iter(measured.values())))
    rows = []
    for form, norms in measured.items():
        first, expected = mean_norm(norms[lengths[0]]), law[form]
        cells = [f"{mean_norm(norms[n]) / first:.3f} ({expected[n] / expected[lengths[0]]:.3f})" for n in lengths[1:]]
        rows.append([form, ", ".join(f"{layer:.2g}" for layer in norms[lengths[0]]), *cells])
    return reports.table(["", f"RMS of each layer, n = {lengths[0]:,}", *(f"n = {n:,}" for n in lengths[1:])], rows)


# ---- figures --------------------------------------------------------------------------------------


def draw_lengths(results: Results) -> Figure:
    """Draw the loss by position, streaming and in windows, and the growth of the attention beside its law."""
    figure, rows = reports.make_figure(2, 2, figsize=(11, 9))
    titles = dict(alike="the same learning rate for all", best="the best learning rate of each")
    for (left, right), (which, title) in zip(rows, titles.items(), strict=True):
        beyond = results["beyond"][which]
        for index, (form, found) in enumerate(beyond["positions"].items()):
            middles = contexts.middles(found)
            left.plot(middles, [each["streaming"] for each in found["ranges"]], color=f"C{index}", lw=1.4, label=form)
            left.plot(middles, [each["windows"] for each in found["ranges"]], ".", color=f"C{index}", ms=4)
            norms, law = beyond["norms"][form], results["law"][form]
            lengths = list(norms)
            measured = [mean_norm(norms[n]) / mean_norm(norms[lengths[0]]) for n in lengths]
            right.plot(lengths, measured, "o", color=f"C{index}")
            right.plot(lengths, [law[n] / law[lengths[0]] for n in lengths], "-", color=f"C{index}", lw=1)
        window = next(iter(beyond["positions"].values()))["window"]
        left.axvline(window, color="0.5", lw=0.8, ls=":")
        left.set(xlabel="position (bytes before it)", ylabel="loss (nats per byte)", ylim=(2, 4), xscale="log")
        left.set_title(f"{title}. Dots: in windows of {window}, the training length", fontsize=9)
        right.set(xlabel="tokens", ylabel="RMS of the attention, relative", xscale="log", yscale="log")
        right.set_title(f"{title}. Dots: measured; lines: the law", fontsize=9)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.grid(alpha=0.3, which="both")
        right.yaxis.set_major_formatter("{x:g}")
        right.yaxis.set_minor_formatter("{x:g}")
    return figure


def draw_rates(results: Results) -> Figure:
    """Draw the validation loss by learning rate."""
    figure, axes = reports.make_figure(figsize=(8, 6))
    for name, losses in results["rates"].items():
        finite = {rate: loss for rate, loss in losses.items() if loss is not None}
        axes.plot(list(finite), list(finite.values()), "o--" if name in EXCHANGED.values() else "o-", ms=4, label=name)
    axes.set(xlabel="learning rate", ylabel="validation loss (nats per byte)", xscale="log")
    axes.grid(alpha=0.3, which="both")
    return figure


FIGURES = {"lengths.png": draw_lengths, "rates.png": draw_rates}
