"""Train every combination of some fields of a config, or search them; many runs at a time, here or on SLURM.

    python scripts/sweep.py --config=configs/NAME.py --workdir=DIR --sweep.FIELD=V1,V2 [--sweep.FIELD=...] [--seeds=3]
    python scripts/sweep.py ... --sweep.optimizer.learning_rate=1e-5..1e-2:log --search=random --trials=20
    python scripts/sweep.py ... --sweep.model.n_layers=2,4 --sweep.model.d_model=128,256 --search=zip
    python scripts/sweep.py --workdir=DIR --status
    python scripts/sweep.py --workdir=DIR --report

A zip takes the first values of all fields together, then the second ones. --config.FIELD=VALUE holds for every run.
Values with commas: --sweep.FIELD='["A,B","C"]'. All are checked before the first run starts. The same command goes on
with a sweep that was stopped or killed; what has finished is not repeated. Each run is a run folder of train.py, for
example DIR/learning_rate=0.001__seed=0; beside them sweep.json, sweep.csv, report.html.

Leaves with status 3 where runs have crashed, 75 where it was interrupted, 1 for what is wrong with the command.
"""

import math
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from absl import app, flags, logging

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the sweep.", required=True)
CONFIG = flags.DEFINE_string("config", None, "Config file; --config.a.b=value overrides a field in every run.")
SEEDS = flags.DEFINE_integer("seeds", None, "Runs of each point, of seeds that follow the config's.", lower_bound=1)
SEARCH = flags.DEFINE_string("search", "grid", "grid, zip, random or optuna (pip install optuna; median pruning).")
TRIALS = flags.DEFINE_integer("trials", None, "Points of a random search or of Optuna; more may follow later.")
SEARCH_SEED = flags.DEFINE_integer("search_seed", 0, "Of the points that a search draws.", lower_bound=0)
LAUNCHER = flags.DEFINE_string("launcher", "local", "local: on this machine; slurm: array jobs, from a login node.")
PARALLEL = flags.DEFINE_integer("parallel", None, "Runs at a time, which share cores and GPUs.", lower_bound=1)
PARTITION = flags.DEFINE_string("partition", None, "slurm: of the jobs.")
TIME = flags.DEFINE_string("time", "24:00:00", "slurm: of a job, [D-]HH:MM:SS or minutes; runs go on in the next one.")
GPUS = flags.DEFINE_integer("gpus_per_run", 0, "slurm: GPUs of a job.", lower_bound=0)
CPUS = flags.DEFINE_integer("cpus_per_run", 1, "slurm: cores of a job.", lower_bound=1)
RETRY = flags.DEFINE_bool("retry", False, "Start runs again that have crashed before.")
STATUS = flags.DEFINE_bool("status", False, "Show how the runs get on; on a terminal until all have ended.")
REPORT = flags.DEFINE_bool("report", False, "Write DIR/report.html of what there is.")

EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: run again
EXIT_UNFINISHED = 3  # runs have crashed

FIELDS: dict[str, dict[str, str]] = {"config": {}, "sweep": {}}  # of the command line: {field: text}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    import jax

    jax.config.update("jax_platforms", "cpu")  # accelerators are the runs'
    from heinsen.sweep.space import SweepError

    folder = Path(WORKDIR.value)
    try:
        if STATUS.value:
            show_status(folder)
        elif REPORT.value:
            write_report(folder)
        else:
            run_sweep(folder)
    except SweepError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error}. The same command goes on with the sweep")


