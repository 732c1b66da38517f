"""What reports are made of: results.json and its figures, tables, intervals over seeds. Axes: S seeds."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float
from scipy import stats

from heinsen.figures import save_figure
from heinsen.files import write_atomically

Key = TypeVar("Key")
Results = Mapping[str, Any]  # the contents of results.json
Losses = Mapping[float, float]  # {learning rate: validation loss}; NaN: diverged


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
        save_figure(out / name, draw(results))
    report = "\n".join(module.report(results)) + "\n"
    write_atomically(out / "report.md", report)
    return f"{report}\nwritten: {', '.join([str(out / 'report.md'), 'results.json', *module.FIGURES])}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


class Difference(NamedTuple):
    """A mean difference with its 95% interval, and the p-value of no difference.

    detectable: the smallest difference that as many seeds, as far from each other, would tell from none in about 80% of
    experiments at the level of 5%, by the sum of the two quantiles of t.
    """

    value: float
    low: float
    high: float
    p: float
    detectable: float


def seed_interval(differences: Float[np.ndarray, " S"]) -> Difference:
    """Return the mean over seeds with its interval by Student's t, with S - 1 degrees of freedom.

    differences: of the same seed in two cells, or anything else that each seed has.
    """
    mean, t = float(np.mean(differences)), stats.t(len(differences) - 1)
    error = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    half = t.ppf(0.975) * error
    p = 2 * t.sf(abs(mean) / error) if error else float(mean == 0)
    return Difference(mean, mean - half, mean + half, p, detectable=half + t.ppf(0.8) * error)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of a family of comparisons, corrected for their number (Holm 1979)."""
    order = np.argsort(p_values)
    corrected = np.maximum.accumulate(np.sort(p_values) * np.arange(len(order), 0, -1))
    return np.minimum(corrected, 1)[np.argsort(order)].tolist()


def show_family(differences: Mapping[Key, Float[np.ndarray, " S"]], form: str) -> dict[Key, str]:
    """Return the differences of a table, by seed, as the texts that `explain_family` explains."""
    found = {key: seed_interval(each) for key, each in differences.items()}
    corrected = holm([each.p for each in found.values()])

    def show(each: Difference, p: float) -> str:
        level = f" ({each.detectable:{form.lstrip('+')}})"
        verdict = "*" if p < 0.05 else " uncorrected" if each.p < 0.05 else level
        return f"{each.value:{form}} [{each.low:{form}}, {each.high:{form}}]{verdict}"

    return {key: show(each, p) for (key, each), p in zip(found.items(), corrected, strict=True)}


def explain_family(differences: Mapping[Key, Float[np.ndarray, " S"]]) -> str:
    """Return the sentences that explain the texts of `show_family`."""
    if not differences:
        return ""
    n_seeds = len(next(iter(differences.values())))
    return (
        f"In brackets the 95% interval of each difference by itself: Student's t over {n_seeds} seeds that both sides "
        f"share ({n_seeds - 1} degrees of freedom), for these test data. `*`: not 0, with p < 0.05 after Holm's "
        f"correction for all differences of this table ({len(differences)}). 'uncorrected': p < 0.05 only without "
        "that correction. Otherwise the two are level, and in parentheses stands the difference of which such seeds "
        "would show p < 0.05, without the correction, in about 80% of experiments."
    )


def best_rate(losses: Losses) -> float:
    """Return the learning rate with the lowest loss, a number if there is one."""
    return min(sorted(losses), key=lambda rate: (math.isnan(losses[rate]), losses[rate]))


def tuning_section(tuning: Mapping[str, Losses], runs: str) -> list[str]:
    """Return the section of a report on the tuning by such runs."""
    at_end = [name for name, losses in tuning.items() if best_rate(losses) in (min(losses), max(losses))]
    note = f" At the end of the grid: {', '.join(at_end)}." if at_end else ""
    rates = sorted({rate for losses in tuning.values() for rate in losses})

    def cell(losses: Losses, rate: float) -> str:
        if rate not in losses:
            return ""
        text = "diverged" if math.isnan(losses[rate]) else f"{losses[rate]:.4f}"
        return f"**{text}**" if rate == best_rate(losses) else text

    rows = [[name, *(cell(losses, rate) for rate in rates)] for name, losses in tuning.items()]
    return [
        "## Tuning",
        "",
        f"Validation loss in nats per token of {runs} with one seed, by learning rate.{note}",
        "",
        *table(["", *(f"{rate:g}" for rate in rates)], rows),
        "",
    ]
