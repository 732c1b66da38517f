"""The log-sum-exp monoid, its scans and gradients against float64 NumPy loops; the policy at -inf."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen import logspace
from heinsen.logspace import cumulative_logsumexp, gated_sum, log_divide, log_linear_recurrence, log_matmul, logsumexp
from tests.arrays import takes_numpy

logaddexp = takes_numpy(logspace.logaddexp)
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


def assert_close(got, want, rtol=1e-6, atol=None):
    """Assert equality within rtol, relative to each entry or to 1 (or atol), whichever is larger; infinities agree."""
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=rtol, atol=rtol if atol is None else atol)


@functools.partial(jax.jit, static_argnums=0)
def _pull(function, arguments, cotangent):
    return jax.vjp(function, *arguments)[1](cotangent)


def pull(function, arguments, cotangent):
    """Return the gradients of function(*arguments) with respect to `arguments`; a NaN is an error."""
    with jax.debug_nans(True):
        return _pull(function, tuple(map(jnp.asarray, arguments)), jnp.asarray(cotangent, jnp.float32))


def finite_differences(function, arguments, cotangent, step=1e-5):
    """Return the gradients of sum(cotangent * function(*arguments)), entry by entry in float64; 0 in an empty sum."""
    arguments = [np.asarray(x, np.float64) for x in arguments]
    gradients = [np.zeros_like(x) for x in arguments]
    for x, gradient in zip(arguments, gradients, strict=True):
        for index in np.ndindex(x.shape):
            at, sides = x[index], []
            for side in (at + step, at - step):
                x[index] = side
                sides.append(function(*arguments))
            x[index] = at
            with np.errstate(invalid="ignore"):  # -inf - -inf
                gradient[index] = np.nansum(cotangent * (sides[0] - sides[1])) / (2 * step)
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


def test_posterior_is_at_most_one_and_zero_in_an_empty_sum(rng):
    x = with_zeros(rng, normal(rng, 50, 4, scale=1e3))
    x[0] = -INF
    total = takes_numpy(logsumexp)(x)[:, None]
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


def test_nothing_over_nothing_is_nothing():
    a, b = np.float32([1.5, -INF, -INF, 1e4]), np.float32([0.25, 2.0, -INF, -1e4])
    assert_close(takes_numpy(log_divide)(a, b), [1.25, -INF, -INF, 2e4])
    da, db = pull(log_divide, (a, b), np.ones(4))
    assert_close(da, [1, 1, 0, 1])
    assert_close(db, [-1, -1, 0, -1])


# ---- sums, products and scans ------------------------------------------------------------------


class Operation(NamedTuple):
    """A function, what it computes in float64, and its arguments, given random numbers and the scale of logarithms."""

    function: Callable[..., Any]
    truth: Callable[..., Any]
    arguments: Callable[[np.random.Generator, float], tuple[np.ndarray, ...]]
    scales: tuple[float, ...] = (1, 1e4)  # of its values
    gradient_scales: tuple[float, ...] = (1,)
    rtol: float = 1e-6
    gradient_rtol: float = 1e-5


def gated_sum64(gate, x):
    y, out = np.zeros_like(x[0]), []
    for gate_t, x_t in zip(gate, x, strict=True):
        y = gate_t * y + x_t
        out.append(y)
    return np.stack(out)


def recurrence64(log_a, log_b, initial=-INF):
    e, out = initial, []
    for log_a_t, log_b_t in zip(log_a, log_b, strict=True):
        e = np.logaddexp(e + log_a_t, log_b_t)
        out.append(e)
    return np.stack(out)


def along(axis, truth):
    """Of arrays that have the axis; `truth` goes along the first one."""
    return lambda *arrays: np.moveaxis(truth(*(np.moveaxis(x, axis, 0) for x in arrays)), 0, axis)


def draw_summands(rng, scale):
    """With sums of nothing along every axis."""
    x = with_zeros(rng, normal(rng, 4, 3, 5, scale=3 * scale))
    x[:, 1, 2], x[2, :, 3], x[0, 0, :] = -INF, -INF, -INF
    return (x,)


def draw_factors(rng, scale):
    a, b = with_zeros(rng, normal(rng, 2, 3, 4, scale=scale)), with_zeros(rng, normal(rng, 4, 5, scale=scale))
    a[0, 1], b[:, 2] = -INF, -INF
    return a, b


def draw_tokens(rng, scale):
    """With a beginning of zeros, and zeros alone."""
    x = with_zeros(rng, normal(rng, 11, 3, scale=scale))
    x[:4, 0], x[:, 1] = -INF, -INF
    return (x,)


RESETS = np.zeros((2, 11, 1), bool)  # also at the first token, and around a single one
RESETS[0, [0, 5, 6, 8]] = RESETS[1, [2, 3, 7, 10]] = True


def draw_segments(rng, scale):
    """Some begin with zeros, and there is a fall far beyond exp's range."""
    x = with_zeros(rng, normal(rng, 2, 11, 3, scale=scale))
    x[:, 4], x[:, 5:8], x[0, :, 2] = 1000, -INF, -INF
    return (x,)


