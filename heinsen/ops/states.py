"""The constant-size state of the attention and its sequential use: equations (5)-(8) of the paper.

A state summarises any set of tokens. `LogState` carries the two log-sums of the paper; `MeanState` carries the same
information in normalised form, for values of either sign. Both form a commutative monoid under `merge_states`, and both
have one size whatever the number of tokens seen. All functions are pure and differentiable, at -inf too.

Axes: K key features, V value features, T queries; `*batch` is any leading axes, the same in every argument.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from heinsen.logspace import NEG_INF, finite, log_divide, log_sigmoid, logaddexp, logsumexp, posterior


class LogState(NamedTuple):
    """State of `log_attention`: h_s = LSE_s(k + log v), h_z = LSE_s(k), over the tokens s seen (-inf: none)."""

    h_s: Float[Array, "*batch K V"]
    h_z: Float[Array, "*batch K"]


class MeanState(NamedTuple):
    """State of `attention`: each key feature's running average of the values, with weights exp(k - h_z), and h_z."""

    mean: Float[Array, "*batch K V"]
    h_z: Float[Array, "*batch K"]


State = LogState | MeanState


def init_state(
    batch_shape: tuple[int, ...], d_key: int, d_value: int, *, signed: bool = False, dtype: Any = jnp.float32
) -> State:
    """The state before any token: a `LogState`, or a `MeanState` if `signed`.

    Its log-sums are -inf, so that eq. (6) agrees with eq. (4). The paper's eq. (7) writes zeros; that state, which
    amounts to one more token with k = 0 and log v = 0, is `LogState(jnp.zeros(...), jnp.zeros(...))`.
    """
    h_z = jnp.full((*batch_shape, d_key), NEG_INF, dtype)
    if signed:
        return MeanState(jnp.zeros((*batch_shape, d_key, d_value), dtype), h_z)
    return LogState(jnp.full((*batch_shape, d_key, d_value), NEG_INF, dtype), h_z)


def empty_state_for(k: Array, values: Array, in_logs: bool) -> State:
    """The state before any of the tokens k [*batch, T, K], values [*batch, T, V]: a `LogState` if values are log v."""
    return init_state(k.shape[:-2], k.shape[-1], values.shape[-1], signed=not in_logs, dtype=k.dtype)


def update_state(state: State, k: Float[Array, "*batch K"], values: Float[Array, "*batch V"]) -> State:
    """Eq. (6): the state after one more token. `values` are log v for a `LogState`, v for a `MeanState`.

    Many tokens at once: `log_attention(..., state=state, return_state=True)`.
    """
    if k.shape != state.h_z.shape or values.shape != state[0].shape[:-2] + state[0].shape[-1:]:
        raise ValueError(
            f"k {k.shape} and the token's values {values.shape} do not fit a state for k {state.h_z.shape} and values "
            f"{state[0].shape[:-2] + state[0].shape[-1:]}: update_state takes one token, with the state's leading axes"
        )
    if isinstance(state, LogState):
        return merge_states(state, LogState(k[..., :, None] + values[..., None, :], k))
    return merge_states(state, MeanState(jnp.broadcast_to(values[..., None, :], state.mean.shape), k))


def merge_states(a: State, b: State) -> State:
    """The state of two disjoint sets of tokens together: associative, commutative, `init_state` its identity."""
    if type(a) is not type(b):
        raise TypeError(f"states of different kinds cannot be merged: {type(a).__name__} and {type(b).__name__}")
    h_z = logaddexp(a.h_z, b.h_z)
    if isinstance(a, LogState):
        return LogState(logaddexp(a.h_s, b.h_s), h_z)
    weight_a, weight_b = posterior(a.h_z, h_z)[..., None], posterior(b.h_z, h_z)[..., None]
    return MeanState(weight_a * a.mean + weight_b * b.mean, h_z)


def query_state(state: State, q: Float[Array, "*batch K"] | Float[Array, "*batch T K"]) -> Array:
    """Eqs. (5) and (8): what one query [*batch, K], or T queries [*batch, T, K], read from a state.

    Returns log y [*batch, (T,) V] from a `LogState`, y from a `MeanState`. An empty state gives -inf, or 0.
    """
    if q.ndim == state.h_z.ndim:
        return query_state(state, q[..., None, :])[..., 0, :]
    if q.shape[:-2] + q.shape[-1:] != state.h_z.shape:
        raise ValueError(f"queries {q.shape} do not fit a state with h_z {state.h_z.shape}: expected [*batch, (T,) K]")
    log_weights = q + state.h_z[..., None, :]
    log_z = logsumexp(log_weights, axis=-1)
    if isinstance(state, LogState):
        log_s = logsumexp(q[..., None] + state.h_s[..., None, :, :], axis=-2)
        return log_divide(log_s, log_z[..., None])
    p = posterior(log_weights, log_z[..., None])
    return jnp.sum(p[..., None] * state.mean[..., None, :, :], axis=-2)


