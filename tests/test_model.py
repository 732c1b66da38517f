"""The language model against a float64 NumPy forward pass, written from the paper's table with loops."""

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
from tests.models import model_config

# No two sizes alike, so that no axis passes for another: D = 10, H = 3, K = 2, V = 4, H V = 12, W1 24 wide.
SMALL = model_config(
    vocab_size=13,
    padded_vocab_size=16,
    n_layers=2,
    d_model=10,
    n_heads=3,
    d_key=2,
    d_value=4,
    implementation="reference",
)
B, T = 2, 7

_forward = jax.jit(forward, static_argnums=0)


@pytest.fixture
def params(rng):
    """Random everywhere: freshly initialised norms would hide their scale and bias."""
    shapes = jax.eval_shape(lambda: init_params(SMALL, jax.random.key(0)))
    scale = lambda x: 1 / np.sqrt(x.shape[-2] if x.ndim > 1 else 1)
    params = jax.tree.map(lambda x: (scale(x) * rng.standard_normal(x.shape)).astype(np.float32), shapes)
    for norm in (params["norm"], params["layers"]["norm"]):
        norm["scale"] = 1 + 0.3 * norm["scale"]
    return params


@pytest.fixture
def tokens(rng):
    return rng.integers(0, SMALL.vocab_size, (B, T))


# ---- the reference -------------------------------------------------------------------------------


def sigmoid64(x):
    return 1 / (1 + np.exp(-x))


def layer_norm64(x, norm):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * norm["scale"] + norm["bias"]


def position64(x, dense):
    """e_t = log(a_t exp(e_{t-1}) + exp(l_t)), a = sigmoid(c), from e_0 = 0."""
    c_l = x @ dense["kernel"] + dense["bias"]
    c, l = c_l[..., : x.shape[-1]], c_l[..., x.shape[-1] :]  # noqa: E741
    e, out = np.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        e = np.log(sigmoid64(c[:, t]) * np.exp(e) + np.exp(l[:, t]))
        out.append(e)
    return np.stack(out, axis=1)


def log_attention64(q, k, log_v):
    """[T, K], [T, K], [T, V] -> [T, V]: eqs. (2) and (4), query by query."""
    log_y = np.zeros_like(log_v)
    for t in range(len(q)):
        weights = np.exp(q[t] + k[: t + 1]).sum(-1)
        log_y[t] = np.log(weights @ np.exp(log_v[: t + 1]) / weights.sum())
    return log_y


def layer64(x, layer, config):
    n_k, n_v = config.d_key, config.d_value
    h = layer_norm64(x, layer["norm"]) @ layer["w1"]["kernel"] + layer["w1"]["bias"]
    heads = []
    for head in range(config.n_heads):
        qkv = h[..., head * (2 * n_k + n_v) : (head + 1) * (2 * n_k + n_v)]
        q, k, log_v = qkv[..., :n_k], qkv[..., n_k : 2 * n_k], qkv[..., 2 * n_k :]
        heads.append(np.stack([log_attention64(*row) for row in zip(q, k, log_v, strict=True)]))
    h = np.concatenate(heads, axis=-1) @ layer["w2"]["kernel"] + layer["w2"]["bias"]
    h = h[..., : config.d_model] * sigmoid64(h[..., config.d_model :])
    return x + h @ layer["w3"]["kernel"]


def forward64(config, params, tokens):
    params = jax.tree.map(np.float64, params)
    x = params["embedding"][tokens]
    x = x + position64(x, params["position"]["dense"])
    for index in range(config.n_layers):
        x = layer64(x, jax.tree.map(lambda p, index=index: p[index], params["layers"]), config)
    return layer_norm64(x, params["norm"]) @ params["embedding"].T


def assert_close(got, want, tolerance):
    scale = np.abs(want).max()
    assert np.abs(np.asarray(got, np.float64) - want).max() <= tolerance * scale


# ---- the function --------------------------------------------------------------------------------


