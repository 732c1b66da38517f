"""States in normalised form: running averages and their weights, where no precision is lost at any dynamic range.

Rounding a weight changes the numerator and the denominator of an average alike, and cancels; rounding h_s = LSE_s(k +
log v) and h_z apart does not. Logarithms of averages are kept relative to the largest value so far, so that they are
small where they matter. `recurrent.LogState` is the public form; exact paths convert at their ends.

Axes: K key features, V value features, T queries; `*batch` is any leading axes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from heinsen.attention.recurrent import LogState, MeanState, State
from heinsen.logspace import NEG_INF, finite, log_divide, log_sigmoid, logaddexp, logsumexp, posterior


class Means(NamedTuple):
    """What a set of tokens leaves behind: each key feature's average value, and its log weight LSE_s(k)."""

    mean: Float[Array, "*batch K V"]  # averages of real values; or logarithms of averages, relative to b
    h: Float[Array, "*batch K"]
    b: Float[Array, "*batch V"] | None  # the largest logarithm of each value, -inf before any; None for real values


def from_state(state: State) -> Means:
    if isinstance(state, MeanState):
        return Means(state.mean, state.h_z, None)
    log_mean = log_divide(state.h_s, state.h_z[..., None])
    b = lax.stop_gradient(jnp.max(log_mean, axis=-2))
    return Means(log_mean - finite(b)[..., None, :], state.h_z, b)


def to_state(means: Means) -> State:
    if means.b is None:
        return MeanState(means.mean, means.h)
    log_sum = means.h[..., None] + means.mean
    h_s = jnp.where(log_sum == NEG_INF, NEG_INF, log_sum)  # what is empty has no gradient
    return LogState(h_s + finite(means.b)[..., None, :], means.h)


def merge(x: Means, y: Means) -> Means:
    """The state of two disjoint sets of tokens. Their shares add up to 1 whatever the rounding of h."""
    x_share, y_share = log_shares(x.h, y.h)
    h = logaddexp(x.h, y.h)
    if x.b is None:
        return Means(jnp.exp(x_share)[..., None] * x.mean + jnp.exp(y_share)[..., None] * y.mean, h, None)
    b = jnp.maximum(x.b, y.b)
    x_mean, y_mean = (part.mean + lower(part.b, b)[..., None, :] for part in (x, y))
    return Means(logaddexp(x_mean + x_share[..., None], y_mean + y_share[..., None]), h, b)


def log_shares(h_x: Array, h_y: Array) -> tuple[Array, Array]:
    """Logarithms of the shares of two log weights in their sum; nothing and nothing: all is the first's."""
    above = jnp.where(h_y == NEG_INF, NEG_INF, h_y - finite(h_x))
    above = jnp.where((h_x == NEG_INF) & (h_y > NEG_INF), jnp.inf, above)
    return log_sigmoid(-above), log_sigmoid(above)


def lower(old: Array, new: Array) -> Array:
    """old - new for shifts old <= new; 0 where both are -inf."""
    return lax.stop_gradient(jnp.where(old == new, 0.0, old - new))


def read(means: Means, q: Float[Array, "*batch T K"]) -> tuple[Array, Array]:
    """What T queries read, each from its own state or, with a token axis of 1 in `means`, all from one.

    Returns y or log y [*batch, T, V] and log Z [*batch, T].
    """
    log_weights, top = centred_sum(q, means.h)
    log_z = logsumexp(log_weights, axis=-1)
    p = posterior(log_weights, log_z[..., None])
    if means.b is None:
        y = jnp.sum(p[..., None] * means.mean, axis=-2)
    else:
        shared = _summing_to_zero(log_weights, lax.stop_gradient(p))
        log_s = logsumexp(shared[..., None] + means.mean, axis=-2)
        y = log_divide(log_s, logsumexp(shared, axis=-1)[..., None]) + finite(means.b)
    return y, log_z + top


@jax.custom_vjp
def _summing_to_zero(x, p):
    """x, with a gradient corrected to sum to zero: for what does not change when all of x is shifted.

    Where weights and averages hardly differ, what is left of the gradient is small beside the rounding that this removes.
    """
    return x


def _summing_to_zero_bwd(p, g):
    return g - p * jnp.sum(g, axis=-1, keepdims=True), None


_summing_to_zero.defvjp(lambda x, p: (x, p), _summing_to_zero_bwd)


def centred_sum(q: Array, h: Array) -> tuple[Array, Array]:
    """(q + h - top, top) with top the largest q + h along the last axis, as if nothing had been rounded before."""
    total = q + h
    # Knuth's two-sum: what the rounding of the sum took.
    q_part = finite(total) - finite(h)
    error = (finite(q) - q_part) + (finite(h) - (finite(total) - q_part))
    error = lax.stop_gradient(jnp.where(total == NEG_INF, 0.0, error))
    top = lax.stop_gradient(finite(jnp.max(total, axis=-1)))
    return (total - top[..., None]) + error, top