def draw_gates(shape, shape_of_gate):
    def draw(rng, scale):
        gate, x = rng.random(shape_of_gate, np.float32), normal(rng, *shape)
        gate[0, 1] = 0
        return gate, x

    return draw


def draw_recurrence(shape, axis=0, with_initial=True):
    """Decay only, or decay and growth; gates that are zero, inputs that are, and a last column of nothing."""

    def draw(rng, scale):
        log_a, log_b = normal(rng, *shape, scale=scale), with_zeros(rng, normal(rng, *shape, scale=scale))
        log_a = -np.abs(log_a) if scale > 1 else log_a
        log_a[0, 0], log_b[..., -1] = -INF, -INF
        initial = normal(rng, *np.delete(shape, axis))
        initial[..., -1] = -INF
        return (log_a, log_b, initial) if with_initial else (log_a, log_b)

    return draw


PRECISE = dict(scales=(1, 30, 1e4), gradient_scales=(1, 30, 1e4), rtol=4 * FLOAT32_EPS, gradient_rtol=1e-6)
OPERATIONS = {
    "logaddexp": Operation(
        logspace.logaddexp,
        np.logaddexp,
        lambda rng, scale: (with_zeros(rng, normal(rng, 6, 1, 4, scale=scale)), with_zeros(rng, normal(rng, 5, 1))),
        **PRECISE,
    ),
    "log_matmul": Operation(log_matmul, lambda a, b: np.logaddexp.reduce(a[..., None] + b, axis=-2), draw_factors),
    "cumulative_logsumexp": Operation(
        functools.partial(cumulative_logsumexp, axis=0),
        lambda x: recurrence64(np.zeros_like(x), x),
        draw_tokens,
        **PRECISE | dict(rtol=1e-6, gradient_rtol=1e-5),
    ),
    "cumulative_logsumexp, restarted": Operation(
        lambda x: log_linear_recurrence(jnp.where(RESETS, -INF, 0.0), x, -2, method="associative"),
        lambda x: along(1, recurrence64)(np.broadcast_to(np.where(RESETS, -INF, 0.0), x.shape), x),
        draw_segments,
        **PRECISE | dict(rtol=1e-6, gradient_rtol=1e-5),
    ),
}
for _axis in (0, 1, -1):
    OPERATIONS[f"logsumexp along {_axis}"] = Operation(
        functools.partial(logsumexp, axis=_axis),
        functools.partial(np.logaddexp.reduce, axis=_axis),
        draw_summands,
        gradient_rtol=1e-6,
    )
