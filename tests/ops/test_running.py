"""Steps on running averages against the equations in logarithms, and against float64 over very many tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from heinsen.ops.running import from_running, take_step, to_running
from heinsen.ops.states import LogState, init_state, query_state, update_state
from tests.ops.oracle import draw_decays

BATCH, K, V = (2, 3), 4, 5


def draw(rng, n, sigma):
    """[q, k, log_v] of n tokens, [n, *BATCH, ...]."""
    return [jnp.asarray(sigma * rng.standard_normal((n, *BATCH, size)), jnp.float32) for size in (K, K, V)]


@jax.jit
def step_logarithms(state, tokens):
    def body(state, token):
        q, k, log_v, log_decay = token
        state = update_state(state, k, log_v, log_decay=log_decay)
        return state, query_state(state, q)

    return jax.lax.scan(body, state, (*tokens, *[None] * (4 - len(tokens))))


@jax.jit
def step_averages(state, tokens):
    def body(state, token):
        log_y, state = take_step(state, *token)
        return state, log_y

    state, log_y = jax.lax.scan(body, to_running(state), tuple(tokens))
    return from_running(state), log_y


@pytest.mark.parametrize("sigma, n_before, decay", [(0.1, 0, False), (1.0, 6, False), (8.0, 6, False), (1.0, 0, True)])
def test_steps_are_equations_5_and_6_and_these_the_parallel_form(rng, sigma, n_before, decay):
    """Decays of every size; the second half of the steps begins with the state after the first."""
    state, n = init_state(BATCH, K, V), 60 if decay else 9
    if n_before:
        state, _ = step_logarithms(state, draw(rng, n_before, sigma))
    tokens = [*draw(rng, n, sigma), *[jnp.asarray(draw_decays(rng, (n, *BATCH)))] * decay]
    q, k, log_v, *decays = (jnp.moveaxis(x, 0, 2) for x in tokens)
    attend = jax.jit(functools.partial(heinsen.log_attention, return_state=True))
    want, want_end = attend(q, k, log_v, state=state, log_decay=decays[0] if decays else None)
    found = [step_logarithms(state, tokens)]
    halves, end = [], state
    for part in (slice(0, n // 2), slice(n // 2, None)):
        (end, exact), log_y = step_averages(end, [x[part] for x in tokens])
        assert bool(exact.all())
        halves.append(log_y)
    found.append((end, np.concatenate(halves)))
    bar = 2e-5 if decay else 1e-5 * max(1, sigma)
    for end, log_y in found:
        np.testing.assert_allclose(np.moveaxis(log_y, 0, 2), want, atol=bar)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=bar), end, want_end)


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


@pytest.mark.long
@pytest.mark.parametrize("decay", [-1e-6, -1e-4, -0.1])
def test_a_million_steps(rng, decay):
    """Decays as small as float32's rounding of a sum of exponents add up all the same."""
    n_calls, n, size = 31_250, 32, 8
    key = jax.random.key(int(rng.integers(2**31)))

    def run(dtype):
        def call(carry, i):
            x = jax.random.normal(jax.random.fold_in(key, i), (n, 3, size), jnp.float32).astype(dtype)

            def step(state, token):
                log_y, state = take_step(state, *token, jnp.asarray(decay, dtype))
                return state, log_y

            state, log_y = jax.lax.scan(step, to_running(carry), tuple(x[:, j] for j in range(3)))
            end, exact = from_running(state)
            return end, (log_y[-1], exact)

        state, (log_y, exact) = jax.lax.scan(call, init_state((), size, size, dtype=dtype), jnp.arange(n_calls))
        return state, log_y, exact

    state, log_y, exact = jax.tree.map(np.asarray, jax.jit(run, static_argnums=0)(jnp.float32))
    with jax.enable_x64(True):
        state64, log_y64, _ = jax.tree.map(np.asarray, jax.jit(run, static_argnums=0)(jnp.float64))
    assert exact.all()
    assert np.max(np.abs(log_y - log_y64)) <= 2e-4
    means, means64 = (np.asarray(h_s) - np.asarray(h_z)[..., None] for h_s, h_z in (state, state64))
    assert np.max(np.abs(means - means64)) <= 2e-4
    # The state between calls rounds h_z: by as much for all features, where it is stationary, which no query sees.
    drift = np.asarray(state.h_z) - np.asarray(state64.h_z)
    assert np.max(np.abs(drift)) <= n_calls * np.spacing(np.float32(np.max(np.abs(state64.h_z)))) / 2
    assert np.ptp(drift) <= 2e-4
