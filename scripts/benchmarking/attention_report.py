"""Tables and the figure of the attention benchmark, from its results.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from heinsen.figures import place_legend
from heinsen.files import write_figure
from scripts.benchmarking.contestants import BACKWARD, CHUNKED, DIRECTIONS, FORWARD
from scripts.benchmarking.measure import describe_versions

Summary = Mapping[str, Any]


def report(summary: Summary) -> list[str]:
    """Return the lines of the report."""
    lines = [f"{_shape(summary)}; {summary['device']}; {describe_versions()}"]
    for dtype in _dtypes(summary):
        for direction in DIRECTIONS:
            for field, scale, unit in (("milliseconds", 1.0, "ms"), ("peak_bytes", 2.0**-20, "MiB beyond the inputs")):
                chosen = [r for r in summary["results"] if (r["direction"], r["dtype"]) == (direction, dtype)]
                lines += ["", f"{direction}, {dtype}, {unit}", *_table(summary, chosen, field, scale)]
    lines += ["", *_speedups(summary)]
    for r in summary["growth"]:
        ratio = f"{r['ratio']:.3f} times that at T = {r['since']}"
        lines.append(f"{r['direction']}, {r['dtype']}: time per token at T = {r['tokens']} {ratio}")
    lines += [f"left out: {r['name']}, {r['direction']}, {r['dtype']}: {r['why']}" for r in summary["left_out"]]
    return lines


def _shape(summary: Summary) -> str:
    return "causal, B={batch} H={heads} K=V={features}".format(**summary)


def _dtypes(summary: Summary) -> list[str]:
    return list(dict.fromkeys(r["dtype"] for r in summary["results"]))


def _table(summary: Summary, results: list[dict[str, Any]], field: str, scale: float) -> list[str]:
    lengths = sorted({r["tokens"] for r in summary["results"]})
    known = [r for r in results if r[field] is not None]
    names = list(dict.fromkeys(r["name"] for r in known))
    width = max([len(name) for name in names], default=0)
    lines = [" " * width + "".join(f"{f'T={n}':>12}" for n in lengths)]
    for name in names:
        cells = {r["tokens"]: f"{r[field] * scale:.4g}" for r in known if r["name"] == name}
        lines.append(name.ljust(width) + "".join(f"{cells.get(n, '-'):>12}" for n in lengths))
    return lines


def _speedups(summary: Summary) -> list[str]:
    """Return lines that compare the chunked form with every other contestant, by length."""
    times = {(r["name"], r["direction"], r["dtype"], r["tokens"]): r["milliseconds"] for r in summary["results"]}
    ratios: dict[tuple[str, str, str], list[str]] = {}
    for (name, direction, dtype, n_tokens), milliseconds in times.items():
        chunked = times.get((CHUNKED, direction, dtype, n_tokens))
        if chunked is not None and not name.startswith(CHUNKED):
            ratios.setdefault((name, direction, dtype), []).append(f"{milliseconds / chunked:.2f} (T={n_tokens})")
    return [
        f"{direction}, {dtype}: {CHUNKED} is {', '.join(found)} times as fast as {name}"
        for (name, direction, dtype), found in ratios.items()
    ]


def plot(summary: Summary, path: Path) -> Path:
    """Draw time and memory against the number of tokens."""
    dtypes, names = _dtypes(summary), list(dict.fromkeys(r["name"] for r in summary["results"]))
    figure, rows = plt.subplots(len(dtypes), 3, figsize=(15, 4.6 * len(dtypes)), squeeze=False, layout="constrained")
    colors = dict(zip(names, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    panels = [
        (FORWARD, "milliseconds", 1.0, "ms, forward"),
        (BACKWARD, "milliseconds", 1.0, "ms, forward + backward"),
        (BACKWARD, "peak_bytes", 2.0**-20, "MiB beyond inputs, forward + backward"),
    ]
    for dtype, axes in zip(dtypes, rows, strict=True):
        for axis, (direction, field, scale, label) in zip(axes, panels, strict=True):
            for name in names:
                which = dict(name=name, direction=direction, dtype=dtype)
                chosen = [r for r in summary["results"] if which.items() <= r.items() and r[field]]
                if chosen:
                    points = [r["tokens"] for r in chosen], [r[field] * scale for r in chosen]
                    axis.loglog(*points, "o-", base=2, label=name, color=colors[name])
            axis.set(xlabel="tokens T", ylabel=label, title=dtype)
            axis.grid(alpha=0.3)
    figure.suptitle(f"{_shape(summary).replace('causal,', 'causal attention,')}: {summary['device']}")
    place_legend(figure)
    write_figure(path, figure, dpi=120)
    plt.close(figure)
    return path
