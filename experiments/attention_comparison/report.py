"""report.md, results.json and the figures of the comparison, from what was measured."""

import dataclasses
import json
import math
import statistics
from pathlib import Path

import jax
import numpy as np

from experiments import tools
from experiments.attention_comparison.contestants import CONTESTANTS, RATE, SIGMOIDS, Contestant, train_config
from experiments.tools import figure, save, table
from heinsen.data.loader import evaluation_batches
from heinsen.files import write_atomically
from heinsen.models import activation_rms, init_model_state, init_params
from heinsen.sweep.runs import RunView
from heinsen.sweep.space import SEED
from heinsen.training.metrics import read_metrics
from heinsen.training.run import open_split

HELD = 512, 65536  # tokens, after which what a model remembers is counted


def write(
    out: Path,
    tuning: list[RunView],
    final: list[RunView],
    sigmoid: list[RunView],
    tested: dict[str, dict],
    recall: dict[str, dict],
    speed: dict[str, dict],
) -> None:
    """tested: {run: summary of eval.py}; recall: {kind: that of scripts/recall.py}; speed: {kind: {T: tokens/s}}."""
    bits = {
        name: {run.run.point[SEED]: tested[run.name]["bits_per_byte"] for run in each.runs_of(final)}
        for name, each in CONTESTANTS.items()
    }
    results = dict(
        machine=tools.machine(),
        jax=jax.__version__,
        tokens=final[0].tokens,
        bits_per_byte=bits,
        sources=by_source(final, tested),
        tuning={
            name: dict(sorted((run.run.point[RATE], loss(run)) for run in each.runs_of(tuning)))
            for name, each in (CONTESTANTS | SIGMOIDS).items()
        },
        parameters={name: tools.n_params(train_config(each)) for name, each in CONTESTANTS.items()},
        remembered={name: [n_remembered(each, n) for n in HELD] for name, each in CONTESTANTS.items()},
        speed=speed,
        recall_steps=recall["heinsen"]["steps"],
        recall={kind: {of["length"]: of["answers"] for of in found["accuracy"]} for kind, found in recall.items()},
        sigmoid=sigmoid_results(out, final, sigmoid, tested),
    )
    write_atomically(out / "results.json", json.dumps(without_infinity(results), indent=1) + "\n")
    plot_curves(out, final)
    plot_recall(out, results["recall"])
    plot_sigmoid(out, results)
    (out / "report.md").write_text("\n".join(report(results)) + "\n")
    print((out / "report.md").read_text())
    print(f"written: {out / 'report.md'}, results.json, curves.png, recall.png, sigmoid.png")


def without_infinity(results):
    """For JSON, which has none: null, of a run that has crashed."""
    if isinstance(results, dict):
        return {name: without_infinity(x) for name, x in results.items()}
    return None if results == math.inf else results


# ---- numbers --------------------------------------------------------------------------------------


def loss(run: RunView) -> float:
    """Of the last validation; infinite where the run has crashed."""
    return run.validation_loss if run.state == "finished" else math.inf


def n_remembered(contestant: Contestant, n_tokens: int) -> int:
    """Numbers that the layers keep of so many tokens."""
    model = train_config(contestant).model
    state = jax.eval_shape(lambda: init_model_state(model, 1, n_tokens))
    return sum(leaf.size for leaf in jax.tree.leaves(state.attention))


def by_source(final: list[RunView], tested: dict[str, dict]) -> dict[str, dict[str, float]]:
    """{source: {contestant: bits a byte, the mean over seeds}}, the largest sources first."""
    found: dict[str, dict[str, float]] = {}
    sizes: dict[str, int] = {}
    for name, each in CONTESTANTS.items():
        of_seeds = [tested[run.name].get("sources", {}) for run in each.runs_of(final)]
        for source in of_seeds[0]:
            sizes[source] = of_seeds[0][source]["tokens"]
            found.setdefault(source, {})[name] = statistics.fmean(one[source]["bits_per_byte"] for one in of_seeds)
    return {source: found[source] for source in sorted(found, key=lambda source: -sizes[source])}


def sigmoid_results(out: Path, final: list[RunView], sigmoid: list[RunView], tested: dict[str, dict]) -> dict:
    """Of each alpha and bias: losses, and root mean squares of every layer's attention, before and after training."""
    found = {}
    for name, each in {"alpha 1": CONTESTANTS["sigmoid"], **SIGMOIDS}.items():
        folder = "final" if name == "alpha 1" else "sigmoid"
        runs = [run for run in each.runs_of(final + sigmoid) if run.run.point[SEED] == 1]
        entries = [e for e in read_metrics(out / folder / runs[0].name) if "attention_rms/layer_0" in e]
        of = lambda entry, kind, n=each.n_layers: [entry[f"{kind}_rms/layer_{i}"] for i in range(n)]
        found[name] = dict(
            bits_per_byte=tested[runs[0].name]["bits_per_byte"],
            learning_rate=runs[0].run.point[RATE],
            at_first=first_rms(each, out / "data"),
            steps=[entry["step"] for entry in entries],
            attention=[of(entry, "attention") for entry in entries],
            residual=[of(entry, "residual") for entry in entries],
            ratio=growth(each) / growth(CONTESTANTS["sigmoid"]),
        )
    return found


