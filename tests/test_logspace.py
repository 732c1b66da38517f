"""The log-sum-exp monoid, its scans and gradients against float64 NumPy loops; the policy at -inf."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen import logspace
from tests.arrays import takes_numpy

cumulative_logsumexp = takes_numpy(logspace.cumulative_logsumexp)
gated_sum = takes_numpy(logspace.gated_sum)
log_divide = takes_numpy(logspace.log_divide)
log_linear_recurrence = takes_numpy(logspace.log_linear_recurrence)
log_matmul = takes_numpy(logspace.log_matmul)
logaddexp = takes_numpy(logspace.logaddexp)
logsumexp = takes_numpy(logspace.logsumexp)
posterior = takes_numpy(logspace.posterior)

INF = np.inf
FLOAT32_EPS = np.finfo(np.float32).eps

# Ordinary logarithms, logarithms far outside the range of exp, and the logarithm of zero.
logarithms = st.floats(-30, 30, width=32) | st.floats(-1e4, 1e4, width=32) | st.just(-INF)
logarithms = logarithms.map(np.float32)
laws = settings(max_examples=60, deadline=None)


def normal(rng, *shape, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def with_zeros(rng, x, share=0.3):
    """Replace some logarithms by that of zero."""
    return np.where(rng.random(x.shape) < share, np.float32(-INF), x)


def lse64(x, axis):
    """log-sum-exp in float64 (np.logaddexp handles -inf and any range)."""
    return np.logaddexp.reduce(np.asarray(x, np.float64), axis=axis)


def weights64(x, total):
    """exp(x - total), and 0 in an empty sum."""
    return np.where(total == -INF, 0.0, np.exp(x.astype(np.float64) - np.where(total == -INF, 0.0, total)))


def assert_close(got, want, tolerance=1e-6):
    """Assert equality within `tolerance`, relative to each entry or to 1, whichever is larger; infinities are equal."""
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


@functools.partial(jax.jit, static_argnums=0)
def _pull(function, arguments, cotangent, fixed):
    if hasattr(function, "lower"):
        function = function.__wrapped__  # compiled here, as part of the whole
    return jax.vjp(lambda *arguments: function(*arguments, *fixed), *arguments)[1](cotangent)


def pull(function, arguments, cotangent, *fixed):
    """Return the gradients of function(*arguments, *fixed) with respect to `arguments`; a NaN is an error."""
    with jax.debug_nans(True):
        return _pull(function, tuple(map(jnp.asarray, arguments)), jnp.asarray(cotangent, jnp.float32), fixed)


def finite_differences(function, arguments, cotangent, step=1e-5):
    """Return the gradients of sum(cotangent * function(*arguments)), entry by entry in float64."""
    arguments = [np.asarray(x, np.float64) for x in arguments]
    gradients = [np.zeros_like(x) for x in arguments]
    for x, gradient in zip(arguments, gradients, strict=True):
        for index in np.ndindex(x.shape):
            at, sides = x[index], []
            for side in (at + step, at - step):
                x[index] = side
                sides.append(np.sum(cotangent * function(*arguments)))
            x[index] = at
            gradient[index] = (sides[0] - sides[1]) / (2 * step)
    return gradients


# ---- the monoid --------------------------------------------------------------------------------


@laws
@given(logarithms, logarithms, logarithms)
def test_logaddexp_is_associative(a, b, c):
    left, right = logaddexp(logaddexp(a, b), c), logaddexp(a, logaddexp(b, c))
    assert_close(left, np.float64(right), 4 * FLOAT32_EPS)


@laws
@given(logarithms, logarithms)
def test_logaddexp_is_commutative(a, b):
    assert logaddexp(a, b) == logaddexp(b, a)


@laws
@given(logarithms)
def test_minus_infinity_is_the_identity_of_logaddexp(a):
    assert logaddexp(a, np.float32(-INF)) == a
    assert logaddexp(np.float32(-INF), a) == a


@laws
@given(logarithms, logarithms)
def test_logaddexp_is_the_log_of_the_sum(a, b):
    assert_close(logaddexp(a, b), np.logaddexp(np.float64(a), np.float64(b)), 4 * FLOAT32_EPS)


@laws
@given(logarithms, logarithms)
def test_derivatives_of_logaddexp_are_the_posterior_weights(a, b):
    total = np.logaddexp(np.float64(a), np.float64(b))
    da, db = pull(logaddexp, (a, b), 1.0)
    # A float32 logarithm near 1e4 has an error of 1e-3, and so has the weight, exp of the difference of two.
    tolerance = 1e-6 + 2 * FLOAT32_EPS * max(abs(x) for x in (total, 1) if np.isfinite(x))
    assert_close(da, weights64(a, total), tolerance)
    assert_close(db, weights64(b, total), tolerance)


def test_logaddexp_broadcasts_forward_and_backward(rng):
    a, b, g = normal(rng, 3, 1, 4), normal(rng, 5, 1), normal(rng, 3, 5, 4)
    assert_close(logaddexp(a, b), np.logaddexp(a.astype(np.float64), b))
    wants = finite_differences(np.logaddexp, (a, b), g)
    for got, want in zip(pull(logaddexp, (a, b), g), wants, strict=True):
        assert_close(got, want, 1e-5)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("scale", [1, 1e4])
def test_logsumexp_is_the_log_of_the_sum(rng, axis, scale):
    x = with_zeros(rng, normal(rng, 4, 3, 5, scale=scale))
    assert_close(logsumexp(x, axis), lse64(x, axis))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gradient_of_logsumexp_is_the_posterior_weight(rng, axis):
    x = with_zeros(rng, normal(rng, 4, 3, 5, scale=3))
    x[:, 1, 2], x[2, :, 3], x[0, 0, :] = -INF, -INF, -INF  # sums of nothing along every axis
    total = lse64(x, axis)
    assert np.any(total == -INF) and np.any(np.isfinite(total))
    g = normal(rng, *total.shape)
    (got,) = pull(lambda x: logsumexp(x, axis), (x,), g)
    assert_close(got, np.expand_dims(g, axis) * weights64(x, np.expand_dims(total, axis)))


def test_posterior_is_at_most_one_and_zero_in_an_empty_sum(rng):
    x = with_zeros(rng, normal(rng, 50, 4, scale=1e3))
    x[0] = -INF
    total = logsumexp(x)[:, None]
    weights = np.asarray(posterior(x, total))
    assert np.all(weights <= 1 + 1e-3) and np.all(weights[0] == 0)
    assert_close(weights, weights64(x, np.asarray(total, np.float64)), 1e-5)


# ---- derivatives of other kinds ----------------------------------------------------------------


@pytest.mark.parametrize("b", [0.7, -INF])
@pytest.mark.parametrize("a", [-0.4, -INF])
def test_second_derivatives_of_logaddexp(a, b):
    total = np.logaddexp(a, b)
    p = weights64(np.array([a, b]), np.array(total))
    function = lambda x: logaddexp(x[0], x[1])
    with jax.debug_nans(True):
        forward_over_reverse = jax.jit(jax.hessian(function))(jnp.array([a, b]))
        reverse_over_reverse = jax.jit(jax.jacrev(jax.jacrev(function)))(jnp.array([a, b]))
        _, tangent = jax.jvp(logaddexp, (jnp.array(a), jnp.array(b)), (jnp.array(2.0), jnp.array(3.0)))
    assert_close(forward_over_reverse, np.diag(p) - np.outer(p, p))
    assert_close(reverse_over_reverse, np.diag(p) - np.outer(p, p))
    assert_close(tangent, p @ [2, 3])


@pytest.mark.parametrize("zeros", [0, 2, 4])
def test_second_derivatives_of_logsumexp(rng, zeros):
    x, dx = normal(rng, 4), normal(rng, 4)
    x[:zeros] = -INF
    p = weights64(x, lse64(x, 0))
    with jax.debug_nans(True):
        hessian = jax.jit(jax.hessian(logsumexp))(jnp.asarray(x))
        _, tangent = jax.jvp(logsumexp, (jnp.asarray(x),), (jnp.asarray(dx),))
    assert_close(hessian, np.diag(p) - np.outer(p, p))
    assert_close(tangent, p @ dx)


# ---- products, quotients, signed numbers --------------------------------------------------------


@pytest.mark.parametrize("scale", [1, 1e4])
def test_log_matmul_is_the_log_of_the_product(rng, scale):
    a, b = with_zeros(rng, normal(rng, 2, 3, 4, scale=scale)), with_zeros(rng, normal(rng, 4, 5, scale=scale))
    a[0, 1] = -INF
    terms = a.astype(np.float64)[..., None] + b
    assert_close(log_matmul(a, b), lse64(terms, -2))


def test_gradients_of_log_matmul(rng):
    a, b = with_zeros(rng, normal(rng, 2, 3, 4)), with_zeros(rng, normal(rng, 4, 5))
    a[0, 1], b[:, 2] = -INF, -INF
    terms = a.astype(np.float64)[..., None] + b
    total = lse64(terms, -2)[..., None, :]
    g = normal(rng, 2, 3, 5)
    dterms = g[..., None, :] * weights64(terms, total)
    da, db = pull(log_matmul, (a, b), g)
    assert_close(da, dterms.sum(-1), 1e-5)
    assert_close(db, dterms.sum((0, 1)), 1e-5)


def test_log_divide_is_a_difference_and_nothing_over_nothing_is_nothing():
    a, b = np.float32([1.5, -INF, -INF, 1e4]), np.float32([0.25, 2.0, -INF, -1e4])
    assert_close(log_divide(a, b), [1.25, -INF, -INF, 2e4])
    da, db = pull(log_divide, (a, b), np.ones(4))
    assert_close(da, [1, 1, 0, 1])
    assert_close(db, [-1, -1, 0, -1])


# ---- scans -------------------------------------------------------------------------------------


def gated_sum64(gate, x):
    y, out = np.zeros_like(x[0]), []
    for gate_t, x_t in zip(gate, x, strict=True):
        y = gate_t * y + x_t
        out.append(y)
    return np.stack(out)


METHODS = ["associative", "sequential"]


# One block, and three of 33 where there are blocks.
@pytest.mark.parametrize("n_tokens, reverse", [(9, False), (99, True)])
@pytest.mark.parametrize("method", METHODS)
def test_gated_sum_is_the_linear_recurrence(rng, n_tokens, reverse, method):
    gate = rng.random((n_tokens, 3, 1), np.float32)
    x, g = normal(rng, n_tokens, 3, 2), normal(rng, n_tokens, 3, 2)
    gate[4, 0] = 0
    turn = (lambda z: z[::-1]) if reverse else (lambda z: z)
    loop = lambda gate, x: turn(gated_sum64(turn(gate), turn(x)))
    function = lambda gate, x: gated_sum(gate, x, 0, reverse, method)
    assert_close(jax.jit(function)(gate, x), loop(gate.astype(np.float64), x.astype(np.float64)))
    for got, want in zip(pull(function, (gate, x), g), finite_differences(loop, (gate, x), g), strict=True):
        assert_close(got, want, 1e-5)


def test_gated_sum_runs_along_its_axis(rng):
    gate, x = rng.random((2, 4, 3), np.float32), normal(rng, 2, 4, 3)
    want = np.moveaxis(gated_sum64(*(np.moveaxis(z, 1, 0).astype(np.float64) for z in (gate, x))), 0, 1)
    for axis in (1, -2):
        assert_close(gated_sum(gate, x, axis), want)


def test_the_program_of_a_scan_does_not_grow_with_the_tokens():
    text = lambda n: jax.jit(functools.partial(logspace.cumulative_logsumexp, axis=0)).lower(jnp.ones(n)).as_text()
    assert len(text(4096).splitlines()) == len(text(128).splitlines())


def segments(resets):
    """Return the index of each token's segment."""
    return np.cumsum(resets)


