r"""The paper's attention, gated attention and softmax at 2M parameters and 8M bytes: loss, contexts, recall, cost.

    python experiments/comparison_2m/run.py --corpus=corpus --out=runs/comparison_2m [--parallel=2]
    python experiments/comparison_2m/run.py ... --contestants=$'paper\'s,"gate, parts","softmax, GPT-2\'s block, parts"'

CORPUS is what scripts/build_corpus.py builds; its last training file is kept for the test of long documents. Rerun the
same command to resume. config.py is what all contestants share, and contestants.py lists them. OUT receives data/, the
sweeps tuning*/ and final/NUMBER/ of each contestant, test/ and long/ (losses of the test split, and by position in long
documents), recall/, costs, and the report: report.md, results.json, curves.png, costs.png, positions.png, recall.png.
A contestant is tested before the next one is trained. Where the results of neighbors in the ranking touch, both get one
more seed.

All of it but data and weights is committed in this folder: --out=experiments/comparison_2m writes the report anew, and
trains and tests only what is missing.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from absl import app, flags

from scripts.cli import parse_flags, show_help

CORPUS = flags.DEFINE_string("corpus", None, "Folder of {train-*,validation,test}.jsonl.zst.", required=True)
OUT = flags.DEFINE_string("out", "runs/comparison_2m", "Folder of the experiment.")
PARALLEL = flags.DEFINE_integer(
    "parallel", None, "Runs at a time; default: one per GPU, or one per core.", lower_bound=1
)
WHICH = flags.DEFINE_list(
    "contestants", None, "Contestants of contestants.py, all by default; names with commas in double quotes."
)
RATES = flags.DEFINE_list("learning_rates", ["1.5e-3", "3e-3", "6e-3"], "Learning rates to tune over.")
TUNING_TOKENS = flags.DEFINE_integer("tuning_tokens", 2_000_000, "Tokens of each tuning run.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", None, "Tokens of each final run; default: config.py's.", lower_bound=1)
SEEDS = flags.DEFINE_integer(
    "seeds", 2, "Final runs of each contestant, with seeds 1, 2, ...; one more where they touch.", lower_bound=1
)
DOCUMENTS = flags.DEFINE_integer("documents", 16, "Long documents to test on, at most.", lower_bound=1)
LONGEST = flags.DEFINE_integer("longest", 65_536, "Bytes of each long document.", lower_bound=1)
RECALL_STEPS = flags.DEFINE_integer("recall_steps", 2000, "Training steps on the probe of recall.", lower_bound=101)
SPEED_LENGTHS = flags.DEFINE_list("speed_lengths", ["1024", "8192"], "Tokens of a sequence where speed is measured.")
CONTEXTS = flags.DEFINE_list("contexts", ["1024", "65536", "1048576"], "Tokens of context where decoding is measured.")
SMALL = flags.DEFINE_bool("small", False, "Everything in minutes: a rehearsal, whose results mean nothing.")

show_help(__name__)

from experiments import contexts, recall, tools
from experiments.comparison_2m import report
from experiments.comparison_2m.contestants import CONTEST, CONTESTANTS
from experiments.contest import Trained, close_together, test
from heinsen.sweep.runs import RunView
from heinsen.sweep.space import SEED

SMALL_FLAGS = {
    "contestants": 'paper\'s,"gate, parts","softmax, GPT-2\'s block, parts"',
    "learning_rates": "3e-3",
    "tuning_tokens": "220000",
    "tokens": "220000",
    "seeds": "1",
    "documents": "4",
    "longest": "16384",
    "recall_steps": "150",
    "speed_lengths": "1024",
    "contexts": "1024,8192",
}


def main(argv: list[str]) -> None:
    tools.execute(run, OUT.value, PARALLEL.value, SMALL_FLAGS if SMALL.value else None)


def run(out: Path, parallel: int) -> str:
    """Do what is left of the experiment, and return its report. Raises ExperimentError."""
    names = tools.choose("contestants", WHICH.value, CONTESTANTS)
    if missing := [name for name in (report.PAPER, report.GATED, report.SOFTMAX) if name not in names]:
        raise tools.ExperimentError(f"--contestants: the report is about {missing[0]!r}, too: add it")
    rates = tools.parse_numbers("learning_rates", RATES.value)
    tools.check_tokens(CONTEST.get_config(), tuning_tokens=TUNING_TOKENS.value, tokens=TOKENS.value)
    tools.parse_counts("contexts", CONTEXTS.value)  # before the hours of training
    tools.expect_training(
        CONTEST.train_flops(names, TUNING_TOKENS.value) * len(rates)
        + CONTEST.train_flops(names, TOKENS.value) * SEEDS.value
    )
    tools.share_compilations(out)
    corpus = Path(CORPUS.value)
    splits = contexts.prepare(corpus, out, DOCUMENTS.value, LONGEST.value)
    tools.prepare_bytes({"test": [corpus / "test.jsonl.zst"]}, out / "data")
    data = f"--config.data.path={tools.from_root(out / 'data')}"
    tuning = CONTEST.tune(out, names, rates, parallel, data, f"--config.total_tokens={TUNING_TOKENS.value}")
    found = report.Found(
        tuning,
        *train_and_test(out, names, tuning, splits, parallel, data),
        recall.measure(out / "recall", {name: CONTESTANTS[name] for name in names}, RECALL_STEPS.value, parallel),
        RECALL_STEPS.value,
        measure_decoding(out, names),
        tools.measure_speed(out, "comparison_2m", names, SPEED_LENGTHS.value),
    )
    return report.write(out, found)


def train_and_test(
    out: Path,
    names: Sequence[str],
    tuning: list[RunView],
    splits: tuple[contexts.Documents, contexts.Documents],
    parallel: int,
    *options: str,
) -> tuple[Trained, dict[str, dict], contexts.Positions]:
    """Return the final runs, {run: summary of eval.py}, and by contestant the loss by position of the first seed's."""
    options += (f"--config.total_tokens={TOKENS.value}",) if TOKENS.value else ()
    trained: dict[Path, list[RunView]] = {}
    tested: dict[str, dict] = {}
    positions = contexts.Positions()

    def train(folder: Path, names: list[str], *seeds: str) -> None:
        trained[folder] = CONTEST.train(folder, names, tuning, parallel, *options, *seeds)
        tested.update(test(out / "test", {folder: trained[folder]}, parallel))

    for number, name in enumerate(names):
        folder = out / "final" / str(number)
        train(folder, [name], "--config.seed=1", f"--seeds={SEEDS.value}")
        first = [run for run in trained[folder] if run.run.point[SEED] == 1]
        positions |= contexts.by_position(CONTEST, [name], folder, first, splits, out / "long", parallel)
    close = close_together(CONTEST.bits(names, [*chain(*trained.values())], tested))
    if close:
        train(out / "final" / "one_more", close, f"--config.seed={SEEDS.value + 1}", "--seeds=1")
    return trained, tested, positions


def measure_decoding(out: Path, names: Sequence[str]) -> dict[str, dict]:
    """Return {contestant: {context: time and state}} by experiments/decoding.py; kept in out/decoding.json."""
    what = f"--contestants={tools.format_names(names)}", f"--contexts={','.join(CONTEXTS.value)}"
    command = ["experiments/decoding.py", "--experiment=comparison_2m", *what]
    return tools.run_programs({out / "decoding.json": command}, 1)[out / "decoding.json"]


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
