"""Run an experiment's command with programs that only pretend: sweeps and tests whose results are made up.

    python -m tests.pretend EXPERIMENT [flag of its run.py ...]

Losses follow a law in parameters and tokens and a parabola in the learning rate, with some noise. What the experiment
does with them, from its flags to its report, is real; nothing is compiled or trained.
"""

import csv
import functools
import importlib
import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app

from experiments import tools
from experiments.contest import RATE
from experiments.recall import PAIRS
from heinsen.config import from_mapping
from heinsen.sweep.runs import RunView, SweepRun
from heinsen.sweep.space import SEED
from heinsen.training.config import TrainConfig
from scripts.cli import parse_flags

_BEST_RATE = 8e-3  # beyond the end of the grids


def noise(*key: object) -> float:
    """Return a standard normal number that belongs to a key."""
    return np.random.default_rng(zlib.crc32(repr(key).encode())).standard_normal()


def flag(arguments: Sequence[str], name: str) -> str | None:
    """Return the text of a flag, None where it is not given."""
    values = [text.removeprefix(f"--{name}=") for text in arguments if text.startswith(f"--{name}=")]
    return values[0] if values else None


def run_script(*arguments: str, allowed: Sequence[int] = (0,)) -> None:
    assert (tools.ROOT / arguments[0]).exists()


def run_sweep(
    config: Path, out: Path, runs: Sequence[tools.Settings], parallel: int, *arguments: str, may_crash: bool = False
) -> list[RunView]:
    """Return finished runs, and write their logs."""
    name = ".".join(config.relative_to(tools.ROOT).with_suffix("").parts)
    first, n_seeds = int(flag(arguments, "config.seed") or 1), flag(arguments, "seeds")
    seeds = [{SEED: first + i} for i in range(int(n_seeds))] if n_seeds else [{}]
    return [
        finished(
            out, importlib.import_module(name).get_config(), {**run, **seed}, flag(arguments, "config.total_tokens")
        )
        for run in runs
        for seed in seeds
    ]


def finished(out: Path, config: Any, point: dict[str, Any], tokens: str | None) -> RunView:
    config.update_from_flattened_dict(point)
    if tokens is not None:
        config.total_tokens = int(tokens)
    settings = from_mapping(TrainConfig, config.to_dict())
    n, d = tools.n_params(settings), settings.total_steps * settings.tokens_per_step
    loss = 1 + (1e4 / n) ** 0.3 + (1e5 / d) ** 0.3 + 0.05 * np.log(point[RATE] / _BEST_RATE) ** 2
    loss *= np.exp(0.002 * noise(point))
    run = SweepRun(point, settings.total_steps, settings.tokens_per_step)
    found = dict(step=run.total_steps, tokens=d, validation_loss=loss, validation_bits_per_byte=loss / np.log(2))
    (out / run.name).mkdir(parents=True)
    (out / run.name / "metrics.jsonl").write_text(json.dumps(found) + "\n")
    bits = dict(validation_loss=loss, bits_per_byte=loss / np.log(2))
    return RunView(run=run, state="finished", step=run.total_steps, tokens=d, **bits)


def run_programs(commands: Mapping[Path, Sequence[str]], parallel: int, may_fail: bool = False) -> dict[Path, Any]:
    """Return what the programs might have printed."""
    return {file: PROGRAMS[arguments[0]](arguments) for file, arguments in commands.items()}


def evaluate(arguments: Sequence[str]) -> dict[str, Any]:
    bits = 3 + 0.1 * noise(*arguments)
    sources = {name: dict(tokens=n, bits_per_byte=bits + x) for name, n, x in (("Books", 9, 0.1), ("Code", 7, -0.2))}
    ranges = [
        dict(first=2**i + 1, last=2 ** (i + 1), tokens=5, windows=2.0, streaming=1.9, difference=-0.1)
        | dict(difference_interval=(-0.2, 0.1))
        for i in range(16)
    ]
    positions = dict(window=1024, ranges=ranges)
    return dict(bits_per_byte=bits, bits_per_byte_interval=(bits - 0.1, bits + 0.1), sources=sources) | (
        dict(by_position=positions) if flag(arguments, "by_position") else {}
    )


def contestants(arguments: Sequence[str]) -> list[str]:
    return [*tools.timed(flag(arguments, "experiment"), next(csv.reader([flag(arguments, "contestants")])))]


def speed(arguments: Sequence[str]) -> dict[str, Any]:
    lengths = (flag(arguments, "lengths") or "").split(",")
    return {name: {n: 1e4 * np.exp(noise(name, n)) for n in lengths} for name in contestants(arguments)}


def decode(arguments: Sequence[str]) -> dict[str, Any]:
    contexts = (flag(arguments, "contexts") or "").split(",")
    return {name: {n: dict(milliseconds=2.0, state_bytes=12_345) for n in contexts} for name in contestants(arguments)}


PROGRAMS = {
    "eval.py": evaluate,
    "experiments/speed.py": speed,
    "experiments/decoding.py": decode,
    "scripts/recall.py": lambda arguments: dict(accuracy=[dict(length=n, answers=1 / n) for n in PAIRS]),
}


if __name__ == "__main__":
    tools.run_script, tools.run_sweep, tools.run_programs = run_script, run_sweep, run_programs
    module = importlib.import_module(f"experiments.{sys.argv.pop(1)}.run")
    if module.__name__.endswith("ladder.run"):
        module.N_BOOTSTRAP = 2  # of 100, which take a minute
        module.law.fit = functools.partial(module.law.fit, n_starts=4)  # of 40
    app.run(module.main, flags_parser=parse_flags)
