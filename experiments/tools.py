"""What experiments have in common: data of a corpus, sweeps, programs side by side on parts of the cores."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from heinsen.sweep.folder import RunView, SweepFolder
from heinsen.sweep.launch import divide, usable_cores
from heinsen.sweep.space import Value, text_of

ROOT = Path(__file__).resolve().parent.parent
Settings = Mapping[str, Value]  # of one run: {field of the config: value}


class ExperimentError(RuntimeError):
    """A step of an experiment that has failed; the same command goes on from there."""


def share_compilations(out: Path) -> None:
    """Programs started from now on compile the same step once."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str((out / "compiled").absolute())


def script(*arguments: str) -> None:
    """Run a program of this repository, as a user would. Raises ExperimentError."""
    command = [sys.executable, *arguments]
    print("$ python", shlex.join(arguments), file=sys.stderr, flush=True)
    if subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode:
        raise ExperimentError(f"python {shlex.join(arguments)} has failed, see above")


def prepare_bytes(corpus: Path, data: Path) -> None:
    """DATA/{train,validation,test} from CORPUS/{train-*,validation,test}.jsonl.zst; what is finished stays."""
    for split, pattern in (("train", "train-*"), ("validation", "validation"), ("test", "test")):
        source = str(corpus.absolute() / f"{pattern}.jsonl.zst")
        script(
            "scripts/prepare_data.py", f"--source={source}", "--tokenizer=bytes", f"--split={split}", f"--out={data}"
        )


def sweep(
    config: Path, out: Path, runs: Sequence[Settings], parallel: int, *arguments: str, may_crash: bool = False
) -> list[RunView]:
    """One run of each settings (and seed, by --seeds), through scripts/sweep.py; what is finished is not repeated.

    Raises ExperimentError, and where runs `may_crash` only if some have neither finished nor crashed.
    """
    fields = [f"--sweep.{field}={json.dumps([text_of(run[field]) for run in runs])}" for field in runs[0]]
    where = [f"--config={config.relative_to(ROOT)}", f"--workdir={out.absolute()}", f"--parallel={parallel}"]
    try:
        script("scripts/sweep.py", *where, "--search=zip", *fields, *arguments)
    except ExperimentError:
        ended = may_crash and all(run.state in ("finished", "crashed") for run in SweepFolder.load(out).views())
        if not ended:
            raise
    script("scripts/sweep.py", f"--workdir={out.absolute()}", "--report")
    return SweepFolder.load(out).views()


def machine() -> str:
    """In words, for a report."""
    import jax

    cores, kind = len(usable_cores()), jax.devices()[0].device_kind
    return f"{cores} CPU cores" if kind == "cpu" else f"{jax.device_count()} x {kind}, {cores} CPU cores"


def in_turn(commands: Mapping[Path, Sequence[str]], parallel: int) -> dict[Path, dict]:
    """Of each {file: arguments} the JSON on the last line of its stdout, kept in the file; `parallel` at a time.

    Cores are divided among them; files that are there stand. Raises ExperimentError.
    """
    slots: SimpleQueue[list[int]] = SimpleQueue()
    for cores in divide(usable_cores(), parallel):
        slots.put(cores)

    def run(file: Path, arguments: Sequence[str]) -> dict:
        if not file.exists():
            cores = slots.get()
            print("$ python", shlex.join(arguments), file=sys.stderr, flush=True)
            try:
                if hasattr(os, "sched_setaffinity"):
                    os.sched_setaffinity(0, cores)  # of this thread, whose child has the same
                done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
            finally:
                slots.put(cores)
            if done.returncode:
                raise ExperimentError(f"python {shlex.join(arguments)} has failed:\n{done.stderr[-2000:]}")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(done.stdout.splitlines()[-1] + "\n")
        return json.loads(file.read_text())

    with ThreadPoolExecutor(parallel) as pool:
        futures = {file: pool.submit(run, file, arguments) for file, arguments in commands.items()}
        return {file: future.result() for file, future in futures.items()}
