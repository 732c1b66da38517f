"""The attention as one `jax.lax.associative_scan` over the log-sum-exp monoid: eqs. (2)-(4), the state of every token.

Exact at every dynamic range. It materialises T*K*V states, forward and backward; between the two passes only the inputs
are kept (`jax.checkpoint`). Arguments are those of `heinsen.log_attention` and `heinsen.attention`, validated there;
`resets` [*batch, T] is true where a packed document begins; without one at token 0, that token continues `state`.
"""

from functools import partial

import jax
import jax.numpy as jnp

from heinsen.attention.recurrent import LogState, MeanState, merge_states, query_state, read_states
from heinsen.logspace import NEG_INF, cumulative_logsumexp, gated_sum, logaddexp, logsumexp, posterior


@partial(jax.checkpoint, static_argnums=(3,))
def log_attention(q, k, log_v, causal, state, resets):
    """(log y [*batch, T, V], the `LogState` after all tokens)."""
    if causal or resets is not None:
        return _read_running(_running_log_states(k, log_v, state, resets), q, causal, resets)
    h_s = logsumexp(k[..., :, None] + log_v[..., None, :], axis=-3)
    total = LogState(h_s, logsumexp(k, axis=-2))
    total = total if state is None else merge_states(state, total)
    return query_state(total, q), total


@partial(jax.checkpoint, static_argnums=(3,))
def attention(q, k, v, causal, state, resets):
    """(y [*batch, T, V], the `MeanState` after all tokens); v of either sign."""
    if causal or resets is not None:
        return _read_running(_running_mean_states(k, v, state, resets), q, causal, resets)
    h_z = logsumexp(k, axis=-2)
    total = MeanState(jnp.einsum("...sk,...sv->...kv", posterior(k, h_z[..., None, :]), v), h_z)
    total = total if state is None else merge_states(state, total)
    return query_state(total, q), total


def _running_log_states(k, log_v, state, resets):
    """The state after each token: eq. (4)'s log-cumulative-sums of exponentials."""
    # log Z is log S for a column of values whose logarithm is 0: one scan computes both.
    log_v = jnp.pad(log_v, [(0, 0)] * (log_v.ndim - 1) + [(0, 1)])
    x = k[..., :, None] + log_v[..., None, :]
    if state is not None:
        past = _continued(jnp.concatenate([state.h_s, state.h_z[..., None]], axis=-1)[..., None, :, :], resets)
        x = jnp.concatenate([logaddexp(past, x[..., :1, :, :]), x[..., 1:, :, :]], axis=-3)
    h = cumulative_logsumexp(x, axis=-3, resets=None if resets is None else resets[..., None, None])
    return LogState(h[..., :-1], h[..., -1])


def _running_mean_states(k, v, state, resets):
    """The state after each token, normalised: m[t] = exp(h_z[t-1] - h_z[t]) m[t-1] + exp(k[t] - h_z[t]) v[t]."""
    before = jnp.full_like(k[..., :1, :], NEG_INF) if state is None else _continued(state.h_z[..., None, :], resets)
    x = jnp.concatenate([logaddexp(before, k[..., :1, :]), k[..., 1:, :]], axis=-2)
    h_z = cumulative_logsumexp(x, axis=-2, resets=None if resets is None else resets[..., None])
    update = posterior(k, h_z)[..., None] * v[..., None, :]
    h_before = jnp.concatenate([before, h_z[..., :-1, :]], axis=-2)
    if resets is not None:  # masked before the exponential: the next document may begin far below this one's end
        h_before = jnp.where(resets[..., None], NEG_INF, h_before)
    gate = posterior(h_before, h_z)
    if state is not None:
        past = gate[..., :1, :, None] * state.mean[..., None, :, :]
        update = jnp.concatenate([update[..., :1, :, :] + past, update[..., 1:, :, :]], axis=-3)
    return MeanState(gated_sum(gate[..., None], update, axis=-3), h_z)


def _continued(log_past, resets):
    """Log sums that come before token 0, with a token axis of 1: nothing where that token begins a document."""
    if resets is None:
        return log_past
    begins = resets[..., :1]
    return jnp.where(begins.reshape(begins.shape + (1,) * (log_past.ndim - begins.ndim)), NEG_INF, log_past)


def _read_running(states, q, causal, resets):
    last = jax.tree.map(lambda part: jnp.take(part, -1, axis=q.ndim - 2), states)
    if not causal:
        states = jax.tree.map(lambda part: jnp.take_along_axis(part, _run_end(resets, part.ndim), q.ndim - 2), states)
    return read_states(states, q), last


def _run_end(resets, ndim):
    """For each token the position of the last token of its document, shaped to index states of `ndim` axes."""
    n_tokens = resets.shape[-1]
    ends = jnp.concatenate([resets[..., 1:], jnp.ones_like(resets[..., :1])], axis=-1)
    end = jax.lax.cummin(jnp.where(ends, jnp.arange(n_tokens), n_tokens), axis=resets.ndim - 1, reverse=True)
    return end.reshape(end.shape + (1,) * (ndim - end.ndim))
