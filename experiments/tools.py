"""What the experiments share: data, sweeps, programs in parallel on parts of a machine, tables, figures."""

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, overload

import jax
import matplotlib
from absl import flags

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from ml_collections import ConfigDict
from tqdm import tqdm

from heinsen.config import from_mapping
from heinsen.errors import HeinsenError, exit_on_error
from heinsen.files import write_atomically, write_figure
from heinsen.models import ModelConfig, abstract_params, count_params
from heinsen.sweep.folder import SWEEP_FILE, SweepFolder
from heinsen.sweep.machine import divide, usable_cores, visible_gpus
from heinsen.sweep.runs import RunView
from heinsen.sweep.space import Value, format_value
from heinsen.training.config import TrainConfig
from heinsen.training.throughput import train_flops_per_token

ROOT = Path(__file__).resolve().parent.parent

Settings = Mapping[str, Value]  # {field of the config: value}

RESUME = "interrupted; rerun the same command to resume"
_RUNS_CRASHED = 3  # exit status of scripts/sweep.py
_programs: set[subprocess.Popen] = set()  # started here, and not ended


@dataclasses.dataclass
class Training:
    """All training of an experiment in FLOPs, for the line that tells how far it is."""

    total: float = 0.0
    done: float = 0.0
    here: float = 0.0  # since this process started, in `seconds`
    seconds: float = 0.0

    def add(self, done: float, here: float, seconds: float) -> str:
        """Add the FLOPs and the time of a sweep, and return the line."""
        self.done, self.here, self.seconds = self.done + done, self.here + here, self.seconds + seconds
        left = max(self.total - self.done, 0.0)
        eta = f", ETA {tqdm.format_interval(left / self.here * self.seconds)}" if self.here and left else ""
        return f"{self.done / (self.done + left):.0%} of the experiment's training is done{eta}"


_training = Training()


class ExperimentError(HeinsenError, RuntimeError):
    """A flag that cannot be used, or a step that has failed: rerun the same command to resume there."""


def default_parallel() -> int:
    """Return how many runs to execute at a time: one for each GPU, or one for each core."""
    return len(visible_gpus()) or len(usable_cores())


def execute(
    run: Callable[[Path, int], str], out: str, parallel: int | None, small: Mapping[str, str] | None = None
) -> None:
    """Print the report of run(folder, runs at a time), an experiment's command, and end as commands do on errors.

    small: values of the flags that are not given, for --small; the folder then gets a name of its own.
    """
    if small is not None:
        out = out if flags.FLAGS["out"].present else f"{out}_small"
        for flag in (flags.FLAGS[name] for name in small if not flags.FLAGS[name].present):
            flag.parse(small[flag.name])
    previous = signal.signal(signal.SIGTERM, _pass_on)
    try:
        with exit_on_error(on_interrupt=RESUME):
            if "corpus" in flags.FLAGS:
                _check_corpus(flags.FLAGS["corpus"].value)
            print(run(Path(out), parallel or default_parallel()))
    finally:
        signal.signal(signal.SIGTERM, previous)


def _check_corpus(folder: str) -> None:
    """Raise ExperimentError if the folder has no texts to train on."""
    if not any(Path(folder).glob("train-*")):
        raise ExperimentError(
            f"--corpus={folder} has no train-*.jsonl.zst: build it with `python scripts/build_corpus.py --out=CORPUS`"
        )


def _pass_on(number: int, frame: Any) -> None:
    """Be interrupted by SIGTERM. It reaches this process alone, unlike Ctrl-C, which its programs receive as well."""
    for program in list(_programs):
        program.send_signal(number)
    raise KeyboardInterrupt


