"""Endless training contexts: the state of each row carries over to the next batch, and to a resumed run."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from heinsen.config import ConfigError
from heinsen.data.dataset import TokenDataset
from heinsen.data.loader import evaluation_batches
from heinsen.evaluation.loss import begin_streams, evaluate, make_stream_eval_step
from heinsen.models import (
    init_model_state,
    init_params,
    mean_loss_with_state,
    next_token_losses,
    next_token_losses_with_state,
)
from heinsen.parallel import make_mesh
from heinsen.training.checkpoint import Checkpoints
from heinsen.training.data import RunData
from heinsen.training.loop import train
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import abstract_train_state, init_train_state, make_train_step
from heinsen.training.validation import Validator
from tests.model_configs import model_config
from tests.runs import EOT, STEPS, copy_run, draw_text, finish, read_log, run_config, without_timing, write_split
from tests.test_parallel import start_two

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

BATCH, LENGTH, BATCHES = 4, 4, 3
KINDS = {
    "log values, documents": {"document_token": EOT},
    "two kinds, real values, GPT-2's block": {"attention": "heinsen,linear", "value_domain": "real", "block": "gpt2"},
    "no positions": {"position": "none"},
}
QUICK = "log values, documents"


def small(**changes):
    return model_config(d_model=16, implementation="scan", **changes)


def recorder() -> optax.GradientTransformation:
    """Keeps the last gradients as its state, and leaves the parameters alone."""
    update = lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads)
    return optax.GradientTransformation(lambda params: params, update)


def draw_texts(rng, n_rows=BATCH) -> np.ndarray:
    """Rows of several windows, in documents of a few tokens."""
    texts = rng.integers(0, 257, (n_rows, BATCHES * LENGTH + 1)).astype(np.int32)
    texts[rng.random(texts.shape) < 0.15] = EOT
    texts[0, LENGTH] = 0  # at least one document continues from the first window into the second
    return texts


def windows(texts: np.ndarray) -> list[np.ndarray]:
    return [texts[:, i * LENGTH : (i + 1) * LENGTH + 1] for i in range(BATCHES)]


def in_passes(window: np.ndarray, n_passes: int) -> np.ndarray:
    return window.reshape(-1, n_passes, LENGTH + 1).swapaxes(0, 1)


@functools.cache
def compiled_step(model):
    return make_train_step(model, recorder(), make_mesh(), carry_rows=BATCH)


def take_steps(model, texts, n_passes=1):
    """Return the metrics and the state after each batch; the parameters stay those of seed 0."""
    state, results = init_train_state(model, recorder(), 0, make_mesh(), BATCH), []
    for window in windows(texts):
        state, found = compiled_step(model)(state, jnp.asarray(in_passes(window, n_passes)))
        results.append((found, jax.tree.map(np.asarray, state)))
    return results


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


def assert_same_state(got, want, **tolerances):
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, **tolerances), got, want)


# ---- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind != QUICK)) for kind in KINDS])
def test_losses_are_those_of_one_pass_over_the_whole_text(rng, kind):
    model, texts = small(**KINDS[kind]), draw_texts(rng)
    params = init_params(model, jax.random.key(0))
    losses = np.asarray(jax.jit(next_token_losses, static_argnums=0)(model, params, texts))
    results = take_steps(model, texts)
    fresh = init_train_state(model, recorder(), 0, make_mesh(), BATCH)
    alone = compiled_step(model)(fresh, jnp.asarray(windows(texts)[1][None]))[1]
    for i, (found, _) in enumerate(results):
        np.testing.assert_allclose(found["loss"], losses[:, i * LENGTH : (i + 1) * LENGTH].mean(), rtol=1e-5)
    assert abs(results[1][0]["loss"] - alone["loss"]) > 1e-4, "what came before makes a difference"


def test_passes_equal_one_pass_over_the_whole_batch(rng):
    texts, model = draw_texts(rng), small(**KINDS[QUICK])
    for (found, state), (want, whole) in zip(take_steps(model, texts, 2), take_steps(model, texts), strict=True):
        np.testing.assert_allclose(found["loss"], want["loss"], rtol=1e-6)
        np.testing.assert_allclose(flat(state.opt_state), flat(whole.opt_state), rtol=1e-4, atol=1e-6)
        assert_same_state(state.carry, whole.carry, rtol=1e-5, atol=1e-5)  # row by row


def test_no_gradient_flows_through_the_state(rng):
    """The gradient of a batch is that with the state as a constant, and not that of the loss in the whole text."""
    texts, model = draw_texts(rng), small(**KINDS[QUICK])
    params = init_params(model, jax.random.key(0))

    @jax.jit
    def grads(params):
        before = next_token_losses_with_state(model, params, texts[:, : LENGTH + 1])[1]
        window = texts[:, LENGTH : 2 * LENGTH + 1]
        constant = jax.grad(lambda params: mean_loss_with_state(model, params, window, state=before)[0])
        through = jax.grad(lambda params: jnp.mean(next_token_losses(model, params, texts)[:, LENGTH : 2 * LENGTH]))
        return constant(params), through(params)

    constant, through = map(flat, grads(params))
    got = flat(take_steps(model, texts)[1][1].opt_state)
    np.testing.assert_allclose(got, constant, rtol=1e-4, atol=1e-6)
    assert np.abs(got - through).max() > 1e-3


def test_a_step_that_is_not_finite_makes_all_rows_begin_anew(rng):
    texts, model = draw_texts(rng), small(**KINDS[QUICK])
    empty = init_model_state(model, BATCH)
    good = [jnp.asarray(window[None]) for window in windows(texts)]
    bad = good[1].at[0, 2, 3].set(10**6)  # a token beyond the embedding reads NaN
    step = compiled_step(model)
    state, _ = step(init_train_state(model, recorder(), 0, make_mesh(), BATCH), good[0])
    state, found = step(state, bad)
    assert not np.isfinite(found["loss"]) and found["skipped_in_a_row"] == 1
    assert_same_state(state.carry, empty)
    after_bad, _ = step(state, good[2])
    fresh, _ = step(init_train_state(model, recorder(), 0, make_mesh(), BATCH), good[2])
    assert_same_state(after_bad.carry, fresh.carry)
    # A state that makes every loss NaN is gone after one step.
    carry = after_bad.carry._replace(position=after_bad.carry.position.at[1, 2].set(jnp.nan))
    state, found = step(after_bad._replace(carry=carry), good[0].at[..., 0].set(0))
    assert not np.isfinite(found["loss"])
    state, found = step(state, good[0])
    assert np.isfinite(found["loss"]) and found["skipped"] == 2


def test_a_state_that_is_not_finite_is_never_carried_on(rng):
    """Even if the loss does not show it."""
    model, texts = small(), draw_texts(rng)

    def spoiling_loss(model, params, tokens, mesh, state):
        loss, after = mean_loss_with_state(model, params, tokens, mesh, state)
        value = jnp.asarray([0.0, jnp.nan, jnp.inf])[tokens[1, 0]]
        return loss, after._replace(position=after.position.at[1, 2].add(value))

    step = make_train_step(model, recorder(), make_mesh(), spoiling_loss, BATCH)
    state = init_train_state(model, recorder(), 0, make_mesh(), BATCH)
    for kind, skipped in ((0, 0), (1, 1), (0, 1), (2, 2)):
        texts[1, 0] = kind
        state, found = step(state, jnp.asarray(texts[None, :, : LENGTH + 1]))
        assert np.isfinite(found["loss"]) and found["skipped"] == skipped
        assert state.carry.n_tokens.tolist() == [0 if kind else LENGTH] * BATCH


DEVICES = """
import sys
import jax, numpy as np, optax
from heinsen.parallel import AXES, MeshConfig, make_mesh, place_batch
from heinsen.training.step import init_train_state, make_train_step
from heinsen.training.validation import Validator
from tests.model_configs import model_config

