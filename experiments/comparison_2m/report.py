"""report.md and the figures, from results.json."""

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import contexts, reports
from experiments.reports import Results

GATED, PAPER, SOFTMAX = "gate, parts", "paper's", "softmax, GPT-2's block, parts"
PAIRS = 4, 8, 16, 32  # of the probe of recall
LAYERS = 4  # of the models that it trains


# ---- words ----------------------------------------------------------------------------------------


def report(results: Results) -> list[str]:
    """Return the lines of report.md."""
    bits, length = results["bits_per_byte"], results["settings"]["sequence_length"]
    mean = lambda name: f"{statistics.fmean(bits[name].values()):.3f}"
    versus = lambda name, other: reports.versus(bits, name, other)
    positions = results["positions"][GATED]["ranges"]
    last = positions[-1]
    return [
        "# Two million parameters, eight million bytes",
        "",
        f"**The gated model (gate, gated output, convolution, no positions) has {mean(GATED)} bits per byte on the "
        f"test split, the paper's {mean(PAPER)} and softmax attention in GPT-2's block (rotary positions, and the same "
        f"gated output and convolution) {mean(SOFTMAX)}: differences of {versus(GATED, PAPER)} and "
        f"{versus(GATED, SOFTMAX)}. From byte {last['first']:,} of long documents on, {last['first'] // length} times "
        f"the training length, it has {last['streaming']:.3f} nats per byte where windows of {length:,} have "
        f"{last['windows']:.3f}.**",
        "",
        f"`python experiments/comparison_2m/run.py`, {results['machine']}, jax {results['jax']}: {results['runs']} "
        f"runs, {results['hours']:.1f} hours of training in all at their last tokens/s. Every contestant was trained "
        f"on the same {results['tokens']:,} bytes of the corpus of scripts/build_corpus.py, in windows of {length:,}, "
        "with as many parameters within 1%, the same optimizer and the best learning rate for it from one grid, which "
        "was extended if the best was at its end; tuned on a quarter of the bytes. Bits per byte are measured on the "
        "whole test split: mean over seeds +- their standard deviation; in brackets the 95% interval of the mean "
        "difference between runs with equal seeds (Student's t, not corrected for the number of comparisons; where "
        "seeds are missing it is not that of the means), and that of the first seed's run by a bootstrap over "
        "documents. Tokens/s of training steps of "
        f"{max(map(int, next(iter(results['speed'].values())))):,} tokens, milliseconds per token of decoding one text "
        "and the state by the tokens of context, on all cores, the contestants in turn.",
        "",
        *main_table(results),
        "",
        "![Validation during training](curves.png)",
        "",
        "![Time and state of decoding](costs.png)",
        "",
        *recall_section(results),
        *positions_section(results["positions"]),
        *reports.sources_section(results["sources"]),
        *reports.tuning_section(results["tuning"]),
    ]


def main_table(results: Results) -> list[str]:
    bits = results["bits_per_byte"]
    read = list(next(iter(results["decoding"].values())))
    lengths = list(next(iter(results["speed"].values())))

    def cost(name: str, context: str) -> str:
        found = results["decoding"][name].get(context)
        return f"{found['milliseconds']:.2f} ms, {found['state_bytes'] / 1e6:,.2f} MB" if found else "too large"

    rows = [
        [
            name,
            reports.spread(bits[name]),
            ", ".join(map(str, sorted(bits[name]))),
            "" if name == GATED else reports.versus(bits, name, GATED),
            "[{:.3f}, {:.3f}]".format(*results["by_documents"][name]),
            f"{results['parameters'][name]:,}",
            " / ".join(f"{x:,.0f}" for x in results["speed"][name].values()),
            *(cost(name, context) for context in read),
            f"{reports.best_rate(results['tuning'][name]):g}",
        ]
        for name in reports.ranked(bits)
    ]
    head = [
        "", "bits per byte", "seeds", f"above {GATED}", "by documents", "parameters",
        f"tokens/s, T = {' and '.join(f'{int(n):,}' for n in lengths)}",
        *(f"after {int(context):,}" for context in read), "learning rate",
    ]  # fmt: skip
    return reports.table(head, rows)


