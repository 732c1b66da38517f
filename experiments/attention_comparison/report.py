"""report.md, results.json and the figures of the comparison, from the measurements."""

import dataclasses
import statistics
from pathlib import Path

import jax

from experiments import contest, recall, tools
from experiments.attention_comparison.contestants import CONTEST, CONTESTANTS, SIGMOIDS
from experiments.contest import RATE
from experiments.sigmoid_scaling.forms import window_growth
from experiments.tools import make_figure, save_figure, table
from heinsen.data.loader import evaluation_batches
from heinsen.figures import place_legend
from heinsen.models import activation_rms, init_params
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
    recalled: recall.Recall,
    recall_steps: int,
    speed: dict[str, dict],
) -> str:
    """Write the report and its figures, and return it.

    tested: {run: summary of eval.py}; speed: {kind: {T: tokens/s}}.
    """
    results = dict(
        machine=tools.describe_machine(),
        jax=jax.__version__,
        tokens=final[0].tokens,
        bits_per_byte=CONTEST.bits(CONTESTANTS, final, tested),
        sources=CONTEST.by_source(CONTESTANTS, final, tested),
        tuning={name: CONTEST.losses(name, tuning) for name in CONTEST.contestants},
        parameters={name: CONTEST.parameters(name) for name in CONTESTANTS},
        remembered={name: [CONTEST.state_size(name, n) for n in CONTEXTS] for name in CONTESTANTS},
        speed=speed,
        recall_steps=recall_steps,
        recall=recalled,
        sigmoid=sigmoid_results(out, final, sigmoid, tested),
    )
    CONTEST.plot_curves(out / "curves.png", CONTESTANTS, {out / "final": final})
    recall.plot(out / "recall.png", recalled)
    plot_sigmoid(out, results)
    text = tools.write_report(out, results, report(results))
    return f"{text}\nwritten: {out / 'report.md'}, results.json, curves.png, recall.png, sigmoid.png"


# ---- numbers --------------------------------------------------------------------------------------


def sigmoid_results(out: Path, final: list[RunView], sigmoid: list[RunView], tested: dict[str, dict]) -> dict:
    """Return, for each alpha and bias, losses and the RMS of every layer's attention before and after training."""
    found = {}
    for name, contestant in {"alpha 1": "sigmoid", **{name: name for name in SIGMOIDS}}.items():
        folder = "final" if name == "alpha 1" else "sigmoid"
        n_layers = CONTEST.train_config(contestant).model.n_layers
        runs = [run for run in CONTEST.runs_of(contestant, final + sigmoid) if run.run.point[SEED] == 1]
        entries = [e for e in read_metrics(out / folder / runs[0].name) if "attention_rms/layer_0" in e]
        rms = lambda entry, kind, n=n_layers: [entry[f"{kind}_rms/layer_{i}"] for i in range(n)]
        found[name] = dict(
            bits_per_byte=tested[runs[0].name]["bits_per_byte"],
            learning_rate=runs[0].run.point[RATE],
            at_first=initial_rms(contestant, out / "data"),
            steps=[entry["step"] for entry in entries],
            attention=[rms(entry, "attention") for entry in entries],
            residual=[rms(entry, "residual") for entry in entries],
            ratio=growth(contestant) / growth("sigmoid"),
        )
    return found


def initial_rms(contestant: str, data: Path) -> list[float]:
    """Return the RMS of every layer's attention before training, on the batch for which the runs log it."""
    config = CONTEST.train_config(contestant)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(data)))
    ((dataset, _),) = open_split(config, config.data.validation_split)
    tokens = next(iter(evaluation_batches(dataset, config.sequence_length, config.batch_size)))["tokens"][:, :-1]
    params = init_params(config.model, jax.random.key(1))
    return activation_rms(config.model, params, tokens)["attention"].tolist()


def growth(contestant: str) -> float:
    """Return `window_growth` of a contestant in the windows of training."""
    config = CONTEST.train_config(contestant)
    return window_growth(config.sequence_length, config.model.sigmoid_alpha, config.model.sigmoid_bias)


# ---- words ----------------------------------------------------------------------------------------


def report(results: dict) -> list[str]:
    """Return the lines of report.md."""
    return [
        *summary_section(results),
        *speed_section(results["speed"]),
        *contest.tuning_section(results["tuning"]),
        *contest.sources_section(results["sources"]),
        *recall.section(results["recall"], results["recall_steps"]),
        *sigmoid_section(results),
    ]


def summary_section(results: dict) -> list[str]:
    bits = results["bits_per_byte"]
    ranking = contest.ranked(bits)
    first, length = ranking[0], CONTEST.get_config().sequence_length
    rows = [
        [
            name,
            contest.spread(bits[name]),
            ", ".join(f"{x:.4f}" for x in bits[name].values()),
            f"{results['parameters'][name]:,}",
            f"{contest.best_rate(results['tuning'][name]):g}",
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
        f"**Lowest: {first}, {statistics.fmean(bits[first].values()):.4f} bits per byte.** "
        + " ".join(f"{name} is {contest.versus(bits, name, first)} above it." for name in ranking[1:]),
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


def plot_sigmoid(out: Path, results: dict) -> None:
    figure, axes = make_figure(figsize=(8, 5))
    for index, (name, found) in enumerate(results["sigmoid"].items()):
        values = [statistics.fmean(found["at_first"]), *(statistics.fmean(layers) for layers in found["attention"])]
        axes.plot([0, *found["steps"]], values, "o-", color=f"C{index}", ms=3, lw=1.2, label=name)
    axes.set(xlabel="steps", ylabel="RMS of the attention, mean over layers", yscale="log")
    axes.grid(alpha=0.3)
    place_legend(figure)
    save_figure(figure, out / "sigmoid.png")
