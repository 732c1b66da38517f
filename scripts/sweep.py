"""Train every combination of some fields of a config, or search them: many runs at a time, here or on SLURM.

    python scripts/sweep.py --config=configs/NAME.py --workdir=DIR --sweep.FIELD=V1,V2 [--sweep.FIELD=...] [--seeds=3]
    python scripts/sweep.py ... --sweep.optimizer.learning_rate=1e-5..1e-2:log --search=random --trials=20
    python scripts/sweep.py ... --sweep.model.n_layers=2,4 --sweep.model.d_model=128,256 --search=zip
    python scripts/sweep.py --workdir=DIR --status
    python scripts/sweep.py --workdir=DIR --report

--workdir is required, and --config unless --status or --report is given; what is in brackets is optional.

A zip takes the first values of all fields together, then the second ones. --config.FIELD=VALUE applies to every run.
Values with commas: --sweep.FIELD='["A,B","C"]'. A field that is None in the config can be None in the list, too. All
values are checked before the first run starts. Rerun the same command to resume a sweep that was stopped or killed;
finished runs are not repeated. Each run is a run folder of train.py, such as DIR/learning_rate=0.001__seed=0. Beside
them are sweep.json, sweep.csv and report.html.

Exits with status 3 if runs have not finished, 75 if the sweep was interrupted, 1 if the command is wrong.
"""

import contextlib
import math
import re
import sys
import time
from pathlib import Path

from absl import app, flags, logging

from heinsen.errors import exit_on_error
from scripts import cli

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the sweep.", required=True)
CONFIG = flags.DEFINE_string("config", None, "Config file, required for a sweep; --config.a.b=value overrides a field.")
SEEDS = flags.DEFINE_integer("seeds", None, "Seeds per point, counting up from the config's seed.", lower_bound=1)
SEARCH = flags.DEFINE_string("search", "grid", "grid, zip, random or optuna (pip install optuna; median pruning).")
TRIALS = flags.DEFINE_integer("trials", None, "Points of a random or Optuna search; may grow when it is resumed.")
SEARCH_SEED = flags.DEFINE_integer("search_seed", 0, "Seed of the points that a search draws.", lower_bound=0)
LAUNCHER = flags.DEFINE_string("launcher", "local", "local: this machine; slurm: job arrays, from a login node.")
PARALLEL = flags.DEFINE_integer("parallel", None, "Runs at a time; they share cores and GPUs.", lower_bound=1)
PARTITION = flags.DEFINE_string("partition", None, "slurm: partition of the jobs.")
TIME = flags.DEFINE_string("time", "24:00:00", "slurm: limit per job, [D-]HH:MM:SS or minutes; the next job resumes.")
GPUS = flags.DEFINE_integer("gpus_per_run", 0, "slurm: GPUs per job.", lower_bound=0)
CPUS = flags.DEFINE_integer("cpus_per_run", 1, "slurm: CPU cores per job.", lower_bound=1)
RETRY = flags.DEFINE_bool("retry", False, "Also start runs that have crashed before.")
STATUS = flags.DEFINE_bool("status", False, "Show the progress of the runs; in a terminal, until all have ended.")
REPORT = flags.DEFINE_bool("report", False, "Write DIR/report.html from the results so far.")

cli.show_help(__name__)

import jax

from heinsen.quantities import count
from heinsen.sweep.definition import Definition, find_strategy
from heinsen.sweep.driver import drive
from heinsen.sweep.folder import CSV_FILE, SweepFolder
from heinsen.sweep.launcher import LaunchOptions, find_launcher
from heinsen.sweep.runs import summary, table
from heinsen.sweep.search import make_search
from heinsen.sweep.space import SweepError, parse_space
from scripts.sweep_runs import RunFactory

EXIT_UNFINISHED = 3  # some runs have not finished
_REDRAW_SECONDS = 2.0  # of --status in a terminal

SWEPT: dict[str, str] = {}  # of the flags --sweep.FIELD=TEXT: {field: text}


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    jax.config.update("jax_platforms", "cpu")  # leave the accelerators to the runs
    cli.refuse_address("workdir")
    action = show_status if STATUS.value else report if REPORT.value else run_sweep
    with exit_on_error(on_os_error="Rerun the same command to resume the sweep"):
        action(Path(WORKDIR.value))


