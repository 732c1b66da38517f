"""Markdown pages: links and images resolve, files they name exist, and no phrase comes back that was edited out."""

import re
from pathlib import Path

import pytest

from tests.documents import commands, errors_of
from tests.runs import ROOT

PAGES = sorted(path for pattern in ("*.md", "docs/*.md", "experiments/*/*.md") for path in ROOT.glob(pattern))
FOLDERS = ("configs", "docs", "examples", "experiments", "heinsen", "scripts", "tests")
PROGRAMS = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")} | set(ROOT.glob("*.py"))

# Globs of the files whose language is checked.
CHECKED = ("*.md", "*.py", "CITATION.cff", *(f"{folder}/**/*.{kind}" for folder in FOLDERS for kind in ("md", "py")))
AVOIDED = {
    "bits a byte": "bits per byte",
    "nats a token": "nats per token",
    "tokens a second": "tokens/s",
    "memory a device": "memory per device",
    "the same command goes on": "rerun the same command to resume",
    "leaves with status": "exits with status",
    "the same road": "the same path",
    "that take no part": "absent",
    "script not kept": "a committed command, or no figure",
    "script that was not kept": "a committed command, or no figure",
    "DESIGN section": "docs/design.md",
}


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+://", target):
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


def flowing(text: str) -> str:
    """The text on one line, without the markers that begin lines of comments."""
    return " ".join(re.sub(r"\n\s*#+:?", " ", text).split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_images_resolve(page):
    assert broken_links(page) == []


# The log and the changelog name files as they were called at the time.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ("LOG.md", "CHANGELOG.md")], ids=lambda page: page.name
)
def test_files_that_pages_name_exist(page):
    assert missing_files(page.read_text()) == []


@pytest.mark.parametrize("page", ["docs/design.md"])
def test_every_program_of_a_map_exists(page):
    layout = re.findall(r"^    .*$", (ROOT / page).read_text().split("    configs/", 1)[1], re.MULTILINE)
    named = {name for line in layout for name in re.findall(r"\b[\w]+\.py\b", line)}
    assert len(named) >= 8 and sorted(named - {path.name for path in PROGRAMS}) == []


@pytest.mark.parametrize(("page", "at_least"), [("CONTRIBUTING.md", 4), ("docs/SCALING.md", 6)])
def test_programs_accept_the_commands_of_a_page(page, at_least, tmp_path):
    text = re.sub(r"(?:\w+=\S+ )?(?:\.venv/bin/)?python ", "python ", (ROOT / page).read_text())
    text = re.sub(r"^.*=\.\.\. .*$", "", text, flags=re.MULTILINE)  # a command with something left to fill in
    found = [(program, arguments) for program, arguments in commands(text) if program.endswith(".py")]
    assert len(found) >= at_least
    rejected = [(command, error) for command, error in zip(found, errors_of(found, tmp_path), strict=True) if error]
    assert not rejected, "\n".join(map(str, rejected))


def test_no_phrase_comes_back_that_was_edited_out():
    files = sorted({path for pattern in CHECKED for path in ROOT.glob(pattern)} - {Path(__file__).resolve()})
    assert ROOT / "README.md" in files and ROOT / "docs" / "LOG.md" in files
    found = [
        f"{path.relative_to(ROOT)}: {phrase!r}, write {better!r}"
        for path in files
        for phrase, better in AVOIDED.items()
        if phrase in flowing(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_the_checks_find_what_they_look_for(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title: of it\n\n[a](#a-title-of-it) [b](other.md) ![c](no.png) [d](https://x.org/y) [e](#none)"
    )
    assert broken_links(page) == ["other.md", "no.png", "#none"]
    text = "`heinsen/ops/api.py`, `heinsen/gone.py`, `api.py`, `gone.py`, `configs/`, `data/pile/gone`, `a.gone`"
    assert missing_files(text) == ["heinsen/gone.py", "gone.py"]
    assert "bits a byte" in flowing("1.2 bits a\n    # byte") and "bits a byte" in flowing("bits\n  a byte")
