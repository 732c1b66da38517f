"""Equations (1)-(8) of the paper, each by its number, against NumPy loops in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from heinsen import LogState, MeanState, init_state
from tests.arrays import takes_numpy
from tests.ops import equations
from tests.ops.truth import assert_close

T, K, V = 7, 4, 3

complex_log = takes_numpy(equations.complex_log)

# Compiled once for all tests.
equation_1, equation_2 = jax.jit(equations.equation_1), jax.jit(equations.equation_2)
equation_3, equation_4 = jax.jit(equations.equation_3), jax.jit(equations.equation_4)
update_state, query_state = jax.jit(heinsen.update_state), jax.jit(heinsen.query_state)
log_attention, attention = (
    jax.jit(function, static_argnames=("causal", "implementation", "return_state"))
    for function in (heinsen.log_attention, heinsen.attention)
)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.fixture
def q(rng):
    return normal(rng, 2, T, K)


@pytest.fixture
def k(rng):
    return normal(rng, 2, T, K)


@pytest.fixture
def v(rng):
    v = normal(rng, 2, T, V)
    v.flat[0] = -abs(v.flat[0]) - 0.1
    return v


@pytest.fixture
def log_v(rng):
    return normal(rng, 2, T, V)


def softmax64(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def eq1_64(q, k, v, mask=None):
    """Softmax(log(exp(Q) exp(K)^T)) V, token by token."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    logits = np.zeros((*q.shape[:-1], k.shape[-2]))
    for t in range(q.shape[-2]):
        for s in range(k.shape[-2]):
            logits[..., t, s] = np.log(np.sum(np.exp(q[..., t, :]) * np.exp(k[..., s, :]), axis=-1))
    if mask is not None:
        logits = np.where(mask, logits, -np.inf)
    return softmax64(logits) @ v


def states64(k, log_v):
    """(h_s, h_z) after each token: cumulative log-sums in float64, [batch, T, ...]."""
    k, log_v = k.astype(np.float64), log_v.astype(np.float64)
    h_s = np.logaddexp.accumulate(k[..., :, None] + log_v[..., None, :], axis=-3)
    return h_s, np.logaddexp.accumulate(k, axis=-2)


def step_by_step(state, q, k, values):
    """Outputs [batch, T, V] by eqs. (6) and (5), a token at a time, and the states after each."""
    ys, states = [], []
    for t in range(q.shape[-2]):
        state = update_state(state, k[..., t, :], values[..., t, :])
        ys.append(query_state(state, q[..., t, :]))
        states.append(state)
    return np.stack(ys, axis=-2), states


def test_eq1_is_softmax_of_the_log_of_exponentials(q, k, v):
    assert np.any(v < 0)
    assert_close(equation_1(q, k, v), eq1_64(q, k, v))
    # The similarity is not the dot product's: softmax(Q K^T) V is another thing.
    assert np.abs(eq1_64(q, k, v) - softmax64(q @ np.swapaxes(k, -1, -2)) @ v).max() > 1e-3


def test_eq1_scaling_constant_disappears(rng, q, k, v):
    c = float(rng.uniform(1, 5))
    # The constant does change what is exponentiated, by a factor; only the softmax takes it out.
    assert not np.allclose(np.exp(q - c), np.exp(q))
    assert_close(equation_1(q, k, v, c=c), equation_1(q, k, v, c=0.0))
    assert_close(equation_1(q, k, v, c=-c), eq1_64(q, k, v))


def test_eq1_is_eq2_of_eq3_for_values_of_either_sign(q, k, v):
    assert np.any(v < 0) and np.any(v > 0)
    log_s, log_z = equation_3(q, k, complex_log(v))
    assert jnp.iscomplexobj(log_s) and not jnp.iscomplexobj(log_z)
    assert_close(equation_2(log_s, log_z), eq1_64(q, k, v))
    assert_close(equation_2(log_s, log_z), equation_1(q, k, v))
    assert_close(equation_2(log_s, log_z), attention(q, k, v, causal=False))


