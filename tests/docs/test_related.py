"""docs/related.md: each paper once, with its title, and a link to the arXiv number that is shown."""

import re

from tests.runs import ROOT


def test_each_paper_has_a_title_and_one_link_to_its_number():
    text = " ".join((ROOT / "docs" / "related.md").read_text().split())
    found = re.findall(r"\*([A-Za-z][^*]{9,})\*[^*\[]*\[([\d.]+)\]\(https://arxiv\.org/abs/([\d.]+)\)", text)
    assert all(shown == target for _, shown, target in found)
    numbers = [target for *_, target in found]
    assert numbers == re.findall(r"arxiv\.org/abs/([\d.]+)", text) and len(set(numbers)) == len(numbers) >= 22