def test_forward_is_the_papers_model(params, tokens):
    logits, _ = _forward(SMALL, params, tokens)
    assert logits.shape == (B, T, SMALL.padded_vocab_size) and logits.dtype == jnp.float32
    assert_close(logits, forward64(SMALL, params, tokens), 1e-5)


@pytest.mark.parametrize("implementation", ["scan", None])
def test_implementations_of_attention_make_the_same_model(params, tokens, implementation):
    config = dataclasses.replace(SMALL, implementation=implementation)
    assert config != SMALL
    assert_close(_forward(config, params, tokens)[0], forward64(SMALL, params, tokens), 1e-5)


def test_layer_norms_add_their_epsilon(params, tokens):
    """Where activations are as small as sqrt(epsilon), its value decides the output."""
    params["embedding"] *= 0.01
    params["layers"]["w3"]["kernel"] *= 0.001
    # e_t = log(sigmoid(0) exp(0) + 1/2) = 0: position adds nothing, as long as it begins with e_0 = 0.
    dense = params["position"]["dense"]
    dense["kernel"][...] = 0
    dense["bias"][...] = np.repeat([0, np.log(0.5)], SMALL.d_model)
    want = forward64(SMALL, params, tokens)
    assert np.abs(params["embedding"]).std() < 1e-2
    assert_close(_forward(SMALL, params, tokens)[0], want, 1e-4)


def test_position_recurrence_begins_with_zero(params, tokens):
    """e_0 = 0 is log 1, not log 0: it reaches the outputs."""
    state = init_model_state(SMALL, B)
    np.testing.assert_array_equal(state.position, 0)
    want, _ = _forward(SMALL, params, tokens)
    assert_close(_forward(SMALL, params, tokens, state)[0], np.float64(want), 1e-6)
    nothing = state._replace(position=np.full_like(state.position, -np.inf))
    assert np.abs(np.asarray(_forward(SMALL, params, tokens, nothing)[0]) - want).max() > 1e-3


def test_no_logit_depends_on_later_tokens(params, tokens, rng):
    t = int(rng.integers(1, T))
    other = tokens.copy()
    other[:, t] = (other[:, t] + 1) % SMALL.vocab_size
    before, after = (np.asarray(_forward(SMALL, params, x)[0]) for x in (tokens, other))
    np.testing.assert_allclose(after[:, :t], before[:, :t], rtol=0, atol=1e-6)
    assert np.all(np.abs(after[:, t:] - before[:, t:]).max(axis=(0, 2)) > 1e-5)  # and every later one does


def test_sequences_of_a_batch_do_not_mix(params, tokens):
    both, first = _forward(SMALL, params, tokens)[0], _forward(SMALL, params, tokens[:1])[0]
    assert_close(first, np.float64(both[:1]), 1e-5)


def test_bfloat16_matmuls_are_close_and_accumulate_in_float32(params, tokens):
    config = dataclasses.replace(SMALL, dtype="bfloat16")
    logits, state = _forward(config, params, tokens)
    want, _ = _forward(SMALL, params, tokens)
    assert logits.dtype == jnp.float32
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((state.position, state.attention)))
    assert not np.array_equal(logits, want)
    error = np.asarray(logits - want, np.float64)
    assert np.sqrt(np.mean(error**2)) < 0.05 * np.sqrt(np.mean(np.float64(want) ** 2))


# ---- the state -----------------------------------------------------------------------------------


def run_in_pieces(params, tokens, lengths):
    state, logits, start = None, [], 0
    for length in lengths:
        piece, state = _forward(SMALL, params, tokens[:, start : start + length], state)
        logits.append(piece)
        start += length
    return np.concatenate(logits, axis=1), state


@pytest.mark.parametrize("lengths", [(5, 2), (1,) * T], ids=["two pieces", "token by token"])
def test_pieces_handing_on_the_state_equal_the_whole(params, tokens, lengths):
    want, want_state = _forward(SMALL, params, tokens)
    logits, state = run_in_pieces(params, tokens, lengths)
    assert_close(logits, forward64(SMALL, params, tokens), 1e-5)
    for got, expected in zip(jax.tree.leaves(state), jax.tree.leaves(want_state), strict=True):
        assert_close(got, np.float64(expected), 1e-5)
    forgotten, _ = _forward(SMALL, params, tokens[:, -lengths[-1] :])
    assert np.abs(np.asarray(forgotten) - np.asarray(want)[:, -lengths[-1] :]).max() > 1e-3


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


