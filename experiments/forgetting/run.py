"""What a forget gate is worth, and what helps beside it: parts, blocks and context lengths, tuned and trained alike.

    python experiments/forgetting/run.py --corpus=CORPUS --out=runs/forgetting [--parallel=2] [--contests=parts,...]

CORPUS holds {train-*,validation,test}.jsonl.zst. Rerun the same command to resume. config.py is what all contestants
share, and contestants.py lists them by the question that they answer. OUT receives data/, for each contest its sweeps
CONTEST/tuning*/ and CONTEST/final/ and the test split's losses CONTEST/test/, contexts/ with the models that are tested
on long documents (experiments/contexts.py), and the report: report.md, results.json and figures.
"""

from pathlib import Path

from absl import app, flags

from scripts.cli import parse_flags, show_help

CORPUS = flags.DEFINE_string("corpus", None, "Folder of {train-*,validation,test}.jsonl.zst.", required=True)
OUT = flags.DEFINE_string("out", "runs/forgetting", "Folder of the experiment.")
PARALLEL = flags.DEFINE_integer(
    "parallel", None, "Runs at a time; default: one per GPU, or one per core.", lower_bound=1
)
WHICH = flags.DEFINE_list("contests", None, "Contests of contestants.py, all by default.")
RATES = flags.DEFINE_list("learning_rates", ["1.5e-3", "3e-3", "6e-3"], "Learning rates to tune over.")
TUNING_TOKENS = flags.DEFINE_integer("tuning_tokens", 700_000, "Tokens of each tuning run.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", None, "Tokens of each final run; default: config.py's.", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 3, "Final runs of each contestant, with seeds 1, 2, ...", lower_bound=1)
DOCUMENTS = flags.DEFINE_integer("documents", 16, "Long documents to test on, at most.", lower_bound=1)
LONGEST = flags.DEFINE_integer("longest", 131_072, "Bytes of each long document.", lower_bound=1)
SPEED_LENGTHS = flags.DEFINE_list("speed_lengths", ["512", "8192"], "Tokens of a sequence where speed is measured.")
SMALL = flags.DEFINE_bool("small", False, "Everything in minutes: a rehearsal, whose results mean nothing.")

show_help(__name__)

from experiments import contexts, tools
from experiments.contest import Contest, test
from experiments.forgetting import config, report
from experiments.forgetting.contestants import CONTESTS, LONG

SMALL_FLAGS = {
    "contests": "combined",
    "learning_rates": "3e-3",
    "tuning_tokens": "150000",
    "tokens": "150000",
    "seeds": "2",
    "documents": "4",
    "longest": "16384",
    "speed_lengths": "512,1024",
}


def main(argv: list[str]) -> None:
    tools.execute(run, OUT.value, PARALLEL.value, SMALL_FLAGS if SMALL.value else None)


def run(out: Path, parallel: int) -> str:
    """Do what is left of the experiment, and return its report. Raises ExperimentError."""
    which = tools.choose("contests", WHICH.value, CONTESTS)
    rates = tools.parse_numbers("learning_rates", RATES.value)
    tools.check_tokens(config.get_config(), tuning_tokens=TUNING_TOKENS.value, tokens=TOKENS.value)
    tools.expect_training(sum(expected_flops(name, len(rates)) for name in which))
    tools.share_compilations(out)
    corpus = Path(CORPUS.value)
    tools.prepare_bytes(tools.splits_of(corpus), out / "data")
    splits = None
    if any(name in LONG for name in which):
        splits = contexts.prepare(corpus, out / "contexts", DOCUMENTS.value, LONGEST.value)
    found = {name: run_contest(each, out / name, rates, parallel) for name, each in CONTESTS.items() if name in which}
    by_position = [
        contexts.measure(
            *(each.contest, LONG[name], each.tuning, splits, out / "contexts" / name, parallel),
            *("--config.seed=1", *length_options()),
        )
        for name, each in found.items()
        if splits is not None and name in LONG
    ]
    speed: dict[str, dict[str, float]] = {}
    for name, each in found.items():  # a process each: all together have more mappings than Linux grants a process
        speed |= tools.measure_speed(out / name, "forgetting", each.contest.contestants, SPEED_LENGTHS.value)
    return report.write(out, found, contexts.join(by_position), speed)


def expected_flops(name: str, n_rates: int) -> float:
    """Return the FLOPs of training a contest's runs, and those that are tested on long documents."""
    contest = CONTESTS[name]
    names, long = contest.contestants, LONG.get(name, [])
    streams = [each for each in long if not contest.train_config(each).model.has_cache]
    tuning = contest.train_flops(names, TUNING_TOKENS.value) * n_rates
    return (
        tuning
        + contest.train_flops(names, TOKENS.value) * SEEDS.value
        + contest.train_flops([*long, *streams], TOKENS.value)
    )


def run_contest(contest: Contest, out: Path, rates: list[float], parallel: int) -> report.Result:
    """Tune, train and test the contestants of a contest."""
    data = f"--config.data.path={tools.from_root(out.parent / 'data')}"
    tuning = contest.tune(
        out, contest.contestants, rates, parallel, data, f"--config.total_tokens={TUNING_TOKENS.value}"
    )
    options = data, "--config.seed=1", f"--seeds={SEEDS.value}", *length_options()
    final = contest.train(out / "final", contest.contestants, tuning, parallel, *options)
    tested = test(out / "test", {out / "final": final}, parallel)
    return report.Result(contest, tuning, final, tested)


def length_options() -> list[str]:
    return [f"--config.total_tokens={TOKENS.value}"] if TOKENS.value else []


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
