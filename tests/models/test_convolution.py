"""The short convolution against loops in float64, and where it begins, ends and is nothing."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen import backend
from heinsen.config import ConfigError
from heinsen.models import forward, init_model_state, init_params
from heinsen.models.convolution import convolve, random_taps
from heinsen.parallel import PARAMETER_RULES, MeshError
from heinsen.training.config import check_mesh
from heinsen.training.optimizer import decay_mask
from tests.model_configs import model_config
from tests.models.model64 import DOCUMENT, SIZES, draw_params
from tests.runs import run_config

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

B, H, T, F, N = 3, 2, 9, 5, 4
CONFIG = model_config(**SIZES, convolution=N, document_token=DOCUMENT)
full_forward = jax.jit(forward, static_argnums=0)


def convolve64(x, taps, begins):
    """One head of one row, [T, F] and [N, F], with documents that begin at some tokens: y, token by token."""
    y, first = np.zeros_like(x), 0
    for t in range(len(x)):
        first = t if begins[t] else first
        for i in range(len(taps)):
            if t - i >= first:
                y[t] += taps[i] * x[t - i]
    return y


def places_of(begins):
    slot = np.arange(begins.shape[1])
    return slot - np.maximum.accumulate(np.where(begins, slot, 0), axis=1)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_outputs_states_and_gradients_are_those_of_a_loop(platform, rng):
    """At once, and in pieces of any sizes, one of a single token; rows in turn, and together as on accelerators."""
    x, taps = rng.standard_normal((B, H, T, F)), rng.standard_normal((H, N, F))
    begins = rng.random((B, T)) < [[0.0], [0.2], [0.6]]
    places, cuts = jnp.int32(places_of(begins)), [0, 1, int(rng.integers(2, T - 1)), T]
    weights = rng.standard_normal((B, H, T, F))

    def in_pieces(x, taps, last=None):
        pieces = []
        for here in map(slice, cuts, cuts[1:]):
            y, last = convolve(None, x[:, :, here], taps, last, places[:, here], None)
            pieces.append(y)
        return jnp.concatenate(pieces, axis=2)

    at_once = lambda x, taps: convolve(None, x, taps, None, places, None)[0]
    by_rows = lambda x, taps: np.stack([[convolve64(x[b, h], taps[h], begins[b]) for h in range(H)] for b in range(B)])
    for run in (at_once, in_pieces):
        arguments = jnp.float32(x), jnp.float32(taps)
        with backend.compiling_for(platform):
            y, gradient = jax.jit(lambda *a, run=run: jax.vjp(run, *a))(*arguments)
            grads = jax.jit(gradient)(jnp.float32(weights))
        np.testing.assert_allclose(y, by_rows(x, taps), atol=1e-5)
        # The loss is linear in each argument: its slope is a difference.
        d_x, d_taps = rng.standard_normal(x.shape), rng.standard_normal(taps.shape)
        slopes = np.vdot(weights, by_rows(d_x, taps)), np.vdot(weights, by_rows(x, d_taps))
        np.testing.assert_allclose([np.vdot(d_x, grads[0]), np.vdot(d_taps, grads[1])], slopes, atol=1e-3, rtol=1e-4)


def test_bfloat16_inputs_are_summed_in_float32_and_rounded_once(rng):
    """So are their gradients; those of the taps, sums over many tokens, are float32."""
    x, dy = (jnp.asarray(rng.standard_normal((B, H, T, F)), jnp.bfloat16) for _ in range(2))
    taps, places = jnp.float32(rng.standard_normal((H, N, F))), jnp.broadcast_to(jnp.arange(T), (B, T))
    run = lambda x, taps, dy: jax.vjp(lambda x, taps: convolve(None, x, taps, None, places, None)[0], x, taps)[1](dy)
    y = convolve(None, x, taps, None, places, None)[0]
    want = convolve(None, x.astype(jnp.float32), taps, None, places, None)[0]
    grads, wants = run(x, taps, dy), run(x.astype(jnp.float32), taps, dy.astype(jnp.float32))
    assert (y.dtype, *(g.dtype for g in grads)) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(y, want.astype(jnp.bfloat16))
    np.testing.assert_array_equal(grads[0], wants[0].astype(jnp.bfloat16))
    np.testing.assert_allclose(grads[1], wants[1], rtol=1e-5, atol=1e-5)


def test_padding_is_never_among_the_last_inputs(rng):
    x, before = rng.standard_normal((B, H, T, F)), rng.standard_normal((B, H, N - 1, F))
    lengths = np.array([0, 2, T])
    valid = np.arange(T) < lengths[:, None]
    places = np.broadcast_to(np.arange(T, dtype=np.int32) + 20, (B, T))
    x = np.where(valid[:, None, :, None], x, np.nan)
    taps = rng.standard_normal((H, N, F))
    y, last = convolve(None, *map(jnp.float32, (x, taps, before)), jnp.array(places), jnp.array(valid))
    for row, head in np.ndindex(B, H):
        own = np.concatenate([before[row, head], x[row, head, : lengths[row]]])
        np.testing.assert_array_equal(last[row, head], np.float32(own[-N + 1 :]))
        want = convolve64(own, taps[head], np.zeros(len(own)))[N - 1 :]
        np.testing.assert_allclose(y[row, head, : lengths[row]], want, atol=1e-5)


def test_taps_start_random_and_keep_the_variance_of_what_they_mix(rng):
    taps = random_taps(jax.random.key(rng.integers(2**31)), (H, N, 4096))
    assert np.abs(taps).max() <= np.sqrt(3 / N)
    np.testing.assert_allclose(np.var(taps, axis=-1), 1 / N, rtol=0.1)
    x, places = rng.standard_normal((1, H, N, 4096)), np.arange(N)[None]
    y = convolve(None, jnp.float32(x), taps, None, jnp.array(places), None)[0]
    np.testing.assert_allclose(np.var(y[0, :, -1], axis=-1), 1, rtol=0.15)


def test_it_does_not_decay_and_is_divided_with_the_heads():
    params = jax.eval_shape(lambda: init_params(CONFIG, jax.random.key(0)))
    assert not decay_mask(params)["layers"]["convolution"]["taps"]
    assert params["layers"]["convolution"]["taps"].shape == (2, 3, N, 8)
    assert dict(PARAMETER_RULES)["convolution/taps"] == (None, "tensor", None, None)


def test_a_stream_may_go_on_beyond_what_int32_counts(rng):
    """As if 2^31 tokens had come before: the last inputs are seen, and nothing of an earlier document is."""
    params = draw_params(CONFIG, rng)
    tokens = np.int32(rng.integers(4, 13, (2, 9)))
    tokens[1, 4] = DOCUMENT
    state = forward(CONFIG, params, tokens[:, :3], init_model_state(CONFIG, 2))[1]
    step = jax.jit(lambda tokens, state: forward(CONFIG, params, tokens, state))
    much = state._replace(n_tokens=jnp.full(2, 2**30, jnp.int32))
    for t in range(3, 9):
        want, state = step(tokens[:, t : t + 1], state)
        got, much = step(tokens[:, t : t + 1], much)
        np.testing.assert_array_equal(got, want)
        assert much.n_tokens.max() == 2**30


def test_impossible_numbers_of_taps_are_refused():
    with pytest.raises(ConfigError, match="model.convolution = 1: one tap sees no other token; choose 0 for none"):
        model_config(convolution=1)
    with pytest.raises(ConfigError, match="model.convolution = 65: it must be less than 65"):
        model_config(convolution=65)


def test_a_mesh_whose_parts_are_shorter_than_the_taps_reach_is_refused():
    config = run_config("unused", model__convolution=6)
    mesh = mock.Mock(spec=jax.sharding.Mesh, shape={"data": 1, "fsdp": 1, "tensor": 1, "sequence": 4})
    with pytest.raises(
        MeshError, match="sequence = 4 divides 16 tokens into parts of 4, but model.convolution = 6 needs"
    ):
        check_mesh(config, mesh)
    check_mesh(dataclasses.replace(config, model=dataclasses.replace(config.model, convolution=5)), mesh)
