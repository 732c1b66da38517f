"""Measure what the contestants of an experiment cost, in turn: tokens/s of training, time per token of decoding.

    python experiments/costs.py --experiment=comparison_2m --contest=all --lengths=1024,8192 --contexts=1024,65536

A training step has as many tokens as the longest of --lengths, in sequences of each. Decoding is that of one text, with
random parameters and synthetic states as if so many tokens had been read (scripts/benchmark.py decode); what does not
fit into memory is left out. Prints JSON on the last line of stdout: {contestant: {length: tokens/s}} as "speed",
{contestant: {context: milliseconds, and bytes of the state}} as "decoding".
"""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags, logging

from heinsen.errors import exit_on_error
from scripts.cli import parse_counts, parse_flags, show_help

EXPERIMENT = flags.DEFINE_enum(
    "experiment", None, ["comparison_2m", "forgetting"], "A folder of experiments/.", required=True
)
CONTEST = flags.DEFINE_string("contest", None, "One of CONTESTS in the experiment's config.py.", required=True)
LENGTHS = flags.DEFINE_list("lengths", ["512", "8192"], "Training: tokens of a sequence.")
CONTEXTS = flags.DEFINE_list("contexts", None, "Decoding: tokens read before; default: decoding is not measured.")

show_help(__name__)

from experiments import tools
from heinsen.host import keep_host_memory
from heinsen.training.config import TrainConfig
from scripts.benchmarking import decode, measure
from scripts.benchmarking.step import prepare_step

REPEATS = 5  # timed calls of each contestant


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    with exit_on_error():
        contest = tools.find_contest(EXPERIMENT.value, CONTEST.value)
        lengths = parse_counts("lengths", LENGTHS.value)
        contexts = sorted(parse_counts("contexts", CONTEXTS.value)) if CONTEXTS.value else []
        configs = {name: contest.train_config(name) for name in contest.contestants}
        found: dict[str, Any] = {"speed": measure_speed(configs, lengths)}
        if contexts:
            found["decoding"] = measure_decoding(configs, contexts)
        print(json.dumps(found))


def measure_speed(configs: Mapping[str, TrainConfig], lengths: Sequence[int]) -> dict[str, dict[int, float]]:
    keep_host_memory()
    rates: dict[str, dict[int, float]] = {name: {} for name in configs}
    for length in lengths:
        n_sequences = max(lengths) // length
        sizes = dict(sequence_length=length, batch_size=n_sequences)
        steps = {name: prepare_step(dataclasses.replace(config, **sizes))[0] for name, config in configs.items()}
        for name, times in measure.time_in_turn(steps, REPEATS).items():
            rates[name][length] = n_sequences * length / statistics.median(times)
    return rates


def measure_decoding(configs: Mapping[str, TrainConfig], contexts: Sequence[int]) -> dict[str, dict[int, Any]]:
    settings = decode.Settings(contexts, [1], REPEATS, call_tokens=16)
    models = {name: config.model for name, config in configs.items()}
    found: dict[str, dict[int, Any]] = {name: {} for name in configs}
    for each in decode.time_decoding(models, settings)["results"]:
        cost = dict(milliseconds=each["milliseconds_per_step"], state_bytes=each["state_bytes"])
        found[each["name"]][each["context"]] = cost
    return found


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
