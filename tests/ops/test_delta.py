"""The gated delta rule: its recurrence in float64, states, documents, keys that are alike, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from heinsen.ops import delta
from heinsen.ops.delta import DeltaState, init_delta_state
from heinsen.ops.linear import init_linear_state
from tests.arrays import takes_numpy
from tests.ops.test_precision import products
from tests.ops.truth import assert_close, draw_case, draw_decays

T, K, V = 11, 4, 3
CHUNK = 4  # which does not divide T
BATCH = (2, 3)
NAMES = ("q", "k", "v", "beta", "state", "log_decay")

delta_rule = takes_numpy(delta.delta_rule)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(delta, "_CHUNK", CHUNK)
    assert T > 2 * CHUNK and T % CHUNK


def draw(rng, n_tokens, mean_length=0, decay=False, d_key=K, d_value=V):
    """(q, unit k, v, beta, state and, if asked for, log_decay, in float32; segment ids or None)."""
    case = draw_case(rng, BATCH, n_tokens, n_tokens, d_key, d_value, mean_length=mean_length, decay=decay)
    beta = np.clip(rng.uniform(-0.2, 1.2, (*BATCH, n_tokens)), 0, 1)
    k = case.k / np.linalg.norm(case.k, axis=-1, keepdims=True)
    arrays = [case.q, k, case.values, beta, rng.standard_normal((*BATCH, d_key, d_value))]
    if decay:
        case.log_decay[0, 0, 0] = -np.inf
        arrays.append(case.log_decay)
    return [np.float32(x) for x in arrays], case.segment_ids


def draw_cotangents(rng, n_tokens, d_key=K, d_value=V):
    return [np.float32(rng.standard_normal((*BATCH, *shape))) for shape in ((n_tokens, d_value), (d_key, d_value))]


def run(segment_ids, q, k, v, beta, state, log_decay=None):
    given = {"log_decay": log_decay, "segment_ids": segment_ids}
    y, end = delta_rule(q, k, v, beta, state=DeltaState(state), **given)
    return y, end.memory


def recurrence(segment_ids, q, k, v, beta, state, log_decay=None):
    """The equation in the head of heinsen/ops/delta.py, token by token, with matrices written out."""
    starts = jnp.zeros(beta.shape, bool)
    if segment_ids is not None:
        starts = starts.at[..., 1:].set(segment_ids[..., 1:] != segment_ids[..., :-1])
    left = jnp.where(starts, 0.0, 1.0 if log_decay is None else jnp.exp(log_decay))

    def token(memory, at_t):
        q, k, v, beta, left = at_t
        erase = jnp.eye(k.shape[-1]) - beta[..., None, None] * k[..., :, None] * k[..., None, :]
        memory = left[..., None, None] * (erase @ memory) + beta[..., None, None] * k[..., :, None] * v[..., None, :]
        return memory, jnp.squeeze(q[..., None, :] @ memory, -2)

    tokens_first = [jnp.moveaxis(x, len(BATCH), 0) for x in (q, k, v, beta, left)]
    end, y = lax.scan(token, state, tokens_first)
    return jnp.moveaxis(y, 0, len(BATCH)), end


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(function, segment_ids, arrays, cotangents):
    """(y, the state after all tokens), and the gradients by all arrays."""
    out, pull = jax.vjp(functools.partial(function, segment_ids), *arrays)
    return out, pull(tuple(cotangents))


def truth(segment_ids, arrays, cotangents):
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (list(arrays), list(cotangents)))
        return jax.tree.map(np.asarray, with_gradients(recurrence, segment_ids, *wide))


def assert_true(segment_ids, arrays, cotangents, tolerance=1e-5):
    got, gradients = with_gradients(run, segment_ids, arrays, cotangents)
    want, want_gradients = truth(segment_ids, arrays, cotangents)
    for name, x, expected in zip(("y", "state"), got, want, strict=True):
        assert_close(x, expected, tolerance, name)
    for name, x, expected in zip(NAMES, gradients, want_gradients, strict=False):
        assert_close(x, expected, 2 * tolerance, f"gradient by {name}", floor=1.0)
        assert np.any(expected != 0)


@pytest.mark.parametrize(
    ("n_tokens", "mean_length", "decay"),
    [(T, 0, False), (T, 3, False), (2 * CHUNK, 0, True), (T, 3, True), (1, 0, True)],
    ids=["plain", "documents", "decay, whole chunks", "decay and documents", "one token"],
)
@pytest.mark.usefixtures("small_chunks")
def test_outputs_states_and_gradients_are_those_of_the_recurrence(rng, n_tokens, mean_length, decay):
    """Decays of all sizes, some of -inf; betas of 0 and 1 among others."""
    arrays, ids = draw(rng, n_tokens, mean_length, decay)
    assert_true(ids, arrays, draw_cotangents(rng, n_tokens))


def test_chunks_of_64_tokens_with_keys_that_are_alike(rng):
    """With one key and betas of 1 the powers of A are binomial coefficients, up to 1e18, and the inverse is 0 or 1.

    Errors of the state add up: nothing forgets.
    """
    n_tokens = 150
    (q, k, v, _, state), _ = draw(rng, n_tokens, d_key=16, d_value=8)
    k = np.float32(np.ones_like(k) + np.float32([0, 0.1, 1])[:, None, None] * k * 4)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    beta = np.float32(1 - 0.1 * rng.random((*BATCH, n_tokens)) * np.array([[0], [1]])[..., None])
    assert_true(None, (q, k, v, beta, state), draw_cotangents(rng, n_tokens, 16, 8))


@pytest.mark.usefixtures("small_chunks")
def test_parts_handing_on_their_state_are_the_whole(rng):
    """Documents begin within parts and with them; the last parts are single tokens."""
    (*arrays, log_decay), _ = draw(rng, T, decay=True)
    ids = np.int32([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    whole, end = jax.jit(functools.partial(run, ids))(*arrays, log_decay)
    *tokens, state = arrays
    parts = []
    for first, last in ((0, 5), (5, 7), (7, 10), (10, 11)):
        # A part knows no ids before it.
        state = np.zeros_like(state) if first == 7 else state
        own, decay = [x[:, :, first:last] for x in tokens], log_decay[:, :, first:last]
        y, state = run(ids[first:last], *own, state, decay)
        parts.append(y)
    assert_close(np.concatenate(parts, axis=2), whole, 1e-5)
    assert_close(state, end, 1e-5)
    empty, _ = delta_rule(*tokens, segment_ids=ids, log_decay=log_decay)
    zeros = run(ids, *tokens, np.zeros_like(state), log_decay)[0]
    np.testing.assert_array_equal(empty, zeros)
    assert np.any(np.abs(empty - whole)[:, :, :3] > 1e-2), "the state before matters"


@pytest.mark.usefixtures("small_chunks")
def test_what_is_forgotten_has_no_influence_at_all(rng):
    """Bit for bit, after a document's start or a decay of -inf, by large numbers too."""
    (q, k, v, beta, state), _ = draw(rng, T)
    decay = draw_decays(rng, (*BATCH, T))
    decay[..., 6] = -np.inf
    ids = np.int32(np.arange(T) >= 6)
    others = [np.concatenate([1e6 * x[:, :, :6][:, :, ::-1], x[:, :, 6:]], axis=2) for x in (q, v)]
    attend = jax.jit(run)
    for given in ((None, decay), (ids, np.where(np.isinf(decay), -1, decay))):
        y, end = attend(given[0], q, k, v, beta, state, given[1])
        other_y, other_end = attend(given[0], others[0], k, others[1], beta, 1e6 * state, given[1])
        np.testing.assert_array_equal(y[:, :, 6:], other_y[:, :, 6:])
        np.testing.assert_array_equal(end, other_end)
        assert np.any(np.asarray(y)[:, :, :6] != np.asarray(other_y)[:, :, :6])