def first_rms(contestant: Contestant, data: Path) -> list[float]:
    """Of every layer's attention before any training, on the batch that the runs log theirs of."""
    config = train_config(contestant)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(data)))
    ((dataset, _),) = open_split(config, config.data.validation_split)
    tokens = next(iter(evaluation_batches(dataset, config.sequence_length, config.batch_size)))["tokens"][:, :-1]
    params = init_params(config.model, jax.random.key(1))
    return activation_rms(config.model, params, tokens)["attention"].tolist()


def growth(contestant: Contestant) -> float:
    """The root mean square over t = 1..T of the sum of all weights where the logits are 0: t^(1 - alpha) / 2.

    With bias -log t and alpha = 0 it is t sigmoid(-log t) = t / (t + 1).
    """
    t = np.arange(1.0, train_config(contestant).sequence_length + 1)
    weights = t / (t + 1) if contestant.sigmoid_bias == "-log_n" else t ** (1 - contestant.sigmoid_alpha) / 2
    return float(np.sqrt(np.mean(weights**2)))


# ---- words ----------------------------------------------------------------------------------------


def report(results: dict) -> list[str]:
    bits = results["bits_per_byte"]
    means = {name: statistics.fmean(of.values()) for name, of in bits.items()}
    spread = lambda of: f" +- {statistics.stdev(of.values()):.4f}" if len(of) > 1 else ""
    ranking = sorted(means, key=means.get)
    first, config = ranking[0], train_config(CONTESTANTS["heinsen"])
    lines = [
        "# Kinds of attention, compared",
        "",
        f"`python experiments/attention_comparison/run.py`, {results['machine']}, jax {results['jax']}. Every "
        f"contestant has read the same {results['tokens']:,} bytes of the same text in windows of "
        f"{config.sequence_length}, with the same optimizer and its own best learning rate of one grid, extended where "
        "the best lay at its end. Bits a byte are those of the whole test split.",
        "",
        f"**Lowest: {first}, {means[first]:.4f} bits a byte.** "
        + " ".join(versus(bits, name, first) for name in ranking[1:]),
        "",
        f"The +- is the standard deviation over {len(bits[first])} seeds; in brackets are 95% intervals of the mean "
        "difference between runs of equal seeds (Student's t): of the seeds alone, not of the text, and with no "
        "correction for five comparisons with the one that turned out lowest. Remembered are the numbers that the "
        f"layers keep of the text to go on from it, after {HELD[0]:,} and {HELD[1]:,} tokens.",
        "",
        *table(
            ["", "bits a byte", "each seed", "parameters", "learning rate", "remembered"],
            [
                [
                    name,
                    f"{means[name]:.4f}{spread(bits[name])}",
                    ", ".join(f"{x:.4f}" for x in bits[name].values()),
                    f"{results['parameters'][name]:,}",
                    f"{best_rate(results['tuning'][name]):g}",
                    " / ".join(f"{n:,}" for n in results["remembered"][name]),
                ]
                for name in ranking
            ],
        ),
        "",
        "![Validation during training](curves.png)",
        "",
        "## Speed",
        "",
        "Training steps of 8,192 tokens on all cores, one of each contestant in turn: tokens a second, and how many "
        "times those of softmax in the same block.",
        "",
        *table(
            ["", *(f"T = {int(n):,}" for n in results["speed"]["heinsen"])],
            [
                [name, *(f"{rate:,.0f} ({rate / results['speed']['softmax'][n]:.2f})" for n, rate in of.items())]
                for name, of in results["speed"].items()
            ],
        ),
        "",
        "## Tuning",
        "",
        f"Validation loss in nats a token of shorter runs of one seed, by the learning rate.{at_the_edge(results)}",
        "",
        *tuning_table(results["tuning"]),
        "",
        "## Sources",
        "",
        "Bits a byte by source, means over seeds; the lowest of each in bold.",
        "",
        *table(
            ["", *CONTESTANTS],
            [
                [source, *(f"**{x:.3f}**" if x == min(of.values()) else f"{x:.3f}" for x in of.values())]
                for source, of in results["sources"].items()
            ],
        ),
        "",
        "## Recall",
        "",
        f"Associative recall by models of 4 layers trained on it for {results['recall_steps']:,} steps "
        "(`scripts/recall.py`, one seed, one learning rate): right answers by the number of keys and values in the "
        "context.",
        "",
        *table(
            ["", *(f"{n} things" for n in results["recall"]["heinsen"])],
            [[kind, *(f"{x:.1%}" for x in of.values())] for kind, of in results["recall"].items()],
        ),
        "",
        "![Recall](recall.png)",
        "",
        *sigmoid_report(results),
    ]
    return lines


