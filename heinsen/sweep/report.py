"""report.html of a sweep: one page that needs no network, with charts and a table that answer to the mouse."""

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from heinsen.files import write_atomically
from heinsen.pages import render_chart, render_page
from heinsen.sweep import figures
from heinsen.sweep.definition import Definition
from heinsen.sweep.display import summary
from heinsen.sweep.effects import Effect, Result, find_effects, results_of, seed_spread, swept_fields
from heinsen.sweep.folder import REPORT_FILE, SweepFolder
from heinsen.sweep.runs import RunView, best_of, is_finite
from heinsen.sweep.space import SEED, Range, format_value
from heinsen.training.metrics import read_metrics


def write_report(folder: SweepFolder, views: Sequence[RunView], refresh: int | None = None) -> Path:
    """Write DIR/report.html. Unfinished runs are listed and their curves drawn, but they do not count as results.

    refresh: seconds after which browsers read the page again; None: never.
    """
    results = results_of(views)
    # In a zip all fields vary together, and none has an effect of its own.
    fields = [] if folder.definition.strategy.paired else swept_fields(views)
    effects = find_effects(folder.definition, fields, results) if results else []
    parts = [
        _head(folder, views),
        _best(folder, views, results),
        _effects(folder.definition, effects, results),
        _heat_map(folder.definition, effects, results),
        _parallel(folder.definition, effects, results),
        _curves(folder, views),
        _runs(views),
        _failures(folder, views),
    ]
    name = folder.path.absolute().name
    path = folder.path / REPORT_FILE
    write_atomically(path, render_page(f"Sweep {name}", "\n".join(filter(None, parts)), refresh))
    return path


def _head(folder: SweepFolder, views: Sequence[RunView]) -> str:
    definition = folder.definition
    rows = [("config", definition.config)]
    rows += [(f"--config.{field}", text) for field, text in definition.overrides.items()]
    rows += [(name, text) for name, text in definition.describe().items()]
    if definition.trials is not None:
        rows.append(("--trials", str(definition.trials)))
    return (
        f"<h1>Sweep {escape(folder.path.absolute().name)}</h1><p>{escape(summary(views))}.</p>"
        f"<details><summary>What was swept</summary>{_settings(rows)}</details>"
    )


def _best(folder: SweepFolder, views: Sequence[RunView], results: Sequence[Result]) -> str:
    best = best_of(views)
    if best is None:
        return "<p>No run has finished yet.</p>"
    settings = _settings([(field, format_value(x)) for field, x in best.run.point.items()])
    bits = "" if best.bits_per_byte is None else f", {best.bits_per_byte:.4f} bits per byte"
    noise = ""
    if (spread := seed_spread(results)) is not None:
        noise = (
            f"<p>Runs that differ only in their seed have a standard deviation of {spread[0]:.4f} ({spread[1]} degrees "
            "of freedom): smaller differences mean little.</p>"
        )
    return (
        f"<h2>Best by validation loss</h2><div class=best><b>{best.validation_loss:.4f}</b> nats per token{bits}"
        f"{settings}<code>{escape(str(folder.folder(best.run)))}</code></div>{noise}"
    )


def _effects(definition: Definition, effects: Sequence[Effect], results: Sequence[Result]) -> str:
    if not effects:
        return ""
    sections = [
        f"<div class=effect><h3>{escape(effect.field)}</h3>"
        f"{_image(figures.draw_effect(definition, effect, results), f'validation loss by {effect.field}')}"
        f"{_effect_table(effect)}<p class=note>The means differ by up to {effect.size:.4f}.</p></div>"
        for effect in effects
    ]
    return (
        "<h2>Marginal effect of each field</h2><p class=note>Validation loss of the finished runs by one field, "
        "whatever the others were; the line joins the means. The field with the largest effect comes first. In the "
        "tables the value with the lowest mean is marked.</p>"
        f"<div class=row>{''.join(sections)}</div>"
    )


def _effect_table(effect: Effect) -> str:
    lowest = min(group.mean for group in effect.groups)
    rows = "".join(
        f"<tr{' class=good' if group.mean == lowest and effect.field != SEED else ''}>"
        f"<td>{escape(group.label)}</td><td>{len(group.losses)}</td><td>{group.mean:.4f}</td>"
        f"<td>{min(group.losses):.4f}</td><td>{max(group.losses):.4f}</td></tr>"
        for group in effect.groups
    )
    return (
        "<div class=wide><table><tr><th>value</th><th>runs</th><th>mean</th><th>best</th><th>worst</th></tr>"
        f"{rows}</table></div>"
    )


def _listed_fields(definition: Definition, effects: Sequence[Effect]) -> list[str]:
    """Return the fields with lists of values, the one with the largest effect first, without the seed."""
    fields = [effect.field for effect in effects if effect.field != SEED]
    return [field for field in fields if not isinstance(definition.space.get(field), Range)]


