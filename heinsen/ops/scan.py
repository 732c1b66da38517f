"""The attention as associative scans over the log-sum-exp monoid: eqs. (2)-(4), the state of every token.

Exact at every dynamic range: h_z = LSE_s(k) by one `jax.lax.associative_scan`, and log S by another as running means
with the weights exp(h_z[t-1] - h_z[t]) and exp(k[t] - h_z[t]); h_s = LSE_s(k + log v) itself would lose precision to
its size. It materializes T*K*V states, forward and backward; between the two passes only the inputs are saved
(`jax.checkpoint`). Arguments are those of `heinsen.log_attention` and `heinsen.attention`, validated there; `starts`
[*batch, T] is true where a packed document starts (`documents.document_starts`).

Axes: T queries, S keys, K key and V value features; `*batch` is any leading axes.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from heinsen.logspace import (
    ShiftedLog,
    cumulative_logsumexp,
    difference,
    finite,
    gated_sum,
    log_linear_recurrence,
    log_shares,
    logaddexp,
)
from heinsen.ops.documents import last_tokens, mask_starts
from heinsen.ops.states import (
    LogState,
    MeanState,
    NormalizedMeanState,
    NormalizedState,
    init_state,
    read_all,
    whole_shift,
)
from heinsen.ops.values import LOG_VALUES, REAL_VALUES, N, Values


@partial(jax.checkpoint, static_argnums=(3,))
def log_attention(
    q: Array,
    k: Array,
    log_v: Array,
    causal: bool,
    state: LogState | None,
    starts: Array | None,
    log_decay: Array | None = None,
) -> tuple[Array, LogState]:
    """(log y [*batch, T, V], the `LogState` after all tokens)."""
    state = init_state(k.shape[:-2], k.shape[-1], log_v.shape[-1], dtype=k.dtype) if state is None else state
    y, end = _attend(q, k, log_v, causal, state.normalize(), starts, log_decay, LOG_VALUES, _accumulate_log_values)
    return y, end.denormalize()


@partial(jax.checkpoint, static_argnums=(3,))
def attention(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    state: MeanState | None,
    starts: Array | None,
    log_decay: Array | None = None,
) -> tuple[Array, MeanState]:
    """(y [*batch, T, V], the `MeanState` after all tokens); v of either sign."""
    state = init_state(k.shape[:-2], k.shape[-1], v.shape[-1], signed=True, dtype=k.dtype) if state is None else state
    y, end = _attend(q, k, v, causal, state.normalize(), starts, log_decay, REAL_VALUES, _accumulate_real_values)
    return y, end.denormalize()


def _attend(
    q: Array,
    k: Array,
    values: Array,
    causal: bool,
    past: N,
    starts: Array | None,
    log_decay: Array | None,
    kind: Values[N],
    accumulate: Callable[[Array, Array, Array, Array, N], tuple[N, N]],
) -> tuple[Array, N]:
    """(what the queries read, the normalized state after all tokens), by a function of the kind of values."""
    if not causal and starts is None:
        end = past.merge(kind.state_of_tokens(k, values))
        return read_all(end, q)[0], end
    states, end = accumulate(*_scan_weights(k, past.h_z.value(), starts, log_decay), values, past)
    if not causal and starts is not None:
        at, axis = last_tokens(starts), q.ndim - 2
        at_end = lambda x: jnp.take_along_axis(x, at.reshape(at.shape + (1,) * (x.ndim - at.ndim)), axis)
        states = jax.tree.map(lambda x: x if x.shape[axis] == 1 else at_end(x), states)  # the shift b has one for all
    return states.read(q)[0], end


def _scan_weights(
    k: Array, past_h_z: Array, starts: Array | None, log_decay: Array | None
) -> tuple[Array, Array, Array]:
    """h_z [*batch, T, K] after each token, and the log shares [*batch, T, K, 1] of its past and of the token in it."""
    past, axis = past_h_z[..., None, :], k.ndim - 2
    if log_decay is not None:
        # What a token leaves of the sums before it.
        gate = log_decay[..., None] if starts is None else mask_starts(starts, log_decay[..., None])
        h_z = log_linear_recurrence(gate, k, axis, initial=past_h_z, method="associative")
        before = ShiftedLog.of(jnp.concatenate([past, h_z[..., :-1, :]], axis=-2)).scale(gate)
    else:
        past = past if starts is None else mask_starts(starts[..., :1], past)
        x = jnp.concatenate([logaddexp(past, k[..., :1, :]), k[..., 1:, :]], axis=-2)
        h_z = cumulative_logsumexp(x, axis=axis, resets=None if starts is None else starts[..., None])
        past = jnp.concatenate([past, h_z[..., :-1, :]], axis=-2)
        before = ShiftedLog.of(past if starts is None else mask_starts(starts, past))
    past_share, own_share = log_shares(before, ShiftedLog.of(k))
    if starts is not None:  # also where both are empty
        past_share = mask_starts(starts, past_share)
    return h_z, past_share[..., None], own_share[..., None]


def _accumulate_log_values(
    h_z: Array, past_share: Array, own_share: Array, log_v: Array, past: NormalizedState
) -> tuple[NormalizedState, NormalizedState]:
    """(the state after each token, the state after all)."""
    b = jnp.maximum(past.b, whole_shift(jnp.max(log_v, axis=-2)))
    update = own_share + (log_v - finite(b)[..., None, :])[..., None, :]
    initial = past.log_mean + difference(past.b, b)[..., None, :]
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