def positions_section(positions: Mapping[str, Mapping[str, Any]]) -> list[str]:
    window = next(iter(positions.values()))["window"]
    return [
        "## Longer contexts",
        "",
        "Loss in nats per byte by position in long documents of the corpus's last training file, which training did "
        f"not read, each read from its start to its end. In parentheses is the difference to windows of {window:,}; * "
        "where its 95% interval (over documents) excludes 0. Models whose cache grows are tested on the documents' "
        "first eighths. First seed.",
        "",
        *contexts.positions_table(positions),
        "",
        "![Loss by position](positions.png)",
        "",
    ]


def recall_section(results: Results) -> list[str]:
    rows = [[name, *(f"{x:.1%}" for x in answers.values())] for name, answers in results["recall"].items()]
    parameters = [found["parameters"] for found in results["recall_runs"].values()]
    return [
        "## Recall",
        "",
        f"Associative recall by models of each kind with {LAYERS} layers, trained on it for "
        f"{results['recall_steps']:,} steps (`scripts/recall.py`, one seed, one learning rate): right answers by the "
        f"number of key-value pairs in the context. The models are not of equal size: from {min(parameters):,} to "
        f"{max(parameters):,} parameters, GPT-2's blocks the largest. So few steps tell how soon a kind learns it. "
        "What it can hold is measured by "
        "experiments/associative_recall, with more steps and tuned learning rates.",
        "",
        *reports.table(["", *(f"{n} pairs" for n in PAIRS)], rows),
        "",
        "![Recall](recall.png)",
        "",
    ]


# ---- figures --------------------------------------------------------------------------------------


def draw_curves(results: Results) -> Figure:
    """Draw validation by training bytes: the mean over seeds, in a band from the lowest to the highest."""
    figure, axes = reports.make_figure(figsize=(8, 5))
    for index, name in enumerate(results["bits_per_byte"]):
        logs = [log for log in results["logs"] if (log["contestant"], log["stage"]) == (name, "final")]
        _, tokens, _, bits = np.array([log["validation"] for log in logs]).transpose(2, 0, 1)
        axes.plot(tokens[0] / 1e6, bits.mean(0), marker="o", ms=3, lw=1.2, label=name, color=f"C{index}")
        axes.fill_between(tokens[0] / 1e6, bits.min(0), bits.max(0), color=f"C{index}", alpha=0.2, lw=0)
    axes.set(xlabel="million bytes of training", ylabel="validation (bits per byte)", yscale="log")
    axes.yaxis.set_major_formatter("{x:.1f}")
    axes.yaxis.set_minor_formatter("{x:.1f}")
    axes.grid(alpha=0.3, which="both")
    return figure


def draw_recall(results: Results) -> Figure:
    """Draw the right answers by the number of pairs."""
    figure, axes = reports.make_figure(figsize=(8, 5))
    for name, answers in results["recall"].items():
        axes.plot(list(answers), list(answers.values()), "o-", ms=4, lw=1.2, label=name)
    axes.set(xlabel="key-value pairs in the context", ylabel="right answers", ylim=(-0.02, 1.02))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    return figure


def draw_costs(results: Results) -> Figure:
    """Draw the time of decoding and the state by the tokens of context."""
    figure, axes = reports.make_figure(1, 2, figsize=(10, 5))
    for index, (name, found) in enumerate(results["decoding"].items()):
        contexts = [int(n) for n in found]
        style = dict(marker="o", ms=4, lw=1.2, color=f"C{index % 10}")
        axes[0].plot(contexts, [each["milliseconds"] for each in found.values()], label=name, **style)
        axes[1].plot(contexts, [each["state_bytes"] / 1e6 for each in found.values()], **style)
    for one, label in zip(axes, ("decoding, ms per token", "state (MB)"), strict=True):
        one.set(xlabel="tokens of context", ylabel=label, xscale="log", yscale="log")
        one.grid(alpha=0.3)
    return figure


FIGURES = {
    "curves.png": draw_curves,
    "positions.png": lambda results: contexts.draw(results["positions"]),
    "recall.png": draw_recall,
    "costs.png": draw_costs,
}
