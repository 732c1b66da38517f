"""Measure the tokens/s of a training step for every contestant of an experiment, one step of each in turn.

    python experiments/speed.py --experiment=forgetting [--lengths=512,8192]

Prints a table, and JSON on the last line of stdout.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from absl import app, flags, logging

from heinsen.errors import exit_on_error
from scripts.cli import parse_flags, show_help

EXPERIMENT = flags.DEFINE_enum(
    "experiment", None, ["comparison_2m", "forgetting"], "A folder of experiments/.", required=True
)
CONTESTANTS = flags.DEFINE_list(
    "contestants", None, "Those to measure, all by default; names with commas in double quotes."
)
LENGTHS = flags.DEFINE_list("lengths", ["512", "8192"], "Tokens of a sequence; a step has as many as the longest.")

show_help(__name__)

import jax
import numpy as np

from experiments import tools
from heinsen.distributed import keep_host_memory
from heinsen.parallel import make_mesh
from heinsen.training.config import TrainConfig
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import init_train_state, make_train_step

REPEATS = 5  # timed steps of each contestant


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    with exit_on_error():
        contestants = tools.contestants_of(EXPERIMENT.value, CONTESTANTS.value)
        print(json.dumps(measure(contestants, tools.parse_counts("lengths", LENGTHS.value))))


def measure(contestants: Mapping[str, TrainConfig], lengths: Sequence[int]) -> dict[str, dict[int, float]]:
    """Return {contestant: {length: tokens/s}}, and print each as it comes."""
    n_tokens = max(lengths)
    keep_host_memory()
    rates: dict[str, dict[int, float]] = {name: {} for name in contestants}
    for length in lengths:
        steps = {name: prepare(config, n_tokens // length, length) for name, config in contestants.items()}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(REPEATS):
            for name, step in steps.items():
                step()  # removes from the caches what the others have left there
                start = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - start)
        for name, times in seconds.items():
            rates[name][length] = n_tokens // length * length / statistics.median(times)
            print(f"T = {length:>6}  {name:<42} {rates[name][length]:>10,.0f} tokens/s", flush=True)
    return rates


def prepare(config: TrainConfig, n_sequences: int, length: int) -> Callable[[], None]:
    """Return a function that takes one training step and waits for it."""
    mesh = make_mesh()
    optimizer = make_optimizer(config.optimizer, config.total_steps)
    state = init_train_state(config.model, optimizer, 0, mesh)
    train_step = make_train_step(config.model, optimizer, mesh)
    tokens = np.random.default_rng(0).integers(0, 256, (1, n_sequences, length + 1), np.int32)

    def step() -> None:
        nonlocal state
        state, _ = train_step(state, tokens)
        jax.block_until_ready(state)

    step()
    return step


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
