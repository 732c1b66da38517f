"""Masked language modelling: what is hidden, that it is not seen, and what the model computes from the rest."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen.decoding import Sampling, generate, prefill
from heinsen.models import LanguageModel, forward, init_model_state, masked_loss, mean_loss, next_token_losses
from heinsen.models.cross_entropy import token_losses
from heinsen.models.losses import masked_logits
from heinsen.models.masking import FRACTION, ROUNDS, mask_tokens, window_losses
from heinsen.plan.plan import plan
from heinsen.training.loop import train
from tests.model_configs import model_config
from tests.models.model64 import (
    DOCUMENT,
    SIZES,
    B,
    T,
    assert_close,
    assert_gradients,
    draw_params,
    draw_tokens,
    logits64,
    losses64,
)
from tests.models.test_kinds import EQUAL
from tests.runs import copy_run, read_log, run_config, without_timing

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

MODEL = model_config(**SIZES, objective="masked", document_token=DOCUMENT)
GATED = [  # the directions are gated separately
    model_config(
        **SIZES | dict(implementation="chunked", forget_gate="head", value_domain=domain),
        objective="masked",
        document_token=DOCUMENT,
    )
    for domain in ("log", "real")
]


# ---- which tokens --------------------------------------------------------------------------------


def test_as_many_tokens_are_hidden_as_bert_hides_and_in_its_way(rng):
    model = model_config(objective="masked", document_token=256)
    tokens = rng.integers(0, 200, (200, 100))
    tokens[:, ::9] = 256
    batch = mask_tokens(model, tokens, 0, 1, np.arange(200))
    chosen, becomes = batch["weights"] == 1, batch["tokens"]
    np.testing.assert_array_equal(batch["targets"], tokens)
    np.testing.assert_array_equal(becomes[~chosen], tokens[~chosen])
    np.testing.assert_array_equal(chosen.sum(-1), 15)
    assert not np.any(chosen & (tokens == 256)) and np.all((becomes == 256) == (tokens == 256))
    is_mask = becomes[chosen] == model.mask_token
    stays = becomes[chosen] == tokens[chosen]
    # To five standard deviations of 3000 draws.
    assert model.mask_token == 257 and abs(is_mask.mean() - 0.8) < 0.037
    assert abs(stays.mean() - 0.1) < 0.03 and abs((~is_mask & ~stays).mean() - 0.1) < 0.03
    assert np.max(becomes[chosen][~is_mask]) < 257 and len(np.unique(becomes[chosen][~is_mask & ~stays])) > 100
    assert np.all(chosen.sum(0)[tokens[0] != 256] > 0), "every place has its turn"


def test_what_is_hidden_follows_from_seed_step_and_row_alone(rng):
    model = model_config(objective="masked")
    tokens = np.repeat(rng.integers(0, 257, (1, 64)), 6, axis=0)
    hide = lambda seed, step, rows: mask_tokens(model, tokens[rows], seed, step, np.asarray(rows))["tokens"]
    whole = hide(5, 7, range(6))
    np.testing.assert_array_equal(hide(5, 7, [1, 4]), whole[[1, 4]])
    assert len(np.unique(whole, axis=0)) == 6, "rows differ"
    for seed, step in ((6, 7), (5, 8), (7, 5)):
        assert not np.any(np.all(hide(seed, step, range(6)) == whole, axis=-1))


def test_a_row_of_document_tokens_has_nothing_to_hide(rng):
    tokens = np.full((2, 20), DOCUMENT)
    tokens[1, 4] = 5
    batch = mask_tokens(MODEL, tokens, 0, 0, np.arange(2))
    assert batch["weights"].sum() == batch["weights"][1, 4] == 1


# ---- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [MODEL, *(pytest.param(model, marks=pytest.mark.long) for model in GATED)],
    ids=["plain", "gated", "gated, real values"],
)
def test_logits_and_gradients_are_those_of_the_float64_model(rng, model):
    """Every token sees its whole document, and positions come from both ends of it."""
    params, targets = draw_params(model, rng), draw_tokens(model, rng)
    batch = mask_tokens(model, targets, 0, 0, np.arange(B))
    batch["weights"] /= batch["weights"].sum()

    def run(params, batch):
        return masked_logits(model, params, batch["tokens"]), jax.grad(lambda p: masked_loss(model, p, batch))(params)

    logits, grads = jax.jit(run)(params, batch)
    assert_close(logits, logits64(model, params, batch["tokens"]), 2e-5)

    def loss(params):
        losses = losses64(logits64(model, params, batch["tokens"]), targets)
        return np.sum(losses * batch["weights"])

    assert_gradients(rng, params, grads, loss)


def test_all_kinds_read_in_both_directions(rng):
    changes = dict(
        attention="softmax,sigmoid,linear",
        n_layers=3,
        sigmoid_bias="-log_n",
        position="rotary",
        **EQUAL,
    )
    changes |= dict(convolution=3)  # causal here too
    model = model_config(**SIZES | changes, objective="masked", document_token=DOCUMENT)
    params, tokens = draw_params(model, rng), draw_tokens(model, rng)
    logits = jax.jit(lambda params, tokens: masked_logits(model, params, tokens))(params, tokens)
    assert_close(logits, logits64(model, params, tokens), 2e-5)


def test_a_hidden_token_is_not_seen(rng):
    """Its embedding has the gradient of the output head alone; what the model reads in its place is the mask's."""
    params, tokens = draw_params(MODEL, rng), draw_tokens(MODEL, rng)
    place = 4
    tokens[:, place], targets = MODEL.mask_token, tokens.copy()
    tokens[tokens == 12] = 11
    targets[:, place] = 12  # a token that is nowhere else
    weights = np.zeros((B, T), np.float32)
    weights[:, place] = 1 / B
    batch = {"tokens": tokens, "targets": targets, "weights": weights}

    def run(params, batch):
        whole = jax.grad(lambda p: masked_loss(MODEL, p, batch))(params)["embedding"]
        x, _ = LanguageModel(MODEL).apply({"params": params}, batch["tokens"])
        of_place = lambda e: jnp.mean(token_losses(x, e, batch["targets"], MODEL.dtype)[:, place])
        return whole, jax.grad(of_place)(params["embedding"])

    whole, head = jax.jit(run)(params, batch)
    np.testing.assert_allclose(whole[12], head[12], atol=1e-6)
    assert np.abs(head[12]).max() > 1e-3 and np.abs(whole - head)[MODEL.mask_token].max() > 1e-3