def run_sweep(path: Path) -> None:
    from heinsen.sweep.folder import Screen, SweepFolder, SweepRun, table
    from heinsen.sweep.launch import LAUNCHERS, LocalLauncher, SlurmLauncher, SweepInterrupted, drive
    from heinsen.sweep.search import ListSearch, OptunaSearch
    from heinsen.sweep.space import Definition, Point, SweepError, parse_space, text_of

    if LAUNCHER.value not in LAUNCHERS:
        raise SweepError(f"--launcher={LAUNCHER.value}: choose {' or '.join(LAUNCHERS)}")
    if CONFIG.value is None:
        raise SweepError("--config=configs/NAME.py is missing: the config of all runs")
    minutes = minutes_of(TIME.value)
    config, overrides = CONFIG.value, FIELDS["config"]
    base = resolve(config, overrides)

    def look_up(mapping: Mapping, field: str):
        for key in field.split("."):
            mapping = mapping.get(key) if isinstance(mapping, Mapping) else None
        return mapping

    def convert(field: str, text: str):
        if isinstance(group := look_up(base, field), Mapping):
            raise SweepError(f"--sweep.{field}={text}: {field} is a group of fields ({', '.join(group)}): sweep those")
        return look_up(resolve(config, overrides, {field: text}), field)

    seen = set()  # models and data that go together

    def make_run(point: Point, refuse: bool = True) -> SweepRun:
        """A run of the point; one that the config forbids is an error, or (not `refuse`) a run that says so."""
        try:
            checked = check(config, overrides, point)
            if LAUNCHER.value == "local" and (checked.data, checked.model) not in seen:
                check_data(checked)
                seen.add((checked.data, checked.model))
        except SweepError as error:
            if refuse:
                raise
            return SweepRun(point, 0, 0, str(error))
        return SweepRun(point, checked.total_steps, checked.batch_size * checked.sequence_length)

    definition = Definition(
        config=config,
        overrides=overrides,
        base=base,
        space=parse_space(FIELDS["sweep"], convert, SEARCH.value),
        seeds=None if SEEDS.value is None else tuple(range(base["seed"], base["seed"] + SEEDS.value)),
        search=SEARCH.value,
        trials=TRIALS.value,
        search_seed=SEARCH_SEED.value,
    )
    by_optuna = definition.search == "optuna"
    runs = [make_run(point) for point in definition.points()]
    for point in definition.corners() if by_optuna else ():
        make_run(point)
    folder = SweepFolder.open_or_create(path, definition, runs)

    def command(run: SweepRun, where: Path) -> list[str]:
        fields = {**overrides, **{field: text_of(value) for field, value in run.point.items()}}
        train = Path(__file__).resolve().parent.parent / "train.py"
        settings = [f"--config.{field}={text}" for field, text in fields.items()]
        return [sys.executable, str(train), f"--config={config}", f"--workdir={where}", *settings]

    screen = Screen()
    with folder.lock() as sweep:
        if LAUNCHER.value == "local":
            launcher = LocalLauncher(folder, command, sweep, PARALLEL.value)
        else:
            launcher = SlurmLauncher(folder, command, PARALLEL.value, PARTITION.value, minutes, GPUS.value, CPUS.value)
        search = OptunaSearch(folder, lambda point: make_run(point, refuse=False)) if by_optuna else ListSearch(folder)
        how_many = f"{definition.trials} trials" if by_optuna else f"{len(folder.runs)} runs"
        screen.say(f"{path}: {how_many}; --status --workdir={path} shows how they get on")
        try:
            views = drive(folder, search, launcher, screen, RETRY.value)
        except SweepInterrupted as interruption:
            print(interruption, file=sys.stderr)
            sys.exit(EXIT_INTERRUPTED)
    screen.draw([])
    print("\n".join(table(views)))
    print(f"{path / 'sweep.csv'}; --report --workdir={path} writes report.html")
    if failed := [view.name for view in views if view.state in ("crashed", "interrupted", "waiting")]:
        print(f"error: {len(failed)} of {len(views)} runs have not finished: {', '.join(failed)}", file=sys.stderr)
        sys.exit(EXIT_UNFINISHED)


