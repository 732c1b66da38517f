"""report.html of a sweep: one page that needs no network; its figures are SVG images inside it."""

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from heinsen.files import write_atomically
from heinsen.sweep import figures
from heinsen.sweep.definition import Definition
from heinsen.sweep.display import summary
from heinsen.sweep.effects import Effect, Result, find_effects, results_of, seed_spread, swept_fields
from heinsen.sweep.folder import REPORT_FILE, SweepFolder
from heinsen.sweep.runs import RunView, best_of, is_finite
from heinsen.sweep.space import SEED, Range, format_value
from heinsen.training.metrics import read_metrics


def write_report(folder: SweepFolder, views: Sequence[RunView]) -> Path:
    """Write DIR/report.html. Unfinished runs are listed and their curves drawn, but they do not count as results."""
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
    name = escape(folder.path.absolute().name)
    page = _PAGE.replace("{title}", f"Sweep {name}").replace("{body}", "\n".join(filter(None, parts)))
    path = folder.path / REPORT_FILE
    write_atomically(path, page)
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
        "whatever the others were; the line joins the means. The field with the largest effect comes first.</p>"
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
    return (
        "<h2>Curves</h2><p class=note>Colored by the last validation loss, the lowest darkest and thickest; crashed "
        f"and pruned runs are dashed.</p>{_image(figures.draw_curves(logged), 'loss curves of all runs')}"
    )


def _runs(views: Sequence[RunView]) -> str:
    fields = list(dict.fromkeys(field for view in views for field in view.run.point))
    order = lambda view: (view.state != "finished", not is_finite(view.validation_loss), view.validation_loss or 0.0)
    number = lambda x, form=".4f": "" if x is None else format(x, form)
    rows = []
    for view in sorted(views, key=order):
        settings = "".join(f"<td>{escape(format_value(view.run.point.get(field)))}</td>" for field in fields)
        rows.append(
            f"<tr><td class={view.state}>{view.state}</td>{settings}<td>{number(view.validation_loss)}</td>"
            f"<td>{number(view.bits_per_byte)}</td><td>{number(view.loss)}</td>"
            f"<td>{view.step:,}/{view.run.total_steps:,}</td><td>{number(view.tokens_per_second, ',.0f')}</td>"
            f"<td>{number(view.seconds, ',.0f')}</td></tr>"
        )
    head = "".join(f"<th>{escape(field)}</th>" for field in fields)
    return (
        f"<h2>Runs</h2><div class=wide><table><tr><th>state</th>{head}<th>validation loss</th><th>bits per byte</th>"
        f"<th>loss</th><th>step</th><th>tokens/s</th><th>seconds</th></tr>{''.join(rows)}</table></div>"
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


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<style>
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1c1917; background: #fff; max-width: 1120px;
  margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.7rem; margin-bottom: .3rem } h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem }
h3 { font-size: 1rem; margin: 0 0 .3rem; overflow-wrap: anywhere }
img { max-width: 100%; height: auto; display: block }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums }
th, td { padding: .22rem .7rem; border-bottom: 1px solid #e7e5e4; text-align: right; white-space: nowrap }
th:first-child, td:first-child, .plain th, .plain td { text-align: left }
.plain td { white-space: normal; overflow-wrap: anywhere }
th { font-weight: 600; color: #57534e } .good td { background: #ecfdf5; font-weight: 600 }
.best { border: 1px solid #a7f3d0; background: #ecfdf5; border-radius: 8px; padding: .8rem 1.1rem }
.best b { font-size: 1.5rem } .best table { margin: .4rem 0 } code { overflow-wrap: anywhere; font-size: .85rem }
.row { display: flex; flex-wrap: wrap; gap: 1.4rem } .effect { flex: 1 1 330px; max-width: 520px; min-width: 0 }
.effect th, .effect td { padding: .22rem .5rem } .effect td:first-child { white-space: normal }
.note { color: #57534e; font-size: .87rem; margin: .2rem 0 .6rem } .wide { overflow-x: auto }
.finished { color: #15803d } .crashed, .refused { color: #b91c1c; font-weight: 600 } .running { color: #1d4ed8 }
.pruned, .interrupted { color: #b45309 }
details { margin: .6rem 0 } summary { cursor: pointer; color: #44403c }
pre { background: #f5f5f4; padding: .7rem; overflow-x: auto; font-size: .8rem; border-radius: 6px }
</style></head><body>
{body}
</body></html>
"""
