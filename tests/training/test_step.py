"""One training step: accumulation, gradient norm, donation, and that it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from heinsen import backend
from heinsen.errors import InputError
from heinsen.models import forward
from heinsen.models.losses import masked_losses
from heinsen.models.masking import mask_tokens
from heinsen.parallel import make_mesh
from heinsen.training import data as training_data
from heinsen.training import devices
from heinsen.training import step as step_module
from heinsen.training.devices import compiler_options
from heinsen.training.optimizer import OptimizerConfig, make_optimizer
from heinsen.training.step import init_train_state, make_train_step
from tests.model_configs import model_config
from tests.runs import run_config

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

MODEL = model_config(d_model=16, implementation="reference")
BATCH, LENGTH = 8, 8
RATE, CLIP = 0.5, 1e-3


def recorder() -> optax.GradientTransformation:
    """Passes gradients on, and keeps the last ones as its state."""
    return optax.GradientTransformation(lambda params: params, lambda grads, state, params=None: (grads, grads))


RECORDING = optax.chain(recorder(), optax.clip_by_global_norm(CLIP), optax.sgd(RATE))


def draw_tokens(rng, n: int) -> jax.Array:
    return jnp.asarray(rng.integers(0, 257, (n, BATCH // n, LENGTH + 1)), jnp.int32)


@pytest.fixture(scope="module")
def one_step():
    """tokens [A, B, T + 1] -> (loss, gradient norm, gradients, params after, params before), from the same start."""
    mesh = make_mesh()
    step = make_train_step(MODEL, RECORDING, mesh)
    start = init_train_state(MODEL, RECORDING, 0, mesh)

    def run(tokens):
        state = jax.tree.map(jnp.copy, start)  # the step consumes it
        state, metrics = step(state, tokens)
        gradients = state.opt_state[0]
        return metrics["loss"], metrics["grad_norm"], gradients, state.params, start.params

    return run


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


def test_loss_is_the_mean_over_all_targets_in_nats(rng, one_step):
    tokens = draw_tokens(rng, 1)
    loss, _, _, _, params = one_step(tokens)
    logits, _ = jax.jit(forward, static_argnums=0)(MODEL, params, tokens[0, :, :-1])
    logits = np.asarray(logits, np.float64)
    assert np.ptp(logits) > 0.1
    top = logits.max(-1, keepdims=True)
    log_probabilities = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    targets = np.asarray(tokens[0, :, 1:, None])
    np.testing.assert_allclose(loss, -np.take_along_axis(log_probabilities, targets, -1).mean(), rtol=1e-6)


def test_accumulated_microbatches_equal_the_whole_batch(rng, one_step):
    tokens = draw_tokens(rng, 1)
    whole_loss, whole_norm, whole_gradients, whole_params, before = one_step(tokens)
    assert np.abs(flat(whole_gradients)).max() > 1e-2  # something to agree on
    assert np.abs(flat(whole_params) - flat(before)).max() > 1e-5
    split = tokens.reshape(4, BATCH // 4, LENGTH + 1)
    loss, norm, gradients, params, _ = one_step(split)
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-6)
    np.testing.assert_allclose(norm, whole_norm, rtol=1e-5)
    np.testing.assert_allclose(flat(gradients), flat(whole_gradients), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(flat(params), flat(whole_params), rtol=1e-5, atol=1e-7)


def test_microbatches_of_a_masked_model_weigh_as_much_as_they_hide(rng):
    """The tokens that begin documents are not hidden: the rows of the second pass have few others."""
    model = model_config(
        d_model=16, n_layers=1, attention="softmax", position="none", objective="masked", document_token=256
    )
    tokens = rng.integers(0, 256, (BATCH, 40)).astype(np.int32)
    tokens[BATCH // 2 :, 2:] = 256
    batch = mask_tokens(model, tokens, 0, 1, np.arange(BATCH))
    hidden = batch["weights"].sum(-1)
    assert hidden[: BATCH // 2].min() == 6 and hidden[BATCH // 2 :].max() == 2
    mesh = make_mesh()
    step, start = make_train_step(model, RECORDING, mesh), init_train_state(model, RECORDING, 0, mesh)
    found = []
    for n_microbatches in (1, 2):
        state, metrics = step(
            jax.tree.map(jnp.copy, start), {name: x.reshape(n_microbatches, -1, 40) for name, x in batch.items()}
        )
        found.append((metrics["loss"], flat(state.opt_state[0])))
    (loss, gradients), (loss_of_two, gradients_of_two) = found
    losses = jax.jit(masked_losses, static_argnums=0)(model, start.params, batch["tokens"], batch["targets"])
    want = np.sum(np.float64(losses) * batch["weights"]) / hidden.sum()
    np.testing.assert_allclose([loss, loss_of_two], want, rtol=1e-6)
    np.testing.assert_allclose(gradients_of_two, gradients, rtol=1e-5, atol=1e-6)
    assert np.abs(gradients).max() > 1e-2
    nothing = batch | {"weights": np.zeros_like(batch["weights"])}
    _, metrics = step(state, {name: x[None] for name, x in nothing.items()})
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0, "a batch of beginnings alone teaches nothing"


@pytest.mark.parametrize("changes", [{}, dict(model__objective="masked", model__attention="softmax")], ids=str)
def test_microbatches_of_processes_are_parts_of_those_of_the_whole_batch(rng, monkeypatch, changes):
    changes = changes | dict(model__position="none", batch_size=12, accumulation_steps=3, sample_tokens=0)
    config, mesh = run_config("unused", **changes), make_mesh()
    windows = rng.integers(0, 256, (12, 9)).astype(np.int32)
    whole = training_data.make_microbatches(config, windows, 7, training_data.rows_by_microbatch(config, mesh))
    if config.model.causal:
        np.testing.assert_array_equal(whole, windows.reshape(3, 4, 9))
    for held in ([0, 2], [1, 3]):
        monkeypatch.setattr(training_data, "process_rows", lambda mesh, n_rows, held=held: np.arange(n_rows)[held])
        rows = training_data.rows_by_microbatch(config, mesh)
        own = training_data.make_microbatches(config, windows[rows], 7, rows)
        jax.tree.map(lambda own, whole, held=held: np.testing.assert_array_equal(own, whole[:, held]), own, whole)


def test_reported_norm_is_the_gradients_before_clipping(rng, one_step):
    _, norm, gradients, params, before = one_step(draw_tokens(rng, 1))
    np.testing.assert_allclose(norm, np.linalg.norm(flat(gradients)), rtol=1e-5)
    update = np.linalg.norm(flat(params) - flat(before))
    assert norm > 100 * CLIP
    np.testing.assert_allclose(update, RATE * CLIP, rtol=1e-2)


@pytest.fixture(scope="module")
def adamw():
    """(the state before the first step, the step, which consumes a state)"""
    config = OptimizerConfig("adamw", 3.0, 3e-2, 3e-3, 2, 0.9, 0.95, 1e-8, 0.1, 1.0)
    mesh, optimizer = make_mesh(), make_optimizer(config, 40)
    return init_train_state(MODEL, optimizer, 0, mesh), make_train_step(MODEL, optimizer, mesh)


def test_steps_consume_their_state_and_memorise_a_batch(rng, adamw):
    start, step = adamw
    state = jax.tree.map(jnp.copy, start)
    tokens = draw_tokens(rng, 1)
    losses = []
    for _ in range(30):
        given = state
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given)), "the old state still takes memory"
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, tokens)))
    assert losses[0] == losses[1], "the first step of a warm-up has rate 0"
    assert abs(losses[0] - np.log(264)) < 0.5, "a fresh model knows nothing"
    assert losses[-1] < 0.5 * losses[0]


def test_a_step_that_is_not_finite_changes_nothing_but_the_counts(rng, adamw):
    """Moments and schedule stay, too: later steps equal those of a run without it."""
    start, step = adamw
    good = [draw_tokens(rng, 1) for _ in range(4)]
    # A token beyond the embedding reads NaN.
    bad = good[0].at[0, 3, 4].set(10**6)
    states, counts = {}, {}
    for name, batches in {"met": [good[0], good[1], bad, bad, good[2], bad, good[3]], "never met": good}.items():
        state, counts[name] = jax.tree.map(jnp.copy, start), []
        for tokens in batches:
            state, metrics = step(state, tokens)
            counts[name].append((int(metrics["skipped"]), int(metrics["skipped_in_a_row"])))
            assert np.isfinite(metrics["loss"]) == (tokens is not bad) and np.isfinite(metrics["param_norm"])
        states[name] = state
        np.testing.assert_allclose(metrics["param_norm"], np.linalg.norm(flat(state.params)), rtol=1e-5)
    assert counts["met"] == [(0, 0), (0, 0), (1, 1), (2, 2), (2, 0), (3, 1), (3, 0)]
    assert counts["never met"] == [(0, 0)] * 4
    jax.tree.map(np.testing.assert_array_equal, states["met"][:2], states["never met"][:2])


def test_initial_state_depends_on_the_seed_alone():
    mesh = make_mesh()
    first, again, other = (flat(init_train_state(MODEL, RECORDING, seed, mesh).params) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


# ---- options of the compiler ---------------------------------------------------------------------


def test_a_step_for_gpus_has_xlas_options_that_this_version_knows(monkeypatch):
    assert compiler_options() == {}, "on a CPU"
    monkeypatch.setattr(devices, "_GPU_OPTIONS", devices._GPU_OPTIONS | {"xla_gpu_of_another_version": True})
    with backend.compiling_for("gpu"):
        found = compiler_options()
        assert {*devices._GPU_OPTIONS} - {*found} == {"xla_gpu_of_another_version"}
        (name,) = found
        monkeypatch.setenv("XLA_FLAGS", f"--{name}=false")
        assert {*found} - {*compiler_options()} == {name}, "what XLA_FLAGS says holds"
        monkeypatch.setenv("HEINSEN_XLA_OPTIONS", "0")
        assert compiler_options() == {}
        monkeypatch.setenv("HEINSEN_XLA_OPTIONS", "off")
        with pytest.raises(InputError, match="^HEINSEN_XLA_OPTIONS=off: set it to 0"):
            compiler_options()


def test_the_step_is_compiled_with_the_options(monkeypatch, rng):
    monkeypatch.setattr(step_module, "compiler_options", lambda: {"xla_of_no_version": True})
    start, step = init_train_state(MODEL, RECORDING, 0, make_mesh()), make_train_step(MODEL, RECORDING, make_mesh())
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_of_no_version'"):
        step.lower(start, draw_tokens(rng, 1)).compile()
