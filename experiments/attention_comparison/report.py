"""report.md, results.json and the figures of the comparison, from the measurements."""

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import tools
from experiments.attention_comparison.contestants import CONTESTANTS, RATE, SIGMOIDS, Contestant, train_config
from experiments.tools import make_figure, save_figure, table
from heinsen.data.loader import evaluation_batches
from heinsen.models import activation_rms, init_model_state, init_params
from heinsen.sweep.runs import RunView
from heinsen.sweep.space import SEED
from heinsen.training.metrics import read_metrics
from heinsen.training.run import open_split

CONTEXTS = 512, 65536  # tokens after which the size of the state is counted


def write(
    out: Path,
    tuning: list[RunView],
    final: list[RunView],
    sigmoid: list[RunView],
    tested: dict[str, dict],
    recall: dict[str, dict],
    speed: dict[str, dict],
) -> str:
    """Write the report and its figures, and return it.

    tested: {run: summary of eval.py}; recall: {kind: results of scripts/recall.py}; speed: {kind: {T: tokens/s}}.
    """
    bits = {
        name: {run.run.point[SEED]: tested[run.name]["bits_per_byte"] for run in each.runs_of(final)}
        for name, each in CONTESTANTS.items()
    }
    results = dict(
        machine=tools.describe_machine(),
        jax=jax.__version__,
        tokens=final[0].tokens,
        bits_per_byte=bits,
        sources=by_source(final, tested),
        tuning={
            name: dict(sorted((run.run.point[RATE], loss(run)) for run in each.runs_of(tuning)))
            for name, each in (CONTESTANTS | SIGMOIDS).items()
        },
        parameters={name: tools.n_params(train_config(each)) for name, each in CONTESTANTS.items()},
        remembered={name: [state_size(each, n) for n in CONTEXTS] for name, each in CONTESTANTS.items()},
        speed=speed,
        recall_steps=recall["heinsen"]["steps"],
        recall={
            kind: {point["length"]: point["answers"] for point in found["accuracy"]} for kind, found in recall.items()
        },
        sigmoid=sigmoid_results(out, final, sigmoid, tested),
    )
    plot_curves(out, final)
    plot_recall(out, results["recall"])
    plot_sigmoid(out, results)
    text = tools.write_report(out, without_infinity(results), report(results))
    return f"{text}\nwritten: {out / 'report.md'}, results.json, curves.png, recall.png, sigmoid.png"


def without_infinity(results: Any) -> Any:
    """Return the results with None for infinite losses (of crashed runs), which JSON lacks."""
    if isinstance(results, dict):
        return {name: without_infinity(x) for name, x in results.items()}
    return None if results == math.inf else results


# ---- numbers --------------------------------------------------------------------------------------


def loss(run: RunView) -> float:
    """Return the last validation loss, infinite if the run has crashed."""
    return run.validation_loss if run.state == "finished" else math.inf


def state_size(contestant: Contestant, n_tokens: int) -> int:
    """Return how many numbers the states of all layers have after so many tokens."""
    model = train_config(contestant).model
    state = jax.eval_shape(lambda: init_model_state(model, 1, n_tokens))
    return sum(leaf.size for leaf in jax.tree.leaves(state.attention))


def by_source(final: list[RunView], tested: dict[str, dict]) -> dict[str, dict[str, float]]:
    """Return {source: {contestant: bits per byte, mean over seeds}}, the largest source first."""
    found: dict[str, dict[str, float]] = {}
    sizes: dict[str, int] = {}
    for name, each in CONTESTANTS.items():
        runs = [tested[run.name].get("sources", {}) for run in each.runs_of(final)]
        for source in runs[0]:
            sizes[source] = runs[0][source]["tokens"]
            found.setdefault(source, {})[name] = statistics.fmean(run[source]["bits_per_byte"] for run in runs)
    return {source: found[source] for source in sorted(found, key=lambda source: -sizes[source])}


