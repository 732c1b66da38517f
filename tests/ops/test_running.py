"""Steps on running averages against the equations in logarithms, and against float64 over very many tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen.ops.running import from_running, take_step, to_running
from heinsen.ops.states import LogState, init_state, query_state, update_state

BATCH, K, V = (2, 3), 4, 5


def draw(rng, n, sigma):
    """(q, k, log_v) of n tokens, [n, *BATCH, ...]."""
    return [jnp.asarray(sigma * rng.standard_normal((n, *BATCH, size)), jnp.float32) for size in (K, K, V)]


@jax.jit
def step_logarithms(state, tokens):
    def body(state, token):
        state = update_state(state, *token[1:])
        return state, query_state(state, token[0])

    return jax.lax.scan(body, state, tokens)


@jax.jit
def step_averages(state, tokens):
    def body(state, token):
        log_y, state = take_step(state, *token)
        return state, log_y

    state, log_y = jax.lax.scan(body, to_running(state), tokens)
    return from_running(state), log_y


@pytest.mark.parametrize("n_before", [0, 6])
@pytest.mark.parametrize("sigma", [0.1, 1.0, 8.0])
def test_steps_are_equations_5_and_6(rng, sigma, n_before):
    state = init_state(BATCH, K, V)
    if n_before:
        state, _ = step_logarithms(state, draw(rng, n_before, sigma))
    tokens = draw(rng, 9, sigma)
    (end, exact), log_y = step_averages(state, tokens)
    expected_end, expected = step_logarithms(state, tokens)
    assert bool(exact.all())
    np.testing.assert_allclose(log_y, expected, atol=1e-5 * max(1, sigma))
    for got, want in zip(end, expected_end, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * max(1, sigma))


def test_steps_whose_averages_underflow_say_so_and_no_others(rng):
    state, _ = step_logarithms(init_state(BATCH, K, V), draw(rng, 3, 1.0))
    tokens = draw(rng, 4, 1.0)
    # One token of a huge value that hardly counts for one feature: beside it, that feature's own values vanish.
    tokens[2] = tokens[2].at[1, 0, 1, 2].set(200.0)
    tokens[1] = tokens[1].at[1, 0, 1, 0].set(-100.0)
    (_, exact), log_y = step_averages(state, tokens)
    assert not exact[0, 1] and int((~exact).sum()) == 1
    _, expected = step_logarithms(state, tokens)
    np.testing.assert_allclose(log_y, expected, rtol=1e-6, atol=1e-5)  # that value hides what is lost, for now


def test_values_of_zero_are_left_to_the_logarithms(rng):
    tokens = draw(rng, 4, 1.0)
    tokens[2] = tokens[2].at[..., 0].set(-jnp.inf)
    (_, exact), _ = step_averages(init_state(BATCH, K, V), tokens)
    assert not exact.any()


@pytest.mark.parametrize("n_tokens", [60_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_error_stays_small_over_very_many_tokens(rng, n_tokens):
    """In calls of 32 tokens, as decoding takes them: log y within 2e-4 of float64, h_z within 1e-4.

    Token by token in logarithms the error is some hundred times as large: the increments of h_z, 1/t, are rounded to
    its last place, which at h_z = 14 is 1e-6.
    """
    n_calls = n_tokens // 32
    key = jax.random.key(int(rng.integers(2**31)))

    def draw(call):
        return jax.random.normal(jax.random.fold_in(key, call), (32, K + V))

    @jax.jit
    def run(state):
        def one_call(i, state):
            tokens = draw(i)
            body = lambda j, s: take_step(s, tokens[j, :K], tokens[j, :K], tokens[j, K:])[1]
            return from_running(jax.lax.fori_loop(0, 32, body, to_running(state)))[0]

        return jax.lax.fori_loop(0, n_calls, one_call, state)

    state = run(init_state((), K, V))
    sum_z, sum_s = np.zeros(K), np.zeros((K, V))
    draw_many = jax.jit(jax.vmap(draw))
    for start in range(0, n_calls, 1000):
        weights = np.exp(np.float64(draw_many(jnp.arange(start, min(start + 1000, n_calls)))).reshape(-1, K + V))
        sum_z += weights[:, :K].sum(0)
        sum_s += weights[:, :K].T @ weights[:, K:]
    expected = LogState(np.log(sum_s), np.log(sum_z))
    assert np.abs(np.float64(state.h_z) - expected.h_z).max() < 1e-4
    q = rng.standard_normal((50, K))
    read = lambda s: (
        np.log(np.exp(q) @ np.exp(np.float64(s.h_s))) - np.log(np.exp(q) @ np.exp(np.float64(s.h_z)))[:, None]
    )
    assert np.abs(read(state) - read(expected)).max() < 2e-4
