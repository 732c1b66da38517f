"""Sigmoid attention in trained models: what alpha does to the learning rate, and beyond the training length.

    python experiments/sigmoid_training/run.py --corpus=corpus --out=runs/sigmoid_training [--parallel=2]

CORPUS is what scripts/build_corpus.py builds. Rerun the same command to resume. Every form of contestants.py is trained
at each learning rate. Two controlled sets of runs separate the learning rate from the scale of the initial outputs:
alpha = 1 with the initial scale of alpha = 1.5, and the reverse. The best run of each form then reads documents of 16
times the training length (--read), and so does that at the learning rate that is best for all of them. OUT receives
data/, starts/, the sweeps grid/ and exchanged/, long/, and the report: report.md, results.json, lengths.png, rates.png.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from absl import app, flags

from scripts.cli import parse_flags, show_help

CORPUS = flags.DEFINE_string("corpus", None, "Folder of {train-*,validation,test}.jsonl.zst.", required=True)
OUT = flags.DEFINE_string("out", "runs/sigmoid_training", "Folder of the experiment.")
PARALLEL = flags.DEFINE_integer(
    "parallel", None, "Runs at a time; default: one per GPU, or one per core.", lower_bound=1
)
RATES = flags.DEFINE_list(
    "learning_rates",
    ["7.5e-4", "1.5e-3", "3e-3", "6e-3", "1.2e-2", "2.4e-2", "4.8e-2", "9.6e-2"],
    "Learning rates of each form.",
)
TOKENS = flags.DEFINE_integer("tokens", None, "Tokens of each run; default: the config's.", lower_bound=1)
DOCUMENTS = flags.DEFINE_integer("documents", 32, "Long documents to test on, at most.", lower_bound=1)
READ = flags.DEFINE_integer("read", 8192, "Bytes of each document that the models read.", lower_bound=1)
SMALL = flags.DEFINE_bool("small", False, "Everything in minutes: a rehearsal, whose results mean nothing.")

show_help(__name__)

import jax
import jax.numpy as jnp
import numpy as np

from experiments import contexts, tools
from experiments.contest import RATE, common_rate
from experiments.sigmoid_training import report
from experiments.sigmoid_training.contestants import CONTEST, FORMS, ONE, STEEPER, exchanged_scale, write_start
from heinsen.models import activation_rms
from heinsen.sweep.runs import RunView, best_of
from heinsen.weights import load_params, mesh_for_reading

SMALL_FLAGS = {
    "learning_rates": "3e-3,1.2e-2",
    "tokens": "150000",
    "documents": "4",
    "read": "2048",
}


def main(argv: list[str]) -> None:
    tools.execute(run, OUT.value, PARALLEL.value, SMALL_FLAGS if SMALL.value else None)


def run(out: Path, parallel: int) -> str:
    """Do what is left of the experiment, and return its report. Raises ExperimentError."""
    rates = tools.parse_numbers("learning_rates", RATES.value)
    tools.check_tokens(CONTEST.get_config(), tokens=TOKENS.value)
    tools.expect_training(CONTEST.train_flops([*FORMS, ONE, STEEPER], TOKENS.value) * len(rates))
    tools.share_compilations(out)
    splits = contexts.prepare(Path(CORPUS.value), out, DOCUMENTS.value, 8 * READ.value)  # reads an eighth of each
    grid = train(out, "grid", dict.fromkeys(FORMS, 1.0), rates, parallel)
    exchanged = train(out, "exchanged", {form: exchanged_scale(form) for form in (ONE, STEEPER)}, rates, parallel)
    length = CONTEST.get_config().sequence_length
    lengths = [n for i in range(20) if (n := length * 2**i) <= READ.value] or [READ.value]
    best = {form: best_run(form, grid) for form in FORMS}
    rate = common_rate({form: CONTEST.losses(form, grid) for form in FORMS})
    alike = {form: run for form in FORMS for run in CONTEST.runs_of(form, grid) if run.run.point[RATE] == rate}
    own = {run.name: (form, run) for runs in (best, alike) for form, run in runs.items()}
    norms = {name: measure_norms(out, *each, splits[0].split, lengths) for name, each in own.items()}

    def measure(runs: Mapping[str, RunView]) -> report.Beyond:
        positions = contexts.by_position(CONTEST, FORMS, out / "grid", [*runs.values()], splits, out / "long", parallel)
        rates = {form: run.run.point[RATE] for form, run in runs.items()}
        return report.Beyond(rates, positions, {form: norms[run.name] for form, run in runs.items()})

    return report.write(out, grid, exchanged, report.Found(measure(best), measure(alike)))


def train(out: Path, name: str, scales: dict[str, float], rates: list[float], parallel: int) -> list[RunView]:
    """Return one run of some forms at each rate, started with `scales` times their initial outputs."""
    runs = []
    for form, scale in scales.items():
        start = (out / "starts" / f"{list(FORMS).index(form)}_{scale:.4g}").absolute()
        write_start(start, form, scale)
        runs += [CONTEST.fields(form) | {RATE: rate, "init_from": str(start)} for rate in rates]
    options = [f"--config.data.path={tools.from_root(out / 'data')}"]
    options += [f"--config.total_tokens={TOKENS.value}"] if TOKENS.value else []
    return tools.run_sweep(CONTEST.config, out / name, runs, parallel, *options, may_crash=True)


def best_run(form: str, runs: list[RunView]) -> RunView:
    """Return a form's run with the lowest validation loss. Raises ExperimentError."""
    best = best_of(CONTEST.runs_of(form, runs))
    if best is None:
        raise tools.ExperimentError(f"{form} has crashed at all --learning_rates: give lower ones, and another --out")
    return best


def measure_norms(out: Path, form: str, run: RunView, split: str, lengths: list[int]) -> dict[int, list[float]]:
    """Return {n: RMS of each layer's attention over the first n tokens of the documents of a split}."""
    config = CONTEST.train_config(form)
    mesh = mesh_for_reading(config)
    _, params = load_params(out / "grid" / run.name, config.model, mesh)
    measure = jax.jit(lambda params, tokens: activation_rms(config.model, params, tokens)["attention"])
    squares: dict[int, list[jax.Array]] = {n: [] for n in lengths}
    for line in (out / f"{split}.jsonl").read_text().splitlines():
        tokens = np.frombuffer(json.loads(line)["text"].encode(), np.uint8).astype(np.int32)
        for n in lengths:
            squares[n].append(jnp.square(measure(params, tokens[None, :n])))
    return {n: jnp.sqrt(jnp.mean(jnp.stack(found), 0)).tolist() for n, found in squares.items()}


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
