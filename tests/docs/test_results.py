"""Tables and figures of README.md and docs/results.md are those of the experiments' results.json."""

import pytest

from scripts.results_tables import PAGES, TABLES, fill, ladder_trend, results
from tests.runs import ROOT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_follow_from_the_results(page):
    text = page.read_text()
    assert fill(text) == text, "run scripts/results_tables.py"
    assert any(f"<!-- table: {name} -->\n\n| " in text for name in TABLES)


def test_a_changed_figure_is_found():
    text = (ROOT / "README.md").read_text()
    changed = text.replace("| 2.37 ", "| 2.36 ")
    assert changed != text and fill(changed) == text


def test_figures_in_prose_follow_from_the_results():
    text = " ".join(page.read_text() for page in (*PAGES, ROOT / "docs" / "replication.md"))
    text = " ".join(text.split()).replace("+-", "±")
    trend = ladder_trend()
    said = [f"{-trend['text'][0]:.3f} ± {trend['text'][1]:.3f} per doubling of bytes"]
    said += [f"{-trend['parameters'][0]:.3f} ± {trend['parameters'][1]:.3f} per doubling of parameters"]
    losses = results("comparison_2m")["bits_per_byte"]["softmax, GPT-2's block, parts"].values()
    low, middle, high = sorted(f"{loss:.2f}" for loss in losses)
    said.append(f"{low}, {middle} and {high}")
    assert [words for words in said if words not in text] == []
