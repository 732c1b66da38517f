"""What the experiments share: programs and sweeps in parallel, contestants that are tuned alike, tables, figures."""

import importlib
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any, NamedTuple

import jax
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from tqdm import tqdm

from heinsen.config import from_mapping
from heinsen.errors import HeinsenError, exit_on_error
from heinsen.files import write_atomically, write_figure
from heinsen.models import abstract_params, count_params
from heinsen.sweep.folder import SweepFolder
from heinsen.sweep.launch import divide, usable_cores, visible_gpus
from heinsen.sweep.runs import RunView, best_of
from heinsen.sweep.space import SEED, Value, format_value
from heinsen.training.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
RATE = "optimizer.learning_rate"
RUNS_CRASHED = 3  # exit status of scripts/sweep.py
MOST_EXTENSIONS = 2  # of the grid of learning rates

Settings = Mapping[str, Value]  # {field of the config: value}
Losses = Mapping[float, float | None]  # {learning rate: validation loss}; None: crashed
Bits = Mapping[str, Mapping[int, float]]  # {contestant: {seed: bits per byte}}


class ExperimentError(HeinsenError, RuntimeError):
    """A flag that cannot be used, or a step that has failed: rerun the same command to resume there."""


def execute(
    measure: Callable[[Path], dict[str, Any]],
    write: Callable[[Path, dict[str, Any]], str],
    out: str,
    small: bool,
    report_only: bool,
) -> None:
    """Measure what is missing in a folder, write the report of all, and end as commands do on errors."""
    folder = Path(f"{out}_small" if small else out)
    with exit_on_error(on_interrupt="interrupted; rerun the same command to resume"):
        if report_only:
            if not (folder / "results.json").exists():
                raise ExperimentError(f"{folder} has no results.json: run the experiment without --report")
            results = json.loads((folder / "results.json").read_text(), object_hook=_restore_numbers)
        else:
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str((folder / "compiled").absolute())
            results = dict(machine=describe_machine(), jax=jax.__version__) | measure(folder)
        print(write(folder, results))


def _restore_numbers(mapping: dict[str, Any]) -> dict[Any, Any]:
    """Return a mapping of JSON with numbers as keys where their texts are those of numbers."""

    def restore(key: str) -> int | float | str:
        try:
            return int(key) if key.isdecimal() else float(key)
        except ValueError:
            return key

    return {restore(key): value for key, value in mapping.items()}


def default_parallel() -> int:
    """Return how many runs to execute at a time: one for each GPU, or one for each core."""
    return len(visible_gpus()) or len(usable_cores())


def describe_machine() -> str:
    cores, kind = len(usable_cores()), jax.devices()[0].device_kind
    return f"{cores} CPU cores" if kind == "cpu" else f"{jax.device_count()} x {kind}, {cores} CPU cores"


def parse_counts(flag: str, texts: Sequence[str]) -> list[int]:
    """Return the positive integers of a list flag, at least one. Raises ExperimentError, which names the flag."""
    for text in texts or [""]:
        if not text.isdecimal() or int(text) == 0:
            raise ExperimentError(f"--{flag}: {text!r} is not a positive integer")
    return [int(text) for text in texts]


# ---- programs -------------------------------------------------------------------------------------


def from_root(path: Path) -> str:
    """Return a path for programs, which run in the repository: relative inside it, so that results do not name it."""
    path = path.absolute()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def run_script(*arguments: str, allowed: Sequence[int] = (0,)) -> None:
    """Run a program of this repository as a user would. Raises ExperimentError if its status is not `allowed`."""
    shown = " ".join(text if len(text) < 100 else f"{text[:97]}..." for text in map(shlex.quote, arguments))
    print(f"$ python {shown}", file=sys.stderr, flush=True)
    program = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=sys.stderr)
    try:
        program.wait()
    finally:
        program.wait()  # Ctrl-C interrupts it, too, and it may have to save
    if program.returncode not in allowed:
        raise ExperimentError(f"python {shown} has failed, see above")


