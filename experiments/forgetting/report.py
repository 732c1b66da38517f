"""report.md, results.json and the figures, from the measurements."""

from pathlib import Path
from typing import NamedTuple

from experiments.contest import Contest
from heinsen.sweep.runs import RunView


class Held(NamedTuple):
    """A contest, and its runs: of the tuning, the final ones, and {run: summary of eval.py}."""

    contest: Contest
    tuning: list[RunView]
    final: list[RunView]
    tested: dict[str, dict]


def write(out: Path, found: dict[str, Held]) -> str:
    return ""