@jax.jit
def lcse(x, resets):
    """Along axis 0; where it restarts, as the recurrence whose gates are 1 and 0 there."""
    if resets is None:
        return cumulative_logsumexp(x, 0)
    return log_linear_recurrence(jnp.where(resets, -INF, 0.0), x, 0, method="associative")


def lcse64(x, resets):
    """Log-cumulative-sum along axis 0, restarted where `resets` is true."""
    h = np.full(x.shape[1:], -INF)
    out = []
    for x_t, reset in zip(x.astype(np.float64), resets, strict=True):
        h = x_t if reset else np.logaddexp(h, x_t)
        out.append(h)
    return np.stack(out)


def lcse64_gradient(x, resets, g):
    """sum_t g[t] exp(x[s] - h[t]) over the t >= s in the segment of s."""
    h, gradient, segment = lcse64(x, resets), np.zeros(x.shape), segments(resets)
    for s in range(len(x)):
        for t in range(s, len(x)):
            if segment[s] == segment[t]:
                gradient[s] += g[t] * weights64(x[s], h[t])
    return gradient


@pytest.mark.parametrize("scale", [1, 30, 1e4])
@pytest.mark.parametrize("reset", [False, True])
def test_cumulative_logsumexp(rng, scale, reset):
    x, g = with_zeros(rng, normal(rng, 11, 3, scale=scale)), normal(rng, 11, 3)
    x[:4, 0] = -INF
    resets = np.zeros(11, bool)
    if reset:
        # Two segments that begin with zero, one of a single token, and a fall far beyond exp's range.
        resets[[5, 6, 8]] = True
        x[4], x[5:8] = 1000, -INF
        assert np.any(lcse64(x, resets) != lcse64(x, np.zeros(11, bool)))
    fixed = resets[:, None] if reset else None
    tolerance = 1e-6 + 4 * FLOAT32_EPS * scale
    assert_close(lcse(x, fixed), lcse64(x, resets))
    assert_close(pull(lcse, (x,), g, fixed)[0], lcse64_gradient(x, resets, g), 10 * tolerance)