def extend_context(
    state: State,
    k: Float[Array, "*batch K"],
    values: Float[Array, "*batch V"],
    q: Float[Array, "*batch T K"],
) -> tuple[Array, State]:
    """Eq. (8): what T queries read once one more token is in their context, and the state with it.

    What `log_attention(..., causal=False)` of the whole context gives (`attention`, for a `MeanState`), at a cost that
    does not depend on how many tokens the context has. Arguments and errors as in `update_state` and `query_state`.
    """
    state = update_state(state, k, values)
    return query_state(state, q), state


# ---- the normalized state ----


class NormalizedState(NamedTuple):
    """What a set of tokens leaves behind: each key feature's average value, and its log weight LSE_s(k)."""

    mean: Float[Array, "*batch K V"]  # averages of real values; or logarithms of averages, relative to b
    h: Float[Array, "*batch K"]
    b: Float[Array, "*batch V"] | None  # a whole number for each value, -inf before any; None for real values


def normalize_state(state: State) -> NormalizedState:
    if isinstance(state, MeanState):
        return NormalizedState(state.mean, state.h_z, None)
    log_mean = log_divide(state.h_s, state.h_z[..., None])
    b = whole_shift(jnp.max(log_mean, axis=-2))
    return NormalizedState(log_mean - finite(b)[..., None, :], state.h_z, b)


def normalized_token(k: Float[Array, "*batch K"], values: Float[Array, "*batch V"], in_logs: bool) -> NormalizedState:
    """The state of one token: its values are the averages of all key features."""
    b = whole_shift(values) if in_logs else None
    mean = values - finite(b) if in_logs else values
    return NormalizedState(jnp.broadcast_to(mean[..., None, :], (*k.shape, values.shape[-1])), k, b)


def denormalize_state(means: NormalizedState) -> State:
    if means.b is None:
        return MeanState(means.mean, means.h)
    log_sum = means.h[..., None] + means.mean
    h_s = jnp.where(log_sum == NEG_INF, NEG_INF, log_sum)  # what is empty has no gradient
    return LogState(h_s + finite(means.b)[..., None, :], means.h)


def merge_normalized(x: NormalizedState, y: NormalizedState) -> NormalizedState:
    """The state of two disjoint sets of tokens. Their shares add up to 1 whatever the rounding of h."""
    x_share, y_share = log_shares(x.h, y.h)
    h = logaddexp(x.h, y.h)
    if x.b is None:
        return NormalizedState(jnp.exp(x_share)[..., None] * x.mean + jnp.exp(y_share)[..., None] * y.mean, h, None)
    b = jnp.maximum(x.b, y.b)
    x_mean = (x.mean + x_share[..., None]) + shift_difference(x.b, b)[..., None, :]
    y_mean = (y.mean + y_share[..., None]) + shift_difference(y.b, b)[..., None, :]
    mean = logaddexp(x_mean, y_mean)
    rise = finite(whole_shift(jnp.max(mean, axis=-2)))
    return NormalizedState(mean - rise[..., None, :], h, b + rise)


def log_shares(h_x: Array, h_y: Array) -> tuple[Array, Array]:
    """Logarithms of the shares of two log weights in their sum; nothing and nothing: all is the first's."""
    above = jnp.where(h_y == NEG_INF, NEG_INF, h_y - finite(h_x))
    above = jnp.where((h_x == NEG_INF) & (h_y > NEG_INF), jnp.inf, above)
    return log_sigmoid(-above), log_sigmoid(above)


def whole_shift(largest: Array) -> Array:
    """The shift that covers the largest logarithm."""
    return lax.stop_gradient(jnp.ceil(largest))


def shift_difference(old: Array, new: Array) -> Array:
    """old - new for shifts old <= new; 0 where both are -inf."""
    return lax.stop_gradient(jnp.where(old == new, 0.0, old - new))


def read_normalized_per_token(means: NormalizedState, q: Float[Array, "*batch T K"]) -> tuple[Array, Array]:
    """What T queries read, each from its own state or, with a token axis of 1 in `means`, all from one.

    Returns y or log y [*batch, T, V] and log Z [*batch, T].
    """
    log_weights, top = centered_sum(q, means.h)
    log_z = logsumexp(log_weights, axis=-1)
    if means.b is None:
        y = jnp.sum(posterior(log_weights, log_z[..., None])[..., None] * means.mean, axis=-2)
    else:
        y = _log_average(log_weights, means.mean) + finite(means.b)
    return y, log_z + top


