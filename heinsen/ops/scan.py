"""The attention as associative scans over the log-sum-exp monoid: eqs. (2)-(4), the state of every token.

Exact at every dynamic range: h_z = LSE_s(k) by one `jax.lax.associative_scan`, and log S by another as running means
with the weights exp(h_z[t-1] - h_z[t]) and exp(k[t] - h_z[t]); h_s = LSE_s(k + log v) itself would lose precision to
its size. It materializes T*K*V states, forward and backward; between the two passes only the inputs are saved
(`jax.checkpoint`). Arguments are those of `heinsen.log_attention` and `heinsen.attention`, validated there; `resets`
[*batch, T] is true where nothing is left of the tokens before.

Axes: T queries, S keys, K key and V value features; `*batch` is any leading axes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from heinsen.logspace import (
    ShiftedLog,
    constant_difference,
    cumulative_logsumexp,
    finite,
    gated_sum,
    log_linear_recurrence,
    log_shares,
    logaddexp,
)
from heinsen.ops.chunk import Keys
from heinsen.ops.documents import last_tokens, mask_starts
from heinsen.ops.states import NormalizedMeanState, NormalizedState, read_all, whole_shift
from heinsen.ops.values import LOG_DOMAIN, Domain, StateT


@partial(jax.checkpoint, static_argnums=(0, 3))
def attend(domain: Domain[StateT], q: Array, keys: Keys, causal: bool, state: Any) -> tuple[Array, Any]:
    """(log y or y [*batch, T, V], the `LogState` or `MeanState` after all tokens)."""
    k, values = keys.k, keys.values
    resets, log_decay = keys.per_token()
    past = domain.empty_state(k, values) if state is None else state.normalize()
    accumulate: Any = _accumulate_log_values if domain is LOG_DOMAIN else _accumulate_real_values
    states, end = accumulate(*_scan_weights(k, past.h_z.value(), resets, log_decay), values, past)
    if not causal:
        if resets is None:
            return read_all(end, q)[0], end.denormalize()
        at, axis = last_tokens(resets), q.ndim - 2
        at_end = lambda x: jnp.take_along_axis(x, at.reshape(at.shape + (1,) * (x.ndim - at.ndim)), axis)
        states = jax.tree.map(lambda x: x if x.shape[axis] == 1 else at_end(x), states)  # the shift b has one for all
    return states.read(q)[0], end.denormalize()


def _scan_weights(
    k: Array, past_h_z: Array, resets: Array | None, log_decay: Array | None
) -> tuple[Array, Array, Array]:
    """h_z [*batch, T, K] after each token, and the log shares [*batch, T, K, 1] of its past and of the token in it."""
    past, axis = past_h_z[..., None, :], k.ndim - 2
    if log_decay is not None or resets is not None:
        # What a token leaves of the sums before it.
        gate = jnp.zeros_like(k[..., :1]) if log_decay is None else log_decay[..., None]
        gate = gate if resets is None else mask_starts(resets, gate)
        h_z = log_linear_recurrence(gate, k, axis, initial=past_h_z, method="associative")
        before = ShiftedLog.of(jnp.concatenate([past, h_z[..., :-1, :]], axis=-2)).scale(gate)
    else:
        h_z = cumulative_logsumexp(jnp.concatenate([logaddexp(past, k[..., :1, :]), k[..., 1:, :]], axis=-2), axis)
        before = ShiftedLog.of(jnp.concatenate([past, h_z[..., :-1, :]], axis=-2))
    past_share, own_share = log_shares(before, ShiftedLog.of(k))
    if resets is not None:  # also where both are empty
        past_share = mask_starts(resets, past_share)
    return h_z, past_share[..., None], own_share[..., None]


def _accumulate_log_values(
    h_z: Array, past_share: Array, own_share: Array, log_v: Array, past: NormalizedState
) -> tuple[NormalizedState, NormalizedState]:
    """(the state after each token, the state after all)."""
    b = jnp.maximum(past.b, whole_shift(jnp.max(log_v, axis=-2)))
    update = own_share + (log_v - finite(b)[..., None, :])[..., None, :]
    initial = past.log_mean + constant_difference(past.b, b)[..., None, :]
    log_mean = log_linear_recurrence(past_share, update, h_z.ndim - 2, initial=initial, method="associative")
    end = NormalizedState(log_mean[..., -1, :, :], ShiftedLog.of(h_z[..., -1, :]), b)
    return NormalizedState(log_mean, ShiftedLog.of(h_z), b[..., None, :]), end


def _accumulate_real_values(
    h_z: Array, past_share: Array, own_share: Array, v: Array, past: NormalizedMeanState
) -> tuple[NormalizedMeanState, NormalizedMeanState]:
    """(the state after each token, the state after all)."""
    update = jnp.exp(own_share) * v[..., None, :]
    from_past = jnp.exp(past_share[..., :1, :, :]) * past.mean[..., None, :, :]
    update = jnp.concatenate([update[..., :1, :, :] + from_past, update[..., 1:, :, :]], axis=-3)
    mean = gated_sum(jnp.exp(past_share), update, h_z.ndim - 2)
    end = NormalizedMeanState(mean[..., -1, :, :], ShiftedLog.of(h_z[..., -1, :]))
    return NormalizedMeanState(mean, ShiftedLog.of(h_z)), end
