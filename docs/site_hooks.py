"""Hooks of mkdocs: pages from outside docs/ join the site, with their links."""

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# The README is the first page. Everything else keeps its path, and the pages of docs/ are moved to the root.
OTHERS = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add pages and pictures that are not in docs/."""
    patterns = ("experiments/**/*.md", "experiments/**/*.png", "examples/*.ipynb")
    others = [path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)]
    pages = OTHERS | {path: path for path in others}
    for source, target in pages.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def typeset(equation: re.Match[str]) -> str:
    """MathML, which browsers draw without a script or a font from elsewhere. Equations side by side wrap like words."""
    parts = [equation[1]] if r"\begin" in equation[1] else equation[1].split(r"\qquad")
    return f'<div class="equation">{"".join(convert(part, display="block") for part in parts)}</div>'


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Typeset equations, and let links follow the pages: ](docs/x) and ](../x) of pages at the root become ](x)."""
    markdown = re.sub(r"^\$\$\n(.*?)\n\$\$$", typeset, markdown, flags=re.DOTALL | re.MULTILINE)
    if page.file.src_uri.startswith("log/"):
        return markdown.replace("](../../", "](../")
    if "/" in page.file.src_uri:
        return markdown
    return re.sub(r"\]\((?:docs/|\.\./)", "](", markdown).replace("](README.md", "](index.md")