@pytest.mark.parametrize("reset", [False, True])
def test_cumulative_logsumexp_of_nothing_is_nothing(reset):
    resets = np.arange(11)[:, None] == 2 if reset else None
    x = np.full((11, 3), -INF, np.float32)
    assert np.all(np.asarray(lcse(x, resets)) == -INF)
    assert np.all(np.asarray(pull(lcse, (x,), np.ones((11, 3)), resets)[0]) == 0)


def test_cumulative_logsumexp_broadcasts_resets_off_its_axis(rng):
    x, resets, g = normal(rng, 2, 7, 3), rng.random((2, 7, 1)) < 0.4, normal(rng, 2, 7, 3)
    resets[0, 3], resets[1, 3] = True, False
    function = jax.jit(lambda x: log_linear_recurrence(jnp.where(resets, -INF, 0.0), x, -2, method="associative"))
    out, gradient = function(x), pull(function, (x,), g)[0]
    for row in range(2):
        assert_close(out[row], lcse64(x[row], resets[row, :, 0]))
        assert_close(gradient[row], lcse64_gradient(x[row], resets[row, :, 0], g[row]), 1e-5)


def test_first_token_may_reset(rng):
    x, resets = normal(rng, 11, 3), np.isin(np.arange(11), [0, 3])
    assert_close(lcse(x, resets[:, None]), lcse64(x, resets))


