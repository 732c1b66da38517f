"""The paper's recipe: schedule, decay mask, clipping and AdamW against formulas written out here in float64."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from heinsen.models import init_params
from heinsen.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from tests.model_configs import model_config

PAPER = OptimizerConfig("adamw", 3.0, 6e-4, 6e-5, 2000, 0.9, 0.95, 1e-8, 0.1, 1.0)
SMALL = dataclasses.replace(PAPER, warmup_steps=20)
MODEL = model_config(d_model=8)


def exact_rate(config: OptimizerConfig, total_steps: int, step: int) -> float:
    if step < config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = min((step - config.warmup_steps) / (total_steps - config.warmup_steps), 1.0)
    low, high = config.final_learning_rate, config.learning_rate
    return low + (high - low) * (1 + math.cos(math.pi * progress)) / 2


# ---- schedule --------------------------------------------------------------------------------


RATES = {
    0: 0.0,
    1: 3e-5,
    10: 3e-4,
    19: 5.7e-4,
    20: 6e-4,  # warm-up ends
    45: 6e-5 + 5.4e-4 * (1 + math.sqrt(0.5)) / 2,  # a quarter of the cosine
    70: 3.3e-4,  # half of it: the mean of both ends
    120: 6e-5,  # the end
    1000: 6e-5,  # and after it
}


def test_schedule_is_linear_over_the_warmup_then_half_a_cosine():
    rates = jax.jit(make_schedule(SMALL, 120))(jnp.array([*RATES]))
    np.testing.assert_allclose(rates, [*RATES.values()], rtol=1e-6, atol=1e-12)
    without_warmup = jax.jit(make_schedule(dataclasses.replace(SMALL, warmup_steps=0), 100))
    np.testing.assert_allclose(without_warmup(jnp.array([0, 50, 100])), [6e-4, 3.3e-4, 6e-5], rtol=1e-6)


@pytest.mark.parametrize("total_steps", [1, 19, 20])
def test_a_warmup_that_does_not_fit_the_run_is_an_error_with_both_numbers(total_steps):
    with pytest.raises(ValueError, match=rf"warmup_steps = 20 .* {total_steps} steps.*total_tokens"):
        make_schedule(SMALL, total_steps)
    with pytest.raises(ValueError, match="warmup_steps"):
        make_optimizer(SMALL, total_steps)
    make_schedule(SMALL, 21)


IMPOSSIBLE = {
    "learning_rate": (0.0, -1e-3),
    "final_learning_rate": (-1e-9,),
    "b1": (1.0, -0.1),
    "b2": (1.0, 1.5),
    "eps": (0.0,),
    "weight_decay": (-0.1,),
    "clip_norm": (0.0,),
    "muon_multiple": (0.0,),
}


@pytest.mark.parametrize(("field", "value"), [(name, value) for name in IMPOSSIBLE for value in IMPOSSIBLE[name]])
def test_bad_values_name_their_field(field, value):
    """NaN, infinity and numbers beyond float32, of every field: tests/training/test_bad_input.py."""
    with pytest.raises(ValueError, match=rf"optimizer\.{field} = {value}: it must"):
        dataclasses.replace(PAPER, **{field: value})


# ---- decay -----------------------------------------------------------------------------------

KERNELS = {"layers/w1/kernel", "layers/gate/kernel"}
DECAYED = {"embedding", "position/dense/kernel", "layers/w1/kernel", "layers/w2/kernel", "layers/w3/kernel"}
UNDECAYED = {
    "position/dense/bias",
    "layers/norm/scale",
    "layers/norm/bias",
    "layers/w1/bias",
    "layers/w2/bias",
    "norm/scale",
    "norm/bias",
}


def leaves(tree) -> dict[str, jax.Array]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}


@pytest.fixture
def params(rng):
    """Numbers in the shapes of the real model's parameters."""
    shapes = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), shapes)


def test_a_step_without_gradient_shrinks_matrices_and_leaves_biases_and_norms(params):
    """Stacked over layers, a bias is a two-dimensional array, too."""
    config = dataclasses.replace(PAPER, warmup_steps=0, learning_rate=0.5, weight_decay=0.1)
    optimizer = make_optimizer(config, 100)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
    before, after = leaves(params), leaves(optax.apply_updates(params, updates))
    assert before.keys() == DECAYED | UNDECAYED
    for name in DECAYED:
        np.testing.assert_allclose(after[name], 0.95 * np.asarray(before[name]), rtol=1e-6, err_msg=name)
    for name in UNDECAYED:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)


