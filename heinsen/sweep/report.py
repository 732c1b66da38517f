"""report.html of a sweep: the effect of each field, the curves and a table of the runs, in one file."""

import base64
import io
import math
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from heinsen.figures import count_tokens, place_legend, pyplot, smooth
from heinsen.files import write_atomically
from heinsen.sweep.definition import Definition
from heinsen.sweep.folder import REPORT_FILE, SweepFolder
from heinsen.sweep.runs import RunView, best_of, format_number, is_finite, summary
from heinsen.sweep.space import SEED, Point, Range, all_numbers, format_value, is_number
from heinsen.training.metrics import metric_points, read_metrics

_BINS = 4  # of the values drawn from a range
_NAMED = 12  # runs in the legend of the curves at most
_SMOOTHING = 0.9  # of the training loss, in long logs
_BLUE, _ORANGE = "#3b6ea5", "#c2410c"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1917; max-width: 1080px; margin: 2rem auto; padding: 0 1.5rem }
h1, h2 { line-height: 1.2; margin: 2rem 0 .5rem } img { max-width: 100%; height: auto; display: block }
table { border-collapse: collapse; font-size: .87rem; display: block; overflow-x: auto; margin: .6rem 0 }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #e7e5e4; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { color: #57534e } tr.best td { background: #ecfdf5 }
pre { background: #f5f5f4; padding: .7rem; overflow-x: auto; font-size: .8rem } .note { color: #57534e }
"""


# ---- effects -------------------------------------------------------------------------------------


class Result(NamedTuple):
    """A finished run: its point and its validation loss."""

    point: Point
    loss: float


# {field: {one of its values, or a part of its range: the results with it}}
Effects = dict[str, dict[str, list[Result]]]


def mean_of(results: Sequence[Result]) -> float:
    return statistics.fmean(result.loss for result in results)


def find_results(views: Sequence[RunView]) -> list[Result]:
    """Return the results of the finished runs whose validation loss is finite."""
    return [Result(view.run.point, view.result) for view in views if view.result is not None]


def find_effects(definition: Definition, results: Sequence[Result]) -> Effects:
    """Return the results by the value of each field, whatever the values of the others: its marginal effect.

    The field whose means differ most comes first, and the seed last. In a zip all fields vary together, and none has an
    effect of its own.
    """
    if definition.strategy.paired:
        return {}
    sizes, effects = {}, {}
    for field in dict.fromkeys(field for result in results for field in result.point):
        groups = _group(field, isinstance(definition.space.get(field), Range), results)
        means = [mean_of(group) for group in groups.values()]
        if len(groups) > 1:
            effects[field], sizes[field] = groups, max(means) - min(means)
    return {field: effects[field] for field in sorted(effects, key=lambda field: (field == SEED, -sizes[field]))}


def _group(field: str, in_range: bool, results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results by the value of a field; those from a range in parts with equal numbers of runs."""
    by_size = lambda value: (0, value, "") if is_number(value) else (1, 0, format_value(value))
    ordered = sorted(results, key=lambda result: by_size(result.point[field]))
    groups: dict[str, list[Result]] = {}
    if in_range:
        for indices in np.array_split(np.arange(len(ordered)), min(_BINS, max(len(ordered) // 2, 1))):
            low, high = (ordered[i].point[field] for i in (indices[0], indices[-1]))
            groups[f"{low:.3g} to {high:.3g}"] = [ordered[i] for i in indices]
    else:
        for result in ordered:
            groups.setdefault(format_value(result.point[field]), []).append(result)
    return groups


def seed_spread(results: Sequence[Result]) -> tuple[float, int] | None:
    """Return the pooled standard deviation of the loss among runs that differ only in their seed, and its degrees of
    freedom; None if no runs do."""
    alike: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for result in results:
        settings = tuple(sorted((f, format_value(x)) for f, x in result.point.items() if f != SEED))
        alike.setdefault(settings, []).append(result.loss)
    groups = [losses for losses in alike.values() if len(losses) > 1]
    freedom = sum(len(losses) - 1 for losses in groups)
    if not freedom:
        return None
    return math.sqrt(sum((len(losses) - 1) * statistics.variance(losses) for losses in groups) / freedom), freedom


# ---- figures -------------------------------------------------------------------------------------


def _draw_effects(effects: Effects) -> Any:
    """Draw the losses by the value of each field, one panel for each, and the mean of each group."""
    n_columns = min(3, len(effects))
    n_rows = -(-len(effects) // n_columns)
    size = (3.6 * n_columns, 3.0 * n_rows)
    figure, grid = pyplot().subplots(n_rows, n_columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axes, (field, groups) in zip(grid.flat, effects.items(), strict=False):
        values = all_numbers([result.point[field] for group in groups.values() for result in group])
        values = None if field == SEED else values  # a name, not a quantity
        middles = []
        for i, group in enumerate(groups.values()):
            x = all_numbers([i if values is None else result.point[field] for result in group]) or []
            axes.plot(x, [result.loss for result in group], "o", ms=4, alpha=0.5, color=_BLUE)
            middles.append(statistics.median(x))
        axes.plot(middles, [mean_of(group) for group in groups.values()], "D-", ms=5, color=_ORANGE)
        if values is None:
            axes.set_xticks(middles, list(groups))
        elif min(values) > 0 and max(values) / min(values) >= 8:
            axes.set_xscale("log")
        axes.set(xlabel=field)
        axes.margins(x=0.15)
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(effects) :]:
        axes.remove()
    figure.supylabel("validation loss", fontsize="medium")
    return figure


def _draw_curves(folder: SweepFolder, views: Sequence[RunView]) -> Any:
    """Draw the training loss, smoothed, and the validation loss of runs, given the best first."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    logs = [read_metrics(folder.folder(view.run)) for view in views]
    for axes, name, title in zip(panels, ("loss", "validation_loss"), ("training", "validation"), strict=True):
        for i, (view, log) in enumerate(zip(views, logs, strict=True)):
            if points := metric_points(log, name):
                x, y = np.array(points, float).T
                y = smooth(y, min(_SMOOTHING, 1 - 10 / max(len(y), 10))) if name == "loss" else y
                color = plt.get_cmap("viridis")(0.9 * i / max(len(views) - 1, 1))
                style = dict(
                    ls="--" if view.state in ("crashed", "pruned") else "-",
                    lw=2.5 if i == 0 else 1.2,
                    zorder=3 - i / len(views),
                )
                axes.plot(x, y, color=color, label=view.name if i < _NAMED else None, **style)
        axes.set(title=f"{title} loss", xlabel="tokens", ylabel="nats per token")
        count_tokens(axes.xaxis)
        axes.grid(alpha=0.3)
    place_legend(figure)
    return figure


# ---- the page ------------------------------------------------------------------------------------


def write_report(folder: SweepFolder, views: Sequence[RunView]) -> Path:
    """Write DIR/report.html. Unfinished runs are listed and their curves drawn, but they do not count as results."""
    name, results = folder.path.absolute().name, find_results(views)
    loss_of = lambda view: view.validation_loss if is_finite(view.validation_loss) else math.inf
    ranked = sorted(views, key=lambda view: (view.state != "finished", loss_of(view)))
    parts = [
        f"<h1>Sweep {escape(name)}</h1><p>{escape(summary(views))}.</p>",
        _best(folder, views, results),
        _effects(find_effects(folder.definition, results)),
        _curves(folder, [view for view in sorted(views, key=loss_of) if view.loss is not None]),
        _runs(ranked),
        _failures(folder, views),
        _settings(folder.definition),
    ]
    path = folder.path / REPORT_FILE
    write_atomically(
        path,
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Sweep {escape(name)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(filter(None, parts))
        + "\n</body></html>\n",
    )
    return path


def _best(folder: SweepFolder, views: Sequence[RunView], results: Sequence[Result]) -> str:
    best = best_of(views)
    if best is None:
        return "<p>No run has finished yet.</p>"
    bits = "" if best.bits_per_byte is None else f", {best.bits_per_byte:.4f} bits per byte"
    noise = ""
    if (spread := seed_spread(results)) is not None:
        noise = (
            f"<p>Runs that differ only in their seed have a standard deviation of {spread[0]:.4f} ({spread[1]} degrees "
            "of freedom): smaller differences mean little.</p>"
        )
    return (
        f"<p>Best validation loss: <b>{best.validation_loss:.4f}</b> nats per token{bits}, in "
        f"<code>{escape(str(folder.folder(best.run)))}</code>.</p>{noise}"
    )


def _effects(effects: Effects) -> str:
    if not effects:
        return ""
    rows: list[list[str]] = []
    best: set[int] = set()
    for field, groups in effects.items():
        means = [mean_of(group) for group in groups.values()]
        if field != SEED:
            best.add(len(rows) + means.index(min(means)))
        for mean, (label, group) in zip(means, groups.items(), strict=True):
            losses = [result.loss for result in group]
            rows.append([field, label, str(len(group)), *(f"{x:.4f}" for x in (mean, min(losses), max(losses)))])
    return (
        "<h2>Effect of each field</h2><p class=note>Validation loss of the finished runs by one field, whatever the "
        "others were, the field with the largest effect first; orange: the means. The value with the lowest mean is "
        f"marked in the table.</p>{_image(_draw_effects(effects), 'validation loss by field')}"
        f"{_table(['field', 'value', 'runs', 'mean', 'best', 'worst'], rows, best)}"
    )


def _curves(folder: SweepFolder, views: Sequence[RunView]) -> str:
    if not views:
        return ""
    return (
        "<h2>Curves</h2><p class=note>The lowest last validation loss is darkest and thickest; crashed and pruned runs "
        f"are dashed.</p>{_image(_draw_curves(folder, views), 'loss curves')}"
    )


def _runs(views: Sequence[RunView]) -> str:
    """Return the table of the runs, given the best first."""
    fields = list(dict.fromkeys(field for view in views for field in view.run.point))
    head = [*fields, "state", "validation loss", "bits per byte", "loss", "step", "tokens/s", "seconds"]
    rows = [
        [
            *(format_value(view.run.point[field]) if field in view.run.point else "" for field in fields),
            view.state,
            *(format_number(x) for x in (view.validation_loss, view.bits_per_byte, view.loss)),
            f"{view.step:,}/{view.run.total_steps:,}",
            *(format_number(x, ",.0f") for x in (view.tokens_per_second, view.seconds)),
        ]
        for view in views
    ]
    return f"<h2>Runs</h2>{_table(head, rows, {0} if best_of(views) else set())}"


def _failures(folder: SweepFolder, views: Sequence[RunView]) -> str:
    text = ""
    for view in views:
        if view.state in ("crashed", "refused"):
            lines = [view.run.refused] if view.run.refused else folder.last_lines(view.run)
            text += f"<p>{escape(view.name)}: {view.state}</p><pre>{escape(chr(10).join(lines))}</pre>"
    return f"<h2>Failures</h2>{text}" if text else ""


def _settings(definition: Definition) -> str:
    rows = [["--config", definition.config]]
    rows += [[f"--config.{field}", text] for field, text in definition.overrides.items()]
    rows += [[name, text] for name, text in definition.describe().items()]
    if definition.trials is not None:
        rows.append(["--trials", str(definition.trials)])
    return f"<h2>Settings</h2>{_table(['flag', 'value'], rows)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], best: set[int] | None = None) -> str:
    """Return a table in which the rows `best` are marked."""
    cells = lambda texts, tag: "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
    body = "".join(
        f"<tr{' class=best' if i in (best or ()) else ''}>{cells(row, 'td')}</tr>\n" for i, row in enumerate(rows)
    )
    return f"<table><tr>{cells(head, 'th')}</tr>\n{body}</table>"


def _image(figure: Any, alt: str) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    pyplot().close(figure)
    return f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'