@pytest.mark.parametrize(
    "call",
    [
        lambda params, tokens: mean_loss(MODEL, params, tokens),
        lambda params, tokens: next_token_losses(MODEL, params, tokens),
        lambda params, tokens: forward(MODEL, params, tokens),
        lambda params, tokens: init_model_state(MODEL, B),
        lambda params, tokens: prefill(MODEL, params, tokens),
        lambda params, tokens: next(generate(MODEL, params, tokens[0], Sampling(), 0)),
    ],
    ids=["mean_loss", "next_token_losses", "forward", "init_model_state", "prefill", "generate"],
)
def test_to_decode_with_a_bidirectional_model_is_refused(rng, call):
    with pytest.raises(ValueError, match="model.objective = 'masked': the model reads .* objective = next_token"):
        call(draw_params(MODEL, rng), draw_tokens(MODEL, rng))


# ---- evaluation ----------------------------------------------------------------------------------


def test_pseudo_perplexity_predicts_every_token_once_from_those_that_are_seen_with_it(rng):
    params, tokens = draw_params(MODEL, rng), np.concatenate([np.full((B, 1), 5), draw_tokens(MODEL, rng)], axis=1)
    assert abs(1 / ROUNDS - FRACTION) < 0.01 and T > ROUNDS
    targets, want = tokens[:, 1:], np.zeros((B, T))
    for i in range(ROUNDS):
        hide = (targets != DOCUMENT) & (np.arange(T) % ROUNDS == i)
        logits = logits64(MODEL, params, np.where(hide, MODEL.mask_token, targets))
        want[hide] = losses64(logits, targets)[hide]
    assert np.all((want > 0) == (targets != DOCUMENT))
    assert_close(jax.jit(lambda p, t: window_losses(MODEL, p, t))(params, tokens), want, 2e-5)


