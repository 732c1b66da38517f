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
    b: Float[Array, "*batch V"] | None  # a whole number for each value, -inf before any; None for real values


def from_state(state: State) -> Means:
    if isinstance(state, MeanState):
        return Means(state.mean, state.h_z, None)
    log_mean = log_divide(state.h_s, state.h_z[..., None])
    b = whole(jnp.max(log_mean, axis=-2))
    return Means(log_mean - finite(b)[..., None, :], state.h_z, b)


def of_token(k: Float[Array, "*batch K"], values: Float[Array, "*batch V"], in_logs: bool) -> Means:
    """The state of one token: its values are the averages of all key features."""
    b = whole(values) if in_logs else None
    mean = values - finite(b) if in_logs else values
    return Means(jnp.broadcast_to(mean[..., None, :], (*k.shape, values.shape[-1])), k, b)


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
    x_mean = (x.mean + x_share[..., None]) + lower(x.b, b)[..., None, :]
    y_mean = (y.mean + y_share[..., None]) + lower(y.b, b)[..., None, :]
    mean = logaddexp(x_mean, y_mean)
    rise = finite(whole(jnp.max(mean, axis=-2)))
    return Means(mean - rise[..., None, :], h, b + rise)


def log_shares(h_x: Array, h_y: Array) -> tuple[Array, Array]:
    """Logarithms of the shares of two log weights in their sum; nothing and nothing: all is the first's."""
    above = jnp.where(h_y == NEG_INF, NEG_INF, h_y - finite(h_x))
    above = jnp.where((h_x == NEG_INF) & (h_y > NEG_INF), jnp.inf, above)
    return log_sigmoid(-above), log_sigmoid(above)


def whole(largest: Array) -> Array:
    """The shift that covers the largest logarithm."""
    return lax.stop_gradient(jnp.ceil(largest))


def lower(old: Array, new: Array) -> Array:
    """old - new for shifts old <= new; 0 where both are -inf."""
    return lax.stop_gradient(jnp.where(old == new, 0.0, old - new))


def read(means: Means, q: Float[Array, "*batch T K"]) -> tuple[Array, Array]:
    """What T queries read, each from its own state or, with a token axis of 1 in `means`, all from one.

    Returns y or log y [*batch, T, V] and log Z [*batch, T].
    """
    log_weights, top = centred_sum(q, means.h)
    log_z = logsumexp(log_weights, axis=-1)
    if means.b is None:
        y = jnp.sum(posterior(log_weights, log_z[..., None])[..., None] * means.mean, axis=-2)
    else:
        y = _log_average(log_weights, means.mean) + finite(means.b)
    return y, log_z + top


def read_one(means: Means, q: Float[Array, "*batch T K"]) -> tuple[Array, Array]:
    """`read` where all queries read the one state."""
    return read(jax.tree.map(lambda part: jnp.expand_dims(part, means.h.ndim - 1), means), q)


@jax.custom_vjp
def _log_average(log_weights: Float[Array, "*batch T K"], log_x: Float[Array, "*batch #T K V"]) -> Array:
    """log of the average of x under weights: LSE_k(log_weights + log_x) - LSE_k(log_weights), [*batch, T, V]."""
    return _log_average_fwd(log_weights, log_x)[0]


def _log_average_fwd(log_weights, log_x):
    log_s = logsumexp(log_weights[..., None] + log_x, axis=-2)
    log_z = logsumexp(log_weights, axis=-1)
    return log_divide(log_s, log_z[..., None]), (log_weights, log_x, log_s, log_z)


def _log_average_bwd(residuals, g):
    log_weights, log_x, log_s, log_z = residuals
    p = posterior(log_weights, log_z[..., None])
    p_x = posterior(log_weights[..., None] + log_x, log_s[..., None, :])
    g = jnp.where((log_z == NEG_INF)[..., None], 0.0, g)
    dweights = jnp.sum((p_x - p[..., None]) * g[..., None, :], axis=-1)
    # A shift of the weights leaves the average: the gradient's sum is 0, but for averages of nothing but zeros. Where
    # weights and x hardly differ, what is left of the gradient is small beside the rounding that this removes.
    total = -jnp.sum(jnp.where(log_s == NEG_INF, g, 0.0), axis=-1)
    dweights = dweights + p * (total - jnp.sum(dweights, axis=-1))[..., None]
    dx = p_x * g[..., None, :]
    shared = tuple(i for i, size in enumerate(log_x.shape) if size != dx.shape[i])
    return dweights, jnp.sum(dx, axis=shared, keepdims=True) if shared else dx


_log_average.defvjp(_log_average_fwd, _log_average_bwd)


def centred_sum(q: Array, h: Array) -> tuple[Array, Array]:
    """(q + h - top, top) with top the largest q + h along the last axis, as if nothing had been rounded before."""
    total = q + h
    # Knuth's two-sum: what the rounding of the sum took.
    q_part = finite(total) - finite(h)
    error = (finite(q) - q_part) + (finite(h) - (finite(total) - q_part))
    error = lax.stop_gradient(jnp.where(total == NEG_INF, 0.0, error))
    top = lax.stop_gradient(finite(jnp.max(total, axis=-1)))
    return (total - top[..., None]) + error, top
