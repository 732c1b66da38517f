"""report.md, results.json and the figures, from the measurements."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments import contest, contexts, tools
from experiments.sigmoid_training.contestants import CONTEST, FORMS, ONE, STEEPER, exchanged_scale, growth
from heinsen.figures import place_legend
from heinsen.sweep.runs import RunView

EXCHANGED = {
    ONE: f"{ONE}, initial outputs as with {STEEPER}",
    STEEPER: f"{STEEPER}, initial outputs as with {ONE}",
}

Norms = Mapping[str, Mapping[int, Sequence[float]]]  # {form: {n: RMS of each layer's attention over n tokens}}


def write(out: Path, grid: list[RunView], exchanged: list[RunView], positions: contexts.Positions, norms: Norms) -> str:
    """Write the report and its figures, and return it."""
    results = dict(
        machine=tools.describe_machine(),
        jax=jax.__version__,
        tokens=max(run.tokens for run in grid),
        rates={form: CONTEST.losses(form, grid) for form in FORMS}
        | {name: CONTEST.losses(form, exchanged) for form, name in EXCHANGED.items()},
        positions=positions,
        norms=norms,
        law={form: {n: growth(form, n) for n in found} for form, found in norms.items()},
    )
    plot_lengths(out / "lengths.png", results)
    plot_rates(out / "rates.png", results["rates"])
    text = tools.write_report(out, results, report(results))
    return f"{text}\nwritten: {out / 'report.md'}, results.json, lengths.png, rates.png"


# ---- words ----------------------------------------------------------------------------------------


def report(results: dict[str, Any]) -> list[str]:
    """Return the lines of report.md."""
    length = CONTEST.get_config().sequence_length
    farthest = max(next(iter(results["norms"].values())))
    return [
        "# Sigmoid attention in trained models",
        "",
        f"**At {farthest // length} times the training length the attention's RMS is "
        + ", ".join(f"{ratio(results['norms'][form]):.2f} times as large with {form}" for form in FORMS)
        + " (the law predicts "
        + ", ".join(f"{law_ratio(results, form):.2f}" for form in FORMS)
        + "); the loss over the last half of such a text is "
        + ", ".join(last_difference(results["positions"][form]) for form in FORMS)
        + " nats per byte above that in windows. The lowest validation losses over learning rates are "
        + ", ".join(best_of(name, losses) for name, losses in results["rates"].items())
        + ".**",
        "",
        f"`python experiments/sigmoid_training/run.py`, {results['machine']}, jax {results['jax']}. Models of 0.46M "
        f"parameters (experiments/attention_comparison), trained on {results['tokens']:,} bytes in windows of "
        f"{length}, one seed. Initial outputs are those of every layer's attention as W2 reads it; they are exchanged "
        f"by a factor in W2's initial values, {exchanged_scale(ONE):.3f} or {exchanged_scale(STEEPER):.3g}, the ratio "
        "by the law over a window; all else is as in the runs with their own scale.",
        "",
        *contest.tuning_section(results["rates"], "Learning rates"),
        "![Validation loss by learning rate](rates.png)",
        "",
        "## Beyond the training length",
        "",
        "The best run of each form on long documents of the corpus's last training file, read from their start: loss "
        f"in nats per byte by position, and in parentheses the difference to windows of {length}; * where its 95% "
        "interval (over documents) excludes 0.",
        "",
        *contexts.table(results["positions"]),
        "",
        "RMS of the attention over the first n tokens of a document: of each layer over the training length, and "
        "relative to it, geometric mean over layers; in parentheses that of the law, for logits of 0 and equal values. "
        "A layer whose RMS is orders of magnitude below the others' adds nothing to the model.",
        "",
        *norms_table(results),
        "",
        "![Loss and norms beyond the training length](lengths.png)",
    ]


def mean_norm(layers: Sequence[float]) -> float:
    """Return the geometric mean over layers."""
    return math.exp(sum(math.log(x) for x in layers) / len(layers))


def ratio(norms: Mapping[int, Sequence[float]]) -> float:
    """Return how many times as large the attention is at the largest length as at the training length."""
    return mean_norm(norms[max(norms)]) / mean_norm(norms[min(norms)])


def law_ratio(results: Mapping[str, Any], form: str) -> float:
    law = results["law"][form]
    return law[max(law)] / law[min(law)]


def last_difference(found: Mapping[str, Any]) -> str:
    last = found["ranges"][-1]
    return f"{last['difference']:+.3f}{contexts.significance(last)}"


def best_of(name: str, losses: Mapping[float, float]) -> str:
    rate = contest.best_rate(losses)
    return f"{losses[rate]:.3f} ({name}, at {rate:g})"


def norms_table(results: Mapping[str, Any]) -> list[str]:
    lengths = list(next(iter(results["norms"].values())))
    rows = []
    for form, norms in results["norms"].items():
        first, law = mean_norm(norms[lengths[0]]), results["law"][form]
        cells = [f"{mean_norm(norms[n]) / first:.3f} ({law[n] / law[lengths[0]]:.3f})" for n in lengths[1:]]
        rows.append([form, ", ".join(f"{layer:.2g}" for layer in norms[lengths[0]]), *cells])
    return tools.table(["", f"RMS of each layer, n = {lengths[0]:,}", *(f"n = {n:,}" for n in lengths[1:])], rows)


# ---- figures --------------------------------------------------------------------------------------


def plot_lengths(path: Path, results: Mapping[str, Any]) -> None:
    """Draw the loss by position, streaming and in windows, and the growth of the attention beside its law."""
    figure, (left, right) = tools.make_figure(1, 2, figsize=(11, 5))
    for index, (form, found) in enumerate(results["positions"].items()):
        middles = [math.sqrt(each["first"] * (each["last"] or 2 * each["first"])) for each in found["ranges"]]
        left.plot(middles, [each["streaming"] for each in found["ranges"]], color=f"C{index}", lw=1.4, label=form)
        left.plot(middles, [each["windows"] for each in found["ranges"]], ".", color=f"C{index}", ms=4)
        norms, law = results["norms"][form], results["law"][form]
        lengths = list(norms)
        right.plot(
            lengths, [mean_norm(norms[n]) / mean_norm(norms[lengths[0]]) for n in lengths], "o", color=f"C{index}"
        )
        right.plot(lengths, [law[n] / law[lengths[0]] for n in lengths], "-", color=f"C{index}", lw=1)
    window = next(iter(results["positions"].values()))["window"]
    left.axvline(window, color="0.5", lw=0.8, ls=":")
    left.set(xlabel="position (bytes before it)", ylabel="loss (nats per byte)", ylim=(1, 5), xscale="log")
    left.set_title(f"Dots: in windows of {window}, the training length", fontsize=9)
    right.set(xlabel="tokens", ylabel="RMS of the attention, relative", xscale="log", yscale="log")
    right.set_title("Dots: measured; lines: the law", fontsize=9)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3, which="both")
    place_legend(figure, 4)
    tools.save_figure(figure, path)


def plot_rates(path: Path, rates: Mapping[str, Mapping[float, float]]) -> None:
    figure, axes = tools.make_figure(figsize=(8, 6))
    for name, losses in rates.items():
        finite = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
        axes.plot(list(finite), list(finite.values()), "o--" if name in EXCHANGED.values() else "o-", ms=4, label=name)
    axes.set(xlabel="learning rate", ylabel="validation loss (nats per byte)", xscale="log")
    axes.grid(alpha=0.3, which="both")
    place_legend(figure, 2)
    tools.save_figure(figure, path)
