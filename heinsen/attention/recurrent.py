"""The constant-size state of the attention and its sequential use: equations (5)-(8) of the paper.

A state summarises any set of tokens. `LogState` carries the two log-sums of the paper; `MeanState` carries the same
information in normalised form, for values of either sign. Both form a commutative monoid under `merge_states`, and both
have one size whatever the number of tokens seen. All functions are pure and differentiable, at -inf too.

Axes: K key features, V value features, T queries; `*batch` is any leading axes, the same in every argument.
"""

from typing import Any, NamedTuple

import jax
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
    return read_states(type(state)(*(jnp.expand_dims(part, state.h_z.ndim - 1) for part in state)), q)


def read_states(states: State, q: Float[Array, "*batch T K"]) -> Float[Array, "*batch T V"]:
    """What each of T queries reads from its own state; the fields have a token axis of T, or of 1 for all alike."""
    log_weights = q + states.h_z
    log_z = logsumexp(log_weights, axis=-1)
    if isinstance(states, LogState):
        log_s = logsumexp(q[..., None] + states.h_s, axis=-2)
        return log_divide(log_s, log_z[..., None])
    p = posterior(log_weights, log_z[..., None])
    return jnp.sum(p[..., None] * states.mean, axis=-2)


def attend_sequentially(q: Array | None, k: Array, values: Array, state: State, resets: Array | None):
    """Causal attention token by token: (y [*batch, T, V], the state after all tokens), T*K*V time, K*V memory.

    Eq. (6), then eq. (5), for each token; without q the state only (y is None). `resets` [*batch, T] is true where a
    packed document begins: there the state is emptied first.
    """
    signed = isinstance(state, MeanState)
    empty = init_state(state.h_z.shape[:-1], k.shape[-1], values.shape[-1], signed=signed, dtype=k.dtype)

    def step(state, token):
        q_t, k_t, values_t, reset_t = token
        if reset_t is not None:
            keep = lambda old, new: jnp.where(
                reset_t.reshape(reset_t.shape + (1,) * (old.ndim - reset_t.ndim)), new, old
            )
            state = jax.tree.map(keep, state, empty)
        state = update_state(state, k_t, values_t)
        return state, None if q_t is None else query_state(state, q_t)

    token_first = lambda x: jnp.moveaxis(x, k.ndim - 2, 0)
    state, y = jax.lax.scan(step, state, jax.tree.map(token_first, (q, k, values, resets)))
    return None if q is None else jnp.moveaxis(y, 0, k.ndim - 2), state