# ---- AdamW and Muon --------------------------------------------------------------------------------


def test_steps_equal_adamw_with_clipping_in_float64(rng):
    config = dataclasses.replace(PAPER, learning_rate=0.02, final_learning_rate=0.002, warmup_steps=2)
    total_steps = 6
    shapes = {"kernel": (3, 4), "bias": (4,), "embedding": (5, 3), "scale": (3,)}
    params = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    optimizer = make_optimizer(config, total_steps)
    tree = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    opt_state, apply = optimizer.init(tree), jax.jit(optimizer.update)
    first, second = ({name: np.zeros(shape) for name, shape in shapes.items()} for _ in range(2))
    clipped = []
    # From gradients that are clipped to such that are not, and back.
    for step, size in enumerate([3.0, 0.01, 0.1, 10.0, 0.001, 1.0]):
        grads = {name: size * rng.standard_normal(shape) for name, shape in shapes.items()}
        updates, opt_state = apply(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), grads), opt_state, tree)
        tree = optax.apply_updates(tree, updates)

        norm = math.sqrt(sum(np.sum(g**2) for g in grads.values()))
        clipped.append(norm > config.clip_norm)
        rate = exact_rate(config, total_steps, step)
        for name, grad in grads.items():
            grad = grad * min(1.0, config.clip_norm / norm)
            first[name] = config.b1 * first[name] + (1 - config.b1) * grad
            second[name] = config.b2 * second[name] + (1 - config.b2) * grad**2
            first_unbiased = first[name] / (1 - config.b1 ** (step + 1))
            second_unbiased = second[name] / (1 - config.b2 ** (step + 1))
            update = first_unbiased / (np.sqrt(second_unbiased) + config.eps)
            decay = config.weight_decay if name in ("kernel", "embedding") else 0.0
            params[name] = params[name] - rate * (update + decay * params[name])
            np.testing.assert_allclose(tree[name], params[name], rtol=1e-5, atol=1e-6, err_msg=f"{name}, step {step}")
    assert set(clipped) == {True, False}


def orthogonalized(m):
    """Singular values pulled towards 1 by five steps of the quintic iteration."""
    x = m / (np.linalg.norm(m) + 1e-8)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_muon_orthogonalizes_the_momentum_of_each_layers_matrices_and_of_nothing_else(rng):
    """In float64; all else takes the steps of AdamW. Both decay as before."""
    adam = dataclasses.replace(PAPER, learning_rate=0.02, final_learning_rate=0.002, warmup_steps=2, clip_norm=math.inf)
    config, steps, b = dataclasses.replace(adam, name="muon"), 4, 0.95
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    matrices = lambda: {"w1": {"kernel": draw(2, 3, 4), "bias": draw(2, 4)}, "gate": {"kernel": draw(2, 6, 2)}}
    draw_tree = lambda: {"embedding": draw(5, 3), "position": {"kernel": draw(3, 3)}, "layers": matrices()}
    muon_tree = adam_tree = draw_tree()
    optimizers = [make_optimizer(x, steps) for x in (config, adam)]
    muon_state, adam_state = (x.init(muon_tree) for x in optimizers)
    exact = {name: np.float64(x) for name, x in leaves(muon_tree).items() if name in KERNELS}
    momentum = {name: np.zeros(x.shape) for name, x in exact.items()}
    for step in range(1, steps + 1):
        grads = draw_tree()
        updates, muon_state = optimizers[0].update(grads, muon_state, muon_tree)
        muon_tree = optax.apply_updates(muon_tree, updates)
        updates, adam_state = optimizers[1].update(grads, adam_state, adam_tree)
        adam_tree = optax.apply_updates(adam_tree, updates)
        for name, x in exact.items():
            grad = np.float64(leaves(grads)[name])
            momentum[name] = b * momentum[name] + (1 - b) * grad
            nesterov = b * momentum[name] / (1 - b ** (step + 1)) + (1 - b) * grad / (1 - b**step)
            direction = np.stack([orthogonalized(m) for m in nesterov]) * 0.2 * 3.0 * math.sqrt(max(x.shape[1:]))
            exact[name] = x - exact_rate(config, steps, step - 1) * (direction + 0.1 * x)
    found, of_adam = leaves(muon_tree), leaves(adam_tree)
    for name, x in found.items():
        expected = exact[name] if name in KERNELS else of_adam[name]
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-5, err_msg=name)
    assert not np.allclose(found["layers/w1/kernel"], of_adam["layers/w1/kernel"], atol=1e-2)
