"""Measure the time per token of decoding for every contestant of an experiment, by the tokens of context.

    python experiments/decoding.py --experiment=comparison_2m [--contexts=1024,65536,1048576]

One text at a time, random parameters and synthetic states (scripts/benchmark.py decode). Prints JSON on the last line
of stdout: {contestant: {context: milliseconds, and bytes of the state}}; what does not fit into memory is left out.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags, logging

from heinsen.errors import exit_on_error
from scripts.cli import parse_flags, show_help

EXPERIMENT = flags.DEFINE_enum(
    "experiment", None, ["comparison_2m", "forgetting"], "A folder of experiments/.", required=True
)
CONTESTANTS = flags.DEFINE_list(
    "contestants", None, "Those to measure, all by default; names with commas in double quotes."
)
CONTEXTS = flags.DEFINE_list("contexts", ["1024", "65536", "1048576"], "Tokens read before.")
REPEATS = flags.DEFINE_integer("repeats", 5, "Timed calls of each contestant.", lower_bound=1)

show_help(__name__)

from experiments import tools
from heinsen.training.config import TrainConfig
from scripts.benchmarking.decode import Settings, time_decoding

CALL_TOKENS = 16


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    with exit_on_error():
        contestants = tools.contestants_of(EXPERIMENT.value, CONTESTANTS.value)
        print(json.dumps(measure(contestants, sorted(tools.parse_counts("contexts", CONTEXTS.value)))))


def measure(contestants: Mapping[str, TrainConfig], contexts: Sequence[int]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return {contestant: {context: milliseconds per token, bytes of the state}}."""
    models = {name: config.model for name, config in contestants.items()}
    settings = Settings(contexts, [1], REPEATS.value, CALL_TOKENS)
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in contestants}
    for each in time_decoding(models, settings)["results"]:
        kept = {"milliseconds": each["milliseconds_per_step"], "state_bytes": each["state_bytes"]}
        found[each["name"]][each["context"]] = kept
    return found


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