def _recurrence(method, log_a, log_b, initial=None):
    return log_linear_recurrence(log_a, log_b, 0, initial, method)


recurrence = jax.jit(_recurrence, static_argnums=0)
RECURRENCE_BY = {method: functools.partial(_recurrence, method) for method in METHODS}


def recurrence64(log_a, log_b, initial):
    e, out = initial, []
    for log_a_t, log_b_t in zip(log_a, log_b, strict=True):
        e = np.logaddexp(e + log_a_t, log_b_t)
        out.append(e)
    return np.stack(out)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1, 1e4])
@pytest.mark.parametrize("given_initial", [False, True])
def test_log_linear_recurrence(rng, scale, given_initial, method):
    log_a, log_b = normal(rng, 9, 4, scale=scale), with_zeros(rng, normal(rng, 9, 4, scale=scale))
    log_a = -np.abs(log_a) if scale > 1 else log_a  # decay only, or decay and growth
    log_a[3, 0], log_b[:, 1] = -INF, -INF
    initial = normal(rng, 4) if given_initial else None
    start = np.float64(initial) if given_initial else np.full(4, -INF)
    want = recurrence64(log_a.astype(np.float64), log_b.astype(np.float64), start)
    largest = np.max(np.abs(want[np.isfinite(want)]))  # rounding errors scale with the terms, even if these cancel
    got = np.asarray(recurrence(method, log_a, log_b, initial), np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=3e-7 * largest)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_log_linear_recurrence(rng, method):
    arguments, g = (normal(rng, 9, 4), normal(rng, 9, 4), normal(rng, 4)), normal(rng, 9, 4)
    wants = finite_differences(recurrence64, arguments, g)
    for got, want in zip(pull(RECURRENCE_BY[method], arguments, g), wants, strict=True):
        assert_close(got, want, 1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("initial", [(np.full(4, -INF, np.float32),), ()], ids=["initial", "no initial"])
def test_gradients_of_a_recurrence_of_nothing_are_zero(initial, method):
    log_a, log_b = np.full((9, 4), -1, np.float32), np.full((9, 4), -INF, np.float32)
    for gradient in pull(RECURRENCE_BY[method], (log_a, log_b, *initial), np.ones((9, 4))):
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("method", METHODS)
def test_recurrence_with_zero_gates_forgets(rng, method):
    arguments = np.full((9, 4), -INF, np.float32), normal(rng, 9, 4), normal(rng, 4)
    assert_close(recurrence(method, *arguments), arguments[1])
    da, db, dinitial = pull(RECURRENCE_BY[method], arguments, np.ones((9, 4)))
    assert np.all(np.asarray(da) == 0) and np.all(np.asarray(db) == 1) and np.all(np.asarray(dinitial) == 0)


def test_log_linear_recurrence_runs_along_its_axis(rng):
    log_a, log_b, initial = -np.abs(normal(rng, 2, 5, 3)), normal(rng, 2, 5, 3), normal(rng, 2, 3)
    swap = lambda x: np.moveaxis(x.astype(np.float64), 1, 0)
    want = np.moveaxis(recurrence64(swap(log_a), swap(log_b), np.float64(initial)), 0, 1)
    for axis in (1, -2):
        assert_close(jax.jit(log_linear_recurrence, static_argnums=2)(log_a, log_b, axis, initial), want)


@pytest.mark.parametrize("length", range(1, 10))
def test_an_associative_scan_combines_no_empty_slices(rng, length):
    def combine(earlier, later):
        assert earlier.size and later.size
        return earlier + later

    x = rng.integers(0, 100, (3, length))
    np.testing.assert_array_equal(logspace.associative_scan(combine, jnp.asarray(x), 1), np.cumsum(x, axis=1))


@pytest.mark.wrong_types
def test_unknown_methods_are_refused_with_the_choices():
    for function in (gated_sum, log_linear_recurrence):
        with pytest.raises(ValueError, match="'fast'.*associative.*sequential"):
            function(jnp.zeros(3), jnp.zeros(3), 0, method="fast")