def test_gradients_are_those_of_the_float64_model(params, tokens, rng):
    """Along a random direction through all parameters."""
    grads = jax.jit(jax.grad(lambda params: mean_loss(SMALL, params, tokens)))(params)
    direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), params)
    slope = sum(jax.tree.leaves(jax.tree.map(lambda d, g: np.sum(d * np.float64(g)), direction, grads)))
    moved = lambda step: jax.tree.map(lambda x, d: np.float64(x) + step * d, params, direction)
    loss64 = lambda params: cross_entropy64(forward64(SMALL, params, tokens[:, :-1]), tokens[:, 1:]).mean()
    numeric = (loss64(moved(1e-5)) - loss64(moved(-1e-5))) / 2e-5
    assert abs(numeric - slope) < 1e-4 * max(1, abs(slope))


def cross_entropy64(logits, targets):
    logits = np.float64(logits)
    top = logits.max(-1, keepdims=True)
    log_z = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    out = np.zeros(targets.shape)
    for index in np.ndindex(targets.shape):
        out[index] = log_z[index] - logits[index][targets[index]]
    return out


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


# ---- documents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [pytest.param("reference", marks=pytest.mark.long), None])
def test_with_a_document_token_packed_documents_are_separate_ones(params, tokens, implementation):
    """Documents that begin anywhere, in the first token too, have the logits that they have alone."""
    config = dataclasses.replace(SMALL, document_token=5, implementation=implementation)
    tokens = np.where(tokens == 5, 6, tokens)
    tokens[0, [0, 3, 4]] = tokens[1, 2] = 5
    got, state = _forward(config, params, tokens)
    for row, starts in enumerate([[0, 3, 4], [0, 2]]):
        for start, end in zip(starts, [*starts[1:], T], strict=True):
            alone, end_state = _forward(SMALL, params, tokens[row : row + 1, start:end])
            np.testing.assert_allclose(got[row : row + 1, start:end], alone, atol=2e-5, rtol=1e-4)
        for x, y in zip(jax.tree.leaves(state.attention), jax.tree.leaves(end_state.attention), strict=True):
            np.testing.assert_allclose(x[row : row + 1], y, atol=2e-5, rtol=1e-4)
        np.testing.assert_allclose(state.position[row : row + 1], end_state.position, atol=2e-5, rtol=1e-4)
    assert np.abs(got[0, 3:] - _forward(SMALL, params, tokens)[0][0, 3:]).max() > 1e-3


def test_with_a_document_token_steps_forget_as_the_whole_does(params, tokens):
    config = dataclasses.replace(SMALL, document_token=5)
    tokens = np.where(tokens == 5, 6, tokens)
    tokens[0, 4] = 5
    whole, _ = _forward(config, params, tokens)
    state = init_model_state(config, B)
    for t in range(T):
        logits, state = _forward(config, params, tokens[:, t : t + 1], state)
        np.testing.assert_allclose(logits[:, 0], whole[:, t], atol=2e-5, rtol=1e-4)


# ---- parameters ----------------------------------------------------------------------------------


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
    BAD_VALUES += [(_name, 0), (_name, -1)]


@pytest.mark.parametrize("name, value", BAD_VALUES)
def test_impossible_model_configs_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"model.{name} = {value!r}"):
        dataclasses.replace(SMALL, **{name: value})


@pytest.mark.parametrize("name, of", [("gated_125m", "pile_125m"), ("gated_demo", "demo")])
def test_the_gated_models_have_as_many_parameters_within_1_percent(name, of):
    configs = [importlib.import_module(f"configs.{each}").get_config() for each in (name, of)]
    gated, plain = (
        count_params(abstract_params(from_mapping(TrainConfig, config.to_dict()).model)) for config in configs
    )
    assert 0 < abs(gated / plain - 1) < 0.01
