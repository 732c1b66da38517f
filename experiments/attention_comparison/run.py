"""Every kind of attention in one frame: tuned alike and trained alike on the same text; then recall, speed, a report.

    python experiments/attention_comparison/run.py --corpus=CORPUS --out=runs/attention_comparison [--parallel=2]

CORPUS holds {train-*,validation,test}.jsonl.zst. Rerun the same command to resume. config.py is what all contestants
share. OUT receives data/, the sweeps tuning*/, final/ and sigmoid/, test/, recall/, and the report: report.md,
results.json, curves.png, sigmoid.png, recall.png.
"""

from pathlib import Path

from absl import app, flags

from configs import parse_flags, show_help

CORPUS = flags.DEFINE_string("corpus", None, "Folder of {train-*,validation,test}.jsonl.zst.", required=True)
OUT = flags.DEFINE_string("out", "runs/attention_comparison", "Folder of the experiment.")
PARALLEL = flags.DEFINE_integer(
    "parallel", None, "Runs at a time; default: one per GPU, or one per core.", lower_bound=1
)
RATES = flags.DEFINE_list("learning_rates", ["1.5e-3", "3e-3", "6e-3", "1.2e-2"], "Learning rates to tune over.")
TUNING_TOKENS = flags.DEFINE_integer("tuning_tokens", 700_000, "Tokens of each tuning run.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", None, "Tokens of each final run; default: config.py's.", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 3, "Final runs of each contestant, with seeds 1, 2, ...", lower_bound=1)
RECALL_STEPS = flags.DEFINE_integer("recall_steps", 1000, "Training steps on the probe of recall.", lower_bound=101)
SPEED_LENGTHS = flags.DEFINE_list("speed_lengths", ["512", "8192"], "Tokens of a sequence where speed is measured.")
SMALL = flags.DEFINE_bool("small", False, "Everything in minutes: a rehearsal, whose results mean nothing.")

show_help(__name__)

from experiments import recall, tools
from experiments.attention_comparison import report
from experiments.attention_comparison.contestants import CONTEST, CONTESTANTS, SIGMOIDS
from experiments.contest import test
from heinsen.sweep.runs import RunView

SMALL_FLAGS = {
    "learning_rates": "3e-3",
    "tuning_tokens": "150000",
    "tokens": "300000",
    "seeds": "2",
    "recall_steps": "150",
    "speed_lengths": "512,1024",
}


def main(argv: list[str]) -> None:
    tools.execute(run, OUT.value, PARALLEL.value, SMALL_FLAGS if SMALL.value else None)


def run(out: Path, parallel: int) -> str:
    """Do what is left of the experiment, and return its report. Raises ExperimentError."""
    tools.share_compilations(out)
    rates = tools.parse_numbers("learning_rates", RATES.value)
    tools.check_tokens(CONTEST.get_config(), tuning_tokens=TUNING_TOKENS.value, tokens=TOKENS.value)
    tools.expect_training(
        CONTEST.train_flops(CONTEST.contestants, TUNING_TOKENS.value) * len(rates)
        + CONTEST.train_flops(CONTESTANTS, TOKENS.value) * SEEDS.value
        + CONTEST.train_flops(SIGMOIDS, TOKENS.value)
    )
    tools.prepare_bytes(tools.splits_of(Path(CORPUS.value)), out / "data")
    tuning, final, sigmoid = train(out, rates, parallel)
    tested = test(out / "test", {out / "final": final, out / "sigmoid": sigmoid}, parallel)
    kinds = {name: fields for name, fields in CONTESTANTS.items() if fields.get("block") != "gpt2"}
    recalled = recall.measure(out / "recall", kinds, RECALL_STEPS.value, parallel)
    speed = tools.measure_speed(out, "attention_comparison", SPEED_LENGTHS.value)
    return report.write(out, tuning, final, sigmoid, tested, recalled, RECALL_STEPS.value, speed)


def train(out: Path, rates: list[float], parallel: int) -> tuple[list[RunView], list[RunView], list[RunView]]:
    """Return the runs of the tuning, of the contestants, and of the sigmoid variants."""
    data = f"--config.data.path={tools.from_root(out / 'data')}"
    tuning = CONTEST.tune(out, rates, parallel, data, f"--config.total_tokens={TUNING_TOKENS.value}")
    options = [data, "--config.log_activations=True", "--config.seed=1"]
    options += [f"--config.total_tokens={TOKENS.value}"] if TOKENS.value else []
    final = CONTEST.train(out / "final", CONTESTANTS, tuning, parallel, *options, f"--seeds={SEEDS.value}")
    sigmoid = CONTEST.train(out / "sigmoid", SIGMOIDS, tuning, parallel, *options, "--seeds=1")
    return tuning, final, sigmoid


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
