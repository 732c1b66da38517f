"""The paper's language model: its numbers, parameters and config; test_kinds.py has all kinds of models."""

import dataclasses
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import pile_125m
from heinsen.config import from_mapping
from heinsen.models import (
    ModelState,
    abstract_params,
    count_params,
    forward,
    init_model_state,
    init_params,
    mean_loss,
)
from heinsen.ops.states import LogState
from heinsen.training.config import TrainConfig
from tests.model_configs import model_config
from tests.models.model64 import DOCUMENT, SIZES, B, assert_close, draw_params, draw_tokens, logits64

SMALL = model_config(**SIZES)

_forward = jax.jit(forward, static_argnums=0)


@pytest.fixture
def params(rng):
    return draw_params(SMALL, rng)


@pytest.fixture
def tokens(rng):
    return draw_tokens(SMALL, rng)


# ---- the function --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "implementation, document_token",
    [
        (None, DOCUMENT),
        ("scan", None),
        *(pytest.param(*x, marks=pytest.mark.long) for x in [(None, None), ("scan", DOCUMENT)]),
        *(pytest.param("reference", token, marks=pytest.mark.long) for token in (None, DOCUMENT)),
    ],
)
def test_implementations_of_attention_make_the_papers_model(rng, params, implementation, document_token):
    config = dataclasses.replace(SMALL, implementation=implementation, document_token=document_token)
    tokens = draw_tokens(config, rng)
    logits, _ = _forward(config, params, tokens)
    assert logits.shape == (*tokens.shape, SMALL.padded_vocab_size) and logits.dtype == jnp.float32
    assert_close(logits, logits64(config, params, tokens), 1e-5)


def test_layer_norms_add_their_epsilon(params, tokens):
    """Where activations are as small as sqrt(epsilon), its value decides the output."""
    params["embedding"] *= 0.01
    params["layers"]["w3"]["kernel"] *= 0.001
    # e_t = log(sigmoid(0) exp(0) + 1/2) = 0: position adds nothing, as long as it begins with e_0 = 0.
    dense = params["position"]["dense"]
    dense["kernel"][...] = 0
    dense["bias"][...] = np.repeat([0, np.log(0.5)], SMALL.d_model)
    assert np.abs(params["embedding"]).std() < 1e-2
    assert_close(_forward(SMALL, params, tokens)[0], logits64(SMALL, params, tokens), 1e-4)


def test_position_recurrence_begins_with_zero(params, tokens):
    """e_0 = 0 is log 1, not log 0: it reaches the outputs."""
    state = init_model_state(SMALL, B)
    np.testing.assert_array_equal(state.position, 0)
    want, _ = _forward(SMALL, params, tokens)
    assert_close(_forward(SMALL, params, tokens, state)[0], np.float64(want), 1e-6)
    nothing = state._replace(position=np.full_like(state.position, -np.inf))
    assert np.abs(np.asarray(_forward(SMALL, params, tokens, nothing)[0]) - want).max() > 1e-3


def test_bfloat16_matmuls_are_close_and_accumulate_in_float32(params, tokens):
    config = dataclasses.replace(SMALL, dtype="bfloat16")
    logits, state = _forward(config, params, tokens)
    want, _ = _forward(SMALL, params, tokens)
    assert logits.dtype == jnp.float32
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((state.position, state.attention)))
    assert not np.array_equal(logits, want)
    error = np.asarray(logits - want, np.float64)
    assert np.sqrt(np.mean(error**2)) < 0.05 * np.sqrt(np.mean(np.float64(want) ** 2))
    program = jax.make_jaxpr(lambda params: forward(config, params, tokens))(params)
    layers = [equation for equation in program.eqns if equation.primitive.name == "scan"]
    streams = [x.aval.dtype for x in layers[-1].outvars if x.aval.shape == (*tokens.shape, config.d_model)]
    assert streams == [jnp.bfloat16]


def test_state_has_one_size(params):
    state_after = lambda n: jax.eval_shape(lambda: forward(SMALL, params, jnp.zeros((B, n), jnp.int32))[1])
    shapes = [jax.tree.map(jnp.shape, state_after(n)) for n in (1, 50)]
    empty = jax.tree.map(jnp.shape, init_model_state(SMALL, B))
    assert shapes[0] == shapes[1] == empty
    assert empty == ModelState((B, 10), (LogState((B, 3, 2, 4), (B, 3, 2)),) * 2, (None,) * 2, (B,), (B,))


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [pytest.param("full", marks=pytest.mark.long), "dots"])
def test_remat_changes_neither_loss_nor_gradients(params, tokens, policy):
    def loss(config):
        return lambda params: mean_loss(config, params, tokens)

    plain, recomputing = (loss(dataclasses.replace(SMALL, remat=remat)) for remat in ("none", policy))
    count = lambda f: len(re.findall("remat|checkpoint", str(jax.make_jaxpr(f)(params))))
    assert count(recomputing) > count(plain)
    (a, grads_a), (b, grads_b) = (jax.jit(jax.value_and_grad(f))(params) for f in (plain, recomputing))
    assert_close(a, np.float64(b), 1e-6)
    for got, want in zip(jax.tree.leaves(grads_b), jax.tree.leaves(grads_a), strict=True):
        assert np.any(np.asarray(want) != 0)
        assert_close(got, np.float64(want), 1e-5)


