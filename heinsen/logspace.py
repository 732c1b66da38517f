"""Log-space arithmetic: the log-sum-exp monoid, its scans, and the policy for -inf.

A non-negative quantity x is stored as `log_x`, and zero is stored as -inf. Addition becomes log-sum-exp: associative,
commutative, with identity -inf, so that running sums over tokens are one `jax.lax.associative_scan`.

This module owns the policy for -inf, on which all others rely:

  * the empty sum is -inf, never NaN: logaddexp(-inf, -inf) = logsumexp of all -inf = -inf;
  * the derivative of a log-sum-exp with respect to a term is that term's posterior weight, exp(term - sum), and every
    term of an empty sum has weight 0: gradients stay finite where `jax.grad` of the plain formulas gives NaN;
  * 0 / 0 is 0: `log_divide(-inf, -inf)` is -inf, with zero gradient.

Weights are computed as exp(term - sum) <= 1, so nothing here overflows at any dynamic range.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from heinsen import backend
from heinsen.promotion import usual_promotion

NEG_INF = -jnp.inf

Out = TypeVar("Out")

Method = Literal["associative", "sequential"]  # the two ways to compute a recurrence

_PIECES = range(64, 31, -1)  # tokens of a piece of an associative scan on CPUs, if they divide all


def finite(shift: Array) -> Array:
    """Replace -inf by 0, so that the shift can be subtracted from -inf."""
    return jnp.where(shift == NEG_INF, 0.0, shift)


def posterior(term: Array, total: Array) -> Array:
    """exp(term - total) <= 1: the share of one term in a log-sum-exp; 0 in an empty sum."""
    return jnp.exp(term - finite(total))


def constant_difference(a: Array, b: Array) -> Array:
    """a - b, a constant; 0 where both are -inf."""
    return jax.lax.stop_gradient(jnp.where(a == b, 0.0, a - finite(b)))


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """(a + b rounded, what the rounding took), by Knuth's two-sum; the second has no derivative, and is 0 at -inf."""
    total = a + b
    a_part = finite(total) - finite(b)
    error = (a - a_part) + (finite(b) - (finite(total) - a_part))
    return total, jnp.where(total == NEG_INF, 0.0, error)


def log_shares(a: Array, b: Array, log_decay: Array | float = 0.0) -> tuple[Array, Array]:
    """Logarithms of the shares of a + log_decay and b in their log-sum-exp; -inf for those that are zero.

    Their difference is formed first, which is hardly rounded however large they are.
    """
    nothing, other_nothing = (a == NEG_INF) | (log_decay == NEG_INF), b == NEG_INF
    above = (finite(b) - finite(a)) - finite(jnp.asarray(log_decay))
    above = jnp.where(other_nothing, NEG_INF, jnp.where(nothing, jnp.inf, above))
    return jnp.where(nothing, NEG_INF, log_sigmoid(-above)), log_sigmoid(above)


def centered_sum(q: Array, h: Array) -> tuple[Array, Array]:
    """(q + h - top, top), with top the largest q + h along the last axis (-inf: all are), as if no sum were rounded."""
    total, error = two_sum(q, h)
    top = jax.lax.stop_gradient(jnp.max(total, axis=-1))
    return (total - finite(top)[..., None]) + jax.lax.stop_gradient(error), top


