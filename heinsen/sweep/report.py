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

from heinsen.figures import count_tokens, make_figure, place_legend, pyplot, smooth
from heinsen.files import write_atomically
from heinsen.sweep.definition import Definition
from heinsen.sweep.folder import REPORT_FILE, SweepFolder
from heinsen.sweep.runs import RunView, best_of, count_states, format_number, is_finite
from heinsen.sweep.space import SEED, Point, Range, Space, format_value, is_number
from heinsen.training.metrics import metric_points, read_metrics

_BINS = 4  # of the values drawn from a range
_NAMED = 12  # runs in the legend of the curves, or in a sentence, at most
_SMOOTHING = 0.9  # of the training loss
_LABELS = 32  # characters below a panel that fit side by side
_BLUE, _ORANGE = "#3b6ea5", "#c2410c"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1917; max-width: 1080px; margin: 2rem auto; padding: 0 1.5rem }
h1, h2 { line-height: 1.2; margin: 2rem 0 .5rem } img { max-width: 100%; height: auto; display: block }
code { overflow-wrap: anywhere }
table { border-collapse: collapse; font-size: .87rem; display: block; overflow-x: auto; margin: .6rem 0 }
th, td { padding: .2rem .55rem; border-bottom: 1px solid #e7e5e4; text-align: right; white-space: nowrap }
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
    """Return the results by the value of each field: its marginal effect.

    In a grid, values are compared by the settings of the other fields that have a result with each of them: else a
    value could look best because a run with a bad setting is missing. A search draws the other settings anew for each
    point, and all results count. The field whose means differ most comes first, and the seed last. In a zip all fields
    vary together, and none has an effect of its own.
    """
    if definition.strategy.paired:
        return {}
    sizes, effects = {}, {}
    for field in dict.fromkeys(field for result in results for field in result.point):
        groups = _group(field, isinstance(definition.space.get(field), Range), results)
        if not definition.strategy.draws:
            groups = _keep_common(field, groups)
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


def _keep_common(field: str, groups: dict[str, list[Result]]) -> dict[str, list[Result]]:
    """Return the results whose other settings occur in every group; {} if none do."""
    common = set.intersection(*({_others(result, field) for result in group} for group in groups.values()))
    kept = {label: [r for r in group if _others(r, field) in common] for label, group in groups.items()}
    return kept if common else {}


def _others(result: Result, apart_from: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((field, format_value(x)) for field, x in result.point.items() if field != apart_from))


def seed_spread(results: Sequence[Result]) -> tuple[float, int] | None:
    """Return the pooled standard deviation of the loss among runs that differ only in their seed, and its degrees of
    freedom; None if no runs do."""
    alike: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for result in results:
        alike.setdefault(_others(result, SEED), []).append(result.loss)
    groups = [losses for losses in alike.values() if len(losses) > 1]
    freedom = sum(len(losses) - 1 for losses in groups)
    if not freedom:
        return None
    return math.sqrt(sum((len(losses) - 1) * statistics.variance(losses) for losses in groups) / freedom), freedom


# ---- figures -------------------------------------------------------------------------------------


def _draw_effects(effects: Effects, space: Space) -> Any:
    """Draw the losses by the value of each field, one panel for each, and the mean of each group."""
    n_columns = min(3, len(effects))
    n_rows = -(-len(effects) // n_columns)
    size = (3.6 * n_columns, 3.0 * n_rows)
    figure, grid = make_figure(n_rows, n_columns, figsize=size, sharey=True, squeeze=False)
    for axes, (field, groups) in zip(grid.flat, effects.items(), strict=False):
        values, middles = space.get(field), []
        for i, group in enumerate(groups.values()):
            x: list[Any] = [result.point[field] if isinstance(values, Range) else i for result in group]
            axes.plot(x, [result.loss for result in group], "o", ms=4, alpha=0.5, color=_BLUE)
            middles.append(statistics.median(x))
        axes.plot(middles, [mean_of(group) for group in groups.values()], "D-", ms=5, color=_ORANGE)
        if not isinstance(values, Range):
            slant = dict(rotation=30, ha="right") if sum(map(len, groups)) > _LABELS else {}
            axes.set_xticks(middles, list(groups), **slant)
        elif values.log:
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
    figure, panels = make_figure(1, 2, figsize=(11, 4.6))
    logs = [read_metrics(folder.folder(view.run)) for view in views]
    for axes, name, title in zip(panels, ("loss", "validation_loss"), ("training", "validation"), strict=True):
        for i, (view, log) in enumerate(zip(views, logs, strict=True)):
            if points := metric_points(log, name):
                x, y = np.array(points, float).T
                y = smooth(y, _SMOOTHING) if name == "loss" else y
                color = pyplot().get_cmap("viridis")(0.9 * i / max(len(views) - 1, 1))
                style = dict(
                    ls="-" if view.state == "finished" else "--",
                    lw=2.5 if i == 0 else 1.2,
                    zorder=3 - i / len(views),
                )
                axes.plot(x, y, color=color, label=_name(view) if i < _NAMED else None, **style)
        axes.set(title=f"{title} loss", xlabel="tokens", ylabel="nats per token")
        count_tokens(axes.xaxis)
        axes.grid(alpha=0.3)
    place_legend(figure)
    return figure


def _name(view: RunView) -> str:
    """Return the run's name, with its state if it has not finished."""
    return view.name if view.state == "finished" else f"{view.name} ({view.state})"


# ---- the page ------------------------------------------------------------------------------------


def write_report(folder: SweepFolder, views: Sequence[RunView]) -> Path:
    """Write DIR/report.html. Unfinished runs are listed and their curves drawn, but they do not count as results."""
    name, results = folder.path.absolute().name, find_results(views)
    loss_of = lambda view: view.validation_loss if is_finite(view.validation_loss) else math.inf
    ranked = sorted(views, key=lambda view: (view.state != "finished", loss_of(view)))
    parts = [
        f"<h1>{escape(name)}</h1><p>{escape(count_states(views))}.</p>",
        _best(folder, views, results),
        _effects(folder.definition, views, results),
        _curves(folder, [view for view in ranked if view.loss is not None]),
        _runs(ranked),
        _failures(folder, views),
        _settings(folder.definition),
    ]
    path = folder.path / REPORT_FILE
    write_atomically(
        path,
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(name)}: a sweep</title>\n'
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


def _effects(definition: Definition, views: Sequence[RunView], results: Sequence[Result]) -> str:
    head, effects = "<h2>Effect of each field</h2>", find_effects(definition, results)
    left_out = "" if definition.strategy.paired else _left_out(effects, views, results)
    if not effects:
        return head + left_out if left_out else ""
    others = (
        "whatever the others were"
        if definition.strategy.draws
        else "over the settings of the other fields that have a result with each of its values"
    )
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
        f"{head}<p class=note>Validation loss of finished runs for each value of a field, {others}. The field with the "
        "largest effect comes first. Orange: the means. The value with the lowest mean is marked in the table.</p>"
        f"{left_out}{_image(_draw_effects(effects, definition.space), 'validation loss by field')}"
        f"{_table(['field', 'value', 'runs', 'mean', 'best', 'worst'], rows, best)}"
    )


def _left_out(effects: Effects, views: Sequence[RunView], results: Sequence[Result]) -> str:
    """Return a paragraph on fields and runs that are not compared, "" if all are or if no field varies."""
    values: dict[str, set[str]] = {}
    for field, value in ((field, value) for result in results for field, value in result.point.items()):
        values.setdefault(field, set()).add(format_value(value))
    varied = [field for field, texts in values.items() if len(texts) > 1]
    missing, text = [_name(view) for view in views if view.result is None], ""
    if apart := [field for field in varied if field not in effects]:
        text += f"Not compared, as no settings have a result with each of its values: {', '.join(apart)}. "
    if varied and missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        text += f"Runs without a result: {', '.join(missing[:_NAMED])}{more}."
    return f"<p class=note>{escape(text)}</p>" if text else ""


def _curves(folder: SweepFolder, views: Sequence[RunView]) -> str:
    if not views:
        return ""
    return (
        "<h2>Curves</h2><p class=note>The best run is darkest and thickest. Runs that have not finished are dashed.</p>"
        f"{_image(_draw_curves(folder, views), 'loss curves')}"
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
