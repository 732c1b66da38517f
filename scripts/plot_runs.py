"""Draw the loss curves of any runs in one figure, and print a table of their final values.

    python scripts/plot_runs.py RUN... --out=FILE.png [--x=tokens|steps|flops|time] [--metric=loss] [--smooth=0.9]
    python scripts/plot_runs.py RUN... --out=FILE.svg --metric=validation_loss --against=docs/anchors.csv --log_x

RUN, a run folder, and --out are required; what is in brackets is optional.

Points are validations. --against draws published losses (nats per GPT-2 token), and prints how far each run is from
them.
"""

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging

from heinsen.errors import InputError, exit_on_error
from heinsen.figures import count_tokens, make_figure, pyplot, save_figure
from scripts.cli import parse_flags, refuse, show_help

OUT = flags.DEFINE_string("out", None, "File of the figure, .png or .svg.", required=True)
X = flags.DEFINE_string("x", "tokens", "Horizontal axis: tokens, steps, flops or time.")
METRIC = flags.DEFINE_string("metric", "loss", "loss, validation_loss or bits_per_byte.")
SMOOTH = flags.DEFINE_float("smooth", 0.0, "Weight of the past in running means, in [0, 1); less for short curves.")
LOG_X = flags.DEFINE_bool("log_x", False, "Logarithmic horizontal axis.")
LOG_Y = flags.DEFINE_bool("log_y", False, "Logarithmic vertical axis.")
AGAINST = flags.DEFINE_string(
    "against", None, "Published losses: a CSV file with columns tokens, loss, label, source[, tokenizer]."
)

show_help(__name__)

from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

from scripts.curves import (
    AXES,
    METRICS,
    Anchor,
    RunLog,
    compare_with_anchors,
    final_table,
    make_curve,
    read_anchors,
)


def main(argv: list[str]) -> None:
    check_flags(argv[1:])
    logging.set_verbosity(logging.WARNING)
    with exit_on_error():
        print("\n".join(plot_runs([Path(path) for path in dict.fromkeys(argv[1:])], Path(OUT.value))))


def check_flags(paths: Sequence[str]) -> None:
    """End the program if flags do not fit."""
    for flag, value, choices in (("x", X.value, AXES), ("metric", METRIC.value, METRICS)):
        if value not in choices:
            refuse(f"--{flag}={value}: choose {', '.join(choices)}")
    if not 0 <= SMOOTH.value < 1:
        refuse(f"--smooth={SMOOTH.value}: expected a number from 0 to below 1")
    if Path(OUT.value).suffix not in (".png", ".svg"):
        refuse(f"--out={OUT.value}: expected a name that ends in .png or .svg")
    if AGAINST.value is not None and (X.value != "tokens" or METRIC.value == "bits_per_byte"):
        refuse("--against holds losses by tokens: it needs --x=tokens and --metric=loss or validation_loss")
    if not paths:
        refuse("expected run folders: scripts/plot_runs.py RUN... --out=FILE.png")


def plot_runs(paths: Sequence[Path], out: Path) -> list[str]:
    """Write the figure, and return the lines to print. Raises InputError."""
    anchors = read_anchors(Path(AGAINST.value)) if AGAINST.value is not None else []
    logs = [RunLog.read(path) for path in paths]
    for log in logs:
        if other := {anchor.tokenizer for anchor in anchors} - {log.tokenizer}:
            raise InputError(
                f"{log.path} counts {log.tokenizer} tokens, --against={AGAINST.value} those of "
                f"{other.pop()}: leave it out, or say what it counts in a column tokenizer"
            )
    draw(logs, anchors, out)
    lines = final_table(logs)
    for log in logs if anchors else ():
        lines += [f"{log.path}: {line}" for line in compare_with_anchors(anchors, *log.points("validation_loss"))]
    return [*lines, f"written: {out}"]


def draw(logs: Sequence[RunLog], anchors: Sequence[Anchor], out: Path) -> None:
    """Draw the curves. Raises InputError if there is none, OSError if `out` cannot be written."""
    figure, axes = make_figure(figsize=(9, 5.5))
    if anchors:
        draw_anchors(axes, anchors)
    metric, n_points = METRICS[METRIC.value], 0
    for i, (log, label) in enumerate(zip(logs, labels([log.path for log in logs]), strict=True)):
        color = pyplot().get_cmap("tab10")(i) if len(logs) <= 10 else pyplot().get_cmap("viridis")(i / len(logs))
        x, y = make_curve(log, metric.curve, X.value, SMOOTH.value)
        keep = x > 0 if LOG_X.value else slice(None)
        style = "o-" if METRIC.value == "validation_loss" else "-"
        axes.plot(x[keep], y[keep], style, color=color, lw=1.2, ms=3, label=label)
        if metric.marks is not None:
            axes.plot(*make_curve(log, metric.marks, X.value), "o", color=color, ms=4, mec="white", mew=0.5)
        n_points += len(x)
    if not n_points:
        raise InputError(f"nothing to draw: no {METRIC.value} is logged in {', '.join(str(log.path) for log in logs)}")
    if metric.marks is not None and any(len(log.points(metric.marks)[0]) for log in logs):
        axes.plot([], [], "o", color="0.4", ms=4, label="validation")
    axes.set_xscale("log" if LOG_X.value else "linear")
    if LOG_Y.value:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
    smoothed = ", running means" if SMOOTH.value else ""
    axes.set(xlabel=AXES[X.value].label, ylabel=metric.label + smoothed)
    axes.grid(alpha=0.3, which="both" if LOG_Y.value else "major")
    if X.value == "tokens":
        count_tokens(axes.xaxis)
    save_figure(out, figure)


def draw_anchors(axes: Axes, anchors: Sequence[Anchor]) -> None:
    """Draw published losses, those of one label with one marker."""
    names = dict.fromkeys(anchor.label for anchor in anchors)
    for marker, name in zip(itertools.cycle("Ds^vP*"), names, strict=False):
        points = [anchor[:2] for anchor in anchors if anchor.label == name]
        axes.plot(*zip(*points, strict=True), marker, color="black", ms=5, label=name)


def labels(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell them apart."""
    parts = [path.absolute().parts for path in paths]
    depths = range(1, 1 + max(map(len, parts)))
    depth = next((n for n in depths if len({names[-n:] for names in parts}) == len(parts)), 1)
    return ["/".join(names[-depth:]) for names in parts]


if __name__ == "__main__":
    app.run(main, flags_parser=functools.partial(parse_flags, takes_arguments=True))
