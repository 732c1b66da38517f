"""Linear attention: its quadratic form in float64, states, documents, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from heinsen import init_linear_state
from heinsen.ops import linear
from tests.arrays import takes_numpy
from tests.ops.truth import assert_close, document_numbers, draw_case

T, K, V = 11, 4, 3
CHUNK = 4  # which does not divide T

linear_attention = takes_numpy(heinsen.linear_attention)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(linear, "_CHUNK", CHUNK)
    assert T > 2 * CHUNK and T % CHUNK


def features(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def truth(q, k, v, causal, ids, state, g):
    """y, the sums after all tokens, and the gradients by q, k, v: every weight at once, in float64."""
    q, k, v, state, g = (np.asarray(x, np.float64) for x in (q, k, v, state, g))
    fq, fk = features(q), features(k)
    seen = np.ones((q.shape[-2], k.shape[-2]))
    seen = np.tril(seen) if causal else seen
    first = last = np.ones(k.shape[:-1])
    goes_on = np.ones(k.shape[:-2])
    if ids is not None:
        run = np.apply_along_axis(document_numbers, -1, ids)
        seen = seen * (run[..., :, None] == run[..., None, :])
        first, last = np.equal(run, 0) * 1.0, np.equal(run, run[..., -1:]) * 1.0
        goes_on = np.equal(run[..., -1], 0) * 1.0
    a = seen * (fq @ fk.swapaxes(-1, -2))
    from_before = first[..., : q.shape[-2], None] * fq
    v1 = np.concatenate([v, np.ones((*v.shape[:-1], 1))], axis=-1)
    sums = a @ v1 + from_before @ state
    y = sums[..., :-1] / sums[..., -1:]
    end = goes_on[..., None, None] * state + (last[..., None] * fk).swapaxes(-1, -2) @ v1
    d_sums = np.concatenate([g, -(g * y).sum(-1, keepdims=True)], axis=-1) / sums[..., -1:]
    d_a = seen * (d_sums @ v1.swapaxes(-1, -2))
    d_fq = d_a @ fk + first[..., : q.shape[-2], None] * (d_sums @ state.swapaxes(-1, -2))
    slope = lambda x: np.where(x > 0, 1.0, np.exp(np.minimum(x, 0)))
    return y, end, (d_fq * slope(q), (d_a.swapaxes(-1, -2) @ fq) * slope(k), (a.swapaxes(-1, -2) @ d_sums)[..., :-1])


@pytest.mark.parametrize("mean_length", [0, 3], ids=["one document", "several"])
def test_decays_multiply_what_is_before_them(rng, mean_length):
    """The recurrence token by token in float64; gradients by finite differences along a direction."""
    case = draw_case(rng, (2, 3), T, T, K, V, mean_length=mean_length, decay=True)
    state = np.abs(rng.standard_normal((2, 3, K, V + 1)))
    weights = rng.standard_normal((2, 3, T, V)), rng.standard_normal((2, 3, K, V + 1))
    starts = np.zeros((2, 3, T), bool)
    if case.segment_ids is not None:
        starts[..., 1:] = case.segment_ids[..., 1:] != case.segment_ids[..., :-1]

    def recurrence(q, k, v, decays, sums):
        outputs = []
        for t in range(T):
            left = np.where(starts[..., t], 0.0, np.exp(decays[..., t]))[..., None, None]
            v1 = np.concatenate([v[..., t, :], np.ones((2, 3, 1))], axis=-1)
            sums = left * sums + features(k[..., t, :])[..., None] * v1[..., None, :]
            read = (features(q[..., t, :])[..., None] * sums).sum(-2)
            outputs.append(read[..., :-1] / read[..., -1:])
        return np.stack(outputs, axis=-2), sums

    def attend(q, k, v, decays, sums):
        y, end = linear_attention(
            q,
            k,
            v,
            log_decay=decays,
            state=linear.LinearState(sums),
            segment_ids=case.segment_ids,
            return_state=True,
        )
        return y, end.sums

    arrays = [np.float64(x) for x in (*case[:3], case.log_decay, state)]
    loss = lambda *arrays: sum(np.sum(w * x) for w, x in zip(weights, recurrence(*arrays), strict=True))
    inputs, cotangents = jax.tree.map(np.float32, (arrays, weights))
    got, gradients = jax.jit(lambda arrays: (lambda out, pull: (out, pull(cotangents)))(*jax.vjp(attend, *arrays)))(
        inputs
    )
    for x, want in zip(got, recurrence(*arrays), strict=True):
        assert_close(x, want, 1e-5)
    for i, gradient in enumerate(gradients):
        direction = np.where(np.isfinite(arrays[i]), rng.standard_normal(arrays[i].shape), 0.0)
        moved = [[x + step * direction if i == j else x for j, x in enumerate(arrays)] for step in (1e-6, -1e-6)]
        slope = (loss(*moved[0]) - loss(*moved[1])) / 2e-6
        assert (
            abs(np.sum(direction * gradient) - slope) < 1e-4 * np.sqrt(np.sum(np.square(np.float64(gradient)))) + 1e-5
        )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mean_length", [0, 3], ids=["one document", "several"])
def test_outputs_states_and_gradients_are_those_of_the_quadratic_form(rng, causal, mean_length):
    case = draw_case(rng, (2, 3), T, T, K, V, causal, mean_length=mean_length, scale=2.0)
    state = linear.LinearState(np.float32(np.abs(rng.standard_normal((2, 3, K, V + 1)))))
    g = np.float32(rng.standard_normal((2, 3, T, V)))
    want, want_end, want_gradients = truth(*case[:3], causal, case.segment_ids, state.sums, g)

    def run(q, k, v, state, g):
        attend = lambda q, k, v: linear_attention(
            q, k, v, causal=causal, state=state, segment_ids=case.segment_ids, return_state=True
        )
        y, pull, end = jax.vjp(attend, q, k, v, has_aux=True)
        return y, end, pull(g)

    y, end, gradients = jax.jit(run)(*case[:3], state, g)
    assert_close(y, want, 1e-5)
    assert_close(end.sums, want_end, 1e-5)
    for name, got, expected in zip("qkv", gradients, want_gradients, strict=True):
        assert_close(got, expected, 2e-5, name)


def test_more_queries_than_keys_and_parts_handing_on_their_state(rng):
    q, k, v = (np.float32(rng.standard_normal((2, T, d))) for d in (K, K, V))
    zeros = np.zeros((2, K, V + 1))
    y = jax.jit(lambda q, k, v: linear_attention(q, k, v, causal=False))(q[:, :5], k, v)
    assert_close(y, truth(q[:, :5], k, v, False, None, zeros, y)[0], 1e-5)
    step = jax.jit(lambda q, k, v, state: linear_attention(q, k, v, state=state, return_state=True))
    state, parts = init_linear_state((2,), K, V), []
    for first, last in ((0, 5), (5, 10), (10, 11)):
        y, state = step(*(x[:, first:last] for x in (q, k, v)), state)
        parts.append(y)
    assert_close(np.concatenate(parts, axis=1), truth(q, k, v, True, None, zeros, np.zeros((2, T, V)))[0], 1e-5)


def test_what_cannot_be_divided_is_zero_with_gradients_that_are_finite(rng):
    """Keys of -inf have no features; so have keys far below zero."""
    q, k, v = (np.float32(rng.standard_normal((T, d))) for d in (K, K, V))
    k[:3], k[5] = -np.inf, -200.0

    def run(q, k, v):
        y, pull = jax.vjp(linear_attention, q, k, v)
        return y, pull(jnp.ones_like(y))

    y, gradients = jax.jit(run)(q, k, v)
    np.testing.assert_array_equal(y[:3], 0)
    assert all(np.isfinite(x).all() for x in (y, *gradients))
    only = np.ones(T, bool)
    only[[0, 1, 2, 5]] = False
    zeros = np.zeros((K, V + 1)), np.zeros((only.sum(), V))
    assert_close(y[only], truth(q[only], k[only], v[only], True, None, *zeros)[0], 1e-5)


def test_bfloat16_inputs_give_bfloat16_from_float32_arithmetic(rng):
    arrays = [jnp.asarray(rng.standard_normal((T, d)), jnp.bfloat16) for d in (K, K, V)]
    attend = jax.jit(lambda *arrays: linear_attention(*arrays, return_state=True))
    y, state = attend(*arrays)
    assert y.dtype == jnp.bfloat16 and state.sums.dtype == jnp.float32
    want = truth(*(np.float32(x) for x in arrays), True, None, np.zeros((K, V + 1)), np.zeros((T, V)))[0]
    np.testing.assert_allclose(np.float32(y), want, rtol=2**-8, atol=1e-6)


@pytest.mark.wrong_types
def test_shapes_that_do_not_fit_are_refused(rng):
    q, k, v = (np.float32(rng.standard_normal((T, d))) for d in (K, K, V))
    with pytest.raises(ValueError, match="number of tokens"):
        linear_attention(q, k, v[1:])
    with pytest.raises(ValueError, match="as many queries as keys"):
        linear_attention(q[1:], k, v)
    with pytest.raises(TypeError, match="int32"):
        linear_attention(q, k, v.astype(np.int32))
