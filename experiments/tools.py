"""What the experiments share: flags, cells that are kept, and programs and sweeps in parallel."""

import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import jax
from absl import app, flags
from tqdm import tqdm

from experiments.reports import Results, read_results, write_report
from heinsen.errors import HeinsenError, exit_on_error
from heinsen.files import make_folder, write_atomically
from heinsen.sweep.folder import SweepFolder
from heinsen.sweep.launch import divide, usable_cores, visible_gpus
from heinsen.sweep.runs import RunView
from heinsen.sweep.space import Value, format_value
from scripts.cli import parse_flags

ROOT = Path(__file__).resolve().parent.parent
RATE = "optimizer.learning_rate"
RUNS_CRASHED = 3  # exit status of scripts/sweep.py

Settings = Mapping[str, Value]  # {field of the config: value}


class ExperimentError(HeinsenError, RuntimeError):
    """A flag that cannot be used, or a step that has failed: rerun the same command to resume there."""


def run_experiment(measure: Callable[..., Results], plan: Any, small_plan: Any, report: ModuleType) -> None:
    """Run an experiment as its flags say (experiments/command.py).

    measure: (plan, the corpus if it reads one, folder, then runs at a time for experiments of programs, minutes and
    cells for those of cells) -> results; does what is left of the plan.
    """

    def main(argv: list[str]) -> None:
        given = flags.FLAGS
        out = Path(f"{given.out}_small" if given.small else given.out)
        options: tuple[Any, ...] = ()
        if "cells" in given:
            options = given.minutes, given.cells
        elif "parallel" in given:
            options = (given.parallel or len(visible_gpus()) or len(usable_cores()),)
        corpus = [Path(given.corpus)] if "corpus" in given else []
        own = small_plan if given.small else plan
        if "size" in given and given.size is not None:
            own = own._replace(size=given.size)
        if "plan" in given and given.plan:
            print("\n".join(list_cells(own.cells, out)))
            return
        measure_all = lambda: measure(own, *corpus, out, *options)
        execute(out, report, None if given.report else measure_all)

    app.run(main, flags_parser=parse_flags)


def execute(out: Path, report: ModuleType, measure: Callable[[], Results] | None) -> None:
    """Measure, or read results.json if there is nothing to measure; write and print the report.

    Ends the program with one line on errors.
    """
    with exit_on_error(on_interrupt="interrupted; rerun the same command to resume"):
        if measure is not None:
            make_folder(out)
            with _keep_compilations(out / "compiled"):
                results: Results = {**describe_machine(), **measure()}
        elif (out / "results.json").exists():
            results = read_results(out / "results.json")
        else:
            raise ExperimentError(f"{out} has no results.json: run the experiment without --report")
        print(write_report(out, results, report))


def cell_file(name: str, out: Path) -> Path:
    return out / "cells" / f"{name.replace(' ', '_').replace(',', '')}.json"


def done_cells(names: Iterable[str], out: Path) -> dict[str, dict[str, Any]]:
    """Return {name: what was found} of the cells that OUT/results.json or OUT/cells has."""
    results = out / "results.json"
    found = dict(read_results(results)["cells"]) if results.exists() else {}
    found |= {name: dict(read_results(file)) for name in names if (file := cell_file(name, out)).exists()}
    return {name: found[name] for name in names if name in found}


def list_cells(names: Sequence[str], out: Path) -> list[str]:
    """Return the lines of --plan."""
    hours = {name: cell["seconds"] / 3600 for name, cell in done_cells(names, out).items()}
    lines = [
        f"{i:2}  {name}: " + (f"{hours[name]:.2f} hours" if name in hours else "to do")
        for i, name in enumerate(names, 1)
    ]
    if not hours:
        return [*lines, f"{out} has no cell that tells how long one takes"]
    left = (len(names) - len(hours)) * statistics.fmean(hours.values())
    return [
        *lines,
        f"{sum(hours.values()):.1f} hours for {len(hours)} of {len(names)}; about {left:.1f} for the others",
    ]


