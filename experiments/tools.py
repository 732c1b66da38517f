"""What experiments have in common: data, sweeps, programs side by side on parts of a machine, tables, figures."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from heinsen.files import write_atomically
from heinsen.sweep.folder import SweepFolder
from heinsen.sweep.machine import divide, usable_cores, visible_gpus
from heinsen.sweep.runs import RunView
from heinsen.sweep.space import Value, format_value
from heinsen.training.run import TrainConfig

ROOT = Path(__file__).resolve().parent.parent

Settings = Mapping[str, Value]  # of one run: {field of the config: value}

_RUNS_CRASHED = 3  # what scripts/sweep.py leaves with


class ExperimentError(RuntimeError):
    """A step of an experiment that has failed; the same command goes on from there."""


def at_a_time() -> int:
    """How many runs to have at a time: one a GPU, or one a core."""
    return len(visible_gpus()) or len(usable_cores())


def numbers(flag: str, texts: Sequence[str]) -> list[float]:
    """Raises ExperimentError, which names the flag, where one of them is not a positive number, or there is none."""
    found = []
    for text in texts or [""]:
        try:
            found.append(float(text))
        except ValueError:
            found.append(0.0)
        if not 0 < found[-1] < float("inf"):
            raise ExperimentError(f"--{flag}: {text!r} is not a positive number")
    return found


# ---- programs -------------------------------------------------------------------------------------


def share_compilations(out: Path) -> None:
    """Programs started from now on compile the same step once."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str((out / "compiled").absolute())


def script(*arguments: str, allowed: Sequence[int] = (0,)) -> None:
    """Run a program of this repository, as a user would. Raises ExperimentError for another status than `allowed`."""
    print("$ python", shlex.join(arguments), file=sys.stderr, flush=True)
    if subprocess.run([sys.executable, *arguments], cwd=ROOT, stdout=sys.stderr).returncode not in allowed:
        raise ExperimentError(f"python {shlex.join(arguments)} has failed, see above")


def prepare_bytes(corpus: Path, data: Path) -> None:
    """DATA/{train,validation,test} from CORPUS/{train-*,validation,test}.jsonl.zst; what is finished stays."""
    for split, pattern in (("train", "train-*"), ("validation", "validation"), ("test", "test")):
        source = str(corpus.absolute() / f"{pattern}.jsonl.zst")
        where = ["--tokenizer=bytes", f"--split={split}", f"--out={data.absolute()}"]
        script("scripts/prepare_data.py", f"--source={source}", *where)


def sweep(
    config: Path, out: Path, runs: Sequence[Settings], parallel: int, *arguments: str, may_crash: bool = False
) -> list[RunView]:
    """One run of each settings (and seed, by --seeds), through scripts/sweep.py; what is finished is not repeated.

    Raises ExperimentError. Runs that `may_crash` stay so, others are started again by the next command.
    """
    fields = [f"--sweep.{field}={json.dumps([format_value(run[field]) for run in runs])}" for field in runs[0]]
    where = [f"--config={config.relative_to(ROOT)}", f"--workdir={out.absolute()}", f"--parallel={parallel}"]
    options = [] if may_crash else ["--retry"]
    allowed = (0, _RUNS_CRASHED) if may_crash else (0,)
    script("scripts/sweep.py", *where, "--search=zip", *fields, *arguments, *options, allowed=allowed)
    script("scripts/sweep.py", f"--workdir={out.absolute()}", "--report")
    return SweepFolder.load(out).views()


def in_turn(commands: Mapping[Path, Sequence[str]], parallel: int) -> dict[Path, dict]:
    """Of each {file: arguments} the JSON on the last line of its stdout, kept in the file; `parallel` at a time.

    Cores and GPUs are divided among them. What the same arguments have given before stands. Raises ExperimentError.
    """
    slots: SimpleQueue[tuple[list[int], list[str]]] = SimpleQueue()
    for slot in zip(divide(usable_cores(), parallel), divide(visible_gpus(), parallel), strict=True):
        slots.put(slot)

    def run(file: Path, arguments: Sequence[str]) -> dict:
        if file.exists() and (kept := json.loads(file.read_text()))["arguments"] == list(arguments):
            return kept["result"]
        cores, gpus = slots.get()
        print("$ python", shlex.join(arguments), file=sys.stderr, flush=True)
        try:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, cores)  # of this thread, whose child has the same
            environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
            command = [sys.executable, *arguments]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        finally:
            slots.put((cores, gpus))
        if done.returncode:
            raise ExperimentError(f"python {shlex.join(arguments)} has failed:\n{done.stderr[-2000:]}")
        result = json.loads(done.stdout.splitlines()[-1])
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"arguments": list(arguments), "result": result}) + "\n")
        return result

    pool = ThreadPoolExecutor(parallel)
    try:
        futures = {file: pool.submit(run, file, arguments) for file, arguments in commands.items()}
        return {file: future.result() for file, future in futures.items()}
    finally:
        pool.shutdown(cancel_futures=True)


# ---- reports --------------------------------------------------------------------------------------


def machine() -> str:
    """In words."""
    import jax

    cores, kind = len(usable_cores()), jax.devices()[0].device_kind
    return f"{cores} CPU cores" if kind == "cpu" else f"{jax.device_count()} x {kind}, {cores} CPU cores"


def n_params(config: TrainConfig) -> int:
    from heinsen.models import abstract_params, count_params

    return count_params(abstract_params(config.model))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """In Markdown."""
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


def figure(*arguments, **options):
    """(figure, axes) of matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(*arguments, layout="constrained", **options)


def save(fig, path: Path) -> None:
    import matplotlib.pyplot as plt

    fig.savefig(path, dpi=120)
    plt.close(fig)