for _method in ("associative", "sequential"):
    _gated_sum, _recurrence = (functools.partial(f, method=_method) for f in (gated_sum, log_linear_recurrence))
    OPERATIONS |= {
        # One block, and three of 33 where there are blocks.
        f"gated_sum, {_method}": Operation(
            functools.partial(_gated_sum, axis=0), gated_sum64, draw_gates((9, 3, 2), (9, 3, 1)), (1,)
        ),
        f"gated_sum, {_method}, reverse": Operation(
            functools.partial(_gated_sum, axis=0, reverse=True),
            lambda gate, x: gated_sum64(gate[::-1], x[::-1])[::-1],
            draw_gates((99, 3, 2), (99, 3, 1)),
            (1,),
        ),
        f"gated_sum, {_method}, along -2": Operation(
            functools.partial(_gated_sum, axis=-2), along(1, gated_sum64), draw_gates((2, 4, 3), (2, 4, 3)), (1,)
        ),
        f"recurrence, {_method}": Operation(
            functools.partial(_recurrence, axis=0), recurrence64, draw_recurrence((9, 4), with_initial=False)
        ),
        f"recurrence, {_method}, from an initial value": Operation(
            lambda a, b, initial, f=_recurrence: f(a, b, 0, initial), recurrence64, draw_recurrence((9, 4))
        ),
        f"recurrence, {_method}, along 1": Operation(
            lambda a, b, initial, f=_recurrence: f(a, b, 1, initial),
            lambda a, b, initial: along(1, lambda a, b: recurrence64(a, b, initial))(a, b),
            draw_recurrence((2, 5, 3), axis=1),
        ),
    }
VALUES = [(name, scale) for name, each in OPERATIONS.items() for scale in each.scales]
GRADIENTS = [(name, scale) for name, each in OPERATIONS.items() for scale in each.gradient_scales]


@pytest.mark.parametrize("name, scale", VALUES)
def test_operations_have_the_values_of_loops_in_float64(rng, name, scale):
    operation = OPERATIONS[name]
    arguments = operation.arguments(rng, scale)
    want = operation.truth(*(x.astype(np.float64) for x in arguments))
    # Rounding errors of a recurrence scale with its terms, even if these cancel.
    atol = 3e-7 * np.max(np.abs(want[np.isfinite(want)])) if name.startswith("recurrence") else None
    assert_close(jax.jit(operation.function)(*map(jnp.asarray, arguments)), want, operation.rtol, atol)


@pytest.mark.parametrize("name, scale", GRADIENTS)
def test_operations_have_the_gradients_of_loops_in_float64(rng, name, scale):
    """Those of a sum are the posterior weights of its terms, which are 0 in an empty sum."""
    operation = OPERATIONS[name]
    arguments = operation.arguments(rng, scale)
    cotangent = normal(rng, *operation.truth(*arguments).shape)
    wants = finite_differences(operation.truth, arguments, cotangent)
    # A float32 logarithm near 1e4 has an error of 1e-3, and so has the weight, exp of the difference of two.
    tolerance = operation.gradient_rtol + (4 * FLOAT32_EPS * scale if scale > 1 else 0)
    for got, want in zip(pull(operation.function, arguments, cotangent), wants, strict=True):
        assert_close(got, want, tolerance)


def test_recurrence_with_zero_gates_forgets(rng):
    arguments = np.full((9, 4), -INF, np.float32), normal(rng, 9, 4), normal(rng, 4)
    recurrence = lambda log_a, log_b, initial: log_linear_recurrence(log_a, log_b, 0, initial, "associative")
    da, db, dinitial = pull(recurrence, arguments, np.ones((9, 4)))
    assert np.all(np.asarray(da) == 0) and np.all(np.asarray(db) == 1) and np.all(np.asarray(dinitial) == 0)


def test_the_program_of_a_scan_does_not_grow_with_the_tokens():
    text = lambda n: jax.jit(functools.partial(cumulative_logsumexp, axis=0)).lower(jnp.ones(n)).as_text()
    assert len(text(4096).splitlines()) == len(text(128).splitlines())


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