sizes, changes, seed = map(eval, sys.argv[1:])
rng = np.random.default_rng(seed)
texts = rng.integers(0, 257, (8, 33)).astype(np.int32)
texts[rng.random(texts.shape) < 0.05] = 256

def run(model, mesh):
    state, losses, optimizer = init_train_state(model, optax.sgd(0.1), 0, mesh, 8), [], optax.sgd(0.1)
    step = make_train_step(model, optimizer, mesh, carry_rows=8)
    for i in range(2):
        window = texts[:, 16 * i : 16 * i + 17].reshape(4, 2, 17).swapaxes(0, 1)
        state, metrics = step(state, place_batch(mesh, window, axis=1))
        losses.append(float(metrics["loss"]))
    return losses, state

one = jax.make_mesh((1,) * 4, AXES, devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,) * 4)
model = model_config(implementation="scan", document_token=256, **changes)
want, whole = run(model, one)
losses, state = run(model, make_mesh(MeshConfig(*sizes)))
np.testing.assert_allclose(losses, want, rtol=1e-5)
jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), state.carry, whole.carry)
h = jax.tree.leaves(state.carry.attention)[0]
assert h.addressable_shards[0].data.shape[:2] == (8 // (sizes[0] * sizes[1]), 2 // sizes[2])
"""


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((1, 2, 1, 2), {}),
        pytest.param((4, 1, 1, 1), {}, marks=LONG),
        pytest.param((1, 1, 2, 2), {}, marks=LONG),
        pytest.param((2, 1, 2, 1), {"value_domain": "real"}, marks=LONG),
        pytest.param((4, 1, 1, 1), {"attention": "window", "window": 4, "position": "none"}, marks=LONG),
    ],
    ids=str,
)
def test_a_mesh_agrees_with_one_device(commands, rng, sizes, changes):
    arguments = map(repr, (sizes, changes, int(rng.integers(2**31))))
    done = commands.run("-W", "error", "-c", DEVICES, *arguments, devices=4)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("mixture"), np.random.default_rng(0)
    for name, n_tokens in (("a", 700), ("b", 300)):
        write_split(folder / name / "train", draw_text(rng, n_tokens))
        write_split(folder / name / "validation", draw_text(rng, 200))
    return f"{folder / 'a'}:3,{folder / 'b'}:1"


# ---- validation ----------------------------------------------------------------------------------


def test_validation_carries_the_state_along_each_row(rng, data):
    model, dataset, mesh = small(document_token=EOT), TokenDataset(data / "validation"), make_mesh()
    params = init_params(model, jax.random.key(0))
    batches = evaluation_batches(dataset, LENGTH, 3, in_streams=True)
    state = begin_streams(model, mesh, 3)
    result = evaluate(make_stream_eval_step(model, mesh), params, batches, mesh, 1.0, state)
    stream = np.concatenate([[EOT], dataset.read(0, dataset.num_tokens)]).astype(np.int32)
    part = len(batches) * LENGTH
    rows = np.full((3, part + 1), EOT, np.int32)
    for row, first in zip(rows, range(0, dataset.num_tokens, part), strict=True):
        text = stream[first : first + part + 1]
        row[: len(text)] = text
    nats = np.asarray(jax.jit(next_token_losses, static_argnums=0)(model, params, rows)).reshape(-1)
    assert result.tokens == dataset.num_tokens
    assert result.loss == pytest.approx(nats[: dataset.num_tokens].mean(), rel=1e-5)


@pytest.mark.parametrize("validation_tokens", [None, 2 * LENGTH])
def test_validation_does_not_depend_on_the_rows_of_a_pass(mixture, validation_tokens):
    """Streams of the batch's rows, some of which may be empty, each read from its beginning."""
    losses, params = [], None
    for passes in (1, 2, 4):
        sizes = dict(sequence_length=LENGTH, batch_size=BATCH, accumulation_steps=passes, carry_state=True)
        config = run_config(mixture, validation_tokens=validation_tokens or 10**6, **sizes)
        params = init_params(config.model, jax.random.key(0)) if params is None else params
        data = RunData.open(config, make_mesh())
        result, metrics = Validator(config, make_mesh(), data)(params)
        losses.append([result.tokens, *metrics.values()])
    assert losses[0][0] == 2 * (validation_tokens or 200)
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-6)