def test_eq1_is_eq2_of_eq3_for_log_values(q, k, log_v):
    log_s, log_z = equation_3(q, k, log_v)
    want = eq1_64(q, k, np.exp(log_v.astype(np.float64)))
    assert_close(equation_2(log_s, log_z), want)
    assert_close(log_attention(q, k, log_v, causal=False), np.log(want))


def test_eq3_takes_fewer_queries_than_keys(q, k, v):
    assert_close(equation_2(*equation_3(q[:, :2], k, complex_log(v))), eq1_64(q, k, v)[:, :2])


def test_eq4_is_eq1_with_a_causal_mask(q, k, v):
    mask = np.tril(np.ones((T, T), bool))
    want = eq1_64(q, k, v, mask)
    assert np.abs(want - eq1_64(q, k, v))[:, :-1].max() > 1e-3  # the mask matters
    assert_close(equation_1(q, k, v, mask=mask), want)
    assert_close(equation_2(*equation_4(q, k, complex_log(v))), want)
    assert_close(attention(q, k, v), want)


def test_eq4_in_logs_is_log_attention(q, k, log_v):
    want = eq1_64(q, k, np.exp(log_v.astype(np.float64)), np.tril(np.ones((T, T), bool)))
    log_s, log_z = equation_4(q, k, log_v)
    assert_close(log_s - log_z[..., None], np.log(want))
    assert_close(log_attention(q, k, log_v), np.log(want))


def test_eq6_state_is_cumulative_lse(q, k, log_v):
    h_s, h_z = states64(k, log_v)
    _, states = step_by_step(init_state((2,), K, V), q, k, log_v)
    for t, state in enumerate(states):
        assert_close(state.h_s, h_s[:, t])
        assert_close(state.h_z, h_z[:, t])


def test_eq6_state_of_signed_values_is_the_running_average(q, k, v):
    _, states = step_by_step(init_state((2,), K, V, signed=True), q, k, v)
    weights = np.exp(k.astype(np.float64))
    for t, state in enumerate(states):
        seen = weights[:, : t + 1]
        mean = np.einsum("bsk,bsv->bkv", seen, v[:, : t + 1]) / seen.sum(1)[..., None]
        assert_close(state.mean, mean)
        assert_close(state.h_z, np.log(seen.sum(1)))


@pytest.mark.parametrize("signed", [False, True])
def test_eq5_and_eq6_in_sequence_equal_the_parallel_form(q, k, v, log_v, signed):
    values, parallel = (v, attention) if signed else (log_v, log_attention)
    in_sequence, states = step_by_step(init_state((2,), K, V, signed=signed), q, k, values)
    at_once, end = parallel(q, k, values, return_state=True)
    assert_close(in_sequence, np.float64(at_once))
    assert type(states[-1]) is type(end)
    for got, want in zip(states[-1], end, strict=True):
        assert_close(got, np.float64(want))


def test_eq7_zero_state_is_a_phantom_token(q, k, log_v):
    """Zeros in log space are a token with k = 0 and log v = 0; eq. (4) has no such token."""
    zeros, empty = LogState(jnp.zeros((2, K, V)), jnp.zeros((2, K))), init_state((2,), K, V)
    assert not np.array_equal(zeros.h_s, empty.h_s) and not np.array_equal(zeros.h_z, empty.h_z)

    prepend = lambda x: np.concatenate([np.zeros_like(x[:, :1]), x], axis=1)
    phantom = np.asarray(log_attention(prepend(q), prepend(k), prepend(log_v)))[:, 1:]
    in_sequence, _ = step_by_step(zeros, q, k, log_v)
    assert_close(in_sequence, phantom)
    assert_close(log_attention(q, k, log_v, state=zeros), phantom)
    assert np.abs(phantom - np.asarray(log_attention(q, k, log_v))).max() > 1e-3


def test_init_state_agrees_with_eq4(q, k, v, log_v):
    log_s, log_z = equation_4(q, k, log_v)
    want = np.asarray(log_s - log_z[..., None])
    assert_close(step_by_step(init_state((2,), K, V), q, k, log_v)[0], want)
    assert_close(log_attention(q, k, log_v, state=init_state((2,), K, V)), want)
    want = np.asarray(equation_2(*equation_4(q, k, complex_log(v))))
    assert_close(attention(q, k, v, state=init_state((2,), K, V, signed=True)), want)


