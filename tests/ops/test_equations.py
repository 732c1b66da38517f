"""Equations (1)-(8) of the paper, each by its number, in NumPy's float64 and complex128, against the package."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from heinsen import LogState, MeanState, init_state
from tests.ops.oracle import Case, Form, assert_close, truth

T, K, V = 7, 4, 3
CAUSAL = np.tril(np.ones((T, T), bool))

# Compiled once for all tests.
update_state, query_state = jax.jit(heinsen.update_state), jax.jit(heinsen.query_state)
log_attention, attention = (
    jax.jit(function, static_argnames=("causal", "implementation", "return_state"))
    for function in (heinsen.log_attention, heinsen.attention)
)


def lse(x, axis):
    """log-sum-exp, shifted by the largest real part; complex terms may cancel."""
    top = np.max(x.real, axis=axis, keepdims=True)
    return np.log(np.sum(np.exp(x - top), axis=axis)) + np.squeeze(top, axis)


def complex_log(v):
    """log |v| + i pi where v < 0."""
    return np.log(v.astype(np.complex128))


def equation_1(q, k, v, c=0.0, mask=True):
    """Softmax(log(exp(Q) exp(K)^T / exp(c))) V, with `mask` true where a query sees a key."""
    logits = np.log(np.exp(np.float64(q)) @ np.exp(np.float64(k)).swapaxes(-1, -2) / np.exp(c))
    weights = np.exp(np.where(mask, logits, -np.inf))
    return weights / weights.sum(-1, keepdims=True) @ v


def equation_2(log_s, log_z):
    return np.exp(log_s - log_z[..., None]).real


def equation_3(q, k, log_v):
    """log S and log Z over all keys."""
    q, k = np.float64(q), np.float64(k)
    h_s, h_z = lse(k[..., :, None] + log_v[..., None, :], -3), lse(k, -2)
    return lse(q[..., None] + h_s[..., None, :, :], -2), lse(q + h_z[..., None, :], -1)


def equation_4(q, k, log_v):
    """log S and log Z of each query over the keys up to its own."""
    prefixes = [equation_3(q[:, t : t + 1], k[:, : t + 1], log_v[:, : t + 1]) for t in range(q.shape[1])]
    return tuple(np.concatenate(parts, axis=1) for parts in zip(*prefixes, strict=True))


def step_by_step(state, q, k, values):
    """Outputs [batch, T, V] by eqs. (6) and (5), a token at a time, and the states after each."""
    ys, states = [], []
    for t in range(q.shape[-2]):
        state = update_state(state, k[..., t, :], values[..., t, :])
        ys.append(query_state(state, q[..., t, :]))
        states.append(state)
    return np.stack(ys, axis=-2), states


@pytest.fixture
def arrays(rng):
    """q, k, v of either sign, log v of another one."""
    q, k, v, log_v = (np.float32(rng.standard_normal((2, T, n))) for n in (K, K, V, V))
    v[0, 0, 0], v[0, 0, 1] = -abs(v[0, 0, 0]) - 0.1, 0.1
    return q, k, v, log_v


def test_eq1_is_eq2_of_eq3_and_its_constant_disappears(rng, arrays):
    q, k, v, log_v = arrays
    want = equation_1(q, k, v)
    assert_close(equation_1(q, k, v, c=float(rng.uniform(-5, 5))), want)
    log_s, log_z = equation_3(q, k, complex_log(v))
    assert np.any(log_s.imag != 0) and not np.iscomplexobj(log_z)
    assert_close(equation_2(log_s, log_z), want)
    assert_close(attention(q, k, v, causal=False), want)
    assert_close(attention(q[:, :2], k, v, causal=False), want[:, :2])
    want = equation_1(q, k, np.exp(np.float64(log_v)))
    assert_close(equation_2(*equation_3(q, k, log_v)), want)
    assert_close(log_attention(q, k, log_v, causal=False), np.log(want))
    # The similarity is not the dot product's: softmax(Q K^T) V is another thing.
    weights = np.exp(q @ np.swapaxes(k, -1, -2))
    assert np.abs(equation_1(q, k, v) - weights / weights.sum(-1, keepdims=True) @ v).max() > 1e-3


def test_eq4_is_eq1_with_a_causal_mask_and_init_state_agrees_with_it(arrays):
    q, k, v, log_v = arrays
    want = equation_1(q, k, v, mask=CAUSAL)
    assert np.abs(want - equation_1(q, k, v))[:, :-1].max() > 1e-3  # the mask matters
    assert_close(equation_2(*equation_4(q, k, complex_log(v))), want)
    assert_close(attention(q, k, v), want)
    assert_close(attention(q, k, v, state=init_state((2,), K, V, signed=True)), want)
    want = equation_1(q, k, np.exp(np.float64(log_v)), mask=CAUSAL)
    assert_close(equation_2(*equation_4(q, k, log_v)), want)
    assert_close(log_attention(q, k, log_v), np.log(want))
    assert_close(log_attention(q, k, log_v, state=init_state((2,), K, V)), np.log(want))


@pytest.mark.parametrize("signed", [False, True])
def test_eq5_and_eq6_in_sequence_equal_the_parallel_form(arrays, signed):
    """States are cumulative log-sums, or the running average of values."""
    q, k, v, log_v = arrays
    values, parallel = (v, attention) if signed else (log_v, log_attention)
    in_sequence, states = step_by_step(init_state((2,), K, V, signed=signed), q, k, values)
    at_once, end = parallel(q, k, values, return_state=True)
    assert_close(in_sequence, np.float64(at_once))
    assert type(states[-1]) is type(end) is (MeanState if signed else LogState)
    for got, want in zip(states[-1], end, strict=True):
        assert_close(got, np.float64(want))
    for t, state in enumerate(states):
        weights = np.exp(np.float64(k[:, : t + 1]))
        sums = np.einsum("bsk,bsv->bkv", weights, v[:, : t + 1] if signed else np.exp(np.float64(log_v[:, : t + 1])))
        z = weights.sum(1)
        assert_close(state[0], sums / z[..., None] if signed else np.log(sums))
        assert_close(state.h_z, np.log(z))


def test_eq7_zero_state_is_a_phantom_token(arrays):
    """Zeros in log space are a token with k = 0 and log v = 0; eq. (4) has no such token."""
    q, k, _, log_v = arrays
    zeros, empty = LogState(jnp.zeros((2, K, V)), jnp.zeros((2, K))), init_state((2,), K, V)
    assert not np.array_equal(zeros.h_s, empty.h_s) and not np.array_equal(zeros.h_z, empty.h_z)
    log_s, log_z = (x[:, 1:] for x in equation_4(*(np.pad(x, [(0, 0), (1, 0), (0, 0)]) for x in (q, k, log_v))))
    phantom = np.log(equation_2(log_s, log_z))
    assert_close(step_by_step(zeros, q, k, log_v)[0], phantom)
    assert_close(log_attention(q, k, log_v, state=zeros), phantom)
    assert np.abs(phantom - np.asarray(log_attention(q, k, log_v))).max() > 1e-3


@pytest.mark.parametrize("signed", [False, True])
def test_eq8_a_token_more_in_the_context_updates_all_queries_at_constant_cost(rng, arrays, signed):
    """Non-causal in sequence: the keys arrive token by token, then every query reads the same state."""
    q, k, v, log_v = arrays
    values, v = (v, v) if signed else (log_v, np.exp(np.float64(log_v)))
    q = np.concatenate([q, np.float32(rng.standard_normal((2, 5, K)))], axis=1)
    y_of = lambda y: y if signed else np.exp(np.float64(y))
    extend = jax.jit(heinsen.extend_context)
    state, programs = init_state((2,), K, V, signed=signed), set()
    for t in range(T):
        y, state = extend(state, k[:, t], values[:, t], q)
        programs.add(extend._cache_size())
        assert_close(y_of(y), equation_1(q, k[:, : t + 1], v[:, : t + 1]))
    assert len(programs) == 1, "one program, of one cost, for contexts of any length"
    assert_close(y_of(query_state(state, q[:, 3])), equation_1(q, k, v)[:, 3])


def test_log_state_and_mean_state_say_the_same_of_positive_values(arrays):
    """And log Z is log S of a column whose logarithm is zero."""
    q, k, _, log_v = arrays
    log_v[..., 0] = 0
    log_y, log_state = log_attention(q, k, log_v, return_state=True)
    y, mean_state = attention(q, k, np.exp(log_v), return_state=True)
    assert_close(y, np.exp(np.float64(log_y)))
    assert_close(mean_state.h_z, np.float64(log_state.h_z))
    assert_close(mean_state.mean, np.exp(np.float64(log_state.h_s) - np.float64(log_state.h_z)[..., None]))
    assert_close(log_state.h_s[..., 0], np.float64(log_state.h_z))
    assert_close(np.asarray(log_y)[..., 0], np.zeros((2, T)))


def test_states_have_one_size_whatever_the_number_of_tokens():
    def state_shapes(n):
        q, k, log_v = jnp.zeros((n, K)), jnp.zeros((n, K)), jnp.zeros((n, V))
        _, state = jax.eval_shape(lambda: heinsen.log_attention(q, k, log_v, return_state=True))
        return jax.tree.map(jnp.shape, state)

    assert state_shapes(1) == state_shapes(2000) == LogState((K, V), (K,))


def test_gradients_pass_through_the_sequential_form(arrays):
    """Eqs. (5) and (6) differentiate to what the parallel form does, from the empty state on."""
    q, k, _, log_v = arrays

    def in_sequence(q, k, log_v):
        def step(state, token):
            q, k, log_v = token
            state = heinsen.update_state(state, k, log_v)
            return state, heinsen.query_state(state, q)

        tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, log_v))
        return jnp.moveaxis(jax.lax.scan(step, init_state((2,), K, V), tokens)[1], 0, 1)

    g = np.sin(np.arange(2 * T * V, dtype=np.float32)).reshape(2, T, V)
    case = Case({"q": q, "k": k, "values": log_v}, None, True)
    want = truth(Form("log"), case, (g, (np.zeros((2, K, V)), np.zeros((2, K)))))[1]
    gradients = jax.jit(lambda *x: jax.vjp(in_sequence, *x)[1](g))(q, k, log_v)
    for got, name in zip(gradients, ("q", "k", "values"), strict=True):
        assert_close(got, want[name])
