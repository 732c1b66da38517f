"""Recall of pairs against the size of the state: kinds of attention, trained and tuned alike.

    python experiments/recall_by_state/run.py --out=runs/recall_by_state [--cells=1,2] [--minutes=60]
    python experiments/recall_by_state/run.py --report --out=experiments/recall_by_state

The runs of a cell (config.py) train side by side in one program: four learning rates with one seed, more rates where
the best is at the grid's end, then three other seeds. Rerun the same command to resume, at the cell. OUT receives
cells/, and the report: report.md, results.json, recall.png.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import define_flags

define_flags(__name__, "recall_by_state", reads_corpus=False)

import jax
import numpy as np

from experiments import lanes, tools
from experiments.recall_by_state import config, report
from experiments.reports import best_rate
from heinsen.config import from_mapping
from heinsen.evaluation.probes import Task, answer_loss, right_answers
from heinsen.models import abstract_params, count_params, state_size
from heinsen.training.config import TrainConfig


class Plan(NamedTuple):
    """How much of everything."""

    cells: tuple[str, ...] = tuple(config.CELLS)
    n_steps: int = 2000
    n_tests: int = 256  # sequences of each number of pairs


SMALL_PLAN = Plan(cells=config.SMALL, n_steps=40, n_tests=32)
PAIRS = 4, 8, 16, 32


def measure(plan: Plan, out: Path, minutes: float | None, numbers: Sequence[str] | None) -> dict[str, Any]:
    """Do what is left of the experiment, and return its results. Raises InputError."""
    cells = {name: config.CELLS[name] for name in plan.cells}
    found = lanes.run_cells(cells, lambda cell, turn: measure_cell(plan, cell, turn), out, minutes, numbers)
    settings = dict(settings=config.get_config().to_dict(), steps=plan.n_steps, pairs=PAIRS, tests=plan.n_tests)
    return settings | found


def train_config(fields: dict[str, Any]) -> TrainConfig:
    mapping = config.get_config()
    for name, value in fields.items():
        if name != "n_steps":
            next(part for part in (mapping, mapping.optimizer, mapping.model) if name in part)[name] = value
    mapping.update(total_tokens=mapping.batch_size * 10**6, sequence_length=1)  # the probes have their own
    return from_mapping(TrainConfig, mapping.to_dict())


@cache
def draw(task: Task, seed: int, step: int, batch_size: int) -> dict[str, np.ndarray]:
    """The training batch of a seed's step, of the numbers of pairs in turn."""
    return task.draw(np.random.default_rng([seed, 0, step]), batch_size, PAIRS[step % len(PAIRS)]).batch


def measure_cell(plan: Plan, fields: dict[str, Any], turn: lanes.Turn) -> dict[str, Any]:
    """Tune a cell, train it with the other seeds, and test these."""
    each, begin = train_config(fields), time.monotonic()
    n_steps = fields.get("n_steps", plan.n_steps)
    model, task = each.model, Task("associative", each.model.vocab_size)
    tuning_seed, *seeds = config.SEEDS
    n_lanes = max(len(config.RATES), len(seeds))

    def batches_of(seeds: Sequence[int]) -> Callable[[int], dict[str, np.ndarray]]:
        """The batches of a step for these seeds, as many times the last one's as lanes are left."""
        of_lanes = [*seeds, *seeds[-1:] * (n_lanes - len(seeds))]
        drawn = lambda step: [draw(task, seed, step, each.batch_size) for seed in of_lanes]
        return lambda step: jax.tree.map(lambda *x: np.stack(x), *drawn(step))

    to_tune, batch_of = batches_of([tuning_seed]), batches_of(seeds)
    programs = lanes.Lanes.compile(each, n_lanes, [batch_of(step) for step in range(len(PAIRS))], answer_loss)
    tests = [task.draw(np.random.default_rng([0, 1, n]), plan.n_tests, n).batch for n in PAIRS]
    read = lambda params, batch: (answer_loss(model, params, batch), right_answers(model, params, batch).mean())
    read_lanes = jax.jit(jax.vmap(read, (0, None)))
    readers = [read_lanes.lower(programs.params, batch).compile() for batch in tests]
    # Losses and right answers, by lane and number of pairs.
    test = lambda params: np.stack([reader(params, x) for reader, x in zip(readers, tests, strict=True)], -1)
    compiled = time.monotonic()
    with turn:
        began = time.monotonic()
        tuning, _ = programs.tune(config.RATES, tuning_seed, to_tune, n_steps, lambda params: test(params)[0].mean(-1))
        rate = best_rate(tuning)
        params, losses = programs.train(seeds, [rate] * len(seeds), batch_of, n_steps)
        _, right = test(params)
        seconds = time.monotonic() - began
    curves = losses[: n_steps // 40 * 40].reshape(-1, 40, n_lanes).mean(1)
    shown = "/".join(f"{100 * right[lane, -1]:.1f}" for lane in range(len(seeds)))
    return dict(
        summary=f"{PAIRS[-1]} pairs: {shown}%, rate {rate:g} of {', '.join(f'{x:g}' for x in sorted(tuning))}; "
        f"compiled in {compiled - begin:.0f} s, ran {seconds:.0f} s",
        model=fields,
        parameters=count_params(abstract_params(model)),
        state_numbers=state_size(model, 4 * PAIRS[-1] + 1),
        tuning={f"{rate:g}": loss for rate, loss in sorted(tuning.items())},
        learning_rate=rate,
        seconds=seconds,
        runs=[
            dict(seed=seed, curve=np.round(curve, 4).tolist(), right=np.round(own, 5).tolist())
            for seed, curve, own in zip(seeds, curves.T, right, strict=False)
        ],
    )


if __name__ == "__main__":
    tools.run_experiment(measure, Plan(), SMALL_PLAN, report)
