"""Runs side by side in one program (experiments/lanes.py) against runs by the training step alone."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments import lanes
from experiments.lanes import Lanes, double, lane
from experiments.recall_by_state import run as recall
from heinsen.evaluation.probes import answer_loss
from heinsen.parallel import make_mesh, place_batch
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import init_train_state, make_train_step

SIZES = dict(n_layers=2, d_model=16, n_heads=2, d_key=4, d_value=4, vocab_size=70, padded_vocab_size=72)
STEPS = 4  # in two blocks of one cycle


@pytest.mark.parametrize("kind", ["linear", "delta rule"])
def test_lanes_are_the_runs_that_they_stand_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "CYCLES", 1)
    monkeypatch.setattr(recall, "PAIRS", (4, 8))
    config = recall.train_config(recall.config.KINDS[kind] | SIZES | dict(batch_size=4))
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, warmup_steps=2))
    task, seeds, rates = recall.Task("associative", 70), (3, 4), (1e-2, 3e-3)
    of_seed = lambda seed, step: recall.draw(task, seed, step, 4)
    batch_of = lambda step: jax.tree.map(lambda *x: np.stack(x), *(of_seed(seed, step) for seed in seeds))
    programs = Lanes.compile(config, 2, [batch_of(0), batch_of(1)], answer_loss)
    params, losses = programs.train(seeds, rates, batch_of, STEPS)
    mesh = make_mesh(devices=jax.devices()[:1])
    for i, (seed, rate) in enumerate(zip(seeds, rates, strict=True)):
        own = dataclasses.replace(config.optimizer, learning_rate=rate)
        optimizer = make_optimizer(own, STEPS)
        step = make_train_step(config.model, optimizer, mesh, answer_loss)
        state, alone = init_train_state(config.model, optimizer, seed, mesh), []
        for number in range(STEPS):
            batch = {name: x[None] for name, x in of_seed(seed, number).items()}
            state, metrics = step(state, place_batch(mesh, batch, axis=1))
            alone.append(float(metrics["loss"]))
        np.testing.assert_allclose(losses[:, i], alone, rtol=2e-4)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-3), lane(params, i), state.params)


def test_a_grid_is_extended_where_its_best_is_at_the_end() -> None:
    assert double([1.0, 2.0, 4.0], [3.0, 2.0, 2.5]) == []
    assert double([4.0, 1.0, 2.0], [1.0, 3.0, 2.0]) == [8.0, 16.0]
    assert double([1.0, 2.0, 4.0], [1.0, 2.0, np.nan]) == [0.5, 0.25]
    assert double([1.0, 2.0], [np.nan, np.nan]) == [0.5, 0.25]
