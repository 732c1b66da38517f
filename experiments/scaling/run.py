"""The loss by parameters and by text, apart: three widths on three lengths of text, for kinds of attention.

    python experiments/scaling/run.py --corpus=corpus --out=OUT [--cells=1,2] [--minutes=60]
    python experiments/scaling/run.py --report --out=experiments/scaling

CORPUS is what scripts/build_corpus.py builds; where OUT/text.npz is there, it is not read (experiments/attribution with
--size=0.5M makes the same one). config.py lists the cells, a kind at a width. The runs of a cell train side by side in
one program: rates on half of the text, more where the best is at the end of the grid, then three seeds at the best rate
for each length of text; for the last width only on the most. A kind has a law (law.py) once its other widths are done,
which predicts the last. Rerun the same command to resume, at the cell; the cells of OUT/results.json are done. OUT
receives cells/, and the report: report.md, results.json, scaling.png.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import define_flags

define_flags(__name__, "scaling")

import numpy as np

from experiments import lanes, tools
from experiments.attribution import run as attribution
from experiments.attribution import text
from experiments.reports import best_rate
from experiments.scaling import config, law, report
from heinsen.models import abstract_params, count_params
from heinsen.training.config import TrainConfig

SEEDS = attribution.SEEDS[1:4]
RATES = 2e-3, 4e-3, 8e-3
N_LAWS = 100  # of the bootstrap
SIMULATED = 100, 20  # experiments and laws of each, for the coverage of the prediction's interval


class Plan(NamedTuple):
    """How much of everything."""

    cells: tuple[str, ...] = tuple(config.CELLS)
    steps: tuple[int, ...] = config.STEPS
    n_validation: int = 192  # windows
    stride: int = 3  # every third batch of windows of the test split is read


SMALL_PLAN = Plan(config.SMALL, steps=(10, 20), n_validation=32, stride=100)


def measure(
    plan: Plan, corpus: Path, out: Path, minutes: float | None, numbers: Sequence[str] | None
) -> dict[str, Any]:
    """Do what is left of the experiment, and return its results. Raises InputError."""
    own = config.get_config()
    length, n_steps = own.sequence_length, max(config.STEPS)
    found = text.load(corpus, out, attribution.SEEDS, length, own.batch_size, n_steps)
    windows = np.arange(len(found["test"])).reshape(-1, text.ROWS)[:: plan.stride].ravel()
    found |= {name: found[name][windows] for name in ("test", "test_lengths")}
    is_target = np.arange(length) < found["test_lengths"][:, None]
    places = (length * windows[:, None] + np.arange(length))[is_target]
    sum_by_document = lambda losses: text.sum_by_document(losses, places, found["starts"])
    run = lambda cell, turn: measure_cell(plan, cell, found, sum_by_document, turn)
    done = lanes.run_cells({name: config.CELLS[name] for name in plan.cells}, run, out, minutes, numbers)
    tokens = sum_by_document(np.ones((1, len(places))))[0]
    read = [n * own.batch_size * length for n in plan.steps]
    return dict(
        settings=own.to_dict(), text=read, tokens=tokens.tolist(), laws=find_laws(done["cells"], tokens, read), **done
    )


def train_config(cell: config.Cell) -> TrainConfig:
    return attribution.train_config(cell.attributed, config.SIZE)


def measure_cell(
    plan: Plan, cell: config.Cell, found: dict[str, np.ndarray], sum_by_document: Any, turn: lanes.Turn
) -> dict[str, Any]:
    """Tune a cell, and train it on each length of text."""
    own = train_config(cell)
    to_tune, batch_of = (text.training_batches(found, seeds) for seeds in (attribution.SEEDS[:1] * len(SEEDS), SEEDS))
    programs = lanes.Lanes.compile(own, len(SEEDS), [batch_of(0)])
    losses_of = attribution.compile_losses(programs, found)
    with turn:
        began = time.monotonic()
        loss = lambda params: losses_of(params, "validation", plan.n_validation).mean(1)
        tuning, _ = programs.tune(RATES, attribution.SEEDS[0], to_tune, plan.steps[-2], loss)
        rate, nats = best_rate(tuning), []
        for n_steps in plan.steps if cell.width in config.WIDTHS else plan.steps[-1:]:
            params, _ = programs.train(SEEDS, [rate] * len(SEEDS), batch_of, n_steps)
            nats.append(sum_by_document(losses_of(params, "test", len(found["test"]))))
        seconds = time.monotonic() - began
    shown = ", ".join(f"{each.sum(1).mean() / found['test_lengths'].sum():.4f}" for each in nats)
    return dict(
        summary=f"{shown} nats per token, rate {rate:g}; {seconds:.0f} s",
        model=cell.attributed.fields(config.SIZE),
        parameters=count_params(abstract_params(own.model)),
        tuning={f"{rate:g}": loss for rate, loss in sorted(tuning.items())},
        learning_rate=rate,
        seconds=seconds,
        seeds=SEEDS,
        document_nats=np.round(nats, 2).tolist(),
    )


def find_laws(cells: Mapping[str, Any], tokens: np.ndarray, read: Sequence[int]) -> dict[str, dict[str, Any]]:
    """{kind: its law and what it predicts} of kinds that have all widths but the next."""
    found = {}
    for kind in config.KINDS:
        names = [f"{kind}, {width}" for width in config.WIDTHS]
        if set(names) <= set(cells):
            n_params = np.repeat([cells[name]["parameters"] for name in names], len(read)).astype(float)
            losses = [np.sum(cells[name]["document_nats"], -1).mean(1) / tokens.sum() for name in names]
            model = train_config(config.CELLS[f"{kind}, {config.NEXT_WIDTH}"]).model
            wanted = count_params(abstract_params(model)), max(read)
            found[kind] = describe_law(n_params, np.tile(read, len(names)).astype(float), np.ravel(losses), *wanted)
    return found


def describe_law(n_params: np.ndarray, read: np.ndarray, losses: np.ndarray, wanted: int, most: int) -> dict[str, Any]:
    """The law of mean losses, and what it predicts for `wanted` parameters on `most` tokens, as [value, low, high].

    Intervals hold 95% of a residual bootstrap; that of the prediction counts the residual of a new mean, too, and
    `coverage` is the share of simulated experiments in which it holds the new mean.
    """
    best = law.fit(n_params, read, losses)
    laws, residuals = law.bootstrap(best, n_params, read, losses, N_LAWS), law.residuals(best, n_params, read, losses)
    noise = float(residuals.std())
    bounds = lambda value, others: [float(value), *np.percentile(others, [2.5, 97.5]).tolist()]
    names = [field.name for field in dataclasses.fields(law.Law)]
    return dict(
        coefficients={name: bounds(getattr(best, name), [getattr(each, name) for each in laws]) for name in names},
        on_bound=law.on_bound(best),
        residuals=noise,
        parameters=wanted,
        prediction=[float(best(wanted, most)), *law.prediction_interval(laws, residuals, wanted, most)],
        coverage=law.coverage(best, n_params, read, noise, (wanted, most), *SIMULATED),
    )


if __name__ == "__main__":
    tools.run_experiment(measure, Plan(), SMALL_PLAN, report)
