r"""Multi-query associative recall as in Zoology, by every kind of attention: accuracy by width and by state size.

    python experiments/associative_recall/run.py --out=runs/associative_recall [--parallel=2]
    python experiments/associative_recall/run.py ... --widths=32,64,128,256,512 --learning_rates=3e-4,1e-3,3e-3,1e-2 \
      --tokens=5e7 --seeds=3

Each run is one of scripts/recall.py --task=mqar: n key-value pairs in 16 n tokens, in turn for all --pairs, then tested
on --test_pairs too, of which training sees none. A run ends at --tokens, or once 99% of its answers are right. Rerun
the same command to resume: finished runs are kept, also if widths, learning rates, contestants or seeds are added.
contestants.py lists who takes part. OUT receives runs/ and the report: report.md, results.json, recall.png.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

from scripts.cli import parse_flags, show_help

OUT = flags.DEFINE_string("out", "runs/associative_recall", "Folder of the experiment.")
PARALLEL = flags.DEFINE_integer(
    "parallel", None, "Runs at a time; default: one per GPU, or one per core.", lower_bound=1
)
KINDS = flags.DEFINE_list("kinds", None, "Contestants, all of contestants.py by default.")
WIDTHS = flags.DEFINE_list("widths", ["32", "64", "128"], "Widths of the models.")
HEADS = flags.DEFINE_integer("heads", 2, "Heads of each layer, which share the width.", lower_bound=1)
RATES = flags.DEFINE_list("learning_rates", ["1e-3", "3e-3", "1e-2"], "Learning rates, the same for every contestant.")
PAIRS = flags.DEFINE_list("pairs", ["4", "8", "16"], "Numbers of key-value pairs in training, in turn.")
TEST_PAIRS = flags.DEFINE_list("test_pairs", ["32", "64"], "Numbers of key-value pairs that are only tested.")
TOKENS = flags.DEFINE_float("tokens", 20e6, "Tokens of a run, at most.", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 1, "Runs at each learning rate, with seeds 1, 2, ...", lower_bound=1)
SMALL = flags.DEFINE_bool("small", False, "Everything in minutes: a rehearsal, whose results mean nothing.")

show_help(__name__)

from experiments import tools
from experiments.associative_recall import config, report
from experiments.associative_recall.contestants import CONTESTANTS, model_config, model_fields
from heinsen.evaluation.probes import MQAR_SPREAD
from heinsen.sweep.space import format_value

CONFIG = "experiments/associative_recall/config.py"
SOLVED = 0.99


class Grid(NamedTuple):
    """What to run: every combination of the first four."""

    kinds: list[str]
    widths: list[int]
    rates: list[float]
    seeds: list[int]
    pairs: list[int]
    test_pairs: list[int]
    n_heads: int
    n_steps: int


class Point(NamedTuple):
    """One run."""

    kind: str
    width: int
    rate: float
    seed: int


SMALL_FLAGS = {
    "kinds": "softmax,heinsen,heinsen-gate-convolution",
    "widths": "16",
    "learning_rates": "1e-2",
    "pairs": "2,4",
    "test_pairs": "8",
    "tokens": "1e6",
}


def main(argv: list[str]) -> None:
    tools.execute(run, OUT.value, PARALLEL.value, SMALL_FLAGS if SMALL.value else None)


def run(out: Path, parallel: int) -> str:
    """Do what is left of the experiment, and return its report. Raises ExperimentError."""
    grid = read_grid()
    tools.share_compilations(out)
    files = {point: out / "runs" / f"{name_of(grid, point)}.json" for point in points_of(grid)}
    commands = {file: arguments(out, grid, point) for point, file in files.items()}
    found = tools.run_programs(commands, parallel, may_fail=True)
    rows = [row(grid, point, found[file]) for point, file in files.items()]
    return report.write(out, grid._asdict() | {"spread": MQAR_SPREAD}, rows)


def read_grid() -> Grid:
    """Return the grid of the flags. Raises ExperimentError."""
    widths, pairs = tools.parse_counts("widths", WIDTHS.value), tools.parse_counts("pairs", PAIRS.value)
    test_pairs = tools.parse_counts("test_pairs", TEST_PAIRS.value)
    kinds = tools.choose("kinds", KINDS.value, CONTESTANTS)
    for kind in kinds:
        for width in widths:
            if width % (2 * HEADS.value):  # rotary positions rotate pairs of features
                raise tools.ExperimentError(f"--widths: {width} does not divide into {HEADS.value} heads of even size")
            model_config(kind, width, HEADS.value)
    tokens_per_step = config.get_config().batch_size * MQAR_SPREAD * sum(pairs) / len(pairs)
    n_steps, warmup = int(TOKENS.value / tokens_per_step), config.get_config().optimizer.warmup_steps
    if n_steps <= warmup:
        raise tools.ExperimentError(
            f"--tokens={TOKENS.value:g} are {n_steps} steps of {tokens_per_step:,.0f} tokens: the warm-up alone takes "
            f"{warmup}"
        )
    rates, seeds = tools.parse_numbers("learning_rates", RATES.value), list(range(1, SEEDS.value + 1))
    return Grid(kinds, widths, rates, seeds, pairs, test_pairs, HEADS.value, n_steps)


def points_of(grid: Grid) -> Iterator[Point]:
    """Yield the runs, the widest first: then those that run at the same time end at nearly the same time."""
    for seed in grid.seeds:
        for width in sorted(grid.widths, reverse=True):
            for kind in grid.kinds:
                for rate in grid.rates:
                    yield Point(kind, width, rate, seed)


def name_of(grid: Grid, point: Point) -> str:
    return f"{point.kind}_width={point.width}_heads={grid.n_heads}_rate={format_value(point.rate)}_seed={point.seed}"


def arguments(out: Path, grid: Grid, point: Point) -> list[str]:
    """Return the arguments of a run's program."""
    join = lambda numbers: ",".join(map(str, numbers))
    fields = {f"model.{name}": value for name, value in model_fields(point.kind, point.width, grid.n_heads).items()}
    fields |= {"optimizer.learning_rate": point.rate, "seed": point.seed}
    return [
        "scripts/recall.py", f"--config={CONFIG}", "--task=mqar", f"--lengths={join(grid.pairs)}",
        f"--test_lengths={join(sorted({*grid.pairs, *grid.test_pairs}))}", f"--steps={grid.n_steps}",
        f"--stop_at={SOLVED}", f"--out={tools.from_root(out / 'runs' / name_of(grid, point))}",
        *(f"--config.{name}={format_value(value)}" for name, value in fields.items()),
    ]  # fmt: skip


def row(grid: Grid, point: Point, found: dict | None) -> dict:
    """Return a run of results.json; without accuracy if it has failed."""
    kept = point._asdict() | {"accuracy": None}
    if found is not None:
        kept |= {name: found[name] for name in ("parameters", "steps", "tokens", "loss", "seconds")}
        kept["accuracy"] = {n["length"]: n["answers"] for n in found["accuracy"]}
    return kept


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
