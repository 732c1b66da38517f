"""The paper's equation (1): slow, short, and the yardstick for every other implementation.

With states, masks and the -inf policy of `heinsen.logspace`, exact at every dynamic range by `log_matmul`, in T*S*K
memory.

Axes: `*batch` any leading axes; T queries, S keys; K key and V value features. `resets` [*batch, T] is true where
nothing is left of the tokens before, as where a document starts, except the first, which continues the state.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from heinsen.logspace import (
    NEG_INF,
    finite,
    log_divide,
    log_matmul,
    logaddexp,
    logsumexp,
    posterior,
)
from heinsen.ops.arrays import isolate_values
from heinsen.ops.segments import document_numbers, mask_cross_document
from heinsen.ops.states import AnyState, LogState, MeanState, merge_states

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)  # as `arrays.einsum`


def attend(
    signed: bool,
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch S K"],
    values: Float[Array, "*batch S V"],
    log_decay: Float[Array, "*batch T"] | None,
    causal: bool,
    state: Any,
) -> tuple[Float[Array, "*batch T V"], Any]:
    """Eq. (1): log y or, if `signed`, y; and the `LogState` or `MeanState` after all tokens.

    log_decay is -inf where nothing is left of the tokens before, as where a document starts.
    """
    resets = None
    if log_decay is not None:
        resets, log_decay = log_decay == NEG_INF, finite(log_decay)
    values, taint = isolate_values(values.astype(k.dtype), signed)
    by_kind: Any = _attend_real_values if signed else _attend_log_values
    result: tuple[Array, Any] = by_kind(q, k + taint[..., None], values, resets, log_decay, causal, state)
    return result


def _attend_log_values(
    q: Array,
    k: Array,
    log_v: Array,
    resets: Array | None,
    log_decay: Array | None,
    causal: bool,
    state: LogState | None,
) -> tuple[Float[Array, "*batch T V"], LogState]:
    """Eq. (1) in logarithms: log y, and the state after all tokens."""
    log_a = _log_similarity(q, k, causal, resets, log_decay)
    log_z, log_s = logsumexp(log_a, axis=-1), log_matmul(log_a, log_v)
    if state is not None:
        q_state = _state_queries(q, resets, log_decay)
        log_z = logaddexp(log_z, logsumexp(q_state + state.h_z[..., None, :], axis=-1))
        log_s = logaddexp(log_s, log_matmul(q_state, state.h_s))
    k = _keys_at_end(k, resets, log_decay)
    end = LogState(logsumexp(k[..., :, None] + log_v[..., None, :], axis=-3), logsumexp(k, axis=-2))
    return log_divide(log_s, log_z[..., None]), _continue(state, end, resets, log_decay)


def _attend_real_values(
    q: Array,
    k: Array,
    v: Array,
    resets: Array | None,
    log_decay: Array | None,
    causal: bool,
    state: MeanState | None,
) -> tuple[Float[Array, "*batch T V"], MeanState]:
    """Eq. (1): y, and the state after all tokens."""
    log_a = _log_similarity(q, k, causal, resets, log_decay)
    log_z = logsumexp(log_a, axis=-1)
    if state is not None:
        log_a0 = _state_queries(q, resets, log_decay) + state.h_z[..., None, :]
        log_z = logaddexp(log_z, logsumexp(log_a0, axis=-1))
    y = _matmul(posterior(log_a, log_z[..., None]), v)
    if state is not None:
        y = y + _matmul(posterior(log_a0, log_z[..., None]), state.mean)
    k = _keys_at_end(k, resets, log_decay)
    h_z = logsumexp(k, axis=-2)
    end = MeanState(_matmul(jnp.swapaxes(posterior(k, h_z[..., None, :]), -1, -2), v), h_z)
    return y, _continue(state, end, resets, log_decay)


def _log_similarity(q: Array, k: Array, causal: bool, resets: Array | None, log_decay: Array | None) -> Array:
    """log(exp(Q) exp(K)^T) [*batch, T, S], -inf where a query does not see a key, less what the key has decayed."""
    log_a = log_matmul(q, jnp.swapaxes(k, -1, -2))
    if log_decay is not None:
        log_a = log_a + _decay_between(log_decay)
    mask = jnp.tril(jnp.ones(log_a.shape[-2:], bool)) if causal else jnp.ones(log_a.shape[-2:], bool)
    if resets is not None:
        mask = mask & mask_cross_document(resets)
    return jnp.where(mask, log_a, NEG_INF)


def _decay_between(log_decay: Array) -> Array:
    """Sum [*batch, T, S] of log_decay over the tokens after s, up to t."""
    later = jnp.tril(jnp.ones((log_decay.shape[-1],) * 2, bool), -1)
    return jnp.cumsum(jnp.where(later, log_decay[..., :, None], 0.0), axis=-2)


def _state_queries(q: Array, resets: Array | None, log_decay: Array | None) -> Array:
    """q [*batch, T, K] as it reads the state: less what that has decayed, -inf outside the first document."""
    if log_decay is not None:
        q = q + jnp.cumsum(log_decay, axis=-1)[..., None]
    return q if resets is None else jnp.where(document_numbers(resets)[..., None] == 0, q, NEG_INF)


def _keys_at_end(k: Array, resets: Array | None, log_decay: Array | None) -> Array:
    """k [*batch, T, K], less what it has decayed by the end, -inf outside the last document."""
    if log_decay is not None:
        k = k + _decay_between(log_decay)[..., -1, :, None]
    if resets is None:
        return k
    document = document_numbers(resets)
    return jnp.where((document == document[..., -1:])[..., None], k, NEG_INF)


def _continue(state: AnyState | None, end: AnyState, resets: Array | None, log_decay: Array | None) -> AnyState:
    """Merge the initial state into that of the last document, where the last document is also the first."""
    if state is None:
        return end
    merged = merge_states(state, end, log_decay=None if log_decay is None else jnp.sum(log_decay, axis=-1))
    if resets is None:
        return merged
    one_document = ~jnp.any(resets, axis=-1)
    select = lambda a, b: jnp.where(jnp.expand_dims(one_document, range(one_document.ndim, a.ndim)), a, b)
    return jax.tree.map(select, merged, end)
