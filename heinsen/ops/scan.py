"""The attention as associative scans over the log-sum-exp monoid: eqs. (2)-(4), the state of every token.

Exact at every dynamic range: h_z = LSE_s(k) by one `jax.lax.associative_scan`, and log S by another as running
averages with the weights exp(h_z[t-1] - h_z[t]) and exp(k[t] - h_z[t]): h_s = LSE_s(k + log v) would lose precision to
its size. It materialises T*K*V states, forward and backward; between the two passes only the inputs are kept
(`jax.checkpoint`). Arguments are those of `heinsen.log_attention` and `heinsen.attention`, validated there; `resets`
[*batch, T] is true where a packed document begins; without one at token 0, that token continues `state`.
"""

from functools import partial

import jax
import jax.numpy as jnp

from heinsen.logspace import (
    NEG_INF,
    cumulative_logsumexp,
    finite,
    gated_sum,
    log_linear_recurrence,
    logaddexp,
    logsumexp,
    posterior,
)
from heinsen.ops.states import (
    NormalizedState,
    denormalize_state,
    empty_state_for,
    log_shares,
    merge_normalized,
    normalize_state,
    read_normalized,
    read_normalized_per_token,
    shift_difference,
    whole_shift,
)


@partial(jax.checkpoint, static_argnums=(3,))
def log_attention(q, k, log_v, causal, state, resets):
    """(log y [*batch, T, V], the `LogState` after all tokens)."""
    return _attend(q, k, log_v, causal, state, resets, True)


@partial(jax.checkpoint, static_argnums=(3,))
def attention(q, k, v, causal, state, resets):
    """(y [*batch, T, V], the `MeanState` after all tokens); v of either sign."""
    return _attend(q, k, v, causal, state, resets, False)


def _attend(q, k, values, causal, state, resets, in_logs):
    past = normalize_state(empty_state_for(k, values, in_logs) if state is None else state)
    if not causal and resets is None:
        end = merge_normalized(past, _total(k, values, in_logs))
        return read_normalized(end, q)[0], denormalize_state(end)
    states = _running_states(k, values, past, resets)
    end = states._replace(mean=states.mean[..., -1, :, :], h=states.h[..., -1, :])
    if not causal:
        at_end = lambda x: jnp.take_along_axis(x, _run_end(resets, x.ndim), q.ndim - 2)
        states = states._replace(mean=at_end(states.mean), h=at_end(states.h))
    if in_logs:
        states = states._replace(b=states.b[..., None, :])
    return read_normalized_per_token(states, q)[0], denormalize_state(end)


def _total(k, values, in_logs):
    """The state of all tokens."""
    h = logsumexp(k, axis=-2)
    if not in_logs:
        return NormalizedState(jnp.einsum("...sk,...sv->...kv", posterior(k, h[..., None, :]), values), h, None)
    b = whole_shift(jnp.max(values, axis=-2))
    log_weights = (k - finite(h)[..., None, :])[..., None]
    return NormalizedState(logsumexp(log_weights + (values - finite(b)[..., None, :])[..., None, :], axis=-3), h, b)


def _running_states(k, values, past, resets):
    """The state after each token, a token axis in `mean` and `h` but not in b; `past` is the state before them."""
    axis = k.ndim - 2
    past_h = past.h[..., None, :] if resets is None else _unless(resets[..., :1], past.h[..., None, :])
    x = jnp.concatenate([logaddexp(past_h, k[..., :1, :]), k[..., 1:, :]], axis=-2)
    h = cumulative_logsumexp(x, axis=axis, resets=None if resets is None else resets[..., None])
    before = jnp.concatenate([past_h, h[..., :-1, :]], axis=-2)
    if resets is not None:
        before = _unless(resets, before)
    past_share, own_share = log_shares(before, k)
    if resets is not None:  # of nothing and nothing, too
        past_share = _unless(resets, past_share)
    past_share, own_share = past_share[..., None], own_share[..., None]
    if past.b is None:
        update = jnp.exp(own_share) * values[..., None, :]
        from_past = jnp.exp(past_share[..., :1, :, :]) * past.mean[..., None, :, :]
        update = jnp.concatenate([update[..., :1, :, :] + from_past, update[..., 1:, :, :]], axis=-3)
        return NormalizedState(gated_sum(jnp.exp(past_share), update, axis), h, None)
    b = jnp.maximum(past.b, whole_shift(jnp.max(values, axis=-2)))
    update = own_share + (values - finite(b)[..., None, :])[..., None, :]
    past_mean = past.mean + shift_difference(past.b, b)[..., None, :]
    mean = log_linear_recurrence(past_share, update, axis, initial=past_mean, method="associative")
    return NormalizedState(mean, h, b)


def _unless(begins, log_sums):
    """Log sums [*batch, T, K], but nothing where a document begins."""
    return jnp.where(begins[..., None], NEG_INF, log_sums)


def _run_end(resets, ndim):
    """For each token the position of the last token of its document, shaped to index states of `ndim` axes."""
    n_tokens = resets.shape[-1]
    ends = jnp.concatenate([resets[..., 1:], jnp.ones_like(resets[..., :1])], axis=-1)
    end = jax.lax.cummin(jnp.where(ends, jnp.arange(n_tokens), n_tokens), axis=resets.ndim - 1, reverse=True)
    return end.reshape(end.shape + (1,) * (ndim - end.ndim))