def sigmoid_results(out: Path, final: list[RunView], sigmoid: list[RunView], tested: dict[str, dict]) -> dict:
    """Return, for each alpha and bias, losses and the RMS of every layer's attention before and after training."""
    found = {}
    for name, each in {"alpha 1": CONTESTANTS["sigmoid"], **SIGMOIDS}.items():
        folder = "final" if name == "alpha 1" else "sigmoid"
        runs = [run for run in each.runs_of(final + sigmoid) if run.run.point[SEED] == 1]
        entries = [e for e in read_metrics(out / folder / runs[0].name) if "attention_rms/layer_0" in e]
        rms = lambda entry, kind, n=each.n_layers: [entry[f"{kind}_rms/layer_{i}"] for i in range(n)]
        found[name] = dict(
            bits_per_byte=tested[runs[0].name]["bits_per_byte"],
            learning_rate=runs[0].run.point[RATE],
            at_first=initial_rms(each, out / "data"),
            steps=[entry["step"] for entry in entries],
            attention=[rms(entry, "attention") for entry in entries],
            residual=[rms(entry, "residual") for entry in entries],
            ratio=growth(each) / growth(CONTESTANTS["sigmoid"]),
        )
    return found


def initial_rms(contestant: Contestant, data: Path) -> list[float]:
    """Return the RMS of every layer's attention before training, on the batch for which the runs log it."""
    config = train_config(contestant)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(data)))
    ((dataset, _),) = open_split(config, config.data.validation_split)
    tokens = next(iter(evaluation_batches(dataset, config.sequence_length, config.batch_size)))["tokens"][:, :-1]
    params = init_params(config.model, jax.random.key(1))
    return activation_rms(config.model, params, tokens)["attention"].tolist()


def growth(contestant: Contestant) -> float:
    """Return the RMS over t = 1..T of the sum of all weights if the logits are 0, t^(1 - alpha) / 2.

    With bias -log t and alpha = 0 the sum is t sigmoid(-log t) = t / (t + 1).
    """
    t = np.arange(1.0, train_config(contestant).sequence_length + 1)
    weights = t / (t + 1) if contestant.sigmoid_bias == "-log_n" else t ** (1 - contestant.sigmoid_alpha) / 2
    return float(np.sqrt(np.mean(weights**2)))


# ---- words ----------------------------------------------------------------------------------------


def report(results: dict) -> list[str]:
    """Return the lines of report.md."""
    return [
        *summary_section(results),
        *speed_section(results["speed"]),
        *tuning_section(results["tuning"]),
        *sources_section(results["sources"]),
        *recall_section(results),
        *sigmoid_section(results),
    ]


def summary_section(results: dict) -> list[str]:
    bits = results["bits_per_byte"]
    means = {name: statistics.fmean(seeds.values()) for name, seeds in bits.items()}
    spread = lambda seeds: f" +- {statistics.stdev(seeds.values()):.4f}" if len(seeds) > 1 else ""
    ranking = sorted(means, key=means.__getitem__)
    first, length = ranking[0], train_config(CONTESTANTS["heinsen"]).sequence_length
    rows = [
        [
            name,
            f"{means[name]:.4f}{spread(bits[name])}",
            ", ".join(f"{x:.4f}" for x in bits[name].values()),
            f"{results['parameters'][name]:,}",
            f"{best_rate(results['tuning'][name]):g}",
            " / ".join(f"{n:,}" for n in results["remembered"][name]),
        ]
        for name in ranking
    ]
    return [
        "# Kinds of attention, compared",
        "",
        f"`python experiments/attention_comparison/run.py`, {results['machine']}, jax {results['jax']}. Every "
        f"contestant was trained on the same {results['tokens']:,} bytes of the same text in windows of {length}, with "
        "the same optimizer and the best learning rate for it from one grid, which was extended if the best was at its "
        "end. Bits per byte are measured on the whole test split.",
        "",
        f"**Lowest: {first}, {means[first]:.4f} bits per byte.** "
        + " ".join(versus(bits, name, first) for name in ranking[1:]),
        "",
        f"+- is the standard deviation over {len(bits[first])} seeds; in brackets are 95% intervals of the mean "
        "difference between runs with equal seeds (Student's t). They account for the seeds alone, not for the text, "
        "and are not corrected for five comparisons with the lowest. The state is how many numbers the layers keep of "
        f"the text, after {CONTEXTS[0]:,} and {CONTEXTS[1]:,} tokens.",
        "",
        *table(["", "bits per byte", "each seed", "parameters", "learning rate", "state"], rows),
        "",
        "![Validation during training](curves.png)",
        "",
    ]


