"""Recall of pairs against the size of the state: kinds of attention, trained and tuned alike.

    python experiments/recall_by_state/run.py --out=runs/recall_by_state [--cells=1,2] [--minutes=60]
    python experiments/recall_by_state/run.py --report --out=experiments/recall_by_state

The runs of a cell (config.py) train side by side in one program: four learning rates with three seeds each, and more
rates where the best is at the grid's end. Rerun the same command to resume, at the cell. OUT receives cells/, and the
report: report.md, results.json, recall.png.
"""

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import define_flags

define_flags(__name__, "recall_by_state", reads_corpus=False, runs="cells")

import jax
import numpy as np

from experiments import lanes, tools
from experiments.recall_by_state import config, report
from heinsen.config import from_mapping
from heinsen.evaluation.probes import Task, answer_loss, right_answers
from heinsen.models import abstract_params, count_params, state_size
from heinsen.training.config import TrainConfig


class Plan(NamedTuple):
    """How much of everything."""

    cells: tuple[str, ...] = tuple(config.CELLS)
    n_steps: int = 2000
    n_tests: int = 256  # sequences of each number of pairs
    seeds: tuple[int, ...] = (0, 1, 2)


SMALL_PLAN = Plan(cells=config.SMALL, n_steps=40, n_tests=32, seeds=(0,))
PAIRS = 4, 8, 16, 32


def measure(plan: Plan, out: Path, minutes: float | None, numbers: Sequence[str] | None) -> dict[str, Any]:
    """Do what is left of the experiment, and return its results. Raises ExperimentError."""
    cells = {name: config.CELLS[name] for name in plan.cells}
    found = lanes.run_cells(cells, lambda cell, turn: measure_cell(plan, cell, turn), out, minutes, numbers)
    settings = dict(settings=config.get_config().to_dict(), steps=plan.n_steps, pairs=PAIRS, tests=plan.n_tests)
    return settings | found


def train_config(fields: dict[str, Any]) -> TrainConfig:
    mapping = config.get_config()
    mapping.update({name: fields[name] for name in fields if name in mapping})
    mapping.model.update({name: fields[name] for name in fields if name not in mapping})
    mapping.update(total_tokens=mapping.batch_size * 10**6, sequence_length=1)  # the probes have their own
    return from_mapping(TrainConfig, mapping.to_dict())


@cache
def draw(task: Task, seed: int, step: int, batch_size: int) -> dict[str, np.ndarray]:
    """The training batch of a seed's step, of the numbers of pairs in turn."""
    return task.draw(np.random.default_rng([seed, 0, step]), batch_size, PAIRS[step % len(PAIRS)]).batch


def measure_cell(plan: Plan, fields: dict[str, Any], turn: lanes.Turn) -> dict[str, Any]:
    """Train and test a cell at all rates and seeds."""
    each, begin = train_config(fields), time.monotonic()
    model, task, n_lanes = each.model, Task("associative", each.model.vocab_size), len(config.RATES) * len(plan.seeds)
    batches_of = lambda step: [draw(task, seed, step, each.batch_size) for seed in plan.seeds] * len(config.RATES)
    batch_of = lambda step: jax.tree.map(lambda *x: np.stack(x), *batches_of(step))
    cycle = [batch_of(step) for step in range(len(PAIRS))]
    programs = lanes.Lanes.compile(each, n_lanes, cycle, answer_loss)
    tests = {n: task.draw(np.random.default_rng([0, 1, n]), plan.n_tests, n).batch for n in PAIRS}
    are_right = jax.jit(jax.vmap(lambda params, batch: right_answers(model, params, batch).mean(), (0, None)))
    test = {n: are_right.lower(programs.params, tests[n]).compile() for n in PAIRS}
    compiled = time.monotonic()
    points: dict[float, list[dict[str, Any]]] = {}
    score: dict[float, float] = {}
    with turn:
        began = time.monotonic()
        for tried in lanes.grids(config.RATES, score):
            seeds, rates = list(plan.seeds) * len(tried), np.repeat(tried, len(plan.seeds)).tolist()
            params, losses = programs.train(seeds, rates, batch_of, plan.n_steps)
            accuracy = np.stack([np.asarray(test[n](params, tests[n])) for n in PAIRS], axis=1)
            for rate, seed, own, right in zip(rates, seeds, losses.T, accuracy, strict=False):
                points.setdefault(rate, []).append(
                    dict(
                        seed=seed,
                        loss=float(own[-len(PAIRS) :].mean()),
                        curve=np.round(own[: plan.n_steps // 40 * 40].reshape(-1, 40).mean(1), 4).tolist(),
                        right=np.round(right, 5).tolist(),
                    )
                )
            score |= {rate: -np.mean([run["right"][-1] for run in runs]) for rate, runs in points.items()}
        seconds = time.monotonic() - began
    best = lanes.best_rate(score)
    shown = "; ".join(
        f"{rate:g}: " + "/".join(f"{100 * run['right'][-1]:.1f}" for run in points[rate]) for rate in sorted(points)
    )
    return dict(
        summary=f"{PAIRS[-1]} pairs at {best:g}: {-100 * score[best]:.1f}% ({shown}), compiled in "
        f"{compiled - begin:.0f} s, ran {seconds:.0f} s",
        model=fields,
        parameters=count_params(abstract_params(model)),
        state_numbers=state_size(model, 4 * PAIRS[-1] + 1),
        learning_rate=best,
        seconds=seconds,
        runs={f"{rate:g}": points[rate] for rate in sorted(points)},
    )


if __name__ == "__main__":
    tools.run_experiment(measure, Plan(), SMALL_PLAN, report)
