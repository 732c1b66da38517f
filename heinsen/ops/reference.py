"""The paper's equations, literally: slow, small, and the yardstick of every other form.

`equation_1` ... `equation_4` take values as the paper writes them (complex logarithms for values of either sign) and no
state. `log_attention` and `attention` are eq. (1) with states, masks and the -inf policy of `heinsen.logspace`, exact
at every dynamic range through `log_matmul`, in T*S*K memory.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Complex, Float

from heinsen.logspace import (
    NEG_INF,
    complex_logsumexp,
    log_divide,
    log_matmul,
    logaddexp,
    logsumexp,
    posterior,
)
from heinsen.ops.states import LogState, MeanState, merge_states


def equation_1(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch S K"],
    v: Float[Array, "*batch S V"],
    *,
    c: float = 0.0,
    mask: Bool[Array, "*#batch T S"] | None = None,
) -> Float[Array, "*batch T V"]:
    """Softmax(log(exp(Q) exp(K)^T / exp(c))) V, with `mask` true where a query sees a key."""
    logits = log_matmul(q, jnp.swapaxes(k, -1, -2)) - c
    if mask is not None:
        logits = jnp.where(mask, logits, NEG_INF)
    return jax.nn.softmax(logits, axis=-1) @ v


def equation_2(
    log_s: Float[Array, "*batch T V"] | Complex[Array, "*batch T V"], log_z: Float[Array, "*batch T"]
) -> Float[Array, "*batch T V"]:
    """exp(log S - log Z), which is real also where log S is complex."""
    return jnp.exp(log_s - log_z[..., None]).real


def equation_3(q, k, log_v):
    """(log S [*batch, T, V], log Z [*batch, T]) over all keys; log S is complex if log V is."""
    h_s = _lse(k[..., :, None] + log_v[..., None, :], axis=-3)
    h_z = _lse(k, axis=-2)
    return _lse(q[..., None] + h_s[..., None, :, :], axis=-2), _lse(q + h_z[..., None, :], axis=-1)


def equation_4(q, k, log_v):
    """(log S [*batch, T, V], log Z [*batch, T]), each query over the keys up to its own; T*T*K*V memory."""
    n_tokens = q.shape[-2]
    seen = jnp.tril(jnp.ones((n_tokens, n_tokens), bool))
    k_prefixes = jnp.where(seen[..., None], k[..., None, :, :], NEG_INF)
    h_s = _lse(k_prefixes[..., None] + log_v[..., None, :, None, :], axis=-3)
    h_z = _lse(k_prefixes, axis=-2)
    return _lse(q[..., None] + h_s, axis=-2), _lse(q + h_z, axis=-1)


def _lse(x, axis):
    return complex_logsumexp(x, axis) if jnp.iscomplexobj(x) else logsumexp(x, axis)


def log_attention(q, k, log_v, causal, state, resets):
    """Eq. (1) in logs: (log y [*batch, T, V], the `LogState` after all tokens)."""
    log_a = _log_similarity(q, k, causal, resets)
    log_z, log_s = logsumexp(log_a, axis=-1), log_matmul(log_a, log_v)
    if state is not None:
        log_a0 = _state_log_similarity(q, state.h_z, resets)
        log_z = logaddexp(log_z, logsumexp(log_a0, axis=-1))
        q_state = jnp.where(_first_document(resets), q, NEG_INF)
        log_s = logaddexp(log_s, log_matmul(q_state, state.h_s))
    k = jnp.where(_last_document(resets), k, NEG_INF)
    end = LogState(logsumexp(k[..., :, None] + log_v[..., None, :], axis=-3), logsumexp(k, axis=-2))
    return log_divide(log_s, log_z[..., None]), _continue(state, end, resets)


def attention(q, k, v, causal, state, resets):
    """Eq. (1): (y [*batch, T, V], the `MeanState` after all tokens)."""
    log_a = _log_similarity(q, k, causal, resets)
    log_z = logsumexp(log_a, axis=-1)
    if state is not None:
        log_a0 = _state_log_similarity(q, state.h_z, resets)
        log_z = logaddexp(log_z, logsumexp(log_a0, axis=-1))
    y = posterior(log_a, log_z[..., None]) @ v
    if state is not None:
        y = y + posterior(log_a0, log_z[..., None]) @ state.mean
    k = jnp.where(_last_document(resets), k, NEG_INF)
    h_z = logsumexp(k, axis=-2)
    end = MeanState(jnp.swapaxes(posterior(k, h_z[..., None, :]), -1, -2) @ v, h_z)
    return y, _continue(state, end, resets)


def _log_similarity(q, k, causal, resets):
    """log(exp(Q) exp(K)^T) [*batch, T, S], -inf where a query does not see a key."""
    log_a = log_matmul(q, jnp.swapaxes(k, -1, -2))
    seen = jnp.tril(jnp.ones(log_a.shape[-2:], bool)) if causal else jnp.ones(log_a.shape[-2:], bool)
    if resets is not None:
        document = jnp.cumsum(resets, axis=-1)
        seen = seen & (document[..., :, None] == document[..., None, :])
    return jnp.where(seen, log_a, NEG_INF)


def _state_log_similarity(q, h_z, resets):
    """q + h_z [*batch, T, K]: each query's log weights on the state, which only the first document continues."""
    return jnp.where(_first_document(resets), q + h_z[..., None, :], NEG_INF)


def _first_document(resets):
    return True if resets is None else jnp.cumsum(resets, axis=-1)[..., None] == 0


def _last_document(resets):
    if resets is None:
        return True
    document = jnp.cumsum(resets, axis=-1)
    return (document == document[..., -1:])[..., None]


def _continue(state, end, resets):
    """The given state goes on into the last document only where that is also the first."""
    if state is None:
        return end
    merged = merge_states(state, end)
    if resets is None:
        return merged
    one_document = ~jnp.any(resets, axis=-1)
    pick = lambda a, b: jnp.where(one_document.reshape(one_document.shape + (1,) * (a.ndim - one_document.ndim)), a, b)
    return jax.tree.map(pick, merged, end)