# ---- runs ----------------------------------------------------------------------------------------


def last_state(workdir, config):
    optimizer = make_optimizer(config.optimizer, config.total_steps)
    abstract = abstract_train_state(config.model, optimizer, make_mesh(), config.carry_rows)
    with Checkpoints(workdir, 3, warn=pytest.fail) as checkpoints:
        return checkpoints.restore_newest(abstract, config.fingerprint)


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(run, mixture, tmp_path):
    """One that starts from the parameters of a run which carried nothing, and reads a mixture in two passes."""
    sizes = dict(total_tokens=12 * BATCH * LENGTH, sequence_length=LENGTH, batch_size=BATCH, accumulation_steps=2)
    every = dict(checkpoint_every=5, validate_every=6, init_from=str(run.workdir))
    options = dict(carry_state=True, model__document_token=EOT, optimizer__name="muon")
    config = run_config(mixture, **options, **sizes, **every)
    train(config, tmp_path / "whole")
    whole, log = last_state(tmp_path / "whole", config), read_log(tmp_path / "whole")
    assert whole.step == 12 and whole.state.carry.n_tokens.max() > 8 * LENGTH
    before = [entry["loss"] for entry in run.log if "loss" in entry]
    assert log[0]["loss"] < before[0] - 0.5, "it starts from trained parameters"

    resumed = copy_run(tmp_path / "whole", tmp_path / "resumed", keep=lambda step: step == 5)
    train(config, resumed)
    again = last_state(resumed, config)
    assert again.position == whole.position and without_timing(read_log(resumed)) == without_timing(log)
    jax.tree.map(np.testing.assert_array_equal, again.state, whole.state)


