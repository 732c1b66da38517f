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
from heinsen.distributed import keep_host_memory
from heinsen.training.run import TrainConfig
from scripts.benchmarking.decode import Contestant, Race, Settings

CALL_TOKENS = 16


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    with exit_on_error():
        contestants = tools.contestants_of(EXPERIMENT.value, CONTESTANTS.value)
        print(json.dumps(measure(contestants, sorted(map(int, CONTEXTS.value)))))


def measure(contestants: Mapping[str, TrainConfig], contexts: Sequence[int]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return {contestant: {context: milliseconds per token, bytes of the state}}."""
    keep_host_memory()
    created = {name: Contestant.create(config.model) for name, config in contestants.items()}
    race = Race(Settings(contexts, [1], CALL_TOKENS, REPEATS.value), created, next(iter(created)))
    # Those with states of constant size take turns; caches are too large for that.
    constant = [name for name, config in contestants.items() if not config.model.has_cache]
    race.run([case for name in constant for case in race.settings.cases(name)])
    for name in [name for name in contestants if name not in constant]:
        for case in race.settings.cases(name):
            race.run([case])
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in contestants}
    for each in race.results():
        kept = {"milliseconds": each["milliseconds_per_step"], "state_bytes": each["state_bytes"]}
        found[each["name"]][each["context"]] = kept
    return found


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
