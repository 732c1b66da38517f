"""The probe of associative recall, scripts/recall.py, for small models of an experiment's contestants."""

from collections.abc import Mapping
from pathlib import Path

from experiments import tools
from heinsen.figures import place_legend
from heinsen.sweep.space import Value, format_value

PAIRS = (4, 8, 16, 32)
N_LAYERS = 4

Recall = Mapping[str, Mapping[int, float]]  # {contestant: {key-value pairs: share of right answers}}


def measure(out: Path, contestants: Mapping[str, Mapping[str, Value]], steps: int, parallel: int) -> Recall:
    """Train and test a model of each contestant's kind; results are kept in out/NUMBER/stdout.json.

    contestants: {name: fields of its model}; its width and layers are those of the probe.
    """
    commands = {}
    for number, fields in enumerate(contestants.values()):
        given = {field: value for field, value in fields.items() if field != "d_model"} | {"n_layers": N_LAYERS}
        folder = out / str(number)
        commands[folder / "stdout.json"] = [
            "scripts/recall.py", "--task=associative", f"--lengths={','.join(map(str, PAIRS))}", f"--steps={steps}",
            f"--out={tools.from_root(folder)}",
            *(f"--config.model.{field}={format_value(value)}" for field, value in given.items()),
        ]  # fmt: skip
    found = tools.run_programs(commands, parallel)
    accuracy = lambda file: {each["length"]: each["answers"] for each in found[file]["accuracy"]}
    return dict(zip(contestants, map(accuracy, commands), strict=True))


def section(recall: Recall, steps: int) -> list[str]:
    """Return the section of a report; its figure is recall.png."""
    rows = [[name, *(f"{x:.1%}" for x in accuracies.values())] for name, accuracies in recall.items()]
    return [
        "## Recall",
        "",
        f"Associative recall by models of each kind with {N_LAYERS} layers, trained on it for {steps:,} steps "
        "(`scripts/recall.py`, one seed, one learning rate): right answers by the number of key-value pairs in the "
        "context. So few steps tell how soon a kind learns it. What it can hold is measured by "
        "experiments/associative_recall, with more steps and tuned learning rates.",
        "",
        *tools.table(["", *(f"{n} pairs" for n in PAIRS)], rows),
        "",
        "![Recall](recall.png)",
        "",
    ]


def plot(path: Path, recall: Recall) -> None:
    figure, axes = tools.make_figure(figsize=(8, 5))
    for name, accuracies in recall.items():
        axes.plot(list(accuracies), list(accuracies.values()), "o-", ms=4, lw=1.2, label=name)
    axes.set(xlabel="key-value pairs in the context", ylabel="right answers", ylim=(-0.02, 1.02))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    place_legend(figure)
    tools.save_figure(figure, path)