@pytest.mark.parametrize("document_token", [pytest.param(None, marks=pytest.mark.long), DOCUMENT])
def test_the_padding_of_a_window_is_not_seen(rng, document_token):
    """Whatever id it has; a row of padding alone has losses that are finite, to be masked."""
    changes = dict(attention="heinsen,softmax,sigmoid,linear", n_layers=4, sigmoid_bias="-log_n", **EQUAL)
    model = model_config(**SIZES | changes, objective="masked", document_token=document_token)
    params, n = draw_params(model, rng), T - 3
    tokens = np.concatenate([np.full((B, 1), 5), draw_tokens(model, rng)], axis=1)
    losses = jax.jit(lambda p, t, lengths: window_losses(model, p, t, None, lengths))
    want = jax.jit(lambda p, t: window_losses(model, p, t))(params, tokens[:, : n + 1])
    for filler in (0, DOCUMENT, model.vocab_size - 1):
        tokens[:, n + 1 :] = filler
        assert_close(losses(params, tokens, np.full(B, n))[:, :n], want, 2e-5)
    assert np.isfinite(losses(params, tokens, np.arange(B))).all()


# ---- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masked_run(data, compile_cache, tmp_path_factory):
    """24 steps, a checkpoint after 12."""
    workdir = tmp_path_factory.mktemp("masked") / "run"
    train(masked_config(data), workdir)
    return workdir


def masked_config(data, **changes):
    few = dict(total_tokens=24 * 4 * 16, checkpoint_every=12, validate_every=12, model__n_layers=1)
    return run_config(data, model__objective="masked", optimizer__learning_rate=2e-2, **few | changes)


def test_a_masked_run_learns_and_goes_on_bit_for_bit(data, masked_run, tmp_path):
    log = read_log(masked_run)
    validation = [entry["validation_loss"] for entry in log if "validation_loss" in entry]
    assert log[0]["loss"] > 5 and validation[-1] < 3.7, "from log 264 towards the letters' entropy, 3.1"
    resumed = copy_run(masked_run, tmp_path / "run", keep=lambda step: step == 12)
    train(masked_config(data), resumed)
    assert without_timing(read_log(resumed)) == without_timing(log)


@pytest.mark.long
def test_accumulation_hides_the_same_and_the_commands_know_masked_models(data, masked_run, commands, tmp_path):
    train(masked_config(data, accumulation_steps=2), tmp_path / "run")
    losses = lambda workdir: [entry.get("loss", entry.get("validation_loss")) for entry in read_log(workdir)]
    assert losses(tmp_path / "run") == pytest.approx(losses(masked_run), rel=1e-4)
    done = commands.run("eval.py", f"--workdir={masked_run}")
    assert done.returncode == 0 and "pseudo-perplexity" in done.stdout, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    whole = np.exp(summary["loss"])
    assert summary["pseudo_perplexity"] == pytest.approx(whole) and "perplexity" not in summary
    assert plan(masked_config(data), 0).n_params > 0


ON_A_MESH = """
import sys
from pathlib import Path
from heinsen.training.loop import train
from tests.models.test_masking import gated_config
train(gated_config(Path(sys.argv[1]), mesh__data=2, mesh__tensor=2), Path(sys.argv[2]))
"""


def gated_config(data, **changes):
    return masked_config(
        data,
        total_tokens=12 * 4 * 16,
        model__forget_gate="head",
        model__convolution=4,
        model__implementation=None,
        **changes,
    )


@pytest.mark.long
def test_heads_gated_in_both_directions_split_over_devices(data, commands, tmp_path):
    train(gated_config(data), tmp_path / "one")
    done = commands.run("-W", "error", "-c", ON_A_MESH, data, tmp_path / "four", devices=4)
    assert done.returncode == 0, done.stderr
    one, four = ([e["loss"] for e in read_log(tmp_path / n) if "loss" in e] for n in ("one", "four"))
    assert four == pytest.approx(one, rel=1e-4) and four != one