def speed_section(speed: dict[str, dict[int, float]]) -> list[str]:
    relative = lambda rate, n: f"{rate:,.0f} ({rate / speed['softmax'][n]:.2f})"
    rows = [[name, *(relative(rate, n) for n, rate in rates.items())] for name, rates in speed.items()]
    n_tokens = max(map(int, speed["heinsen"]))
    return [
        "## Speed",
        "",
        f"Training steps of {n_tokens:,} tokens on all cores, one of each contestant in turn: tokens/s, and in "
        "parentheses relative to softmax in the same block.",
        "",
        *table(["", *(f"T = {int(n):,}" for n in speed["heinsen"])], rows),
        "",
    ]


def tuning_section(tuning: dict[str, dict[float, float]]) -> list[str]:
    at_end = [name for name, losses in tuning.items() if best_rate(losses) in (min(losses), max(losses))]
    note = f" At the end of the grid: {', '.join(at_end)}." if at_end else ""
    rates = sorted({rate for losses in tuning.values() for rate in losses})
    mark_best = lambda x, losses: f"**{x:.4f}**" if x == min(losses.values()) else f"{x:.4f}"  # inf: crashed
    cell = lambda x, losses: "" if x is None else mark_best(x, losses)
    rows = [[name, *(cell(losses.get(rate), losses) for rate in rates)] for name, losses in tuning.items()]
    return [
        "## Tuning",
        "",
        f"Validation loss in nats per token of shorter runs with one seed, by learning rate.{note}",
        "",
        *table(["", *(f"{rate:g}" for rate in rates)], rows),
        "",
    ]


def sources_section(sources: dict[str, dict[str, float]]) -> list[str]:
    rows = [
        [source, *(f"**{x:.3f}**" if x == min(bits.values()) else f"{x:.3f}" for x in bits.values())]
        for source, bits in sources.items()
    ]
    return [
        "## Sources",
        "",
        "Bits per byte by source, mean over seeds; the lowest of each in bold.",
        "",
        *table(["", *CONTESTANTS], rows),
        "",
    ]


def recall_section(results: dict) -> list[str]:
    recall = results["recall"]
    return [
        "## Recall",
        "",
        f"Associative recall by models with 4 layers, trained on it for {results['recall_steps']:,} steps "
        "(`scripts/recall.py`, one seed, one learning rate): right answers by the number of key-value pairs in the "
        "context.",
        "",
        *table(
            ["", *(f"{n} pairs" for n in recall["heinsen"])],
            [[kind, *(f"{x:.1%}" for x in accuracies.values())] for kind, accuracies in recall.items()],
        ),
        "",
        "![Recall](recall.png)",
        "",
    ]


def versus(bits: dict[str, dict], name: str, first: str) -> str:
    """Return how far one is behind another, by the differences between runs with the same seed (Student's t)."""
    from scipy.stats import t

    differences = [bits[name][seed] - x for seed, x in bits[first].items()]
    mean = statistics.fmean(differences)
    text = f"{name} is {mean:+.4f}"
    if len(differences) > 1:
        half = t.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
        text += f" [{mean - half:+.4f}, {mean + half:+.4f}]"
    return text + " above it" + ("." if mean else ", the same.")