@pytest.mark.usefixtures("small_chunks")
def test_betas_and_decays_of_zero_leave_the_state_as_it_is(rng):
    (q, k, v, beta, state), _ = draw(rng, T)
    zero = np.zeros_like(beta)
    y, end = jax.jit(run)(None, q, k, v, zero, state, zero)
    np.testing.assert_array_equal(end, state)
    assert_close(y, q @ state, 1e-6)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("log_decay", [0.0, -1e-30, -200.0, -1e30, -np.inf])
def test_gradients_of_extreme_inputs_are_finite(rng, log_decay):
    """Of zeros as well."""
    arrays, _ = draw(rng, T)
    for inputs in (arrays, jax.tree.map(np.zeros_like, arrays)):
        given = [*inputs, np.full((*BATCH, T), log_decay, np.float32)]
        out, gradients = with_gradients(run, None, given, draw_cotangents(rng, T))
        assert all(np.isfinite(x).all() for x in (*out, *gradients))


@pytest.mark.usefixtures("small_chunks")
def test_float64_is_kept_and_bfloat16_computed_in_float32(rng):
    (*arrays, decay), ids = draw(rng, T, 3, decay=True)
    with jax.enable_x64(True):
        wide = [np.float64(x) for x in (*arrays, decay)]
        for got, want in zip(run(ids, *wide), recurrence(ids, *wide), strict=True):
            assert got.dtype == np.float64
            assert_close(got, want, 1e-13)
    *tokens, _ = (jnp.asarray(x, jnp.bfloat16) for x in arrays)
    y, end = delta_rule(*tokens)
    assert y.dtype == jnp.bfloat16 and end.memory.dtype == jnp.float32
    want = recurrence(None, *(np.float32(x) for x in tokens), np.zeros((*BATCH, K, V), np.float32))
    np.testing.assert_allclose(np.float32(y), want[0], rtol=2**-8, atol=1e-6)
    assert_close(end.memory, want[1], 1e-5)


