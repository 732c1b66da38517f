"""Runs side by side in one program (experiments/lanes.py) against runs by the training step alone."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import lanes
from experiments.lanes import Lanes, extend, grids
from experiments.recall_by_state import run as recall
from heinsen.evaluation.probes import answer_loss
from heinsen.training.optimizer import make_optimizer_of_rate, make_schedule
from heinsen.training.step import init_function, make_step

pytest_plugins = ["tests.run_fixtures"]

SIZES = dict(n_layers=1, d_model=16, n_heads=2, d_key=4, d_value=4, vocab_size=70, padded_vocab_size=72)
STEPS = 4  # in two blocks of one cycle


@pytest.mark.long
@pytest.mark.parametrize("over_lanes", [lanes.over_lanes, lambda step, n: jax.vmap(step)])
@pytest.mark.usefixtures("compile_cache")
def test_lanes_are_the_runs_that_they_stand_for(monkeypatch: pytest.MonkeyPatch, over_lanes: Any) -> None:
    """Of the kind whose functions have most for vmap to transform, by the optimizer that compiles soonest.

    Two runs in three lanes.
    """
    monkeypatch.setattr(lanes, "over_lanes", over_lanes)
    monkeypatch.setattr(lanes, "CYCLES", 1)
    monkeypatch.setattr(recall, "PAIRS", (1, 2))
    config = recall.train_config(recall.config.KINDS["delta rule"] | SIZES | dict(batch_size=4))
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name="adamw", warmup_steps=1))
    task, seeds, rates = recall.Task("associative", 70), (3, 4), (1e-2, 3e-3)
    of_seed = lambda seed, step: recall.draw(task, seed, step, 4)
    batch_of = lambda step: jax.tree.map(lambda *x: np.stack(x), *(of_seed(seed, step) for seed in (*seeds, 5)))
    programs = Lanes.compile(config, 3, [batch_of(0), batch_of(1)], answer_loss)
    params, losses = programs.train(seeds, rates, batch_of, STEPS)
    schedules = [make_schedule(dataclasses.replace(config.optimizer, learning_rate=x), STEPS) for x in rates]

    def optimizer(i: jax.Array | int) -> optax.GradientTransformation:
        """That of run i; one program has the steps of all."""
        schedule = lambda count: jnp.stack([each(count) for each in schedules])[i]
        return make_optimizer_of_rate(config.optimizer, schedule)

    init = jax.jit(lambda i, seed: init_function(config.model, optimizer(i), seed)())
    step = jax.jit(lambda i, *args: make_step(config.model, optimizer(i), loss=answer_loss)(*args))
    for i, seed in enumerate(seeds):
        state, alone = init(i, seed), []
        for number in range(STEPS):
            state, metrics = step(i, state, jax.tree.map(lambda x: x[None], of_seed(seed, number)))
            alone.append(float(metrics["loss"]))
        np.testing.assert_allclose(losses[:, i], alone, rtol=2e-4)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=2e-3),
            jax.tree.map(lambda x, i=i: x[i], params),
            state.params,
        )


def test_a_grid_is_extended_where_its_best_is_at_the_end() -> None:
    assert extend({1.0: 3.0, 2.0: 2.0, 4.0: 2.5}) == []
    assert extend({4.0: 1.0, 1.0: 3.0, 2.0: 2.0}) == [8.0, 16.0]
    assert extend({1.0: 1.0, 2.0: 2.0, 4.0: np.nan}) == [0.5, 0.25]
    assert extend({2.0: np.nan, 1.0: np.nan}) == [0.5, 0.25]


def test_a_grid_is_extended_while_its_best_is_at_the_end_and_three_times_at_most() -> None:
    losses, tried = {}, []
    for rates in grids([1.0, 2.0, 3.0], losses):
        tried.append(rates)
        losses |= {rate: abs(rate - 6) for rate in rates}
    assert tried == [[1.0, 2.0, 3.0], [6.0, 12.0]]
    assert len(list(grids([1.0], {1.0: np.nan}))) == 4