def test_eq8_all_queries_read_the_updated_state(rng, q, k, log_v):
    """Non-causal in sequence: the keys arrive token by token, then every query reads the same state."""
    more_q = normal(rng, 2, 5, K)
    _, states = step_by_step(init_state((2,), K, V), q, k, log_v)
    want = np.log(eq1_64(more_q, k, np.exp(log_v.astype(np.float64))))
    assert_close(query_state(states[-1], more_q), want)
    assert_close(query_state(states[-1], more_q[:, 3]), want[:, 3])
    assert_close(log_attention(more_q, k, log_v, causal=False), want)
    # A new token changes what the same queries read.
    changed = query_state(update_state(states[-1], normal(rng, 2, K), normal(rng, 2, V)), more_q)
    assert np.abs(np.asarray(changed) - want).max() > 1e-3


@pytest.mark.parametrize("signed", [False, True])
def test_eq8_a_token_more_in_the_context_updates_all_queries_at_constant_cost(rng, q, k, log_v, signed):
    values = normal(rng, *log_v.shape) if signed else log_v
    v = values if signed else np.exp(np.float64(values))
    extend = jax.jit(heinsen.extend_context)
    state, programs = init_state((2,), K, V, signed=signed), set()
    for t in range(T):
        y, state = extend(state, k[:, t], values[:, t], q)
        programs.add(extend._cache_size())
        assert_close(y if signed else np.exp(np.float64(y)), eq1_64(q, k[:, : t + 1], v[:, : t + 1]))
    assert len(programs) == 1, "one program, of one cost, for contexts of any length"


def test_eq8_of_signed_values(q, k, v):
    _, states = step_by_step(init_state((2,), K, V, signed=True), q, k, v)
    assert_close(query_state(states[-1], q), eq1_64(q, k, v))


def test_log_state_and_mean_state_say_the_same_of_positive_values(q, k, log_v):
    v = np.exp(log_v)
    log_y, log_state = log_attention(q, k, log_v, return_state=True)
    y, mean_state = attention(q, k, v, return_state=True)
    assert isinstance(log_state, LogState) and isinstance(mean_state, MeanState)
    assert_close(y, np.exp(np.float64(log_y)))
    assert_close(mean_state.h_z, np.float64(log_state.h_z))
    assert_close(mean_state.mean, np.exp(np.float64(log_state.h_s) - np.float64(log_state.h_z)[..., None]))


def test_log_z_is_log_s_of_a_column_whose_logarithm_is_zero(q, k, log_v):
    log_v[..., 0] = 0
    log_y, (h_s, h_z) = log_attention(q, k, log_v, return_state=True)
    assert_close(h_s[..., 0], np.float64(h_z))
    assert_close(np.asarray(log_y)[..., 0], np.zeros((2, T)))


def test_states_have_one_size_whatever_the_number_of_tokens():
    def state_shapes(n):
        q, k, log_v = jnp.zeros((n, K)), jnp.zeros((n, K)), jnp.zeros((n, V))
        _, state = jax.eval_shape(lambda: heinsen.log_attention(q, k, log_v, return_state=True))
        return jax.tree.map(jnp.shape, state)

    assert state_shapes(1) == state_shapes(2000) == LogState((K, V), (K,))


def test_gradients_pass_through_the_sequential_form(q, k, log_v):
    """Eqs. (5) and (6) differentiate to what the parallel form does, from the empty state on."""

    def in_sequence(q, k, log_v):
        def step(state, token):
            q, k, log_v = token
            state = heinsen.update_state(state, k, log_v)
            return state, heinsen.query_state(state, q)

        tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, log_v))
        return jnp.moveaxis(jax.lax.scan(step, init_state((2,), K, V), tokens)[1], 0, 1)

    g = np.sin(np.arange(2 * T * V, dtype=np.float32)).reshape(2, T, V)
    pull = lambda f: jax.jit(lambda *x: jax.vjp(f, *x)[1](g))(q, k, log_v)
    parallel = functools.partial(heinsen.log_attention, implementation="reference")
    for got, want in zip(pull(in_sequence), pull(parallel), strict=True):
        assert_close(got, np.float64(want))
