"""Loss curves of any runs in one picture, and a table of their final figures.

    python scripts/plot_runs.py RUN... --out=FILE.png [--x=tokens|steps|flops|time] [--metric=loss] [--smooth=0.9]
    python scripts/plot_runs.py RUN... --out=FILE.svg --metric=validation_loss --against=docs/anchors.csv --log_x

Points are validations. --against draws the bands of loss to expect (nats per GPT-2 token) and says where each run lies.
"""

import sys
from pathlib import Path

from absl import app, flags, logging

OUT = flags.DEFINE_string("out", None, "The picture, .png or .svg.", required=True)
X = flags.DEFINE_string("x", "tokens", "tokens, steps, flops or time.")
METRIC = flags.DEFINE_string("metric", "loss", "loss, validation_loss or bits_per_byte.")
SMOOTH = flags.DEFINE_float("smooth", 0.0, "Weight of the past in running means of the curves, from 0 to below 1.")
LOG_X = flags.DEFINE_bool("log_x", False, "Logarithmic horizontal axis.")
LOG_Y = flags.DEFINE_bool("log_y", False, "Logarithmic vertical axis.")
AGAINST = flags.DEFINE_string("against", None, "Bands to draw: a CSV file of tokens, low, high, source.")

MOST_POINTS = 2000  # of a curve: more cannot be seen


def main(argv: list[str]) -> None:
    from heinsen.sweep.curves import AXES, METRICS, CurveError, RunLog, against, final_table, read_anchors

    logging.set_verbosity(logging.WARNING)
    for flag, value, choices in (("x", X.value, AXES), ("metric", METRIC.value, METRICS)):
        if value not in choices:
            raise app.UsageError(f"--{flag}={value}: choose {', '.join(choices)}")
    if not 0 <= SMOOTH.value < 1:
        raise app.UsageError(f"--smooth={SMOOTH.value}: expected a number from 0 to below 1")
    if Path(OUT.value).suffix not in (".png", ".svg"):
        raise app.UsageError(f"--out={OUT.value}: expected a name that ends with .png or .svg")
    if AGAINST.value is not None and (X.value != "tokens" or METRIC.value == "bits_per_byte"):
        raise app.UsageError(
            "--against holds losses by tokens: it needs --x=tokens and --metric=loss or validation_loss"
        )
    if len(argv) < 2:
        raise app.UsageError("expected run folders: scripts/plot_runs.py RUN... --out=FILE.png")
    try:
        anchors = read_anchors(Path(AGAINST.value)) if AGAINST.value is not None else []
        logs = [RunLog.read(Path(path)) for path in dict.fromkeys(argv[1:])]
        draw(logs, anchors)
    except CurveError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {OUT.value} cannot be written: {error.strerror}")
    print("\n".join(final_table(logs)))
    for log in logs if anchors else ():
        if log.config.data.tokenizer != "gpt2":
            print(f"{log.path}: counts {log.config.data.tokenizer} tokens, the bands hold for GPT-2's")
        for line in against(anchors, *log.points("validation_loss")):
            print(f"{log.path}: {line}")
    print(f"written: {OUT.value}")


def draw(logs, anchors) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from heinsen.sweep.curves import AXES, METRICS, CurveError, curves, thin

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    if anchors:
        tokens = [anchor.tokens for anchor in anchors]
        low, high = [anchor.low for anchor in anchors], [anchor.high for anchor in anchors]
        axes.fill_between(tokens, low, high, color="0.85", label=Path(AGAINST.value).name, zorder=0)
        axes.plot(tokens, low, "_", tokens, high, "_", color="0.5", zorder=0)
    parts = [log.path.absolute().parts for log in logs]
    depth = next((n for n in range(1, 1 + max(map(len, parts))) if len({p[-n:] for p in parts}) == len(parts)), 1)
    drawn = 0
    for i, (log, names) in enumerate(zip(logs, parts, strict=True)):
        color = plt.get_cmap("tab10")(i) if len(logs) <= 10 else plt.get_cmap("viridis")(i / len(logs))
        x, y, at, validations = curves(log, X.value, METRIC.value, SMOOTH.value)
        keep = x > 0 if LOG_X.value else slice(None)
        label = "/".join(names[-depth:])
        style = "o-" if METRIC.value == "validation_loss" else "-"
        axes.plot(*thin(x[keep], y[keep], MOST_POINTS), style, color=color, lw=1.2, ms=3, label=label)
        axes.plot(at, validations, "o", color=color, ms=4, mec="white", mew=0.5)
        drawn += len(x)
    if not drawn:
        raise CurveError(f"none of these runs has logged {METRIC.value}")
    if LOG_X.value:
        axes.set_xscale("log")
    if LOG_Y.value:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axes.yaxis.set_minor_formatter(matplotlib.ticker.ScalarFormatter())
    smoothed = f", running means of weight {SMOOTH.value:g}" if SMOOTH.value else ""
    axes.set(xlabel=AXES[X.value], ylabel=METRICS[METRIC.value] + smoothed)
    axes.grid(alpha=0.3, which="both" if LOG_Y.value else "major")
    axes.legend(fontsize="small")
    Path(OUT.value).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT.value, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    from configs import parse_flags

    app.run(main, flags_parser=parse_flags)
