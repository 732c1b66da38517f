"""Pages that need no network: one HTML file with its style, its data, and charts that answer to the mouse.

The charts are drawn by uPlot (uPlot.iife.min.js, version 1.6.32, MIT license); the rest is page.js. Tables with the
class "sortable" sort by a click on a head; the input with the id "filter" hides their rows, and the series named so.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
      color: as in CSS.
      dash: lengths of strokes and gaps in pixels; (): an unbroken line.
      points: whether each point is marked.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    color: str = "#3b6ea5"
    width: float = 1.5
    dash: Sequence[int] = ()
    points: bool = False


def render_chart(series: Sequence[Series], x: str, y: str, title: str = "", log: bool = False) -> str:
    """Return a chart: values under the mouse in the legend, zoom by dragging, a double click shows all again.

    Args:
      x, y: labels of the axes, with units.
      log: whether the vertical axis is logarithmic, where all values are positive.
    """
    values = [value for each in series for value in each.y if value is not None]
    data = dict(x=x, y=y, log=log and min(values, default=0) > 0, series=[_finite(asdict(each)) for each in series])
    text = json.dumps(data, allow_nan=False).replace("</", "<\\/")
    heading = f"<figcaption>{escape(title)}</figcaption>" if title else ""
    return f'<figure class=chart>{heading}<script type="application/json">{text}</script></figure>'


def _finite(series: dict[str, Any]) -> dict[str, Any]:
    return series | {"y": [y if y is not None and math.isfinite(y) else None for y in series["y"]]}


def render_page(title: str, body: str, refresh: int | None = None) -> str:
    """Return a page. Where `refresh` is given, browsers load it again every so many seconds."""
    read = lambda name: (_FOLDER / name).read_text(encoding="utf-8")
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">'
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">{again}
<link rel="icon" href="data:,">
<style>{read("uPlot.min.css")}{read("page.css")}</style></head><body>
{body}
<script>{read("uPlot.iife.min.js")}</script>
<script>{read("page.js")}</script>
</body></html>
"""