@contextlib.contextmanager
def _keep_compilations(folder: Path) -> Iterator[None]:
    """Keep what this process and the programs that it starts compile in a folder."""
    before = jax.config.values["jax_compilation_cache_dir"]
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder.absolute())
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute()))  # which read the variable when it started
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def describe_machine() -> dict[str, str]:
    cores, kind = f"{len(usable_cores())} CPU cores", jax.devices()[0].device_kind
    machine = cores if kind == "cpu" else f"{jax.device_count()} x {kind}, {cores}"
    return {"machine": machine, "jax": jax.__version__}


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


def run_programs(commands: Mapping[Path, Sequence[str]], parallel: int) -> dict[Path, Any]:
    """Run programs, `parallel` at a time, and return the JSON on the last line of stdout of each.

    Cores and GPUs are divided among them. `commands` are {file: arguments}: each result is kept in its file, and not
    computed again for the same arguments; stderr is in FILE.log. Raises ExperimentError if a program fails; the next
    call starts it again.
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
        if end.returncode:
            raise ExperimentError(f"python {shlex.join(arguments)} has failed, see {file}.log")
        result = json.loads(end.stdout.splitlines()[-1])
        write_atomically(file, json.dumps({"arguments": list(arguments), "result": result}) + "\n")
        return result

    found: dict[Path, Any] = {}
    for file, arguments in commands.items():
        if file.exists() and (kept := json.loads(file.read_text()))["arguments"] == list(arguments):
            found[file] = kept["result"]
    pool = ThreadPoolExecutor(parallel)
    try:
        futures = {pool.submit(run, file, commands[file]): file for file in commands if file not in found}
        for future in tqdm(as_completed(futures), "programs", len(futures), disable=not futures):
            found[futures[future]] = future.result()
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def prepare_bytes(corpus: Path, data: Path, **splits: Sequence[Path]) -> None:
    """Prepare DATA/SPLIT from files: train, validation and test of a corpus, unless others are given."""
    if not any(corpus.glob("train-*")):
        raise ExperimentError(
            f"--corpus={corpus} has no train-*.jsonl.zst: build it with `python scripts/build_corpus.py --out=CORPUS`"
        )
    names = {"train": "train-*", "validation": "validation", "test": "test"}
    own = {split: [corpus / f"{name}.jsonl.zst"] for split, name in names.items()}
    for split, sources in (own | splits).items():
        where = [f"--source={source.absolute()}" for source in sources]
        where += ["--tokenizer=bytes", f"--split={split}", f"--out={from_root(data)}"]
        run_script("scripts/prepare_data.py", *where)


def run_sweep(config: str | Path, out: Path, runs: Sequence[Settings], parallel: int, *arguments: str) -> list[RunView]:
    """Train one run for each of `runs` through scripts/sweep.py; return them. Raises ExperimentError.

    Finished and crashed runs are not repeated.
    """
    fields = [f"--sweep.{field}={json.dumps([format_value(run[field]) for run in runs])}" for field in runs[0]]
    where = [f"--config={from_root(Path(config))}", f"--workdir={from_root(out)}", f"--parallel={parallel}"]
    run_script("scripts/sweep.py", *where, "--search=zip", *fields, *arguments, allowed=(0, RUNS_CRASHED))
    return SweepFolder.load(out).views()


def evaluate_runs(
    folder: Path, runs: Sequence[RunView], out: Path, parallel: int, split: str
) -> dict[str, dict[str, Any]]:
    """Return {run: summary of eval.py, by position, on a split}; kept in out/RUN.json."""
    commands = {}
    for run in runs:
        where = f"--workdir={from_root(folder / run.name)}", f"--by_position={from_root(out / run.name)}.png"
        commands[out / f"{run.name}.json"] = ["eval.py", *where, f"--split={split}"]
    found = run_programs(commands, parallel)
    return {run.name: found[out / f"{run.name}.json"] for run in runs}