def _heat_map(definition: Definition, effects: Sequence[Effect], results: Sequence[Result]) -> str:
    """Return the heat map of the two listed fields with the largest effects, if there are two."""
    listed = _listed_fields(definition, effects)
    if len(listed) < 2:
        return ""
    n_values = lambda field: len({format_value(result.point[field]) for result in results})
    rows, columns = sorted(listed[:2], key=n_values)
    return (
        f"<h2>{escape(rows)} and {escape(columns)}</h2>"
        "<p class=note>Mean validation loss of each pair of values, whatever the other fields were; darker is "
        "better.</p>"
        f"{_image(figures.draw_heat_map(results, rows, columns), 'heat map of the validation loss')}"
    )


def _parallel(definition: Definition, effects: Sequence[Effect], results: Sequence[Result]) -> str:
    """Return the parallel coordinates of three or more fields, or of two that a heat map cannot show."""
    fields = [effect.field for effect in effects if effect.field != SEED]
    if len(fields) < 3 and (len(fields) < 2 or len(_listed_fields(definition, effects)) >= 2):
        return ""
    return (
        "<h2>All fields at once</h2><p class=note>One line for each run, dark for a low validation loss (the axis on "
        f"the right); the best is red.</p>{_image(figures.draw_parallel(fields, results), 'parallel coordinates')}"
    )


def _curves(folder: SweepFolder, views: Sequence[RunView]) -> str:
    logged = [(view, read_metrics(folder.folder(view.run))) for view in views if view.loss is not None]
    if not logged:
        return ""
    logged.sort(key=lambda each: (each[0].validation_loss is None, each[0].validation_loss))
    charts = [
        render_chart(figures.curves(logged, name), "tokens", "nats per token", title)
        for name, title in (("loss", "Training loss"), ("validation_loss", "Validation loss"))
    ]
    return (
        "<h2>Curves</h2><p class=note>The lowest last validation loss is darkest and thickest; crashed and pruned runs "
        "are dashed. The legend shows the values under the mouse, and a click on a name hides the run; drag to zoom "
        f"in, double click to see all again.</p><div class=charts>{''.join(charts)}</div>"
    )


def _runs(views: Sequence[RunView]) -> str:
    fields = list(dict.fromkeys(field for view in views for field in view.run.point))
    order = lambda view: (view.state != "finished", not is_finite(view.validation_loss), view.validation_loss or 0.0)
    number = lambda x, form=".4f": "" if x is None else format(x, form)
    best = best_of(views)
    rows = []
    for view in sorted(views, key=order):
        settings = "".join(f"<td>{escape(format_value(view.run.point.get(field)))}</td>" for field in fields)
        rows.append(
            f'<tr data-name="{escape(view.name)}"{" class=best-run" if view is best else ""}>'
            f"<td>{escape(view.name)}</td><td class={view.state}>{view.state}</td>{settings}"
            f"<td>{number(view.validation_loss)}</td><td>{number(view.bits_per_byte)}</td><td>{number(view.loss)}</td>"
            f"<td>{view.step:,}/{view.run.total_steps:,}</td><td>{number(view.tokens_per_second, ',.0f')}</td>"
            f"<td>{number(view.seconds, ',.0f')}</td></tr>"
        )
    head = "".join(f"<th>{escape(field)}</th>" for field in fields)
    marked = (
        "" if best is None else " The run that is marked has the lowest validation loss of those that have finished."
    )
    return (
        f"<h2>Runs</h2><p class=note>Click on a head to sort.{marked}</p>"
        '<input id=filter type=search placeholder="filter: words that a row contains" aria-label="filter the runs">'
        f"<div class=wide><table class=sortable><thead><tr><th>run</th><th>state</th>{head}<th>validation loss</th>"
        "<th>bits per byte</th><th>loss</th><th>step</th><th>tokens/s</th><th>seconds</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _failures(folder: SweepFolder, views: Sequence[RunView]) -> str:
    text = ""
    for view in views:
        if view.state in ("crashed", "refused"):
            lines = [view.run.refused] if view.run.refused else folder.last_lines(view.run)
            text += (
                f"<details><summary>{escape(view.name)}: {view.state}</summary>"
                f"<pre>{escape(chr(10).join(lines))}</pre></details>"
            )
    return text


def _settings(rows: Sequence[tuple[str, str]]) -> str:
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return f"<table class=plain>{lines}</table>"


def _image(figure: Figure, alt: str) -> str:
    """Return an <img> with its own SVG document, so that the ids of two figures cannot collide."""
    file = io.BytesIO()
    figure.savefig(file, format="svg")
    plt.close(figure)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}">'