def versus(bits: dict[str, dict], name: str, first: str) -> str:
    """How far one is behind another, by the differences of runs of the same seed (Student's t)."""
    from scipy.stats import t

    differences = [bits[name][seed] - x for seed, x in bits[first].items()]
    mean = statistics.fmean(differences)
    text = f"{name} is {mean:+.4f}"
    if len(differences) > 1:
        half = t.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
        text += f" [{mean - half:+.4f}, {mean + half:+.4f}]"
    return text + " above it" + ("." if mean else ", the same.")


def at_the_edge(results: dict) -> str:
    at_end = [name for name, of in results["tuning"].items() if best_rate(of) in (min(of), max(of))]
    return f" At the end of the grid: {', '.join(at_end)}." if at_end else ""


def tuning_table(tuning: dict[str, dict[float, float]]) -> list[str]:
    rates = sorted({rate for of in tuning.values() for rate in of})
    mark = lambda x, of: "" if x is None else f"**{x:.4f}**" if x == min(of.values()) else f"{x:.4f}"  # inf: crashed
    rows = [[name, *(mark(of.get(rate), of) for rate in rates)] for name, of in tuning.items()]
    return table(["", *(f"{rate:g}" for rate in rates)], rows)


def best_rate(losses: dict[float, float]) -> float:
    return min(losses, key=losses.get)


def sigmoid_report(results: dict) -> list[str]:
    of_all = results["sigmoid"]
    base = statistics.fmean(of_all["alpha 1"]["at_first"])
    rows = []
    for name, of in of_all.items():
        tuned = results["tuning"]["sigmoid" if name == "alpha 1" else name]
        rows.append(
            [
                name,
                f"{of['bits_per_byte']:.4f}",
                f"{of['learning_rate']:g}",
                f"{max(tuned.values()) - min(tuned.values()):.3f}",
                f"{of['ratio']:.3g}",
                f"{statistics.fmean(of['at_first']) / base:.3g}",
                " ".join(f"{x:.2f}" for x in of["at_first"]),
                " ".join(f"{x:.2f}" for x in of["attention"][-1]),
                " ".join(f"{x:.2f}" for x in of["residual"][-1]),
            ]
        )
    return [
        "## Which sigmoid attention trains?",
        "",
        "One seed each at its own learning rate. By the law outputs grow as n^(1 - alpha), so that root mean squares "
        "over a window should stand in a certain ratio to those of alpha = 1; beside it the ratio measured before "
        "training (means over layers, validation text). Then each layer's, of its attention and of the residual stream "
        "after it.",
        "",
        *table(
            [
                "", "bits a byte", "learning rate", "worst - best of tuning (nats)", "ratio by the law",
                "ratio before training", "attention before", "attention after", "residual after",
            ],
            rows,
        ),
        "",
        "![Attention's root mean square during training](sigmoid.png)",
    ]  # fmt: skip


# ---- figures --------------------------------------------------------------------------------------


def plot_curves(out: Path, final: list[RunView]) -> None:
    """Validation by bytes read: the mean over seeds, in a band from the lowest to the highest."""
    fig, axes = figure(figsize=(8, 5))
    for index, (name, each) in enumerate(CONTESTANTS.items()):
        logs = [read_metrics(out / "final" / run.name) for run in each.runs_of(final)]
        points = [[(e["tokens"], e["validation_bits_per_byte"]) for e in log if "validation_loss" in e] for log in logs]
        tokens, values = np.array([x for x, _ in points[0]]), np.array([[y for _, y in one] for one in points])
        axes.plot(tokens / 1e6, values.mean(0), "o-", color=f"C{index}", ms=3, lw=1.2, label=name)
        axes.fill_between(tokens / 1e6, values.min(0), values.max(0), color=f"C{index}", alpha=0.2, lw=0)
    axes.set(xlabel="million bytes read", ylabel="validation, bits a byte", yscale="log")
    axes.yaxis.set_major_formatter("{x:.1f}")
    axes.yaxis.set_minor_formatter("{x:.1f}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save(fig, out / "curves.png")


def plot_recall(out: Path, recall: dict[str, dict]) -> None:
    fig, axes = figure(figsize=(8, 5))
    for kind, of in recall.items():
        axes.plot([int(n) for n in of], list(of.values()), "o-", ms=4, lw=1.2, label=kind)
    axes.set(xlabel="things in the context", ylabel="right answers", ylim=(-0.02, 1.02))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()
    save(fig, out / "recall.png")


def plot_sigmoid(out: Path, results: dict) -> None:
    fig, axes = figure(figsize=(8, 5))
    for index, (name, of) in enumerate(results["sigmoid"].items()):
        values = [statistics.fmean(of["at_first"]), *(statistics.fmean(layers) for layers in of["attention"])]
        axes.plot([0, *of["steps"]], values, "o-", color=f"C{index}", ms=3, lw=1.2, label=name)
    axes.set(xlabel="steps", ylabel="root mean square of the attention, mean over layers", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    save(fig, out / "sigmoid.png")
