"""report.html of a sweep: one page that needs no network; its figures are SVG within it."""

import base64
import dataclasses
import html
import io
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from heinsen.files import write_atomically
from heinsen.sweep.curves import smooth, thin
from heinsen.sweep.folder import REPORT_FILE, RunView, SweepFolder, best_of, is_number, summary
from heinsen.sweep.space import SEED, Definition, Range, Value, text_of
from heinsen.training.metrics import read_metrics

_POINTS = 300  # of a curve
_SMOOTHING = 0.9  # of the training losses, where there are many
_BINS = 4  # of the values drawn from a range


def write_report(folder: SweepFolder, views: Sequence[RunView]) -> Path:
    """DIR/report.html; runs that have not finished are listed, but judged only by their curves."""
    done = [view for view in views if view.state == "finished" and is_number(view.validation_loss)]
    definition = folder.definition
    parts = [_head(folder, views), _best(folder, done)]
    if done:
        # Of a zip, whose fields vary together, no field has an effect of its own.
        fields = swept_fields(views) if definition.search != "zip" else []
        effects = [effect for field in fields if (effect := effect_of(definition, field, done))]
        effects.sort(key=lambda effect: (effect.field == SEED, -effect.size))
        parts.append(_effects(definition, effects, done))
        parts.append(_maps(definition, effects, done))
    parts += [_curves(folder, views), _runs(folder, views)]
    name = html.escape(folder.path.absolute().name)
    page = _PAGE.replace("{title}", f"Sweep {name}").replace("{body}", "\n".join(filter(None, parts)))
    path = folder.path / REPORT_FILE
    write_atomically(path, page)
    return path


# ---- what the numbers say ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Group:
    """The finished runs of one value of a field, or of one part of its range."""

    label: str
    losses: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)


@dataclasses.dataclass(frozen=True)
class Effect:
    """The marginal effect of a field: losses by its value, over all that the other fields were."""

    field: str
    groups: tuple[Group, ...]

    @property
    def size(self) -> float:
        """How far the best and the worst mean lie apart."""
        means = [group.mean for group in self.groups]
        return max(means) - min(means)


def swept_fields(views: Sequence[RunView]) -> list[str]:
    """Fields of which the runs have more than one value, the seed last."""
    fields = dict.fromkeys(field for view in views for field in view.run.point)
    several = [
        field for field in fields if len({text_of(v.run.point[field]) for v in views if field in v.run.point}) > 1
    ]
    return sorted(several, key=lambda field: field == SEED)


