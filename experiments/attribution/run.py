"""What the attention is worth, what the block, each part and the optimizer: one change at a time, 2M parameters.

    python experiments/attribution/run.py --corpus=corpus --out=runs/attribution [--minutes=60]
    python experiments/attribution/run.py --report --out=experiments/attribution

CORPUS is what scripts/build_corpus.py builds; where OUT/text.npz is there, it is not read. config.py lists the cells.
The runs of a cell train side by side in one program: four learning rates on half of the bytes, more where the best is
at the end of the grid, then four seeds at the best rate. Rerun the same command to resume, at the cell. OUT receives cells/,
and the report: report.md, results.json, attribution.png.
"""

import time
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import define_flags

define_flags(__name__, "attribution")

import jax
import numpy as np
from absl import flags

from experiments import lanes, tools
from experiments.attribution import config, report, text
from heinsen.config import from_mapping
from heinsen.models import abstract_params, count_params, state_size
from heinsen.models.masking import window_losses
from heinsen.training.config import TrainConfig

if __name__ == "__main__":
    flags.DEFINE_float("minutes", 1e9, "No cell is begun after so many minutes.")


class Plan(NamedTuple):
    """How much of everything."""

    cells: tuple[str, ...] = tuple(config.CELLS)
    n_steps: int = 1954  # of 4 windows of 1024 bytes: 8M
    n_tests: int = 10**9  # windows


SMALL_PLAN = Plan(cells=config.SMALL, n_steps=120, n_tests=64)
SEEDS = 0, 1, 2, 3, 4  # the first one tunes
N_LANES = 4
MOST_EXTENSIONS = 3  # of a grid of rates


def measure(plan: Plan, corpus: Path, out: Path, parallel: int) -> dict[str, Any]:
    """Do what is left of the experiment, and return its results. Raises ExperimentError."""
    base = config.get_config()
    file = text.prepare(corpus, out, SEEDS, base.sequence_length, base.batch_size, plan.n_steps)
    with np.load(file) as loaded:
        found = {name: loaded[name] for name in loaded}
    minutes = getattr(flags.FLAGS, "minutes", 1e9)
    run = lambda name, cell, turn: measure_cell(plan, cell, found, turn)
    cells = lanes.run_cells({name: config.CELLS[name] for name in plan.cells}, run, out, minutes)
    return dict(
        settings=base.to_dict(),
        steps=plan.n_steps,
        n_grams=text.N_GRAMS,
        recalled=found["recalled"].sum(1).tolist(),
        documents=dict(
            tokens=np.diff(found["starts"]).tolist(),
            num_bytes=found["num_bytes"].tolist(),
            sources=found["sources"].tolist(),
            names=found["names"].tolist(),
        ),
        cells=cells,
    )


def train_config(cell: dict[str, Any]) -> TrainConfig:
    mapping = config.get_config()
    mapping.optimizer.name = cell["optimizer"]
    mapping.model.update(cell["model"])
    return from_mapping(TrainConfig, mapping.to_dict())


def measure_cell(plan: Plan, cell: dict[str, Any], found: dict[str, np.ndarray], turn: lanes.Turn) -> dict[str, Any]:
    """Tune and train a cell."""
    each, begin = train_config(cell), time.monotonic()
    train, model, wide = found["train"], each.model, lambda x: x.astype(np.int32)

    def batch_of(seeds: tuple[int, ...]) -> Any:
        return lambda step: train[list(seeds), step].astype(np.int32)

    tuners = SEEDS[:1] * N_LANES
    programs = lanes.Lanes.compile(each, N_LANES, [batch_of(tuners)(0)])
    read = jax.vmap(
        lambda params, tokens, lengths: window_losses(model, params, tokens, None, lengths), (0, None, None)
    )
    test_windows, lengths = wide(found["test"]), found["test_lengths"].astype(np.int32)
    read = jax.jit(read).lower(programs.params, test_windows[: text._ROWS], lengths[: text._ROWS]).compile()

    def losses_of(params: Any, windows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """[L, tokens] of the windows' targets."""
        rows = range(0, min(len(windows), plan.n_tests), text._ROWS)
        parts = [np.asarray(read(params, windows[i : i + text._ROWS], lengths[i : i + text._ROWS])) for i in rows]
        every = np.concatenate(parts, axis=1)
        return every[:, np.arange(every.shape[2]) < lengths[: every.shape[1], None]]

    compiled = time.monotonic()
    with turn:
        began, tuning, rates = time.monotonic(), {}, list(config.RATES[cell["optimizer"]])
        for _ in range(1 + MOST_EXTENSIONS):
            own = [*rates, *([rates[-1]] * N_LANES)][:N_LANES]
            params, _ = programs.train(tuners, own, batch_of(tuners), plan.n_steps // 2)
            valid = losses_of(params, wide(found["validation"]), found["validation_lengths"].astype(np.int32))
            tuning |= {rate: float(loss) for rate, loss in zip(own, valid.mean(1), strict=True)}
            if not (rates := lanes.double(list(tuning), list(tuning.values()))):
                break
        rate = min(tuning, key=lambda rate: (np.isnan(tuning[rate]), tuning[rate]))
        seeds = SEEDS[1:]
        params, curves = programs.train(seeds, [rate] * N_LANES, batch_of(seeds), plan.n_steps)
        tested = losses_of(params, test_windows, lengths)
        seconds = time.monotonic() - began
    document = np.searchsorted(found["starts"], np.arange(tested.shape[1]), side="right") - 1
    n_documents, bits = len(found["num_bytes"]), 1 / np.log(2)
    by_document = [np.bincount(document, each, n_documents) for each in tested.astype(np.float64)]
    recalled = found["recalled"][:, : tested.shape[1]]
    total = tested.sum(1) * bits / found["num_bytes"].sum()
    tail = max(plan.n_steps // 20, 1)
    return dict(
        summary=f"{total.mean():.4f} bits per byte +- {total.std(ddof=1):.4f}, rate {rate:g} of {sorted(tuning)}, "
        f"compiled in {compiled - begin:.0f} s, ran {seconds:.0f} s",
        optimizer=cell["optimizer"],
        model=cell["model"],
        parameters=count_params(abstract_params(model)),
        state_numbers=state_size(model, each.sequence_length),
        tuning={f"{rate:g}": loss for rate, loss in sorted(tuning.items())},
        learning_rate=rate,
        seconds=seconds,
        seeds=seeds,
        training=np.round(curves[: plan.n_steps // tail * tail].reshape(-1, tail, N_LANES).mean(1).T, 4).tolist(),
        document_nats=[np.round(each, 2).tolist() for each in by_document],
        recalled_nats=[[round(float(nats[mask].sum()), 1) for mask in recalled] for nats in tested.astype(np.float64)],
    )


if __name__ == "__main__":
    tools.run_experiment(measure, Plan(), SMALL_PLAN, report)
