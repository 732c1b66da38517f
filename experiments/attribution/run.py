"""The worth of the attention, the block, each part and the optimizer: one change at a time.

    python experiments/attribution/run.py --corpus=corpus --out=OUT [--size=2M] [--cells=1,2] [--minutes=60]
    python experiments/attribution/run.py --report --out=experiments/attribution

CORPUS is what scripts/build_corpus.py builds; where OUT/text.npz is there, it is not read. config.py lists the cells,
and the sizes of models and text.
The runs of a cell train side by side in one program: four learning rates on half of the bytes, more where the best is
at the end of the grid, then four seeds at the best rate. Rerun the same command to resume, at the cell; the cells of
OUT/results.json are done. OUT receives cells/, and the report of those that are done: report.md, results.json, figures.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import define_flags

define_flags(__name__, "attribution", sizes=("2M", "0.5M"))

import jax
import numpy as np

from experiments import lanes, tools
from experiments.attribution import config, report, text
from experiments.reports import best_rate, read_results
from heinsen.config import from_mapping
from heinsen.errors import InputError
from heinsen.models import abstract_params, count_params, state_size
from heinsen.models.masking import window_losses
from heinsen.training.config import TrainConfig


class Plan(NamedTuple):
    """How much of everything."""

    cells: tuple[str, ...] = tuple(config.CELLS)
    size: str = "2M"
    most_steps: int = 10**9
    most_tests: int = 10**9  # windows; of long_contexts: documents

    @property
    def n_steps(self) -> int:
        return min(self.most_steps, config.SIZES[self.size].n_steps)


SMALL_PLAN = Plan(cells=config.SMALL, size="0.5M", most_steps=20, most_tests=64)
SEEDS = 0, 1, 2, 3, 4  # the first one tunes
N_LANES = 4


def measure(
    plan: Plan, corpus: Path, out: Path, minutes: float | None, numbers: Sequence[str] | None
) -> dict[str, Any]:
    """Do what is left of the experiment, and return its results. Raises InputError."""
    base, found = config.get_config(plan.size), load_text(corpus, out, plan.size, plan.n_steps)
    cells = {name: config.CELLS[name] for name in plan.cells}
    run = lambda cell, turn: measure_cell(plan, cell, found, turn)
    return dict(
        settings=base.to_dict(),
        size=plan.size,
        steps=plan.n_steps,
        n_grams=text.N_GRAMS,
        recalled=found["recalled"].sum(1).tolist(),
        documents=dict(
            tokens=np.diff(found["starts"]).tolist(),
            num_bytes=found["num_bytes"].tolist(),
            sources=found["sources"].tolist(),
            names=found["names"].tolist(),
        ),
        **lanes.run_cells(cells, run, out, minutes, numbers),
    )


def load_text(corpus: Path, out: Path, size: str, n_steps: int) -> dict[str, np.ndarray]:
    """`text.load` at a size. Raises InputError if OUT is of another one."""
    base, results = config.get_config(size), out / "results.json"
    if results.exists() and (other := read_results(results)["size"]) != size:
        raise InputError(f"{out} has results of --size={other}: give --size={size} an --out of its own")
    return text.load(corpus, out, SEEDS, base.sequence_length, base.batch_size, n_steps)


def train_config(cell: config.Cell, size: str) -> TrainConfig:
    mapping = config.get_config(size)
    mapping.optimizer.name = cell.optimizer
    mapping.model.update(cell.fields(size))
    return from_mapping(TrainConfig, mapping.to_dict())


def measure_cell(plan: Plan, cell: config.Cell, found: dict[str, np.ndarray], turn: lanes.Turn) -> dict[str, Any]:
    """Tune and train a cell on the arrays of text.npz."""
    own, begin = train_config(cell, plan.size), time.monotonic()
    to_tune, batch_of = (text.training_batches(found, seeds) for seeds in (SEEDS[:1] * N_LANES, SEEDS[1:]))
    programs = lanes.Lanes.compile(own, N_LANES, [batch_of(0)])
    losses_of = compile_losses(programs, found)
    size = config.SIZES[plan.size]
    n_validation = min(size.n_validation, plan.most_tests)
    compiled = time.monotonic()
    with turn:
        began = time.monotonic()
        loss = lambda params: losses_of(params, "validation", n_validation).mean(1)
        tuning, _ = programs.tune(size.rates[cell.optimizer], SEEDS[0], to_tune, plan.n_steps // 2, loss)
        rate = best_rate(tuning)
        params, curves = programs.train(SEEDS[1:], [rate] * N_LANES, batch_of, plan.n_steps)
        tested, seconds = losses_of(params, "test", plan.most_tests), time.monotonic() - began
    by_document = text.sum_by_document(tested, np.arange(tested.shape[1]), found["starts"])
    bits = by_document.sum(1) / np.log(2) / found["num_bytes"].sum()
    blocks = curves.reshape(20, -1, N_LANES).mean(1)
    return dict(
        summary=f"{bits.mean():.4f} bits per byte +- {bits.std(ddof=1):.4f}, rate {rate:g} of "
        f"{', '.join(f'{x:g}' for x in sorted(tuning))}; compiled in {compiled - begin:.0f} s, ran {seconds:.0f} s",
        optimizer=cell.optimizer,
        model=cell.fields(plan.size),
        parameters=count_params(abstract_params(own.model)),
        state_numbers=state_size(own.model, own.sequence_length),
        tuning={f"{rate:g}": loss for rate, loss in sorted(tuning.items())},
        learning_rate=rate,
        seconds=seconds,
        seeds=SEEDS[1:],
        training=np.round(blocks.T, 4).tolist(),
        document_nats=[np.round(nats, 2).tolist() for nats in by_document],
        recalled_nats=[
            [round(float(nats[mask[: len(nats)]].sum(dtype=np.float64)), 1) for mask in found["recalled"]]
            for nats in tested
        ],
    )


def compile_losses(programs: lanes.Lanes, found: dict[str, np.ndarray]) -> Any:
    """Return the function (parameters of all lanes, split, n) -> losses [L, tokens] of the first n windows' targets."""
    model, int32 = programs.config.model, lambda name: found[name].astype(np.int32)
    read_lane = lambda params, tokens, lengths: window_losses(model, params, tokens, None, lengths)
    read = jax.jit(jax.vmap(read_lane, (0, None, None)))
    windows, lengths = (found[name][: text.ROWS].astype(np.int32) for name in ("test", "test_lengths"))
    compiled = read.lower(programs.params, windows, lengths).compile()

    def losses_of(params: Any, split: str, n_windows: int) -> np.ndarray:
        windows, lengths = int32(split), int32(f"{split}_lengths")
        rows = [slice(i, i + text.ROWS) for i in range(0, min(len(windows), n_windows), text.ROWS)]
        losses = np.concatenate([np.asarray(compiled(params, windows[own], lengths[own])) for own in rows], axis=1)
        return losses[:, np.arange(losses.shape[2]) < lengths[: losses.shape[1], None]]

    return losses_of


if __name__ == "__main__":
    tools.run_experiment(measure, Plan(), SMALL_PLAN, report)