def show_status(path: Path) -> None:
    from heinsen.sweep.folder import ENDED, Screen, SweepFolder, table

    screen = Screen(sys.stdout)
    try:
        while True:
            folder = SweepFolder.load(path)  # a search adds runs
            views = folder.views()
            if not screen.live or all(view.state in (*ENDED, "crashed") for view in views):
                screen.draw([])
                return print("\n".join(table(views)))
            screen.draw(table(views, screen.height()))
            time.sleep(2)
    except KeyboardInterrupt:
        return


def write_report(path: Path) -> None:
    from heinsen.sweep.folder import SweepFolder, summary
    from heinsen.sweep.report import write_report

    folder = SweepFolder.load(path)
    views = folder.views()
    folder.write_csv(views)
    print(f"{write_report(folder, views)}: {summary(views)}")


# ---- the config ----------------------------------------------------------------------------------


def resolve(config: str, *overrides: Mapping[str, str]) -> dict:
    """The mapping that train.py would make of these flags. Raises SweepError, which names the flag."""
    from ml_collections import config_flags

    from heinsen.sweep.space import SweepError

    arguments = ["sweep", f"--config={config}"]
    arguments += [f"--config.{field}={text}" for fields in overrides for field, text in fields.items()]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "", flag_values=values, sys_argv=arguments)
    try:
        values(arguments)
        return values.config.to_dict()
    except (AttributeError, KeyError) as error:  # from a locked ConfigDict, with a suggestion where one is near
        problem = f"the config has no such field: {error.args[0]}"
    except OSError as error:
        raise SweepError(f"--config cannot be loaded: {str(error).splitlines()[-1].strip()}") from error
    except (flags.Error, TypeError, ValueError) as error:
        problem = str(error)
    if len(overrides) > 1:
        raise SweepError(", ".join(f"--sweep.{f}={text}" for f, text in overrides[-1].items()) + f": {problem}")
    raise SweepError(f"--config: {problem}")


def check(config: str, overrides: Mapping[str, str], point: Mapping):
    """The TrainConfig of a point. Raises SweepError."""
    from heinsen.config import ConfigError, from_mapping
    from heinsen.sweep.space import SweepError, text_of
    from heinsen.training.run import TrainConfig

    texts = {field: text_of(value) for field, value in point.items()}
    try:
        return from_mapping(TrainConfig, resolve(config, overrides, texts))
    except ConfigError as error:
        where = ", ".join(f"{field}={text}" for field, text in texts.items())
        raise SweepError(f"{where}: {error}") from error


def check_data(config) -> None:
    """That the splits are there and fit the model. Raises SweepError."""
    from heinsen.data.dataset import DatasetError
    from heinsen.sweep.space import SweepError
    from heinsen.training.run import open_split

    try:
        for split in (config.data.train_split, config.data.validation_split):
            open_split(config, split)
    except DatasetError as error:
        raise SweepError(str(error)) from error


def minutes_of(text: str) -> int:
    """[D-]HH:MM:SS, or minutes. Raises SweepError."""
    from heinsen.sweep.space import SweepError

    if match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        total = math.ceil(24 * 60 * days + 60 * hours + minutes + seconds / 60)
    else:
        total = int(text) if text.isdecimal() else 0
    if total < 1:
        raise SweepError(f"--time={text}: expected [D-]HH:MM:SS or minutes")
    return total


def parse_flags(argv: list[str]) -> list[str]:
    """absl's, after --sweep.FIELD=... and --config.FIELD=... have gone into FIELDS."""
    from configs import parse_flags

    rest = []
    for argument in argv:
        match = re.fullmatch(r"--?(config|sweep)\.([^=]+)(=.*)?", argument, re.DOTALL)
        if match is None:
            rest.append(argument)
            continue
        kind, field, text = match.groups()
        if text is None:
            sys.exit(f"FATAL Flags parsing error: write {argument}=VALUE, in one word")
        if field in FIELDS[kind] and kind == "sweep":
            sys.exit(f"FATAL Flags parsing error: --sweep.{field} is given twice: put all its values into one")
        FIELDS[kind][field] = text[1:]
    return parse_flags(rest)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
