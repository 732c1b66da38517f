"""Sigmoid attention in trained models: what alpha does to the learning rate, and beyond the training length.

    python experiments/sigmoid_training/run.py --corpus=corpus --out=runs/sigmoid_training [--parallel=2]
    python experiments/sigmoid_training/run.py --report --out=experiments/sigmoid_training

CORPUS is what scripts/build_corpus.py builds. Rerun the same command to resume. Every form of contestants.py is trained
at each learning rate. Two controlled sets of runs separate the learning rate from the scale of the initial outputs:
alpha = 1 with the initial scale of alpha = 1.5, and the reverse. The best run of each form then reads documents of 16
times the training length, and so does that at the learning rate that is best for all of them. OUT receives data/,
starts/, the sweeps grid/ and exchanged/, long/, and the report: report.md, results.json, lengths.png, rates.png.
--report writes the report of a results.json again.
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import define_flags

define_flags(__name__, "sigmoid_training")

import jax
import jax.numpy as jnp
import numpy as np

from experiments import reports, tools
from experiments.reports import Losses
from experiments.sigmoid_training import contestants, contexts, report
from experiments.sigmoid_training.contestants import FORMS, ONE, STEEPER, exchanged_scale, growth, write_start
from experiments.tools import RATE
from heinsen.models import layer_records
from heinsen.sweep.runs import RunView
from heinsen.weights import load_params, mesh_for_reading


class Plan(NamedTuple):
    """How much of everything. read: bytes of each long document that the models read."""

    rates: tuple[float, ...] = (7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2, 9.6e-2)
    tokens: int = 2_000_000
    n_documents: int = 32
    read: int = 8192


SMALL_PLAN = Plan(rates=(3e-3, 1.2e-2), tokens=150_000, n_documents=4, read=2048)


def measure(plan: Plan, corpus: Path, out: Path, parallel: int) -> dict[str, Any]:
    """Do what is left of the experiment, and return its results. Raises ExperimentError."""
    file = contexts.prepare(corpus, out, plan.n_documents, plan.read)

    def train(name: str, scales: Mapping[str, float]) -> list[RunView]:
        """Return one run of some forms at each rate, started with `scales` times their initial outputs."""
        runs = []
        for form, scale in scales.items():
            start = (out / "starts" / f"{list(FORMS).index(form)}_{scale:.4g}").absolute()
            write_start(start, form, scale)
            runs += [contestants.fields(form) | {RATE: rate, "init_from": str(start)} for rate in plan.rates]
        options = f"--config.data.path={tools.from_root(out / 'data')}", f"--config.total_tokens={plan.tokens}"
        return tools.run_sweep(contestants.__file__, out / name, runs, parallel, *options)

    grid = train("grid", dict.fromkeys(FORMS, 1.0))
    exchanged = train("exchanged", {form: exchanged_scale(form) for form in (ONE, STEEPER)})
    length = contestants.get_config().sequence_length
    lengths = [n for i in range(20) if (n := length * 2**i) <= plan.read] or [plan.read]
    losses = {form: contestants.losses(form, grid) for form in FORMS}
    rate = common_rate(losses)
    chosen = dict(best={form: contestants.best_rate(form, grid) for form in FORMS}, alike=dict.fromkeys(FORMS, rate))

    def read(rates: Mapping[str, float]) -> dict[str, Any]:
        """Return the loss by position and the norms of the runs at a rate each."""
        runs = {
            form: run for form in FORMS for run in contestants.runs_of(form, grid) if run.run.point[RATE] == rates[form]
        }
        positions = contexts.measure(runs, out / "grid", file.stem, plan.read, out / "long", parallel)
        norms = {form: measure_norms(out / "grid" / run.name, form, file, lengths) for form, run in runs.items()}
        return dict(rates=dict(rates), positions=positions, norms=norms)

    return dict(
        settings=contestants.get_config().to_dict(),
        tokens=max(run.tokens for run in grid),
        rates=losses | {name: contestants.losses(form, exchanged) for form, name in report.EXCHANGED.items()},
        beyond={name: read(rates) for name, rates in chosen.items()},
        law={form: {n: growth(form, n) for n in lengths} for form in FORMS},
    )


def common_rate(tuning: Mapping[str, Losses]) -> float:
    """Return the learning rate with the lowest loss on average over the contestants. Raises ExperimentError."""
    means = {
        rate: statistics.fmean(losses[rate] for losses in tuning.values())
        for rate in next(iter(tuning.values()))
        if all(losses[rate] is not None for losses in tuning.values())
    }
    if not means:
        raise tools.ExperimentError("one of the forms has crashed at each learning rate: lower them in run.py")
    return reports.best_rate(means)


def measure_norms(folder: Path, form: str, file: Path, lengths: list[int]) -> dict[int, list[float]]:
    """Return {n: RMS of each layer's attention over the first n tokens of the documents in a file}."""
    config = contestants.train_config(form)
    _, params = load_params(folder, config.model, mesh_for_reading(config))
    attention = lambda params, tokens: layer_records(config.model, params, tokens)["attention"]
    measure = jax.jit(lambda params, tokens: jnp.stack([*attention(params, tokens).values()]))
    squares: dict[int, list[jax.Array]] = {n: [] for n in lengths}
    for line in file.read_text().splitlines():
        tokens = np.frombuffer(json.loads(line)["text"].encode(), np.uint8).astype(np.int32)
        for n in lengths:
            squares[n].append(jnp.square(measure(params, tokens[None, :n])))
    return {n: jnp.sqrt(jnp.mean(jnp.stack(found), 0)).tolist() for n, found in squares.items()}


if __name__ == "__main__":
    tools.run_experiment(measure, Plan(), SMALL_PLAN, report)