@pytest.mark.usefixtures("small_chunks")
def test_vmap_and_products_in_float32(rng):
    (*arrays, decay), _ = draw(rng, T, decay=True)
    whole = jax.jit(functools.partial(run, None))(*arrays, decay)
    mapped = jax.jit(jax.vmap(functools.partial(run, None)))(*arrays, decay)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), mapped, whole)
    loss = lambda *arrays: jnp.sum(run(None, *arrays)[0])
    found = list(products(jax.make_jaxpr(jax.grad(loss, argnums=range(6)))(*arrays, decay).jaxpr))
    assert found and all(x.params["precision"] == (lax.Precision.HIGHEST,) * 2 for x in found)


def test_memory_is_linear_in_tokens():
    def temporary(n_tokens):
        q, k, v = (jax.ShapeDtypeStruct((2, n_tokens, 32), jnp.float32) for _ in range(3))
        beta = jax.ShapeDtypeStruct((2, n_tokens), jnp.float32)
        loss = lambda *arrays: jnp.sum(delta.delta_rule(*arrays, log_decay=-arrays[-1])[0])
        compiled = jax.jit(jax.grad(loss, argnums=range(4))).lower(q, k, v, beta).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(4096) < 2.1 * temporary(2048)


@pytest.mark.wrong_types
def test_what_does_not_fit_is_refused(rng):
    (q, k, v, beta, state), _ = draw(rng, T)
    with pytest.raises(ValueError, match="as many queries as keys"):
        delta_rule(q[:, :, 1:], k, v, beta)
    with pytest.raises(ValueError, match=r"beta \(2, 3, 10\) does not fit k .* one number for each head and token"):
        delta_rule(q, k, v, beta[..., 1:])
    with pytest.raises(TypeError, match="beta has dtype int32"):
        delta_rule(q, k, v, np.int32(beta))
    with pytest.raises(ValueError, match="state with shapes .* does not fit"):
        delta_rule(q, k, v, beta, state=DeltaState(state[..., 1:]))
    with pytest.raises(TypeError, match="state is a LinearState: expected a DeltaState"):
        delta_rule(q, k, v, beta, state=init_linear_state(BATCH, K, V))
    with pytest.raises(TypeError, match="the state has dtype int32"):
        init_delta_state(BATCH, K, V, jnp.int32)