def read_normalized(means: NormalizedState, q: Float[Array, "*batch T K"]) -> tuple[Array, Array]:
    """`read_normalized_per_token` where all queries read the one state."""
    return read_normalized_per_token(jax.tree.map(lambda part: jnp.expand_dims(part, means.h.ndim - 1), means), q)


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


def centered_sum(q: Array, h: Array) -> tuple[Array, Array]:
    """(q + h - top, top) with top the largest q + h along the last axis, as if nothing had been rounded before."""
    total = q + h
    # Knuth's two-sum: what the rounding of the sum took.
    q_part = finite(total) - finite(h)
    error = (finite(q) - q_part) + (finite(h) - (finite(total) - q_part))
    error = lax.stop_gradient(jnp.where(total == NEG_INF, 0.0, error))
    top = lax.stop_gradient(finite(jnp.max(total, axis=-1)))
    return (total - top[..., None]) + error, top


# ---- the running state ----


# Outputs and averages at least this large, relative to their column's largest value, have lost nothing that matters:
# terms below float32's range are 1e-38, and there are at most some hundred of them.
SAFE = 1e-28


class RunningState(NamedTuple):
    """Averages of exp(log v - log_scale) <= 1 before and since `begin_steps`, each with its h_z."""

    before: MeanState  # relative to log_scale_before
    since: MeanState  # relative to log_scale
    log_scale_before: Float[Array, "*batch V"]
    log_scale: Float[Array, "*batch V"]
    smallest: Float[Array, "*batch"]  # of all outputs, relative to their scale


def begin_steps(state: LogState) -> RunningState:
    log_mean = state.h_s - finite(state.h_z)[..., None]
    log_scale = jnp.max(log_mean, axis=-2)
    before = MeanState(posterior(log_mean, log_scale[..., None, :]), state.h_z)
    *batch, d_key, d_value = state.h_s.shape
    since = init_state(tuple(batch), d_key, d_value, signed=True, dtype=state.h_s.dtype)
    return RunningState(before, since, log_scale, log_scale, jnp.ones(batch, state.h_s.dtype))


def take_step(
    state: RunningState, q: Float[Array, "*batch K"], k: Float[Array, "*batch K"], log_v: Float[Array, "*batch V"]
) -> tuple[Float[Array, "*batch V"], RunningState]:
    """Eqs. (6) and (5): the state after one more token, and log y of its query. Float32 or float64, as the state."""
    log_scale = jnp.maximum(state.log_scale, log_v)
    h_z = logaddexp(state.since.h_z, k)
    rescaled = posterior(state.log_scale, log_scale)[..., None, :] * state.since.mean
    kept, added = posterior(state.since.h_z, h_z), posterior(k, h_z)
    mean = kept[..., None] * rescaled + added[..., None] * posterior(log_v, log_scale)[..., None, :]
    log_weights = q + state.before.h_z, q + h_z
    log_z = logsumexp(jnp.concatenate(log_weights, axis=-1))[..., None]
    # Products of matrices, which XLA's CPU library is ten times as fast at as at a sum of products.
    product = partial(jnp.einsum, "...k,...kv->...v", precision=jax.lax.Precision.HIGHEST)
    y_before, y_since = (
        product(posterior(x, log_z), part.mean)
        for x, part in zip(log_weights, (state.before, MeanState(mean, h_z)), strict=True)
    )
    y = posterior(state.log_scale_before, log_scale) * y_before + y_since
    smallest = jnp.minimum(state.smallest, jnp.min(y, axis=-1))
    return jnp.log(y) + log_scale, RunningState(
        state.before, MeanState(mean, h_z), state.log_scale_before, log_scale, smallest
    )


def end_steps(state: RunningState) -> tuple[LogState, Bool[Array, " *batch"]]:
    """The state after all steps, and whether its averages and every output were exact (NaN, which stays, counts so)."""
    parts = (state.before, state.log_scale_before), (state.since, state.log_scale)
    logs = [
        LogState(jnp.log(part.mean) + log_scale[..., None, :] + part.h_z[..., None], part.h_z)
        for part, log_scale in parts
    ]
    smallest = state.smallest
    for part, _ in parts:
        lowest = jnp.min(jnp.where(part.h_z[..., None] == NEG_INF, 1.0, part.mean), axis=(-2, -1))
        smallest = jnp.minimum(smallest, lowest)
    return merge_states(*logs), ~(smallest < SAFE)