def run_sweep(path: Path) -> None:
    launcher = find_launcher(LAUNCHER.value)
    options = LaunchOptions(PARALLEL.value, PARTITION.value, parse_minutes(TIME.value), GPUS.value, CPUS.value)
    if CONFIG.value is None:
        raise SweepError("--config=configs/NAME.py is missing: the config of all runs")
    factory = RunFactory(CONFIG.value, cli.given_fields(), check_data=launcher.runs_here)
    folder = open_folder(path, factory)
    with folder.lock():
        launched = launcher(folder, factory.command, options)
        search = make_search(folder, factory.make_or_refuse)
        adaptive = folder.definition.strategy.adaptive
        length = count(folder.definition.trials, "trial") if adaptive else count(len(folder.runs), "run")
        print(f"{path}: {length}; --status --workdir={path} shows their progress", file=sys.stderr, flush=True)
        views = drive(folder, search, launched, RETRY.value)
    print("\n".join(table(views)))
    print(f"{path / CSV_FILE}; --report --workdir={path} writes report.html")
    if failed := [view.name for view in views if view.state in ("crashed", "interrupted", "waiting")]:
        print(
            f"error: {len(failed)} of {count(len(views), 'run')} did not finish: {', '.join(failed)}", file=sys.stderr
        )
        sys.exit(EXIT_UNFINISHED)


def open_folder(path: Path, factory: RunFactory) -> SweepFolder:
    """Return the sweep that the flags define, new or to resume. Raises HeinsenError before anything is written."""
    seed = factory.base["seed"]
    space = parse_space(SWEPT, factory.convert, find_strategy(SEARCH.value).paired)
    definition = Definition(
        config=CONFIG.value,
        overrides=cli.given_fields(),
        base=factory.base,
        space=space,
        seeds=None if SEEDS.value is None else tuple(range(seed, seed + SEEDS.value)),
        search=SEARCH.value,
        trials=TRIALS.value,
        search_seed=SEARCH_SEED.value,
        data_digest=factory.data_digest(space.get("data.path", (factory.base["data"]["path"],))),
    )
    runs = [factory.make(point) for point in definition.points()]
    if definition.strategy.adaptive:  # its points are not known yet: check the ends of what it may propose
        for point in definition.corners():
            factory.make(point)
    return SweepFolder.open_or_create(path, definition, runs)


def show_status(path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            folder = SweepFolder.load(path)  # a search adds runs to it
            views = folder.views()
            if sys.stdout.isatty():
                print("\x1b[2J\x1b[H", end="")  # clear the screen
            print("\n".join(table(views)))
            if not sys.stdout.isatty() or not folder.is_going_on(views):
                return
            time.sleep(_REDRAW_SECONDS)


def report(path: Path) -> None:
    from heinsen.sweep.report import write_report  # matplotlib

    folder = SweepFolder.load(path)
    views = folder.views()
    folder.write_csv(views)
    print(f"{write_report(folder, views)}: {summary(views)}")


# ---- flags ---------------------------------------------------------------------------------------


def parse_minutes(text: str) -> int:
    """Return the minutes of [D-]HH:MM:SS or of a number of minutes. Raises SweepError."""
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        total = math.ceil(24 * 60 * days + 60 * hours + minutes + seconds / 60)
    else:
        total = int(text) if text.isdecimal() else 0
    if total < 1:
        raise SweepError(f"--time={text}: expected [D-]HH:MM:SS or minutes")
    return total


def parse_flags(argv: list[str]) -> list[str]:
    """Parse the flags; those of --sweep.FIELD=TEXT go into SWEPT."""
    rest = []
    for argument in argv:
        match = re.fullmatch(r"--?sweep\.([^=]+)(=.*)?", argument, re.DOTALL)
        if match is None:
            rest.append(argument)
            continue
        field, text = match.groups()
        if text is None:
            cli.refuse(f"write {argument}=VALUE as one word")
        if field in SWEPT:
            cli.refuse(f"--sweep.{field} is given twice: put all its values into one flag")
        SWEPT[field] = text[1:]
    return cli.parse_flags(rest)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
