"""The constant-size state of the attention and its sequential use: equations (5)-(8) of the paper.

A state summarises any set of tokens. `LogState` carries the two log-sums of the paper; `MeanState` carries the same
information in normalised form, for values of either sign. Both form a commutative monoid under `merge_states`, and both
have one size whatever the number of tokens seen. All functions are pure and differentiable, at -inf too.

Axes: K key features, V value features, T queries; `*batch` is any leading axes, the same in every argument.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from heinsen.logspace import NEG_INF, log_divide, logaddexp, logsumexp, posterior


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
