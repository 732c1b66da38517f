"""report.md and conversion.png, from results.json."""

from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from experiments.conversion import config
from experiments.lanes import machines, not_run
from experiments.reports import Results, explain_family, show_family, table, tuning_section
from heinsen.figures import make_figure

TASKS = {"associative": "recall", "copy": "copying"}
DRAWN = {"exponential", "elu + 1", "rotary", "no gate", "from scratch"}  # the last parts of cells' names
CHANGES = ("exponential", "elu + 1"), (", rotary", "")  # of a cell's name, to that of the one it is compared with


def report(results: Results) -> list[str]:
    """Return the lines of report.md."""
    cells, teachers = results["cells"], results["teachers"]
    hours = sum(cell["seconds"] for cell in (*cells.values(), *teachers.values())) / 3600
    batch = results["settings"]["batch_size"]
    main = teachers[config.MAIN]
    return [
        "# Conversion of softmax models",
        "",
        f"`python experiments/conversion/run.py`, {machines(cells)}: {hours:.2f} hours. Teachers of "
        f"{main['parameters']:,} parameters, 2 layers of GPT-2's block with rotary positions, read "
        f"{results['teacher_steps']:,} batches of {batch} windows of {config.LENGTH} tokens: half of them bytes of "
        f"text, a quarter recall of {join(config.PAIRS)} pairs, a quarter copies of {join(config.COPIES)} tokens. A "
        "student reads the share of these tokens that its row names, a tenth if none: half of it to learn the "
        "teacher's attention, half to learn the mix. It has a forget gate, 64 features per head and no rotations "
        "if its row says nothing else. Each stage's rate is tuned with one seed, by validation; then three others.",
        "",
        f"Text: bits per byte of {results['tests'] * config.LENGTH:,} held-out bytes in windows; n = 4, 8: of those "
        f"that end as many bytes that their window has had before; streams: of {16 * config.LENGTH:,} bytes, from "
        f"byte {config.LENGTH} on. Recall and copying: right answers, the mean over their lengths. Distance, "
        "after the first stage: of the attention's outputs from the teacher's, over their variance. State: numbers per "
        "sequence.",
        "",
        *not_run(results),
        *table(
            ["", "text", "n = 4", "n = 8", "streams", "recall", "copying", "distance", "state"],
            [row(name, cell) for name, cell in named(results).items()],
        ),
        "",
        *differences_section(results),
        "![What students keep of their teacher](conversion.png)",
        "",
        "## By length",
        "",
        *table(
            ["", *(f"{n} pairs" for n in config.PAIRS), *(f"copy {n}" for n in config.COPIES)],
            [[name, *(f"{x:.1%}" for x in by_length(cell))] for name, cell in named(results).items()],
        ),
        "",
        *tuning_section(tunings(results, "attention"), runs="first stages (their distance instead)"),
        *tuning_section(tunings(results, "text"), runs="whole runs"),
    ]


def join(numbers: Any) -> str:
    return ", ".join(map(str, numbers))


def named(results: Results) -> dict[str, Any]:
    """The teachers' and the cells' results."""
    return {f"teacher: {name}": each for name, each in results["teachers"].items()} | results["cells"]


def tunings(results: Results, stage: str) -> dict[str, Any]:
    return {name: cell["tuning"][stage] for name, cell in named(results).items() if stage in cell["tuning"]}


def scores(cell: Any, name: str) -> Float[np.ndarray, " seeds"]:
    """Of each seed: bits per byte, or right answers of a task, the mean over its lengths."""
    values = [each[name] for each in cell["runs"]]
    return np.array([np.mean(list(x.values())) if isinstance(x, dict) else x for x in values])


def by_length(cell: Any) -> Float[np.ndarray, " lengths"]:
    return np.mean([[x for name in TASKS for x in each[name].values()] for each in cell["runs"]], axis=0)


def row(name: str, cell: Any) -> list[str]:
    repeated = np.mean([each["repeated"] for each in cell["runs"]], axis=0)
    return [
        name,
        f"{scores(cell, 'text').mean():.3f}",
        *(f"{x:.3f}" for x in repeated[:2]),
        f"{scores(cell, 'streams').mean():.3f}",
        *(f"{scores(cell, task).mean():.1%}" for task in TASKS),
        "" if cell["distances"] is None else f"{np.mean(cell['distances']):.3f}",
        f"{cell['state_numbers']:,}",
    ]


def differences_section(results: Results) -> list[str]:
    recall, bits = (differences(results, name) for name in ("associative", "text"))
    if not recall:
        return []
    shown = zip(show_family(recall, "+.1%").items(), show_family(bits, "+.3f").values(), strict=True)
    return [
        "Recall above another cell's, in percentage points, and loss of text, in bits per byte (less is better), with "
        "the same seeds:",
        "",
        *table(["", "above", "recall", "text"], [[*key, text, other] for (key, text), other in shown]),
        "",
        explain_family(recall),
        "",
    ]


def differences(results: Results, name: str) -> dict[tuple[str, str], Float[np.ndarray, " seeds"]]:
    """{(cell, another): difference of each seed}: exponential features against elu + 1, rotations against none."""
    cells = results["cells"]
    pairs = [(each, each.replace(*change)) for change in CHANGES for each in cells]
    return {(a, b): scores(cells[a], name) - scores(cells[b], name) for a, b in pairs if b in cells and a != b}


def draw(results: Results) -> Figure:
    """Draw recall, copying and the loss of text by the share of the teacher's tokens."""
    figure, axes = make_figure(ncols=3, figsize=(12, 4))
    main = results["teachers"][config.MAIN]
    names = ["associative", "copy", "text"]
    lines: dict[str, dict[float, Any]] = {}
    for name, cell in results["cells"].items():
        kind = ", ".join(part for part in name.split(", ") if not part.endswith("%"))
        if kind.rpartition(", ")[2] in DRAWN:
            lines.setdefault(kind, {})[cell["share"]] = cell
    for axis, name in zip(axes, names, strict=True):
        axis.axhline(scores(main, name).mean(), color="k", lw=1, ls="--", label="teacher")
        for i, (kind, found) in enumerate(lines.items()):
            shares = sorted(found)
            axis.plot(shares, [scores(found[x], name).mean() for x in shares], "_-", ms=10, color=f"C{i}", label=kind)
            for x in shares:
                axis.plot([x] * len(found[x]["runs"]), scores(found[x], name), "o", ms=3, alpha=0.6, color=f"C{i}")
        title = "text, bits per byte" if name == "text" else f"right answers, {TASKS[name]}"
        axis.set(xscale="log", xlabel="share of the teacher's tokens", title=title)
        ticks = sorted({x for found in lines.values() for x in found})
        axis.set_xticks(ticks, [f"{x:.0%}" for x in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    return figure


FIGURES = {"conversion.png": draw}
