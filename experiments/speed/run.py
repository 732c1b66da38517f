"""What attentions cost, in turn in one process: tokens/s of training, time per token and state of decoding.

    python experiments/speed/run.py --out=runs/speed
    python experiments/speed/run.py --report --out=experiments/speed

The models are cells of experiments/attribution (--size=0.5M), with random parameters. A training step has as many
tokens as the longest length, in sequences of each. Decoding is that of one text, from synthetic states as if so many
tokens had been read (scripts/benchmark.py decode); what does not fit into memory is left out. OUT receives report.md,
results.json and speed.png, in about 20 minutes on 2 CPU cores, with nothing else running.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import define_flags

define_flags(__name__, "speed", reads_corpus=False, has_cells=False)

from experiments import tools
from experiments.attribution import config
from experiments.attribution.run import train_config
from experiments.speed import report
from heinsen.host import keep_host_memory
from heinsen.training.config import TrainConfig
from scripts.benchmarking import decode, measure
from scripts.benchmarking.step import prepare_step

SIZE = "0.5M"
CELLS = (
    "exponential",
    "exponential, additions",
    "linear, additions",
    "delta rule, additions",
    "softmax, additions",
    "exponential, additions, GPT-2's block",
    "linear, additions, GPT-2's block",
    "delta rule, additions, GPT-2's block",
    "softmax, GPT-2's block",
    "softmax, additions, GPT-2's block",
    "gated softmax, additions, GPT-2's block",
)


class Plan(NamedTuple):
    """How much of everything: tokens of a sequence in training, tokens read before decoding, timed calls of each."""

    cells: tuple[str, ...] = CELLS
    lengths: tuple[int, ...] = (512, 8192)
    contexts: tuple[int, ...] = (512, 65_536)  # the window of training, and many
    repeats: int = 5


SMALL_PLAN = Plan(CELLS[5:6] + CELLS[-1:], (512,), (512,), 2)


def measure_all(plan: Plan, out: Path) -> dict[str, Any]:
    """Return the results."""
    configs = {name: train_config(config.CELLS[name], SIZE) for name in plan.cells}
    return dict(
        settings=config.get_config(SIZE).to_dict(),
        speed=measure_speed(configs, plan.lengths, plan.repeats),
        decoding=measure_decoding(configs, plan.contexts, plan.repeats),
    )


def measure_speed(
    configs: Mapping[str, TrainConfig], lengths: Sequence[int], repeats: int
) -> dict[str, dict[int, float]]:
    """{cell: {length: tokens/s}} of training steps."""
    keep_host_memory()
    rates: dict[str, dict[int, float]] = {name: {} for name in configs}
    for length in lengths:
        n_sequences = max(lengths) // length
        sizes = dict(sequence_length=length, batch_size=n_sequences)
        steps = {name: prepare_step(dataclasses.replace(each, **sizes))[0] for name, each in configs.items()}
        for name, times in measure.time_in_turn(steps, repeats).items():
            rates[name][length] = n_sequences * length / statistics.median(times)
    return rates


def measure_decoding(
    configs: Mapping[str, TrainConfig], contexts: Sequence[int], repeats: int
) -> dict[str, dict[int, Any]]:
    """{cell: {context: milliseconds per token, and bytes of the state}}."""
    settings = decode.Settings(contexts, [1], repeats, call_tokens=16)
    models = {name: each.model for name, each in configs.items()}
    found: dict[str, dict[int, Any]] = {name: {} for name in configs}
    for each in decode.time_decoding(models, settings)["results"]:
        cost = dict(milliseconds=each["milliseconds_per_step"], state_bytes=each["state_bytes"])
        found[each["name"]][each["context"]] = cost
    return found


if __name__ == "__main__":
    tools.run_experiment(measure_all, Plan(), SMALL_PLAN, report)