def run_programs(commands: Mapping[Path, Sequence[str]], parallel: int, may_fail: bool = False) -> dict[Path, Any]:
    """Run programs, `parallel` at a time, and return the JSON on the last line of stdout of each.

    Cores and GPUs are divided among them. `commands` are {file: arguments}: each result is kept in its file, and not
    computed again for the same arguments; stderr is in FILE.log. The result of a program that fails is None if they
    `may_fail`; the next call starts it again. Raises ExperimentError.
    """
    slots: SimpleQueue[tuple[list[int], list[str]]] = SimpleQueue()
    for slot in zip(divide(usable_cores(), parallel), divide(visible_gpus(), parallel), strict=True):
        slots.put(slot)

    def run(file: Path, arguments: Sequence[str]) -> Any:
        cores, gpus = slot = slots.get()
        try:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, cores)  # of this thread; its child process inherits it
            environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
            file.parent.mkdir(parents=True, exist_ok=True)
            with open(f"{file}.log", "w") as log:
                command = [sys.executable, *arguments]
                end = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log)
        finally:
            slots.put(slot)
        if end.returncode and not may_fail:
            raise ExperimentError(f"python {shlex.join(arguments)} has failed, see {file}.log")
        if end.returncode:
            return None
        result = json.loads(end.stdout.splitlines()[-1])
        write_atomically(file, json.dumps({"arguments": list(arguments), "result": result}) + "\n")
        return result

    found: dict[Path, Any] = {}
    for file, arguments in commands.items():
        if file.exists() and (kept := json.loads(file.read_text()))["arguments"] == list(arguments):
            found[file] = kept["result"]
    left = [file for file in commands if file not in found]
    start, pool = time.monotonic(), ThreadPoolExecutor(parallel)
    try:
        futures = {pool.submit(run, file, commands[file]): file for file in left}
        for done, future in enumerate(as_completed(futures), 1):
            found[futures[future]] = future.result()
            eta = tqdm.format_interval((time.monotonic() - start) / done * (len(left) - done))
            print(f"{done} of {len(left)} programs done, ETA {eta}", file=sys.stderr, flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def splits_of(corpus: Path) -> dict[str, Sequence[Path]]:
    """Return the files of each split of a folder of {train-*,validation,test}.jsonl.zst."""
    names = {"train": "train-*", "validation": "validation", "test": "test"}
    return {split: [corpus / f"{name}.jsonl.zst"] for split, name in names.items()}


def prepare_bytes(corpus: Path, data: Path, **splits: Sequence[Path]) -> None:
    """Prepare DATA/SPLIT from files: train, validation and test of a corpus, unless others are given."""
    if not any(corpus.glob("train-*")):
        raise ExperimentError(
            f"--corpus={corpus} has no train-*.jsonl.zst: build it with `python scripts/build_corpus.py --out=CORPUS`"
        )
    for split, sources in (splits_of(corpus) | splits).items():
        where = [f"--source={source.absolute()}" for source in sources]
        where += ["--tokenizer=bytes", f"--split={split}", f"--out={from_root(data)}"]
        run_script("scripts/prepare_data.py", *where)


def run_sweep(
    config: str | Path, out: Path, runs: Sequence[Settings], parallel: int, *arguments: str, may_crash: bool = False
) -> list[RunView]:
    """Train one run for each of `runs` (and seed, with --seeds) through scripts/sweep.py; return them.

    Finished runs are not repeated. Crashed ones are started again by the next command, unless they `may_crash`. Raises
    ExperimentError.
    """
    fields = [f"--sweep.{field}={json.dumps([format_value(run[field]) for run in runs])}" for field in runs[0]]
    where = [f"--config={from_root(Path(config))}", f"--workdir={from_root(out)}", f"--parallel={parallel}"]
    options, allowed = ([], (0, RUNS_CRASHED)) if may_crash else (["--retry"], (0,))
    run_script("scripts/sweep.py", *where, "--search=zip", *fields, *arguments, *options, allowed=allowed)
    return SweepFolder.load(out).views()


# ---- contestants ----------------------------------------------------------------------------------


class Contest(NamedTuple):
    """Models that differ in a few fields, tuned alike, trained alike, and tested on the same text.

    Attributes:
      config: the module of the config that they share.
      contestants: {name: the fields of the model in which it differs from the config}.
    """

    config: ModuleType
    contestants: Mapping[str, Mapping[str, Value]]

    def fields(self, name: str) -> dict[str, Value]:
        """Return the values of all fields in which contestants differ."""
        varied = {field: None for each in self.contestants.values() for field in each}
        model = self.config.get_config().model
        return {f"model.{field}": self.contestants[name].get(field, model[field]) for field in varied}

    def train_config(self, name: str) -> TrainConfig:
        mapping = self.config.get_config()
        mapping.model.update(self.contestants[name])
        return from_mapping(TrainConfig, mapping.to_dict())

    def parameters(self, name: str) -> int:
        return count_params(abstract_params(self.train_config(name).model))

    def runs_of(self, name: str, runs: Iterable[RunView]) -> list[RunView]:
        fields = self.fields(name).items()
        return [run for run in runs if fields <= run.run.point.items()]

    def losses(self, name: str, tuning: Sequence[RunView]) -> dict[float, float | None]:
        """Return a contestant's last validation loss by learning rate, None for crashed runs."""
        loss = lambda run: run.validation_loss if run.state == "finished" else None
        return dict(sorted((run.run.point[RATE], loss(run)) for run in self.runs_of(name, tuning)))

    def best_rate(self, name: str, tuning: Sequence[RunView]) -> float:
        """Return the learning rate with the lowest validation loss. Raises ExperimentError."""
        best = best_of(self.runs_of(name, tuning))
        if best is None:
            raise ExperimentError(f"{name} has crashed at all learning rates: lower them in run.py")
        return best.run.point[RATE]

    def tune(self, out: Path, rates: Sequence[float], parallel: int, *options: str) -> list[RunView]:
        """Return the runs on the grid, and on its extensions: the sweeps out/tuning, out/tuning_1, ...

        A contestant whose best rate is at an end of the grid gets a rate half or twice as large, and then another one.
        """
        wanted = [self.fields(name) | {RATE: rate} for name in self.contestants for rate in rates]
        tuning = run_sweep(self.config.__file__, out / "tuning", wanted, parallel, *options, may_crash=True)
        for extension in range(1, MOST_EXTENSIONS + 1):
            beyond = []
            for name in self.contestants:
                tried, best = list(self.losses(name, tuning)), self.best_rate(name, tuning)
                if len(tried) > 1 and best in (min(tried), max(tried)):
                    beyond.append(self.fields(name) | {RATE: best / 2 if best == min(tried) else best * 2})
            if beyond:
                folder = out / f"tuning_{extension}"
                tuning += run_sweep(self.config.__file__, folder, beyond, parallel, *options, may_crash=True)
        return tuning

    def train(
        self, folder: Path, names: Iterable[str], tuning: Sequence[RunView], parallel: int, *options: str
    ) -> list[RunView]:
        """Return the runs of some contestants at their best learning rates: a sweep in `folder`."""
        wanted = [self.fields(name) | {RATE: self.best_rate(name, tuning)} for name in names]
        return run_sweep(self.config.__file__, folder, wanted, parallel, *options)

    def results(
        self, tuning: Sequence[RunView], final: Sequence[RunView], tested: Mapping[str, dict[str, Any]]
    ) -> dict[str, Any]:
        """Return what results.json has of a contest. tested: {run: summary of eval.py}."""
        tests = {
            name: {run.run.point[SEED]: tested[run.name] for run in self.runs_of(name, final)}
            for name in self.contestants
        }
        return dict(
            settings=self.config.get_config().to_dict(),
            fields={name: dict(fields) for name, fields in self.contestants.items()},
            parameters={name: self.parameters(name) for name in self.contestants},
            tuning={name: self.losses(name, tuning) for name in self.contestants},
            bits_per_byte={name: {seed: each["bits_per_byte"] for seed, each in tests[name].items()} for name in tests},
            sources=by_source(tests),
            tests=tests,
            logs=[
                dict(contestant=name, stage=stage) | describe_run(run)
                for stage, runs in (("tuning", tuning), ("final", final))
                for name in self.contestants
                for run in self.runs_of(name, runs)
            ],
        )


def contestants_of(experiment: str, names: Sequence[str] | None) -> dict[str, TrainConfig]:
    """Return contestants of experiments/EXPERIMENT/config.py, all or those of a list flag. Raises ExperimentError."""
    config = importlib.import_module(f"experiments.{experiment}.config")
    contests = [Contest(config, contestants) for contestants in config.CONTESTS.values()]
    known = {name: contest.train_config(name) for contest in contests for name in contest.contestants}
    if wrong := [name for name in names or () if name not in known]:
        raise ExperimentError(f"--contestants: {wrong[0]!r}: choose {format_names(known)}")
    return {name: known[name] for name in names or known}


def format_names(names: Iterable[str]) -> str:
    """Return the value of a list flag; names with commas are quoted."""
    return ",".join(f'"{name}"' if "," in name else name for name in names)


def describe_run(run: RunView) -> dict[str, Any]:
    """Return what results.json has of a run: validation is [step, tokens, loss, bits per byte] over training."""
    per_nat = run.bits_per_byte / run.validation_loss if run.bits_per_byte and run.validation_loss else math.nan
    return dict(
        learning_rate=run.run.point[RATE],
        seed=run.run.point.get(SEED),
        state=run.state,
        tokens=run.tokens,
        tokens_per_second=run.tokens_per_second,
        training_loss=run.loss,
        validation=[
            [step, step * run.run.tokens_per_step, loss, loss * per_nat]
            for step, loss in run.validations
            if math.isfinite(loss)
        ],
    )


def by_source(tests: Mapping[str, Mapping[int, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return {source: {contestant: bits per byte, mean over seeds}}, the largest source first."""
    every_test = (found for seeds in tests.values() for found in seeds.values())
    sizes = {source: each["tokens"] for found in every_test for source, each in found.get("sources", {}).items()}
    mean = lambda source, seeds: statistics.fmean(found["sources"][source]["bits_per_byte"] for found in seeds.values())
    return {
        source: {name: mean(source, seeds) for name, seeds in tests.items()}
        for source in sorted(sizes, key=sizes.__getitem__, reverse=True)
    }


def test(
    folder: Path, runs: Sequence[RunView], out: Path, parallel: int, splits: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """Return {run: summary of eval.py}, on the test split or by position on a split each; kept in out/RUN.json."""
    commands = {}
    for run in runs:
        split = ["--split=test"]
        if splits is not None:
            split = [f"--split={splits[run.name]}", f"--by_position={from_root(out / run.name)}.png"]
        workdir = f"--workdir={from_root(folder / run.name)}"
        commands[out / f"{run.name}.json"] = ["eval.py", workdir, *split]
    found = run_programs(commands, parallel)
    return {run.name: found[out / f"{run.name}.json"] for run in runs}


# ---- reports --------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


def write_report(out: Path, results: Mapping[str, Any], lines: Sequence[str]) -> str:
    """Write results.json, with None for infinite numbers, and report.md; return the report."""
    text = json.dumps(_without_infinity(results), indent=1)
    one_line = lambda match: "[" + re.sub(r"\n\s*", " ", match[1]) + "]"
    text = re.sub(r"\[\n\s*([^\[\]{}]*?)\n\s*\]", one_line, text)
    write_atomically(out / "results.json", text + "\n")
    report = "\n".join(lines) + "\n"
    write_atomically(out / "report.md", report)
    return report


def _without_infinity(x: Any) -> Any:
    """Return results with None in place of infinity, which JSON lacks."""
    if isinstance(x, Mapping):
        return {name: _without_infinity(each) for name, each in x.items()}
    if isinstance(x, list | tuple):
        return [_without_infinity(each) for each in x]
    return None if x == math.inf else x


def make_figure(*arguments: Any, **options: Any) -> tuple[Figure, Any]:
    """Return (figure, axes) as plt.subplots does."""
    return plt.subplots(*arguments, layout="constrained", **options)


def save_figure(figure: Figure, path: Path) -> None:
    write_figure(path, figure, dpi=120)
    plt.close(figure)


def versus(bits: Bits, name: str, first: str) -> str:
    """Return how far one is above another, by the differences between runs with the same seed (Student's t)."""
    from scipy.stats import t

    differences = [bits[name][seed] - bits[first][seed] for seed in bits[name].keys() & bits[first].keys()]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return f"{mean:+.4f}"
    half = t.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]"


def spread(seeds: Mapping[int, float]) -> str:
    """Return the mean over seeds, and their standard deviation."""
    deviation = f" +- {statistics.stdev(seeds.values()):.4f}" if len(seeds) > 1 else ""
    return f"{statistics.fmean(seeds.values()):.4f}{deviation}"


def ranked(bits: Bits) -> list[str]:
    """Return the contestants, that with the lowest mean first."""
    return sorted(bits, key=lambda name: statistics.fmean(bits[name].values()))


def best_rate(losses: Losses) -> float:
    """Return the learning rate with the lowest loss."""
    return min((loss, rate) for rate, loss in losses.items() if loss is not None)[1]


def tuning_section(tuning: Mapping[str, Losses], title: str = "Tuning", runs: str = "shorter runs") -> list[str]:
    """Return the section of a report on the tuning by such runs."""
    at_end = [name for name, losses in tuning.items() if best_rate(losses) in (min(losses), max(losses))]
    note = f" At the end of the grid: {', '.join(at_end)}." if at_end else ""
    rates = sorted({rate for losses in tuning.values() for rate in losses})

    def cell(losses: Losses, rate: float) -> str:
        if (loss := losses.get(rate)) is None:
            return "crashed" if rate in losses else ""
        return f"**{loss:.4f}**" if rate == best_rate(losses) else f"{loss:.4f}"

    rows = [[name, *(cell(losses, rate) for rate in rates)] for name, losses in tuning.items()]
    return [
        f"## {title}",
        "",
        f"Validation loss in nats per token of {runs} with one seed, by learning rate.{note}",
        "",
        *table(["", *(f"{rate:g}" for rate in rates)], rows),
        "",
    ]


def sources_section(sources: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the section of a report on the sources of the text."""
    names = list(next(iter(sources.values()), {}))
    rows = [
        [source, *(f"**{x:.3f}**" if x == min(bits.values()) else f"{x:.3f}" for x in bits.values())]
        for source, bits in sources.items()
    ]
    return [
        "## Sources",
        "",
        "Bits per byte by source, mean over seeds; the lowest of each in bold.",
        "",
        *table(["", *names], rows),
        "",
    ]
