"""The table and the figure of the decoding benchmark, from its results.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from heinsen.figures import count_tokens, place_legend
from heinsen.files import write_figure
from scripts.benchmarking.measure import describe_versions

Summary = Mapping[str, Any]


def report(summary: Summary, attention: str, contexts: Sequence[int], batches: Sequence[int]) -> list[str]:
    """Return the lines of the report; `attention` is the config's."""
    reading = f"{summary['parameter_bytes'] / 2**20:.0f} MiB once takes {summary['read_milliseconds']:.1f} ms"
    lines = [
        f"{summary['device']}; {describe_versions()}",
        f"{summary['parameters']:,} parameters, {summary['dtype']}; reading their {reading}",
        f"{'attention':<20} {'batch':>5} {'context':>9} {'ms per step':>11} {'tokens/s':>9} {'state, MiB':>11}",
    ]
    for r in summary["results"]:
        lines.append(
            f"{r['name']:<20} {r['batch']:>5} {r['context']:>9} {r['milliseconds_per_step']:>11.2f} "
            f"{r['tokens_per_second']:>9.1f} {r['state_bytes'] / 2**20:>11.3f}"
        )
    for r in summary["left_out"]:
        reason = f"left out: a state of {r['state_bytes'] / 2**30:.1f} GiB"
        lines.append(f"{r['name']:<20} {r['batch']:>5} {r['context']:>9}   {reason}")
    return lines + _comparisons(summary, attention, contexts, batches)


def _comparisons(summary: Summary, attention: str, contexts: Sequence[int], batches: Sequence[int]) -> list[str]:
    results = {(r["batch"], r["context"]): r for r in summary["results"] if r["name"] == attention}
    first = results.get((batches[0], contexts[0]))
    if first is None:
        return []
    lines = []
    last = results.get((batches[0], contexts[-1]))
    if last is not None and last is not first:
        ratio = last["milliseconds_per_step"] / first["milliseconds_per_step"]
        lines.append(f"{attention}: a token after {last['context']} takes {ratio:.3f} times that after {contexts[0]}")
    ratio = first["milliseconds_per_step"] / summary["read_milliseconds"]
    lines.append(f"{attention}: {ratio:.2f} times as long as reading the parameters")
    for batch in batches[1:]:
        if many := results.get((batch, contexts[0])):
            ratio = many["tokens_per_second"] / first["tokens_per_second"]
            lines.append(f"{attention}: batch {batch} gives {ratio:.1f} times the tokens/s of batch {batches[0]}")
    return lines


def plot(summary: Summary, batch: int, path: Path) -> Path:
    """Draw time per token and size of the state against the context, for one batch size."""
    figure, (time_axes, state_axes) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    results = [r for r in summary["results"] if r["batch"] == batch]
    for axes, field, scale in ((time_axes, "milliseconds_per_step", 1.0), (state_axes, "state_bytes", 2.0**-20)):
        for name in dict.fromkeys(r["name"] for r in results):
            chosen = [r for r in results if r["name"] == name]
            axes.plot([r["context"] for r in chosen], [scale * r[field] for r in chosen], "o-", label=name)
    if lost := [r for r in summary["left_out"] if r["batch"] == batch]:
        style = dict(marker="x", linestyle="none", color="grey", label="does not fit here")
        state_axes.plot([r["context"] for r in lost], [r["state_bytes"] / 2**20 for r in lost], **style)
    for axes, label in ((time_axes, "ms per token"), (state_axes, "MiB of state")):
        axes.set(xscale="log", yscale="log", xlabel="tokens read before", ylabel=label)
        axes.grid(True, which="both", alpha=0.3)
        count_tokens(axes.xaxis)
    reading = summary["read_milliseconds"]
    time_axes.axhline(reading, color="grey", linestyle=":")
    time_axes.set_ylim(bottom=0.6 * min([reading, *(r["milliseconds_per_step"] for r in results)]))
    place = dict(xytext=(-4, -4), textcoords="offset points", ha="right", va="top")
    time_axes.annotate("parameters read once", (time_axes.get_xlim()[1], reading), **place)
    figure.suptitle(f"decoding, {summary['parameters'] / 1e6:.0f}M parameters, batch {batch}: {summary['device']}")
    place_legend(figure)
    write_figure(path, figure, dpi=120)
    plt.close(figure)
    return path