def effect_of(definition: Definition, field: str, done: Sequence[RunView]) -> Effect | None:
    """A range is cut into parts of equally many runs. None where fewer than two values (parts) have finished runs."""
    ordered = sorted(done, key=lambda view: _place(view.run.point[field]))
    if isinstance(definition.space.get(field), Range):
        parts = np.array_split(np.arange(len(ordered)), min(_BINS, max(len(ordered) // 2, 1)))
        runs = [[ordered[i] for i in part] for part in parts]
        ends = lambda part: [f"{view.run.point[field]:.3g}" for view in (part[0], part[-1])]
        groups = [Group(" to ".join(ends(part)), tuple(view.validation_loss for view in part)) for part in runs]
    else:
        by_value: dict[str, list[float]] = {}
        for view in ordered:
            by_value.setdefault(text_of(view.run.point[field]), []).append(view.validation_loss)
        groups = [Group(value, tuple(losses)) for value, losses in by_value.items()]
    return Effect(field, tuple(groups)) if len(groups) > 1 else None


def seed_spread(done: Sequence[RunView]) -> tuple[float, int] | None:
    """(standard deviation, degrees of freedom) of the loss among runs that differ only in their seed; None: none do."""
    alike: dict[tuple, list[float]] = {}
    for view in done:
        settings = tuple(sorted((f, text_of(x)) for f, x in view.run.point.items() if f != SEED))
        alike.setdefault(settings, []).append(view.validation_loss)
    groups = [losses for losses in alike.values() if len(losses) > 1]
    freedom = sum(len(losses) - 1 for losses in groups)
    if not freedom:
        return None
    return math.sqrt(sum((len(losses) - 1) * statistics.variance(losses) for losses in groups) / freedom), freedom


def grid_of(done: Sequence[RunView], rows: str, columns: str) -> tuple[list[Value], list[Value], np.ndarray]:
    """Values of two fields and the mean loss of each pair of them, NaN where no run has finished."""
    values = lambda field: sorted({view.run.point[field] for view in done}, key=_place)
    ys, xs = values(rows), values(columns)
    sums, counts = np.zeros((2, len(ys), len(xs)))
    for view in done:
        place = ys.index(view.run.point[rows]), xs.index(view.run.point[columns])
        sums[place] += view.validation_loss
        counts[place] += 1
    return ys, xs, np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _place(value: Value) -> tuple:
    """Numbers in order, before the rest."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, value, "") if number else (1, 0, text_of(value))


def _scale(values: Sequence[Value]) -> str:
    """Of an axis: linear, log where numbers span a factor of 8, names where they are none."""
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return "names"
    return "log" if min(values) > 0 and max(values) / min(values) >= 8 else "linear"


# ---- sections ------------------------------------------------------------------------------------


def _head(folder: SweepFolder, views: Sequence[RunView]) -> str:
    definition = folder.definition
    rows = [("config", definition.config)]
    rows += [(f"--config.{field}", text) for field, text in definition.overrides.items()]
    rows += [(name, text) for name, text in definition.describe().items()]
    if definition.trials is not None:
        rows.append(("--trials", str(definition.trials)))
    lines = "".join(f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in rows)
    return (
        f"<h1>Sweep {html.escape(folder.path.absolute().name)}</h1><p>{html.escape(summary(views))}.</p>"
        f"<details><summary>What was swept</summary><table class=plain>{lines}</table></details>"
    )


def _best(folder: SweepFolder, done: Sequence[RunView]) -> str:
    best = best_of(done)
    if best is None:
        return "<p>No run has finished yet.</p>"
    settings = "".join(
        f"<tr><th>{html.escape(field)}</th><td>{html.escape(text_of(x))}</td></tr>"
        for field, x in best.run.point.items()
    )
    bits = "" if best.bits_per_byte is None else f", {best.bits_per_byte:.4f} bits a byte"
    noise = ""
    if (spread := seed_spread(done)) is not None:
        noise = (
            f"<p>Runs that differ only in their seed have a standard deviation of {spread[0]:.4f} ({spread[1]} degrees "
            "of freedom): smaller differences mean little.</p>"
        )
    return (
        f"<h2>Best by validation loss</h2><div class=best><b>{best.validation_loss:.4f}</b> nats a token{bits}"
        f"<table class=plain>{settings}</table><code>{html.escape(str(folder.folder(best.run)))}</code></div>{noise}"
    )


def _effects(definition: Definition, effects: Sequence[Effect], done: Sequence[RunView]) -> str:
    if not effects:
        return ""
    sections = []
    for effect in effects:
        lowest = min(group.mean for group in effect.groups)
        rows = "".join(
            f"<tr{' class=good' if group.mean == lowest and effect.field != SEED else ''}>"
            f"<td>{html.escape(group.label)}</td><td>{len(group.losses)}</td><td>{group.mean:.4f}</td><td>{min(group.losses):.4f}</td>"
            f"<td>{max(group.losses):.4f}</td></tr>"
            for group in effect.groups
        )
        sections.append(
            f"<div class=effect><h3>{html.escape(effect.field)}</h3>"
            f"{_image(_effect_figure(definition, effect, done), f'validation loss by {effect.field}')}"
            "<div class=wide><table><tr><th>value</th><th>runs</th><th>mean</th><th>best</th><th>worst</th></tr>"
            f"{rows}</table></div><p class=note>Means lie {effect.size:.4f} apart.</p></div>"
        )
    return (
        "<h2>Marginal effect of each field</h2><p class=note>Validation loss of the finished runs by one field, "
        "whatever the others were; the line joins the means. The field with the largest effect comes first.</p>"
        f"<div class=row>{''.join(sections)}</div>"
    )


def _effect_figure(definition: Definition, effect: Effect, done: Sequence[RunView]):
    plt = _pyplot()
    field = effect.field
    values = [view.run.point[field] for view in done]
    losses = [view.validation_loss for view in done]
    figure, axes = plt.subplots(figsize=(4.2, 3.0), layout="constrained")
    scale = _scale(values)
    if scale == "names" or (len(effect.groups) <= 12 and not isinstance(definition.space.get(field), Range)):
        names = [group.label for group in effect.groups]
        axes.plot([names.index(text_of(value)) for value in values], losses, "o", ms=4, alpha=0.5, color="#3b6ea5")
        axes.plot([group.mean for group in effect.groups], "-", color="#c2410c", lw=1.5, marker="D", ms=5)
        crowded = len(names) > 6 or max(map(len, names)) > 10
        axes.set_xticks(range(len(names)), names, rotation=30 if crowded else 0, ha="right" if crowded else "center")
        axes.margins(x=0.15)
    else:
        axes.plot(values, losses, "o", ms=4, alpha=0.6, color="#3b6ea5")
        axes.set_xscale(scale)
        if isinstance(definition.space.get(field), Range):
            start = 0
            ordered = sorted(values)
            for group in effect.groups:
                part = ordered[start : start + len(group.losses)]
                start += len(group.losses)
                axes.plot([part[0], part[-1]], [group.mean] * 2, color="#c2410c", lw=2)
        else:
            at = sorted(set(values))
            axes.plot(at, [group.mean for group in effect.groups], "D-", color="#c2410c", lw=1.5, ms=5)
    axes.set(xlabel=field, ylabel="validation loss")
    axes.grid(alpha=0.3)
    return figure


def _maps(definition: Definition, effects: Sequence[Effect], done: Sequence[RunView]) -> str:
    """A heat map of the two listed fields of most effect, parallel coordinates of three and more, or of ranges."""
    fields = [effect.field for effect in effects if effect.field != SEED]
    listed = [field for field in fields if not isinstance(definition.space.get(field), Range)]
    text = ""
    if len(listed) >= 2:
        rows, columns = sorted(listed[:2], key=lambda field: len({text_of(v.run.point[field]) for v in done}))
        text += (
            f"<h2>{html.escape(rows)} and {html.escape(columns)}</h2>"
            f"<p class=note>Mean validation loss of each pair of values, whatever the other fields were: the darker "
            "the better.</p>"
            f"{_image(_heat_map(done, rows, columns), 'heat map of the validation loss')}"
        )
    if len(fields) >= 3 or (len(fields) >= 2 and len(listed) < 2):
        text += (
            "<h2>All fields at once</h2><p class=note>A line a run, dark for a low validation loss (the axis on the "
            f"right); the best is drawn in red.</p>{_image(_parallel(fields, done), 'parallel coordinates')}"
        )
    return text


def _heat_map(done: Sequence[RunView], rows: str, columns: str):
    plt = _pyplot()
    ys, xs, means = grid_of(done, rows, columns)
    figure, axes = plt.subplots(
        figsize=(min(2.5 + 0.9 * len(xs), 12), min(1.4 + 0.6 * len(ys), 10)), layout="constrained"
    )
    image = axes.imshow(means, cmap="viridis", aspect="auto")
    middle = (np.nanmin(means) + np.nanmax(means)) / 2
    if means.size <= 150:
        for i, j in itertools.product(range(len(ys)), range(len(xs))):
            empty = np.isnan(means[i, j])
            color = "0.4" if empty else "white" if means[i, j] < middle else "black"
            axes.text(j, i, "-" if empty else f"{means[i, j]:.3f}", ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(xs)), map(text_of, xs), rotation=30 if len(xs) > 6 else 0)
    axes.set_yticks(range(len(ys)), map(text_of, ys))
    axes.set(xlabel=columns, ylabel=rows)
    figure.colorbar(image, label="validation loss")
    return figure


def _parallel(fields: Sequence[str], done: Sequence[RunView]):
    """Each field an axis from 0 to 1; the loss on the right, clipped where a few runs are far worse than the rest."""
    plt = _pyplot()
    losses = np.array([view.validation_loss for view in done])
    low, high = losses.min(), min(losses.max(), np.quantile(losses, 0.9) + (np.quantile(losses, 0.9) - losses.min()))
    heights = [*(_heights([view.run.point[field] for view in done]) for field in fields)]
    heights.append((np.clip((losses - low) / ((high - low) or 1.0), 0, 1), [(0.0, f"{low:.3f}"), (1.0, f"{high:.3f}")]))
    figure, axes = plt.subplots(figsize=(min(3 + 1.9 * len(fields), 13), 4), layout="constrained")
    lines = np.stack([height for height, _ in heights], axis=1)
    for i in np.argsort(-losses):
        axes.plot(lines[i], color=plt.get_cmap("viridis")(lines[i, -1]), lw=1.3, alpha=0.75)
    axes.plot(lines[int(losses.argmin())], color="#c2410c", lw=2.5)
    box = dict(facecolor="white", edgecolor="none", alpha=0.85, pad=1)
    for i, (_, ticks) in enumerate(heights):
        axes.axvline(i, color="0.3", lw=1)
        for y, label in ticks:
            axes.annotate(label, (i, y), xytext=(4, 3), textcoords="offset points", fontsize=8, color="0.2", bbox=box)
    axes.set_xticks(range(len(heights)), [*fields, "validation loss"])
    axes.set_yticks([])
    axes.set_xlim(-0.1, len(fields) + 0.45)
    axes.set_ylim(-0.05, 1.1)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def _heights(values: Sequence[Value]) -> tuple[np.ndarray, list[tuple[float, str]]]:
    """Values as heights from 0 to 1, and the labels of some."""
    distinct = sorted({text_of(v): v for v in values}.values(), key=_place)
    scale = _scale(distinct)
    if scale == "names" or len(distinct) <= 6:
        place = {text_of(value): i / max(len(distinct) - 1, 1) for i, value in enumerate(distinct)}
        return np.array([place[text_of(value)] for value in values]), [(y, label) for label, y in place.items()]
    numbers = np.log(values) if scale == "log" else np.asarray(values, float)
    low, high = numbers.min(), numbers.max()
    return (numbers - low) / (high - low), [(0.0, text_of(distinct[0])), (1.0, text_of(distinct[-1]))]


def _curves(folder: SweepFolder, views: Sequence[RunView]) -> str:
    plt = _pyplot()
    import matplotlib.ticker

    logged = [(view, read_metrics(folder.folder(view.run))) for view in views if view.loss is not None]
    if not logged:
        return ""
    logged.sort(key=lambda each: (each[0].validation_loss is None, each[0].validation_loss))
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    lowest, highest = math.inf, []
    for i, (view, entries) in reversed(list(enumerate(logged))):  # the best on top
        color = plt.get_cmap("viridis")(0.85 * i / max(len(logged) - 1, 1))
        for axes, name, weight in zip(panels, ("loss", "validation_loss"), (_SMOOTHING, 0.0), strict=True):
            points = [(e["tokens"], e[name]) for e in entries if e.get(name) is not None]
            if points:
                x, y = np.array(points, float).T
                y = smooth(y, min(weight, 1 - 10 / max(len(y), 10)))
                style = "--" if view.state in ("crashed", "pruned") else "-"
                axes.plot(
                    *thin(x, y, _POINTS),
                    style,
                    color=color,
                    lw=2 if i == 0 else 1,
                    marker="o" if weight == 0 else "",
                    ms=2.5,
                )
                lowest = min(lowest, y.min())
                highest.append(y[len(y) // 10 :].max())
    top = float(np.quantile(highest, 0.9))
    for axes, label in zip(panels, ("training loss, smoothed", "validation loss"), strict=True):
        axes.set(xlabel="tokens", ylabel=label)
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        if top > lowest:  # what diverges leaves the picture
            axes.set_ylim(lowest - 0.05 * (top - lowest), top + 0.05 * (top - lowest))
        axes.grid(alpha=0.3)
    return (
        "<h2>Curves</h2><p class=note>Coloured by the last validation loss, the lowest darkest and thickest; crashed "
        f"and pruned runs are dashed.</p>{_image(figure, 'loss curves of all runs')}"
    )


def _runs(folder: SweepFolder, views: Sequence[RunView]) -> str:
    fields = list(dict.fromkeys(field for view in views for field in view.run.point))
    order = lambda view: (view.state != "finished", not is_number(view.validation_loss), view.validation_loss or 0.0)
    number = lambda x, form=".4f": "" if x is None else format(x, form)
    rows = []
    for view in sorted(views, key=order):
        settings = "".join(f"<td>{html.escape(text_of(view.run.point.get(field)))}</td>" for field in fields)
        seconds = "" if view.seconds is None else f"{view.seconds:,.0f}"
        rows.append(
            f"<tr><td class={view.state}>{view.state}</td>{settings}<td>{number(view.validation_loss)}</td>"
            f"<td>{number(view.bits_per_byte)}</td><td>{number(view.loss)}</td>"
            f"<td>{view.step:,}/{view.run.total_steps:,}</td><td>{number(view.tokens_per_second, ',.0f')}</td>"
            f"<td>{seconds}</td></tr>"
        )
    head = "".join(f"<th>{html.escape(field)}</th>" for field in fields)
    text = (
        f"<h2>Runs</h2><div class=wide><table><tr><th>state</th>{head}<th>validation loss</th><th>bits a byte</th>"
        f"<th>loss</th><th>step</th><th>tokens/s</th><th>seconds</th></tr>{''.join(rows)}</table></div>"
    )
    for view in views:
        if view.state in ("crashed", "refused"):
            lines = [view.run.refused] if view.run.refused else folder.last_lines(view.run)
            text += (
                f"<details><summary>{html.escape(view.name)}: {view.state}</summary>"
                f"<pre>{html.escape(chr(10).join(lines))}</pre></details>"
            )
    return text


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _image(figure, alt: str) -> str:
    """As an <img> of its own, so that ids within one figure do not meet those of another."""
    file = io.BytesIO()
    figure.savefig(file, format="svg")
    _pyplot().close(figure)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{data}">'


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
