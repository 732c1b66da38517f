"""The documentation as a site: it builds strictly, and its pages fit into a wide and a narrow browser window."""

import json
import re
import subprocess
import sys
from html import unescape

import pytest

from tests.documents import find_chromium
from tests.runs import ROOT

WIDTHS = (1300, 400)
# Measures the page of each frame: its title, its width, the elements over its right edge that nothing scrolls, the
# equations that are cut or have a scroll bar beside them, and the tables with commands in the second of three columns
# that one has to scroll.
MEASURE = """
<meta charset="utf-8"><pre id="found"></pre>
<script>
function measure({contentWindow: page}) {
  const scrolls = x => x && (/auto|scroll/.test(page.getComputedStyle(x).overflowX) || scrolls(x.parentElement));
  const runsOver = x => x.getBoundingClientRect().right > page.innerWidth + 1 && !scrolls(x.parentElement);
  const isCut = x => x.scrollHeight > x.clientHeight + 1 || page.getComputedStyle(x).overflowY != "hidden";
  const find = (what, is) => [...page.document.querySelectorAll(what)].filter(is).map(x => x.outerHTML.slice(0, 99));
  const commands = ".md-typeset__scrollwrap:has(td:nth-child(2) code):not(:has(td:nth-child(4)))";
  return {
    title: page.document.querySelector("article h1")?.innerText,
    width: page.document.documentElement.scrollWidth,
    over: find("article *", runsOver),
    cut: find(".equation", isCut),
    scrolled: find(commands, x => x.scrollWidth > x.clientWidth),
  };
}
onload = () => setTimeout(() => {
  const found = [...document.querySelectorAll("iframe")].map(measure);
  document.getElementById("found").textContent = JSON.stringify(found);
}, 3000);  // after the theme's scripts
</script>
"""


@pytest.mark.long
def test_pages_fit_into_wide_and_narrow_windows(tmp_path):
    for name in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(name, reason="make docs installs it")
    chromium, site = find_chromium(), tmp_path / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={site}"]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (site / "index.html").read_text()
    wide = '<p style="width: 2000px">too wide</p></article>'
    (site / "wide.html").write_text(text.replace("</article>", wide))
    pages = [path.relative_to(site).as_posix() for path in (site / "wide.html", *site.rglob("index.html"))]
    assert len(pages) >= 20
    frames = [(page, width) for page in pages for width in WIDTHS]
    html = "".join(f'<iframe src="{path}" width="{width}" height="900"></iframe>' for path, width in frames)
    (site / "measure.html").write_text(MEASURE + html)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    options += [
        "--allow-file-access-from-files",
        "--virtual-time-budget=30000",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command = [chromium, *options, "--host-resolver-rules=MAP * ~NOTFOUND", (site / "measure.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    found = json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL)[1]))
    measured = dict(zip(frames, found, strict=True))
    assert all(page["title"] for page in found)
    for width in WIDTHS:
        broken = measured.pop(("wide.html", width))
        assert broken["width"] > width and "too wide" in broken["over"][-1], "the check finds what it looks for"
    is_bad = lambda page, width: page["width"] > width or page["over"] or page["cut"] or page["scrolled"]
    assert {frame: page for frame, page in measured.items() if is_bad(page, frame[1])} == {}