def best_rate(losses: dict[float, float]) -> float:
    return min(losses, key=losses.__getitem__)


def sigmoid_section(results: dict) -> list[str]:
    variants = results["sigmoid"]
    base = statistics.fmean(variants["alpha 1"]["at_first"])
    numbers = lambda values: " ".join(f"{x:.2f}" for x in values)
    rows = []
    for name, found in variants.items():
        tuned = results["tuning"]["sigmoid" if name == "alpha 1" else name]
        rows.append(
            [
                name,
                f"{found['bits_per_byte']:.4f}",
                f"{found['learning_rate']:g}",
                f"{max(tuned.values()) - min(tuned.values()):.3f}",
                f"{found['ratio']:.3g}",
                f"{statistics.fmean(found['at_first']) / base:.3g}",
                numbers(found["at_first"]),
                numbers(found["attention"][-1]),
                numbers(found["residual"][-1]),
            ]
        )
    head = [
        "", "bits per byte", "learning rate", "worst - best of tuning (nats)", "ratio by the law",
        "ratio before training", "attention before", "attention after", "residual after",
    ]  # fmt: skip
    return [
        "## Which sigmoid attention trains?",
        "",
        "One seed each, at its own learning rate. By the law, outputs grow as n^(1 - alpha), which predicts the ratio "
        "of the RMS over a window to that of alpha = 1; the ratio before training (mean over layers, validation text) "
        "is beside it. Then the RMS of each layer: of its attention, and of the residual stream after it.",
        "",
        *table(head, rows),
        "",
        "![RMS of the attention during training](sigmoid.png)",
    ]


# ---- figures --------------------------------------------------------------------------------------


def plot_curves(out: Path, final: list[RunView]) -> None:
    """Draw the validation by training bytes: the mean over seeds, in a band from the lowest to the highest."""
    figure, axes = make_figure(figsize=(8, 5))
    for index, (name, each) in enumerate(CONTESTANTS.items()):
        logs = [read_metrics(out / "final" / run.name) for run in each.runs_of(final)]
        points = [[(e["tokens"], e["validation_bits_per_byte"]) for e in log if "validation_loss" in e] for log in logs]
        tokens, values = np.array([x for x, _ in points[0]]), np.array([[y for _, y in one] for one in points])
        axes.plot(tokens / 1e6, values.mean(0), "o-", color=f"C{index}", ms=3, lw=1.2, label=name)
        axes.fill_between(tokens / 1e6, values.min(0), values.max(0), color=f"C{index}", alpha=0.2, lw=0)
    axes.set(xlabel="million bytes of training", ylabel="validation (bits per byte)", yscale="log")
    axes.yaxis.set_major_formatter("{x:.1f}")
    axes.yaxis.set_minor_formatter("{x:.1f}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save_figure(figure, out / "curves.png")


def plot_recall(out: Path, recall: dict[str, dict]) -> None:
    figure, axes = make_figure(figsize=(8, 5))
    for kind, accuracies in recall.items():
        axes.plot([int(n) for n in accuracies], list(accuracies.values()), "o-", ms=4, lw=1.2, label=kind)
    axes.set(xlabel="key-value pairs in the context", ylabel="right answers", ylim=(-0.02, 1.02))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, out / "recall.png")


def plot_sigmoid(out: Path, results: dict) -> None:
    figure, axes = make_figure(figsize=(8, 5))
    for index, (name, found) in enumerate(results["sigmoid"].items()):
        values = [statistics.fmean(found["at_first"]), *(statistics.fmean(layers) for layers in found["attention"])]
        axes.plot([0, *found["steps"]], values, "o-", color=f"C{index}", ms=3, lw=1.2, label=name)
    axes.set(xlabel="steps", ylabel="RMS of the attention, mean over layers", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, out / "sigmoid.png")
