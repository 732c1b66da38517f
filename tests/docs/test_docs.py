"""Pages, and the notebook and web page of the examples: links and images resolve, and files that they name exist."""

import re
from pathlib import Path

import pytest

from tests.runs import ROOT

PATTERNS = ("*.md", "docs/*.md", "docs/log/*.md", "experiments/**/*.md", "examples/*.ipynb", "examples/*/*.html")
PAGES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
FOLDERS = ("configs", "docs", "examples", "experiments", "heinsen", "scripts", "tests")
PROGRAMS = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")} | set(ROOT.glob("*.py"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"""(?:\]\(|(?:src|href)=["'])([^)\s"']+)""", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    return broken


def missing_files(text: str) -> list[str]:
    """Paths in backticks that do not exist: `folder/...` from the root, or a bare `name.py` in any folder."""
    missing = []
    for name in re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)`", text):
        if name.split("/")[0] in FOLDERS and "/" in name:
            found = (ROOT / name).exists()
        else:
            found = not name.endswith(".py") or any(path.name == name for path in PROGRAMS)
        if not found:
            missing.append(name)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_images_resolve(page):
    assert broken_links(page) == []


# The log and the changelog name files as they were called at the time.
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name != "log" and page.name != "CHANGELOG.md"],
    ids=lambda page: page.name,
)
def test_files_that_pages_name_exist(page):
    assert missing_files(page.read_text()) == []


def test_every_program_of_the_map_exists():
    layout = re.findall(r"^    .*$", (ROOT / "docs/design.md").read_text().split("    configs/", 1)[1], re.MULTILINE)
    named = {name for line in layout for name in re.findall(r"\b[\w]+\.py\b", line)}
    assert len(named) >= 8 and sorted(named - {path.name for path in PROGRAMS}) == []


def test_the_checks_find_what_they_look_for(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title: of it\n\n[a](#a-title-of-it) [b](other.md) ![c](no.png) [d](https://x.org/y) [e](#none) "
        '<a href="gone.html">x</a> <img src="data:,">'
    )
    assert broken_links(page) == ["other.md", "no.png", "#none", "gone.html"]
    text = "`heinsen/ops/api.py`, `heinsen/gone.py`, `api.py`, `gone.py`, `configs/`, `data/pile/gone`, `a.gone`"
    assert missing_files(text) == ["heinsen/gone.py", "gone.py"]
