"""The attention as associative scans over the log-sum-exp monoid: eqs. (2)-(4), the state of every token.

Exact at every dynamic range: h_z = LSE_s(k) by one `jax.lax.associative_scan`, and log S by another as running means
with the weights exp(h_z[t-1] - h_z[t]) and exp(k[t] - h_z[t]); h_s = LSE_s(k + log v) itself would lose precision to
its size. It materializes T*K*V states, forward and backward; between the two passes only the inputs are saved
(`jax.checkpoint`).

Axes: T queries, S keys, K key and V value features; `*batch` is any leading axes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from heinsen.logspace import (
    NEG_INF,
    cumulative_logsumexp,
    finite,
    gated_sum,
    log_divide,
    log_linear_recurrence,
    log_shares,
    logaddexp,
)
from heinsen.ops.arrays import isolate_values
from heinsen.ops.segments import last_tokens
from heinsen.ops.states import LogState, MeanState, State, init_state, read_means


@partial(jax.checkpoint, static_argnums=(0, 5))
def attend(
    signed: bool, q: Array, k: Array, values: Array, log_decay: Array | None, causal: bool, state: State | None
) -> tuple[Array, Any]:
    """(log y or, if `signed`, y [*batch, T, V]; the `LogState` or `MeanState` after all tokens).

    log_decay [*batch, T] is -inf where nothing is left of the tokens before.
    """
    values, taint = isolate_values(values.astype(k.dtype), signed)
    k, resets = k + taint[..., None], None if log_decay is None else log_decay == NEG_INF
    if state is None:
        state = init_state(k.shape[:-2], k.shape[-1], values.shape[-1], signed=signed, dtype=k.dtype)
    axis = k.ndim - 2
    h_z, past_share, own_share = _scan_weights(k, state.h_z, log_decay)
    end_h_z = h_z[..., -1, :]
    b: Array = jnp.zeros((), k.dtype)
    end: State
    if isinstance(state, MeanState):
        means = _scan_means(past_share, own_share, values, state.mean)
        end = MeanState(means[..., -1, :, :], end_h_z)
    else:
        # Relative to the largest, a whole number: float32 rounds logarithms to their size.
        past = log_divide(state.h_s, state.h_z[..., None])
        b = jnp.maximum(jnp.max(past, axis=-2), jnp.max(values, axis=-2))
        b = jax.lax.stop_gradient(jnp.ceil(finite(b)))[..., None, :]
        update = own_share + (values - b)[..., None, :]
        means = log_linear_recurrence(past_share, update, axis, initial=past - b, method="associative")
        last = means[..., -1, :, :]
        shift = finite(end_h_z)[..., None] + b
        end = LogState(jnp.where(last == NEG_INF, NEG_INF, last + shift), end_h_z)
    if not causal and resets is None:
        h_z, means = h_z[..., -1:, :], means[..., -1:, :, :]
    elif not causal and resets is not None:
        at = last_tokens(resets)
        take = lambda x: jnp.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - at.ndim)), axis)
        h_z, means = take(h_z), take(means)
    return read_means(q, h_z, means, signed) + b, end


def _scan_weights(k: Array, past_h_z: Array, log_decay: Array | None) -> tuple[Array, Array, Array]:
    """h_z [*batch, T, K] after each token, and the log shares [*batch, T, K, 1] of its past and of the token in it."""
    past, axis = past_h_z[..., None, :], k.ndim - 2
    if log_decay is None:
        gate: Array | float = 0.0
        h_z = cumulative_logsumexp(jnp.concatenate([logaddexp(past, k[..., :1, :]), k[..., 1:, :]], axis=-2), axis)
    else:
        gate = log_decay[..., None]  # what a token leaves of the sums before it
        h_z = log_linear_recurrence(gate, k, axis, initial=past_h_z, method="associative")
    before = jnp.concatenate([past, h_z[..., :-1, :]], axis=-2)
    past_share, own_share = log_shares(before, k, gate)
    return h_z, past_share[..., None], own_share[..., None]


def _scan_means(past_share: Array, own_share: Array, v: Array, past: Array) -> Array:
    """The mean of each key feature after each token, [*batch, T, K, V]."""
    update = jnp.exp(own_share) * v[..., None, :]
    from_past = jnp.exp(past_share[..., :1, :, :]) * past[..., None, :, :]
    update = jnp.concatenate([update[..., :1, :, :] + from_past, update[..., 1:, :, :]], axis=-3)
    return gated_sum(jnp.exp(past_share), update, v.ndim - 2)
