"""report.md, results.json and the figures, from the measurements."""

import statistics
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments import contest, contexts, recall, tools
from experiments.comparison_2m.contestants import CONTEST
from heinsen.figures import place_legend
from heinsen.sweep.runs import RunView
from heinsen.sweep.space import SEED

GATED, PAPER, SOFTMAX = "gate, parts", "paper's", "softmax, GPT-2's block, parts"


class Found(NamedTuple):
    """The measurements: runs of the tuning, the final ones, and by contestant the rest.

    tested: {run: summary of eval.py}; positions: those of long documents; decoding: {contestant: {context:
    {milliseconds, state_bytes}}}; speed: {contestant: {T: tokens/s}}.
    """

    tuning: list[RunView]
    trained: contest.Trained
    tested: dict[str, dict]
    positions: contexts.Positions
    recall: recall.Recall
    recall_steps: int
    decoding: dict[str, dict[str, dict]]
    speed: dict[str, dict[str, float]]


def write(out: Path, found: Found) -> str:
    """Write the report and its figures, and return it."""
    final = [*chain(*found.trained.values())]
    seed_1 = [run for run in final if run.run.point[SEED] == 1]
    names = list(found.recall)
    first = {name: CONTEST.runs_of(name, seed_1)[0] for name in names}
    runs = [*found.tuning, *final]
    results = dict(
        machine=tools.describe_machine(),
        jax=jax.__version__,
        runs=len(runs),
        hours=sum(run.tokens / run.tokens_per_second for run in runs if run.tokens_per_second) / 3600,
        tokens=final[0].tokens,
        bits_per_byte=CONTEST.bits(names, final, found.tested),
        by_documents={name: found.tested[run.name]["bits_per_byte_interval"] for name, run in first.items()},
        sources=CONTEST.by_source(names, final, found.tested),
        tuning={name: CONTEST.losses(name, found.tuning) for name in names},
        fields={name: dict(CONTEST.contestants[name]) for name in names},
        parameters={name: CONTEST.parameters(name) for name in names},
        positions=found.positions,
        recall_steps=found.recall_steps,
        recall=found.recall,
        decoding=found.decoding,
        speed=found.speed,
    )
    CONTEST.plot_curves(out / "curves.png", names, found.trained)
    contexts.plot(out / "positions.png", contexts.Measured(found.positions, {}))
    recall.plot(out / "recall.png", found.recall)
    plot_costs(out / "costs.png", results)
    text = tools.write_report(out, results, report(results))
    return f"{text}\nwritten: {out / 'report.md'}, results.json, curves.png, positions.png, recall.png, costs.png"


# ---- words ----------------------------------------------------------------------------------------


def report(results: dict[str, Any]) -> list[str]:
    """Return the lines of report.md."""
    bits, length = results["bits_per_byte"], CONTEST.get_config().sequence_length
    mean = lambda name: f"{statistics.fmean(bits[name].values()):.3f}"
    versus = lambda name, other: contest.versus(bits, name, other)
    positions = results["positions"][GATED]["ranges"]
    last = positions[-1]
    most = max(results["recall"][GATED])
    recalled = lambda name: results["recall"][name][most]
    return [
        "# Two million parameters, eight million bytes",
        "",
        f"**The gated model (gate, gated output, convolution, no positions) has {mean(GATED)} bits per byte on the "
        f"test split, the paper's {mean(PAPER)} and softmax attention in GPT-2's block (rotary positions, and the same "
        f"gated output and convolution) {mean(SOFTMAX)}: differences of {versus(GATED, PAPER)} and "
        f"{versus(GATED, SOFTMAX)}. From byte {last['first']:,} of long documents on, {last['first'] // length} times "
        f"the training length, it has {last['streaming']:.3f} nats per byte where windows of {length:,} have "
        f"{last['windows']:.3f}. Of {most} pairs it recalls {recalled(GATED):.0%}, that softmax "
        f"{recalled(SOFTMAX):.0%}.**",
        "",
        f"`python experiments/comparison_2m/run.py`, {results['machine']}, jax {results['jax']}: {results['runs']} "
        f"runs, {results['hours']:.1f} hours of training in all at their last tokens/s. Every contestant was trained "
        f"on the same {results['tokens']:,} bytes of the corpus of scripts/build_corpus.py, in windows of {length:,}, "
        "with as many parameters within 1%, the same optimizer and the best learning rate for it from one grid, which "
        "was extended if the best was at its end; tuned on a quarter of the bytes. Bits per byte are "
        "measured on the whole test split: mean over seeds +- their standard deviation; in brackets the 95% interval "
        "of the mean difference between runs with equal seeds (Student's t, not corrected for the number of "
        "comparisons), and that of the first seed's run by a bootstrap over documents. Tokens/s of training steps of "
        f"{max(map(int, next(iter(results['speed'].values())))):,} tokens, milliseconds per token of decoding one text "
        "and the state by the tokens of context, on all cores, the contestants in turn.",
        "",
        *main_table(results),
        "",
        "![Validation during training](curves.png)",
        "",
        "![Time and state of decoding](costs.png)",
        "",
        *recall.section(results["recall"], results["recall_steps"]),
        *positions_section(results["positions"]),
        *contest.sources_section(results["sources"]),
        *contest.tuning_section(results["tuning"]),
    ]


def main_table(results: dict[str, Any]) -> list[str]:
    bits = results["bits_per_byte"]
    read = list(next(iter(results["decoding"].values())))
    lengths = list(next(iter(results["speed"].values())))

    def cost(name: str, context: str) -> str:
        found = results["decoding"][name].get(context)
        return f"{found['milliseconds']:.2f} ms, {found['state_bytes'] / 1e6:,.2f} MB" if found else "too large"

    rows = [
        [
            name,
            contest.spread(bits[name]),
            "" if name == GATED else contest.versus(bits, name, GATED),
            "[{:.3f}, {:.3f}]".format(*results["by_documents"][name]),
            f"{results['parameters'][name]:,}",
            " / ".join(f"{x:,.0f}" for x in results["speed"][name].values()),
            *(cost(name, context) for context in read),
            f"{contest.best_rate(results['tuning'][name]):g}",
        ]
        for name in contest.ranked(bits)
    ]
    head = [
        "", "bits per byte", f"above {GATED}", "by documents", "parameters",
        f"tokens/s, T = {' and '.join(f'{int(n):,}' for n in lengths)}",
        *(f"after {int(context):,}" for context in read), "learning rate",
    ]  # fmt: skip
    return tools.table(head, rows)


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
        *contexts.table(positions),
        "",
        "![Loss by position](positions.png)",
        "",
    ]


# ---- figures --------------------------------------------------------------------------------------


def plot_costs(path: Path, results: Mapping[str, Any]) -> None:
    """Draw the time of decoding and the state by the tokens of context."""
    figure, axes = tools.make_figure(1, 2, figsize=(10, 5))
    for index, (name, found) in enumerate(results["decoding"].items()):
        contexts = [int(n) for n in found]
        style = dict(marker="o", ms=4, lw=1.2, color=f"C{index % 10}")
        axes[0].plot(contexts, [each["milliseconds"] for each in found.values()], label=name, **style)
        axes[1].plot(contexts, [each["state_bytes"] / 1e6 for each in found.values()], **style)
    for one, label in zip(axes, ("decoding, ms per token", "state (MB)"), strict=True):
        one.set(xlabel="tokens of context", ylabel=label, xscale="log", yscale="log")
        one.grid(alpha=0.3)
    place_legend(figure)
    tools.save_figure(figure, path)
