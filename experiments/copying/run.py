"""Copying: which attentions learn, from text alone, to repeat what their context has had, and when.

    python experiments/copying/run.py --corpus=corpus --out=OUT [--cells=1,2] [--minutes=15]
    python experiments/copying/run.py --report --out=OUT

For a GPU: some quarter of an hour on an H200, by an estimate. CORPUS is what scripts/build_corpus.py builds; where
OUT/text.npz is there, it is not read. Five attentions with four seeds, side by side in one program, at one rate, on 16M
bytes. Outcome, fixed before any run: how many bytes a run has read when its loss on the last bytes of 4-grams that
their window has had before, and training text hardly has, is below 3.2 nats; then this loss at the end, and bits per
byte. Rerun the same command to resume, at the cell. OUT receives cells/, and the report: report.md, results.json,
copying.png.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import define_flags

define_flags(__name__, "copying")

import numpy as np

from experiments import lanes, tools
from experiments.attribution import run as attribution
from experiments.attribution import text
from experiments.attribution.config import Cell
from experiments.copying import config, report
from heinsen.models import abstract_params, count_params


class Plan(NamedTuple):
    """How much of everything."""

    cells: tuple[str, ...] = tuple(config.CELLS)
    size: str = "2M"
    n_steps: int = config.N_STEPS
    every: int = config.EVERY
    n_looked_at: int = 256  # windows of the test split, while training
    most_tests: int = 10**9  # windows, at the end


SMALL_PLAN = Plan(config.SMALL, "0.5M", n_steps=40, every=20, n_looked_at=64, most_tests=64)


def measure(
    plan: Plan, corpus: Path, out: Path, minutes: float | None, numbers: Sequence[str] | None
) -> dict[str, Any]:
    """Do what is left of the experiment, and return its results. Raises InputError."""
    base = attribution.config.get_config(plan.size)
    found = text.load(corpus, out, config.SEEDS, base.sequence_length, base.batch_size, plan.n_steps)
    cells = {name: config.CELLS[name] for name in plan.cells}
    run = lambda cell, turn: measure_cell(plan, cell, found, turn)
    return dict(
        sequence_length=base.sequence_length,
        bytes_per_step=base.batch_size * base.sequence_length,
        learning_rate=config.RATE,
        steps=plan.n_steps,
        every=plan.every,
        threshold=config.THRESHOLD,
        **lanes.run_cells(cells, run, out, minutes, numbers),
    )


def measure_cell(plan: Plan, cell: Cell, found: dict[str, np.ndarray], turn: lanes.Turn) -> dict[str, Any]:
    """Train a cell, and look at what it recalls meanwhile."""
    own, begin = attribution.train_config(cell, plan.size), time.monotonic()
    batch_of, n_lanes = text.training_batches(found, config.SEEDS), len(config.SEEDS)
    programs = lanes.Lanes.compile(own, n_lanes, [batch_of(0)])
    losses_of = attribution.compile_losses(programs, found)
    is_recalled = found["recalled"][text.N_GRAMS.index(4)]
    looks: list[np.ndarray] = []

    def recalled_loss(losses: np.ndarray) -> np.ndarray:
        return losses[:, is_recalled[: losses.shape[1]]].mean(1, dtype=np.float64)

    def look(n_done: int, params: Any) -> None:
        if n_done % plan.every == 0:
            looks.append(recalled_loss(losses_of(params, "test", plan.n_looked_at)))

    compiled = time.monotonic()
    with turn:
        began = time.monotonic()
        params, _ = programs.train(config.SEEDS, [config.RATE] * n_lanes, batch_of, plan.n_steps, look=look)
        tested, seconds = losses_of(params, "test", plan.most_tests), time.monotonic() - began
    bits = text.sum_by_document(tested, np.arange(tested.shape[1]), found["starts"]).sum(1) / np.log(2)
    bits /= found["num_bytes"].sum()
    ends = recalled_loss(tested)
    return dict(
        summary=f"{'/'.join(f'{x:.2f}' for x in ends)} nats on recalled bytes, {bits.mean():.4f} bits per byte; "
        f"compiled in {compiled - begin:.0f} s, ran {seconds:.0f} s",
        model=cell.fields(plan.size),
        parameters=count_params(abstract_params(own.model)),
        seconds=seconds,
        seeds=config.SEEDS,
        recalled_meanwhile=np.round(np.stack(looks, 1), 4).tolist(),
        recalled=np.round(ends, 4).tolist(),
        bits_per_byte=np.round(bits, 5).tolist(),
    )


if __name__ == "__main__":
    tools.run_experiment(measure, Plan(), SMALL_PLAN, report)