@jax.custom_jvp
def log_sigmoid(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """log(1 / (1 + exp(-x))), with finite gradients at -inf and +inf."""
    return -jnp.logaddexp(0.0, -x)


@log_sigmoid.defjvp
@usual_promotion
def _log_sigmoid_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return log_sigmoid(*primals), jax.nn.sigmoid(-primals[0]) * tangents[0]


@jax.custom_jvp
def logaddexp(a: Float[Array, "*#shape"], b: Float[Array, "*#shape"]) -> Float[Array, "*#shape"]:
    """log(exp(a) + exp(b)), elementwise with broadcasting: the monoid's operation, with finite gradients at -inf."""
    top = jnp.maximum(a, b)
    below = jnp.minimum(a, b) - finite(top)
    return top + jnp.log1p(jnp.exp(below))


@logaddexp.defjvp
@usual_promotion
def _logaddexp_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (a, b), (da, db) = primals, tangents
    out = logaddexp(a, b)
    return out, posterior(a, out) * da + posterior(b, out) * db


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def logsumexp(x: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """log of the sum of exp(x) along `axis`, with finite gradients at -inf."""
    top = jnp.max(x, axis=axis, keepdims=True)
    shift = finite(top)
    return jnp.squeeze(shift, axis) + jnp.log(jnp.sum(jnp.exp(x - shift), axis=axis))


@logsumexp.defjvp
@usual_promotion
def _logsumexp_jvp(axis: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    out = logsumexp(x, axis)
    return out, jnp.sum(posterior(x, jnp.expand_dims(out, axis)) * dx, axis=axis)


def log_matmul(log_a: Float[Array, "*#batch T K"], log_b: Float[Array, "*#batch K S"]) -> Float[Array, "*#batch T S"]:
    """log(exp(log_a) @ exp(log_b)), exact at every dynamic range, in T*K*S memory."""
    return logsumexp(log_a[..., :, :, None] + log_b[..., None, :, :], axis=-2)


def log_divide(log_a: Float[Array, "*#shape"], log_b: Float[Array, "*#shape"]) -> Float[Array, "*#shape"]:
    """log(a / b) = log_a - log_b, with log(0 / 0) = -inf: the mean over no tokens counts as zero."""
    empty = log_b == NEG_INF
    return jnp.where(empty, NEG_INF, log_a - jnp.where(empty, 0.0, log_b))


# ---- scans -----------------------------------------------------------------------------------


@partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def gated_sum(
    gate: Float[Array, "..."],
    x: Float[Array, "..."],
    axis: int,
    reverse: bool = False,
    method: Method | None = "associative",
) -> Float[Array, "..."]:
    """The linear recurrence y[t] = gate[t] * y[t-1] + x[t] along `axis`, with y[-1] = 0; from the end if `reverse`.

    `gate` and `x` broadcast against each other on all axes but `axis`. `method` as in `log_linear_recurrence`, except
    that the default is "associative".
    """

    def associative(gate: Array, x: Array) -> Array:
        def combine(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
            return earlier[0] * later[0], earlier[1] * later[0] + later[1]

        return _scan_in_pieces(combine, (gate, x), axis, reverse)[1]

    def sequential(gate: Array, x: Array) -> Array:
        def step(y: Array, token: tuple[Array, Array]) -> tuple[Array, Array]:
            y = token[0] * y + token[1]
            return y, y

        tokens = jnp.moveaxis(gate, axis, 0), jnp.moveaxis(x, axis, 0)
        zero = jnp.zeros(jnp.broadcast_shapes(tokens[0].shape[1:], tokens[1].shape[1:]), x.dtype)
        return jnp.moveaxis(jax.lax.scan(step, zero, tokens, reverse=reverse)[1], 0, axis)

    return _by_method(method, associative, sequential)(gate, x)


@gated_sum.defjvp
@usual_promotion
def _gated_sum_jvp(
    axis: int, reverse: bool, method: Method | None, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (gate, x), (dgate, dx) = primals, tangents
    y = gated_sum(gate, x, axis, reverse, method)
    before = _shift(y, axis, -1 if reverse else 1, 0.0)
    return y, gated_sum(gate, dgate * before + dx, axis, reverse, method)


def _shift(x: Array, axis: int, steps: int, fill: float) -> Array:
    """x [..., T, ...] moved by one token to the end (1) or to the beginning (-1); `fill` where none is left."""
    pad = [(0, 0, 0)] * x.ndim
    pad[axis] = (steps, -steps, 0)
    return jax.lax.pad(x, jnp.asarray(fill, x.dtype), pad)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def cumulative_logsumexp(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """The paper's LCSE: h[t] = log sum_{s <= t} exp(x[s]) along `axis`, by an associative scan over the monoid.

    The derivative is the recurrence dh[t] = exp(h[t-1] - h[t]) dh[t-1] + exp(x[t] - h[t]) dx[t]; every weight is at
    most 1.
    """
    return _scan_in_pieces(logaddexp, x, axis)


@cumulative_logsumexp.defjvp
@usual_promotion
def _lcse_jvp(axis: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    h = cumulative_logsumexp(x, axis)
    return h, gated_sum(posterior(_shift(h, axis, 1, NEG_INF), h), posterior(x, h) * dx, axis)


def log_linear_recurrence(
    log_a: Float[Array, "..."],
    log_b: Float[Array, "..."],
    axis: int,
    initial: Float[Array, "..."] | None = None,
    method: Method | None = None,
) -> Float[Array, "..."]:
    """The linear recurrence e[t] = a[t] * e[t-1] + b[t] along `axis`, with everything in logarithms.

    Args:
      log_a: the gates; of size 1, or log_b's size, on each axis other than `axis`.
      log_b: the inputs.
      initial: log e[-1], of log_b's shape without `axis`; None for -inf, the empty sum.
      method: "associative", a scan over affine maps (log_a, log_b) composed as (A1 + A2, logaddexp(b1 + A2, b2));
        "sequential", token by token; None: sequential on CPUs, where it is faster, otherwise associative.

    The derivative is the recurrence de[t] = w[t] (dlog_a[t] + de[t-1]) + exp(log_b[t] - e[t]) dlog_b[t] with
    w[t] = exp(log_a[t] + e[t-1] - e[t]); every weight is at most 1. Raises ValueError for an unknown method.
    """
    axis %= log_b.ndim
    if initial is None:
        initial = jnp.full(log_b.shape[:axis] + log_b.shape[axis + 1 :], NEG_INF, log_b.dtype)
    return _log_linear_recurrence(log_a, log_b, initial, axis, method)


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _log_linear_recurrence(log_a: Array, log_b: Array, initial: Array, axis: int, method: Method | None) -> Array:
    def associative(log_a: Array, log_b: Array, initial: Array) -> Array:
        def combine(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
            return earlier[0] + later[0], logaddexp(earlier[1] + later[0], later[1])

        decay, out = _scan_in_pieces(combine, (log_a, log_b), axis)
        return logaddexp(jnp.expand_dims(initial, axis) + decay, out)

    def sequential(log_a: Array, log_b: Array, initial: Array) -> Array:
        def step(e: Array, token: tuple[Array, Array]) -> tuple[Array, Array]:
            e = logaddexp(e + token[0], token[1])
            return e, e

        tokens = jnp.moveaxis(log_a, axis, 0), jnp.moveaxis(log_b, axis, 0)
        return jnp.moveaxis(jax.lax.scan(step, initial, tokens)[1], 0, axis)

    return _by_method(method, associative, sequential)(log_a, log_b, initial)


@_log_linear_recurrence.defjvp
@usual_promotion
def _recurrence_jvp(
    axis: int, method: Method | None, primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    (log_a, log_b, initial), (dlog_a, dlog_b, dinitial) = primals, tangents
    e = _log_linear_recurrence(log_a, log_b, initial, axis, method)
    earlier = jax.lax.slice_in_dim(e, 0, -1, axis=axis)
    previous = jnp.concatenate([jnp.expand_dims(initial, axis), earlier], axis)
    # The share of e[t] that comes from e[t-1]; the difference first, which is hardly rounded.
    carried = jnp.exp(jnp.where(previous == NEG_INF, NEG_INF, finite(previous) - finite(e)) + log_a)
    dbefore = jnp.concatenate([jnp.expand_dims(dinitial, axis), jnp.zeros_like(earlier)], axis)
    own = carried * (dlog_a + dbefore) + posterior(log_b, e) * dlog_b
    return e, gated_sum(carried, own, axis, False, method)


def associative_scan(combine: Callable[[Out, Out], Out], x: Out, axis: int) -> Out:
    """`jax.lax.associative_scan`, except that no empty slices are combined, which it does where two elements are left.

    Their residuals would be empty, too. As inputs of a `jax.shard_map` these crash XLA of jaxlib 0.11.2.
    """

    def combine_some(earlier: Out, later: Out) -> Out:
        return combine(earlier, later) if jax.tree.leaves(later)[0].size else later

    return jax.lax.associative_scan(combine_some, x, axis=axis)


def _scan_in_pieces(combine: Callable[[Out, Out], Out], x: Out, axis: int, reverse: bool = False) -> Out:
    """`associative_scan`; on CPUs within pieces of the tokens, whose totals are combined one after the other.

    The program of an associative scan grows with the logarithm of its tokens, and CPUs compile a large one for half a
    minute. A number of tokens that no piece divides is scanned at once.
    """
    if reverse:
        flip = partial(jax.tree.map, lambda x: jnp.flip(x, axis))
        return flip(_scan_in_pieces(combine, flip(x), axis))
    n_tokens = jax.tree.leaves(x)[0].shape[axis]
    size = next((n for n in _PIECES if n_tokens % n == 0), n_tokens)
    if size == n_tokens or backend.current() != "cpu":
        return associative_scan(combine, x, axis)
    axis %= jax.tree.leaves(x)[0].ndim
    map_all, at = jax.tree.map, (slice(None),) * axis
    pieces = map_all(lambda x: x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), x)
    within = associative_scan(combine, pieces, axis + 1)
    totals = map_all(lambda x: jnp.moveaxis(x[(*at, slice(None), -1)], axis, 0), within)
    first, others = map_all(lambda x: x[0], totals), map_all(lambda x: x[1:], totals)
    _, before = jax.lax.scan(lambda before, total: (combine(before, total), before), first, others)
    before = map_all(lambda x: jnp.expand_dims(jnp.moveaxis(x, 0, axis), axis + 1), before)
    later = combine(before, map_all(lambda x: x[(*at, slice(1, None))], within))
    joined = map_all(lambda x, later: jnp.concatenate([x[(*at, slice(0, 1))], later], axis), within, later)
    return map_all(lambda x: x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]), joined)


def _by_method(
    method: Method | None, associative: Callable[..., Array], sequential: Callable[..., Array]
) -> Callable[..., Array]:
    """Return the form named by `method`; for None, the faster one on the platform compiled for. Raises ValueError."""
    if method is None:
        method = "sequential" if backend.current() == "cpu" else "associative"
    forms = {"associative": associative, "sequential": sequential}
    if method not in forms:
        raise ValueError(f"method {method!r} is not one of {sorted(forms)} or None")
    return forms[method]