def choose(flag: str, names: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """Return those of the known names that a list flag has, all if it is not given. Raises ExperimentError."""
    known = list(known)
    for name in names or ():
        if name not in known:
            raise ExperimentError(f"--{flag}: {name!r}: choose {format_names(known)}")
    return [name for name in known if name in names] if names else known


def timed(experiment: str, names: Sequence[str] | None) -> dict[str, TrainConfig]:
    """Return the contestants of an experiment's contestants.py to measure, by --contestants. Raises ExperimentError."""
    known = importlib.import_module(f"experiments.{experiment}.contestants").timed()
    return {name: known[name] for name in choose("contestants", names, known)}


def format_names(names: Iterable[str]) -> str:
    """Return the value of a list flag; names with commas are quoted."""
    return ",".join(f'"{name}"' if "," in name else name for name in names)


def parse_numbers(flag: str, texts: Sequence[str]) -> list[float]:
    """Return the positive numbers of a list flag, at least one. Raises ExperimentError, which names the flag."""
    return [_parse_number(flag, text) for text in texts or [""]]


def parse_counts(flag: str, texts: Sequence[str]) -> list[int]:
    """Return the positive integers of a list flag, at least one. Raises ExperimentError, which names the flag."""
    numbers = parse_numbers(flag, texts)
    for text, number in zip(texts, numbers, strict=True):
        if number != int(number):
            raise ExperimentError(f"--{flag}: {text!r} is not an integer")
    return [int(number) for number in numbers]


def check_tokens(config: ConfigDict, **tokens: int | None) -> None:
    """Raise ExperimentError, which names the flag, if the config's schedule does not fit so many tokens."""
    settings = from_mapping(TrainConfig, config.to_dict())
    for flag, number in tokens.items():
        try:
            dataclasses.replace(settings, total_tokens=number if number is not None else settings.total_tokens)
        except ValueError as error:
            raise ExperimentError(f"--{flag}={number:,}: {error}") from error


def _parse_number(flag: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ExperimentError(f"--{flag}: {text!r} is not a positive number")
    return number


# ---- programs -------------------------------------------------------------------------------------


def from_root(path: Path) -> str:
    """Return a path for programs, which run in the repository: relative inside it, so that results do not name it."""
    path = path.absolute()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def expect_training(flops: float) -> None:
    """Let each sweep from now on tell how much of an experiment's training is done, and the time left."""
    global _training
    _training = Training(flops)


def share_compilations(out: Path) -> None:
    """Let the programs started from now on share a compilation cache."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str((out / "compiled").absolute())


def run_script(*arguments: str, allowed: Sequence[int] = (0,)) -> None:
    """Run a program of this repository as a user would. Raises ExperimentError if its status is not `allowed`."""
    shown = " ".join(text if len(text) < 100 else f"{text[:97]}..." for text in map(shlex.quote, arguments))
    print(f"$ python {shown}", file=sys.stderr, flush=True)
    with _start(arguments, stdout=sys.stderr) as program:
        pass
    if program.returncode not in allowed:
        raise ExperimentError(f"python {shown} has failed, see above")


@contextlib.contextmanager
def _start(arguments: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """Start a program of this repository, and wait for its end; when both are interrupted, too: it may have to save."""
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT, **options) as program:
        _programs.add(program)
        try:
            yield program
            program.wait()
        finally:
            program.wait()
            _programs.remove(program)


def splits_of(corpus: Path) -> dict[str, list[Path]]:
    """Return the files of each split of a folder of {train-*,validation,test}.jsonl.zst."""
    pattern = {"train": "train-*", "validation": "validation", "test": "test"}
    return {split: [corpus / f"{name}.jsonl.zst"] for split, name in pattern.items()}


def prepare_bytes(splits: Mapping[str, Sequence[Path]], data: Path) -> None:
    """Prepare DATA/SPLIT from the files and patterns of each split, unless it exists."""
    for split, files in splits.items():
        sources = [f"--source={file.absolute()}" for file in files]
        where = ["--tokenizer=bytes", f"--split={split}", f"--out={from_root(data)}"]
        run_script("scripts/prepare_data.py", *sources, *where)


def run_sweep(
    config: Path, out: Path, runs: Sequence[Settings], parallel: int, *arguments: str, may_crash: bool = False
) -> list[RunView]:
    """Train one run for each of `runs` (and seed, with --seeds) through scripts/sweep.py; return them.

    Finished runs are not repeated. Crashed ones are started again by the next command, unless they `may_crash`. Raises
    ExperimentError.
    """
    fields = [f"--sweep.{field}={json.dumps([format_value(run[field]) for run in runs])}" for field in runs[0]]
    where = [f"--config={config.relative_to(ROOT)}", f"--workdir={from_root(out)}", f"--parallel={parallel}"]
    options = [] if may_crash else ["--retry"]
    allowed = (0, _RUNS_CRASHED) if may_crash else (0,)
    before = _trained_flops(SweepFolder.load(out)) if (out / SWEEP_FILE).exists() else 0.0
    start = time.monotonic()
    run_script("scripts/sweep.py", *where, "--search=zip", *fields, *arguments, *options, allowed=allowed)
    folder, seconds = SweepFolder.load(out), time.monotonic() - start
    done = _trained_flops(folder)
    print(_training.add(done, done - before, seconds), file=sys.stderr, flush=True)
    run_script("scripts/sweep.py", f"--workdir={from_root(out)}", "--report")
    return folder.views()


def _trained_flops(folder: SweepFolder) -> float:
    """Return the FLOPs that the runs of a sweep have taken so far."""
    total = 0.0
    for view in folder.views():
        mapping = ConfigDict(folder.definition.base)
        mapping.update_from_flattened_dict(view.run.point)
        total += train_flops(from_mapping(TrainConfig, mapping.to_dict()), view.tokens)
    return total


@overload
def run_programs(
    commands: Mapping[Path, Sequence[str]], parallel: int, may_fail: Literal[False] = False
) -> dict[Path, dict[str, Any]]: ...


@overload
def run_programs(
    commands: Mapping[Path, Sequence[str]], parallel: int, may_fail: Literal[True]
) -> dict[Path, dict[str, Any] | None]: ...


def run_programs(
    commands: Mapping[Path, Sequence[str]], parallel: int, may_fail: bool = False
) -> Mapping[Path, dict[str, Any] | None]:
    """Run programs, `parallel` at a time, and return the JSON on the last line of stdout of each.

    Cores and GPUs are divided among them. `commands` are {file: arguments}: each result is kept in its file, and not
    computed again for the same arguments. What the programs say on stderr is passed on, with their number and the time
    that is left. The result of a program that fails is None if they `may_fail`; the next call starts it again. Raises
    ExperimentError.
    """
    slots: SimpleQueue[tuple[list[int], list[str]]] = SimpleQueue()
    for slot in zip(divide(usable_cores(), parallel), divide(visible_gpus(), parallel), strict=True):
        slots.put(slot)

    def run(file: Path, arguments: Sequence[str]) -> dict[str, Any] | None:
        slot = slots.get()
        try:
            result = _run_program(arguments, *slot)
        except ExperimentError as error:
            if not may_fail:
                raise
            print(error, file=sys.stderr, flush=True)
            return None
        finally:
            slots.put(slot)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"arguments": list(arguments), "result": result}) + "\n")
        return result

    found = {file: _read_kept(file, arguments) for file, arguments in commands.items()}
    left = {file: arguments for file, arguments in commands.items() if found[file] is None}
    start, pool = time.monotonic(), ThreadPoolExecutor(parallel)
    try:
        futures = {pool.submit(run, file, arguments): file for file, arguments in left.items()}
        for done, future in enumerate(as_completed(futures), 1):
            found[futures[future]] = future.result()
            eta = tqdm.format_interval((time.monotonic() - start) / done * (len(left) - done))
            print(f"{done} of {len(left)} programs done, ETA {eta}", file=sys.stderr, flush=True)
        return found
    finally:
        pool.shutdown(cancel_futures=True)


def _read_kept(file: Path, arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return the result in a file of `run_programs`; None if there is none for these arguments."""
    if not file.exists() or (kept := json.loads(file.read_text()))["arguments"] != list(arguments):
        return None
    return kept["result"]


def _run_program(arguments: Sequence[str], cores: list[int], gpus: list[str]) -> dict[str, Any]:
    print("$ python", shlex.join(arguments), file=sys.stderr, flush=True)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # of this thread; its child process inherits it
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
    with tempfile.TemporaryFile("w+") as output:
        with _start(arguments, env=environment, stdout=output, stderr=subprocess.PIPE, text=True) as program:
            for line in program.stderr or ():  # a pipe, so that they draw no bars over each other
                print(line, end="", file=sys.stderr, flush=True)
        if program.returncode:
            raise ExperimentError(f"python {shlex.join(arguments)} has failed, see above")
        output.seek(0)
        return json.loads(output.read().splitlines()[-1])


def measure_speed(
    out: Path, experiment: str, contestants: Iterable[str], lengths: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return {contestant: {length: tokens/s}} by experiments/speed.py; kept in out/speed.json."""
    who = f"--contestants={format_names(contestants)}"
    command = ["experiments/speed.py", f"--experiment={experiment}", who, f"--lengths={','.join(lengths)}"]
    return run_programs({out / "speed.json": command}, 1)[out / "speed.json"]


# ---- reports --------------------------------------------------------------------------------------


def describe_machine() -> str:
    """Return the machine in words."""
    cores, kind = len(usable_cores()), jax.devices()[0].device_kind
    return f"{cores} CPU cores" if kind == "cpu" else f"{jax.device_count()} x {kind}, {cores} CPU cores"


def n_params(config: TrainConfig) -> int:
    return _count_params(config.model)


@functools.cache
def _count_params(model: ModelConfig) -> int:
    return count_params(abstract_params(model))


def train_flops(config: TrainConfig, tokens: int | None = None) -> float:
    """Return the FLOPs of a run of so many tokens, by default the config's: 6 N D."""
    return train_flops_per_token(n_params(config)) * (config.total_tokens if tokens is None else tokens)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


def make_figure(*arguments: Any, **options: Any) -> tuple[Figure, Any]:
    """Return (figure, axes) as plt.subplots does."""
    return plt.subplots(*arguments, layout="constrained", **options)


def save_figure(figure: Figure, path: Path) -> None:
    write_figure(path, figure, dpi=120)
    plt.close(figure)


def write_report(out: Path, results: Mapping[str, Any], lines: Sequence[str]) -> str:
    """Write results.json, with None for infinite numbers, and report.md; return the report."""
    write_atomically(out / "results.json", json.dumps(_without_infinity(results), indent=1) + "\n")
    text = "\n".join(lines) + "\n"
    write_atomically(out / "report.md", text)
    return text


def _without_infinity(x: Any) -> Any:
    """Return results with None in place of infinity, which JSON lacks."""
    if isinstance(x, Mapping):
        return {name: _without_infinity(each) for name, each in x.items()}
    if isinstance(x, list | tuple):
        return [_without_infinity(each) for each in x]
    return None if x == math.inf else x
