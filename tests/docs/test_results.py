"""Tables and figures of README.md and docs/results.md are those of the experiments' results.json."""

import re

import numpy as np
import pytest

from experiments.attribution.report import bits_per_byte
from scripts.results_tables import PAGES, TABLES, fill, results
from tests.runs import ROOT

REPORTS = "attribution", "attribution/0.5M", "conversion", "long_contexts/0.5M", "scaling"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_follow_from_the_results(page):
    text = page.read_text()
    assert fill(text) == text, "run scripts/results_tables.py"
    assert any(f"<!-- table: {name} -->\n\n| " in text for name in TABLES)


def test_a_changed_figure_is_found():
    text = (ROOT / "README.md").read_text()
    changed = re.sub(r"(\| \d\.\d\d)\d( ±)", r"\1x\2", text, count=1)
    assert changed != text and fill(changed) == text


def test_losses_by_seed_in_prose_follow_from_the_results():
    text = " ".join(" ".join(page.read_text() for page in PAGES).split())
    *seeds, last = (
        f"{x:.3f}" for x in sorted(bits_per_byte(results("attribution"), "softmax, additions, GPT-2's block"))
    )
    assert f"{', '.join(seeds)} and {last}" in text


INTERVAL = re.compile(r"([-+]?\d+\.\d+) \[([-+]?\d+\.\d+), ([-+]?\d+\.\d+)\]")


def test_differences_in_prose_are_those_of_the_reports():
    """Each is in a report, as it is or with its sign changed, to its number of digits."""
    reported = [
        *INTERVAL.findall("\n".join((ROOT / "experiments" / name / "report.md").read_text() for name in REPORTS))
    ]
    known = np.array(reported, float)
    known = np.concatenate([known, -known[:, [0, 2, 1]]])
    wrong = []
    for page in (*PAGES, ROOT / "docs" / "replication.md"):
        prose = re.sub(r"^    .*$", "", page.read_text(), flags=re.MULTILINE)  # without what programs print
        for said in INTERVAL.findall(prose):
            digits = [len(x.partition(".")[2]) for x in said]
            near = np.abs(known - np.array(said, float)) <= 0.5 * 10.0 ** -np.array(digits) + 0.51e-4
            wrong += [] if near.all(1).any() else [said]
    assert not wrong and len(known) > 100
