"""What reports are made of: results.json and its figures, tables, intervals over seeds."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from heinsen.figures import place_legend, pyplot
from heinsen.files import write_atomically, write_figure

RESAMPLES = 2000

Results = Mapping[str, Any]  # the contents of results.json
Losses = Mapping[float, float | None]  # {learning rate: validation loss}; None: crashed


def read_results(file: Path) -> Results:
    """Return the contents of a file of results, with numbers as keys where their texts are those of numbers."""

    def restore(key: str) -> int | float | str:
        try:
            return int(key) if key.isdecimal() else float(key)
        except ValueError:
            return key

    restore_keys = lambda mapping: {restore(key): value for key, value in mapping.items()}
    return json.loads(file.read_text(), object_hook=restore_keys)


def write_report(out: Path, results: Results, module: ModuleType) -> str:
    """Write results.json, report.md and its figures, and return the report.

    module: the experiment's report.py, with `report`, which returns the lines of report.md, and FIGURES, {name of the
    file: function that draws it}.
    """
    text = json.dumps(results, indent=1)
    one_line = lambda match: "[" + re.sub(r"\n\s*", " ", match[1]) + "]"
    text = re.sub(r"\[\n\s*([^\[\]{}]*?)\n\s*\]", one_line, text)
    write_atomically(out / "results.json", text + "\n")
    for name, draw in module.FIGURES.items():
        figure = draw(results)
        if not figure.legends:
            place_legend(figure)
        write_figure(out / name, figure, dpi=120)
        pyplot().close(figure)
    report = "\n".join(module.report(results)) + "\n"
    write_atomically(out / "report.md", report)
    return f"{report}\nwritten: {', '.join([str(out / 'report.md'), 'results.json', *module.FIGURES])}"


def make_figure(*arguments: Any, **options: Any) -> tuple[Figure, Any]:
    """Return (figure, axes) as plt.subplots does."""
    return pyplot().subplots(*arguments, layout="constrained", **options)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


def paired_difference(
    own: Float[np.ndarray, "S D"],
    other: Float[np.ndarray, "S D"],
    sizes: Float[np.ndarray, " D"] | Int[np.ndarray, " D"],
) -> tuple[float, float, float]:
    """How far sums over documents are above others per size, mean over seeds, and the ends of the 95% interval.

    The interval is that of a bootstrap over documents and seeds together.
    """
    above = own - other
    once = lambda seeds, documents: above[seeds][:, documents].sum() / len(seeds) / sizes[documents].sum()
    value, low, high = bootstrap(once, *above.shape)
    return value, low, high


def bootstrap(
    once: Callable[[np.ndarray, np.ndarray], Any], n_seeds: int, n_documents: int
) -> Float[np.ndarray, "3 ..."]:
    """once(numbers of seeds, numbers of documents) of all, and the ends of its 95% interval over both resampled."""
    rng = np.random.default_rng(0)
    drawn = [
        once(rng.integers(n_seeds, size=n_seeds), rng.integers(n_documents, size=n_documents)) for _ in range(RESAMPLES)
    ]
    return np.stack([once(np.arange(n_seeds), np.arange(n_documents)), *np.percentile(drawn, [2.5, 97.5], axis=0)])


def interval(values: Iterable[float], form: str = ".3f") -> str:
    """Return a value and its 95% interval, which are given as [value, low, high], as text."""
    value, low, high = (format(x, form) for x in values)
    return f"{value} [{low}, {high}]"


def best_rate(losses: Losses) -> float:
    """Return the learning rate with the lowest loss."""
    return min((loss, rate) for rate, loss in losses.items() if loss is not None)[1]


def tuning_section(tuning: Mapping[str, Losses], title: str = "Tuning", runs: str = "shorter runs") -> list[str]:
    """Return the section of a report on the tuning by such runs."""
    at_end = [name for name, losses in tuning.items() if best_rate(losses) in (min(losses), max(losses))]
    note = f" At the end of the grid: {', '.join(at_end)}." if at_end else ""
    rates = sorted({rate for losses in tuning.values() for rate in losses})

    def cell(losses: Losses, rate: float) -> str:
        if (loss := losses.get(rate)) is None:
            return "crashed" if rate in losses else ""
        return f"**{loss:.4f}**" if rate == best_rate(losses) else f"{loss:.4f}"

    rows = [[name, *(cell(losses, rate) for rate in rates)] for name, losses in tuning.items()]
    return [
        f"## {title}",
        "",
        f"Validation loss in nats per token of {runs} with one seed, by learning rate.{note}",
        "",
        *table(["", *(f"{rate:g}" for rate in rates)], rows),
        "",
    ]