@pytest.mark.long
def test_two_processes_of_two_devices_give_the_losses_of_one(mixture, commands, tmp_path):
    sizes = dict(total_tokens=12 * 8 * 16, batch_size=8, accumulation_steps=2, checkpoint_every=12, carry_state=True)
    every = dict(validate_every=6)
    for process in start_two(commands, mixture, tmp_path / "two", mesh__data=2, mesh__sequence=2, **sizes, **every):
        end = finish(process)
        assert end.returncode == 0, end.stderr
    train(run_config(mixture, **sizes, **every), tmp_path / "one")
    found, want = ([*map(losses_of, read_log(tmp_path / name))] for name in ("two", "one"))
    assert len(want) == 14
    np.testing.assert_allclose(found, want, rtol=1e-4)


def losses_of(entry):
    return entry.get("loss", entry.get("validation_loss"))


def test_a_run_that_carries_nothing_is_as_before(run):
    """Its checkpoints hold nothing new."""
    record = run.workdir / "checkpoints" / str(STEPS) / "_CHECKPOINT_METADATA"
    arrays = json.loads(record.read_text())["custom_metadata"]["record"]["arrays"]
    assert {name.split("/")[0] for name in arrays} == {"params", "opt_state", "skipped"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__attention": "heinsen,softmax"},
            "model.attention = 'heinsen,softmax' has layers that keep every token",
        ),
        ({"model__attention": "sigmoid"}, "model.attention = 'sigmoid' has layers that keep every token: choose"),
        ({"model__objective": "masked"}, "model.objective = 'masked' reads whole windows: set it to next_token"),
        (
            {"model__position": "learned", "model__n_positions": 64},
            "model.position = 'learned' ends after n_positions = 64 tokens: choose recurrent or none",
        ),
    ],
    ids=str,
)
def test_models_without_a_state_to_carry_are_refused(changes, message):
    run_config("data", **changes)
    with pytest.raises(ConfigError, match="carry_state = True carries a state of constant size on .*") as error:
        run_config("data", carry_state=True, **changes)
    assert message in str(error.value) and "\n" not in str(error.value)