@pytest.mark.long
def test_products_that_remat_saves_are_not_computed_again(params, tokens):
    def flops(remat):
        config = dataclasses.replace(SMALL, remat=remat)
        step = jax.jit(jax.grad(lambda params: mean_loss(config, params, tokens))).lower(params).compile()
        return step.cost_analysis()["flops"]  # of one layer: XLA counts the body of a loop once

    c, n_tokens = SMALL, tokens.shape[0] * (tokens.shape[1] - 1)
    products = 2 * n_tokens * c.d_model * (c.n_heads * (2 * c.d_key + c.d_value) + c.n_heads * c.d_value * 2)
    saved = flops("full") - flops("dots")
    assert 0.8 * products < saved < 1.2 * products, "W1 and W2; nothing reads W3's product"
    assert flops("none") < flops("dots")


# ---- parameters ----------------------------------------------------------------------------------


def test_the_papers_model_has_124879872_parameters():
    config = from_mapping(TrainConfig, pile_125m.get_config().to_dict()).model
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert count_params(params) == 124_879_872
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes["embedding"] == (50304, 768)
    assert shapes["position"] == {"dense": {"kernel": (768, 1536), "bias": (1536,)}}
    assert shapes["layers"] == {
        "norm": {"scale": (24, 768), "bias": (24, 768)},
        "w1": {"kernel": (24, 768, 24 * 96), "bias": (24, 24 * 96)},
        "w2": {"kernel": (24, 768, 1536), "bias": (24, 1536)},
        "w3": {"kernel": (24, 768, 768)},
    }
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


def test_parameters_are_drawn_uniformly_by_their_fan_in(rng):
    sizes = dict(padded_vocab_size=128, d_model=48, n_heads=5, d_key=6, d_value=7)
    config = dataclasses.replace(SMALL, **sizes)
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(int(rng.integers(2**31))))
    layers = params["layers"]
    fan_ins = [
        (params["embedding"], 48),
        (params["position"]["dense"]["kernel"], 48),
        (params["position"]["dense"]["bias"], 48),
        (layers["w1"]["kernel"], 48),
        (layers["w1"]["bias"], 48),
        (layers["w2"]["kernel"], 35),
        (layers["w2"]["bias"], 35),
        (layers["w3"]["kernel"], 48),
    ]
    for x, fan_in in fan_ins:
        x = np.float64(x).ravel() * np.sqrt(fan_in)
        assert np.abs(x).max() <= 1 + 1e-6
        # Of n uniform numbers: the largest, and the first two moments to five standard deviations.
        assert 1 - np.abs(x).max() < 15 / x.size
        assert abs(x.mean()) < 5 * np.sqrt(1 / 3 / x.size)
        assert abs((x**2).mean() - 1 / 3) < 5 * np.sqrt(4 / 45 / x.size)
    for norm in (params["norm"], layers["norm"]):
        assert np.all(np.asarray(norm["scale"]) == 1) and np.all(np.asarray(norm["bias"]) == 0)
    # No layer, and no tensor, repeats another's numbers.
    assert not np.array_equal(layers["w1"]["kernel"][0], layers["w1"]["kernel"][1])
    first_numbers = [float(np.ravel(x)[0] * np.sqrt(fan_in)) for x, fan_in in fan_ins]
    assert len(set(first_numbers)) == len(first_numbers)


def test_parameters_follow_the_key_and_not_the_implementation():
    draw = jax.jit(init_params, static_argnums=0)
    first = draw(SMALL, jax.random.key(1))
    changed = dataclasses.replace(SMALL, implementation="scan", remat="full", dtype="bfloat16")
    again = draw(changed, jax.random.key(1))
    other = draw(SMALL, jax.random.key(2))
    for a, b, c in zip(*map(jax.tree.leaves_with_path, (first, again, other)), strict=True):
        np.testing.assert_array_equal(a[1], b[1])
        assert "norm" in str(a[0]) or not np.array_equal(a[1], c[1])


# ---- configuration -------------------------------------------------------------------------------

BAD_VALUES = [("padded_vocab_size", 12), ("dtype", "float16"), ("dtype", "int8"), ("implementation", "fast")]
BAD_VALUES += [("document_token", 13), ("document_token", -1)]
for _name in ("vocab_size", "n_layers", "d_model", "n_heads", "d_key", "d_value"):
    BAD_VALUES += [(_name, 0)]


@pytest.mark.parametrize("name, value", BAD_VALUES)
def test_impossible_model_configs_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"model.{name} = {value!r}"):
        dataclasses.replace(SMALL, **{name: value})


@pytest.mark.parametrize("name, of", [("gated_125m", "pile_125m"), ("gated_demo", "demo")])
def test_the_gated_models_have_as_many_parameters_within_1_percent(name, of):
    counts = []
    for each in (name, of):
        config = importlib.import_module(f"configs.{each}").get_config()
        if config.model.vocab_size is None:
            config.model.update(vocab_size=257, padded_vocab_size=264)
        counts.append(count_params(abstract_params(from_mapping(TrainConfig, config.to_dict()).model)))
    gated, plain = counts
    assert 0 < abs(gated / plain - 1) < 0.01
