"""Compare runs: loss, recall within the context, time and memory per token of generation.

    python scripts/compare_runs.py runs/softmax runs/converted [--pairs=8,16,32 --contexts=256,65536]

The loss is of the runs' own validation splits. Recall is associative, of pairs of ASCII characters, as a model of bytes
learns it from documents of scripts/recall.py --texts. Time and memory are those of one text after so many tokens, from
states as if these had been read (scripts/benchmark.py decode). Runs of one config but for the attention are meant.
"""

import functools
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from heinsen.errors import InputError, exit_on_error
from scripts.cli import parse_counts, parse_flags, refuse, show_help

PAIRS = flags.DEFINE_list("pairs", ["8", "16", "32"], "Numbers of pairs to recall.")
CONTEXTS = flags.DEFINE_list("contexts", ["256", "65536"], "Numbers of tokens read before those that are timed.")
SEQUENCES = flags.DEFINE_integer("sequences", 128, "Sequences of each number of pairs.", lower_bound=1)

show_help(__name__)

from experiments.reports import table
from heinsen.evaluation.probes import ASCII, Task, make_tester
from heinsen.evaluation.split import evaluate_split
from heinsen.host import keep_compilations
from heinsen.parallel import make_mesh
from heinsen.training.config import TrainConfig
from heinsen.training.folder import load_run
from heinsen.weights import load_params
from scripts.benchmarking import decode


def main(argv: list[str]) -> None:
    if len(folders := argv[1:]) < 1:
        refuse("name run folders, as in scripts/compare_runs.py runs/softmax runs/converted")
    logging.set_verbosity(logging.WARNING)
    keep_compilations()
    with exit_on_error(on_interrupt="interrupted; nothing was written"):
        pairs, contexts = parse_counts("pairs", PAIRS.value), parse_counts("contexts", CONTEXTS.value)
        configs = {folder: load_run(Path(folder)) for folder in folders}
        for folder, config in configs.items():
            if config.model.vocab_size < ASCII or not config.model.causal:
                raise InputError(f"{folder} is no next-token model of at least {ASCII} ids: recall cannot be tested")
        rows = [[folder, *measure(folder, config, pairs)] for folder, config in configs.items()]
        settings = decode.Settings(contexts, [1], repeats=5, call_tokens=16)
        timed = decode.time_decoding({folder: config.model for folder, config in configs.items()}, settings)["results"]
        shown = {(each["name"], each["context"]): show_cost(each) for each in timed}
        rows = [[*row, *(shown.get((row[0], n), "") for n in contexts)] for row in rows]
        head = ["", "bits per byte", *(f"{n} pairs" for n in pairs), *(f"after {n:,} tokens" for n in contexts)]
        print("\n".join(table(head, rows)))


def measure(folder: str, config: TrainConfig, pairs: list[int]) -> list[str]:
    """Return bits per byte, and the right answers of each number of pairs. Raises HeinsenError."""
    mesh = make_mesh()
    result = evaluate_split(config, folder, config.data.validation_split, streaming=False, with_positions=False)
    _, params = load_params(Path(folder), config.model, mesh)
    test = make_tester(config.model, Task("associative", ASCII), mesh, config.batch_size)
    right = [test(params, n, SEQUENCES.value, [0, n]).answers for n in pairs]
    return [f"{result.total.bits_per_byte:.3f}", *(f"{x:.0%}" for x in right)]


def show_cost(each: dict[str, Any]) -> str:
    show = lambda x: f"{x:,.0f}" if x >= 10 else f"{x:.2g}"
    return f"{show(each['milliseconds_per_step'])} ms, {show(each['state_bytes'] / 1e6)} MB"


if __name__ == "__main__":
    app.run(main, flags_parser=functools.partial(parse_flags, takes_arguments=True))
