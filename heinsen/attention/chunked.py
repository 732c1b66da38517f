"""The attention at matmul speed, exact at every dynamic range, in memory linear in T.

Tokens are taken a chunk of C at a time, carrying the log-space state. With c >= k and b >= log v the largest exponents
so far, r[t] = max_k(q[t,k] + c[k]), and h the state before the chunk, every factor below is at most 1:

    qf = exp(q + c - r)     kf = exp(k - c)     vf = exp(log v - b)     hf = exp(h - c - b)
    S = tril(qf kf^T) vf + qf hf          log S[t] = log(S) + r + b     (a query reads its chunk, and all before it)
    M = kf^T vf + hf                      h' = log(M) + c + b           (the state after the chunk)

Z is S for values whose logarithm is 0, so log y = b + log(S / Z): r and c cancel. Terms are lost only where a factor
underflows, below 1e-38; the sum of all that a chunk can lose stays under C*K*1e-38, so a sum above `_TINY` is right to
float32's rounding. A chunk with a smaller sum is computed token by token instead, by eqs. (5) and (6) in the same
shifted coordinates: slower, and exact. Real values of either sign take the same road with v in place of vf, and running
means as the state.

The backward pass keeps the inputs, the sums S and the states between chunks. With W = dL/dS and D = dL/dM, the
gradients are matmuls whose every term is a posterior weight <= 1 times a cotangent.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.attention import scan
from heinsen.attention.recurrent import LogState, MeanState, State, attend_sequentially, init_state, query_state
from heinsen.logspace import NEG_INF, log_divide

CHUNK = 64  # tokens; half of it for heads so narrow that the C x C products would outweigh all else
_TINY = 1e-27  # against at most C * K * 1e-38 of lost terms


def log_attention(q, k, log_v, causal, state, resets):
    """(log y [*batch, T, V], the `LogState` after all tokens)."""
    return _attend(q, k, log_v, causal, state, resets, True)


def attention(q, k, v, causal, state, resets):
    """(y [*batch, T, V], the `MeanState` after all tokens); v of either sign."""
    return _attend(q, k, v, causal, state, resets, False)


def _attend(q, k, values, causal, state, resets, in_logs):
    if not causal and resets is not None:
        # Each query would read the state at its document's end, T*K*V numbers in all: the scan's business.
        return (scan.log_attention if in_logs else scan.attention)(q, k, values, causal, state, resets)
    if state is None:
        state = init_state(k.shape[:-2], k.shape[-1], values.shape[-1], signed=not in_logs, dtype=k.dtype)
    else:
        state = jax.tree.map(lambda part: part.astype(k.dtype), state)
    if causal:
        n_tokens = k.shape[-2]
        q, k, values, resets = _pad(in_logs, _chunk_size(k), q, k, values, resets)
        y, state = _run(q, k, values, state, resets, in_logs)
        return y[..., :n_tokens, :], state
    _, k, values, _ = _pad(in_logs, _chunk_size(k), None, k, values, None)
    _, state = _run(None, k, values, state, None, in_logs)
    n_queries = q.shape[-2]
    y, _ = _run(_pad(in_logs, _chunk_size(q), q, None, None, None)[0], None, None, state, None, in_logs)
    return y[..., :n_queries, :], state


def _chunk_size(tokens):
    """Tokens in a chunk of queries or keys [*batch, T, K]."""
    n_tokens, d_key = tokens.shape[-2:]
    return min(CHUNK if d_key >= 32 else CHUNK // 2, n_tokens)


def _pad(in_logs, size, q, k, values, resets):
    """Up to a multiple of the chunk size; padding keys weigh nothing, padding queries are cut off by the caller."""

    def pad(x, fill):
        if x is None:
            return None
        missing = -x.shape[-2] % size
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)], constant_values=fill)

    resets = None if resets is None else pad(resets[..., None], False)[..., 0]
    return pad(q, 0.0), pad(k, NEG_INF), pad(values, NEG_INF if in_logs else 0.0), resets


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _run(q, k, values, state, resets, in_logs):
    """Chunk by chunk: (y, end state). Without k and values, queries read `state`; without q, only the state goes on."""
    return _run_forward(q, k, values, state, resets, in_logs)[0]


def _run_forward(q, k, values, state, resets, in_logs):
    tokens = k if q is None else q
    size = _chunk_size(tokens)

    def step(carry, i):
        moving, y, sums = carry
        chunk = _slice((q, k, values, resets), i, size)
        moving = moving if k is None else _raise_shifts(moving, chunk, in_logs)
        factors = _factors(chunk, moving, in_logs)
        s, m = _sums(factors)
        lost = _lost(s, m, moving, in_logs)
        y_chunk, end = lax.cond(
            lost,
            lambda: _exact_chunk(_shift(chunk, moving), moving.state),
            lambda: (None if q is None else _outputs(s, in_logs), _state_of(m, in_logs)),
        )
        if q is not None:
            y_chunk = y_chunk + _finite(moving.b)[..., None, :] if in_logs else y_chunk
            y, sums = _write((y, sums), (y_chunk, s), i, size)
        return (moving._replace(state=end), y, sums), (moving, lost)

    y = sums = None
    if q is not None:
        d_value = state[0].shape[-1]
        y, sums = (jnp.zeros((*q.shape[:-1], d_value + extra), q.dtype) for extra in (0, 1))
    n_chunks = tokens.shape[-2] // size
    (moving, y, sums), (before, lost) = lax.scan(step, (_begin(state, in_logs), y, sums), jnp.arange(n_chunks))
    return (y, _finish(moving, in_logs)), (q, k, values, resets, sums, before, lost)


def _run_backward(in_logs, residuals, cotangents):
    q, k, values, resets, sums, before, lost = residuals
    dy, dstate = cotangents
    tokens = k if q is None else q
    size = _chunk_size(tokens)

    def step(carry, xs):
        dend, gradients = carry
        i, moving, lost_chunk = xs
        chunk = _slice((q, k, values, resets), i, size)
        dy_chunk, s = _slice((dy, sums), i, size)

        def exact():
            *inputs, chunk_resets = _shift(chunk, moving)
            run = lambda inputs, state: _exact_chunk((*inputs, chunk_resets), state)
            return jax.vjp(run, tuple(inputs), moving.state)[1]((dy_chunk, dend))

        def fast():
            return _gradients(_factors(chunk, moving, in_logs), s, dy_chunk, dend, in_logs)

        dchunk, dbegin = lax.cond(lost_chunk, exact, fast)
        return (dbegin, _write(gradients, dchunk, i, size)), None

    zeros = jax.tree.map(jnp.zeros_like, (q, k, values))
    xs = (jnp.arange(tokens.shape[-2] // size), before, lost)
    (dbegin, (dq, dk, dvalues)), _ = lax.scan(step, (dstate, zeros), xs, reverse=True)
    return dq, dk, dvalues, dbegin, None


_run.defvjp(_run_forward, _run_backward)


def _slice(arrays, i, size):
    """Chunk i of each array: along axis -2, or the last axis of the boolean resets."""
    axis_of = lambda x: x.ndim - (1 if x.dtype == bool else 2)
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * size, size, axis_of(x)), arrays)


def _write(arrays, chunks, i, size):
    return jax.tree.map(lambda x, part: lax.dynamic_update_slice_in_dim(x, part, i * size, x.ndim - 2), arrays, chunks)


# ---- the shifted coordinates -----------------------------------------------------------------


class _Moving(NamedTuple):
    """A state relative to the shifts c [*batch, K] of the keys and b [*batch, V] of log values (None for real ones)."""

    state: State
    c: Array
    b: Array | None


def _begin(state, in_logs):
    h_z = jnp.where(state.h_z == NEG_INF, NEG_INF, 0.0)
    if not in_logs:
        return _Moving(MeanState(state.mean, h_z), state.h_z, None)
    log_mean = log_divide(state.h_s, state.h_z[..., None])
    b = jnp.max(log_mean, axis=-2)
    return _Moving(LogState(log_mean - _finite(b)[..., None, :], h_z), state.h_z, b)


def _raise_shifts(moving, chunk, in_logs):
    """Let the shifts cover a chunk's keys and values too; the relative state goes down by what they rise."""
    (_, k, values, _), (state, c_old, b_old) = chunk, moving
    rise = lambda new, old: jnp.where(new == old, 0.0, new - old)
    c = jnp.maximum(c_old, jnp.max(k, axis=-2))
    h_z = state.h_z - rise(c, c_old)
    if not in_logs:
        return _Moving(MeanState(state.mean, h_z), c, None)
    b = jnp.maximum(b_old, jnp.max(values, axis=-2))
    h_s = state.h_s - rise(c, c_old)[..., :, None] - rise(b, b_old)[..., None, :]
    return _Moving(LogState(h_s, h_z), c, b)


def _finish(moving, in_logs):
    state, c, b = moving
    h_z = state.h_z + _finite(c)
    if not in_logs:
        return MeanState(state.mean, h_z)
    return LogState(state.h_s + _finite(c)[..., :, None] + _finite(b)[..., None, :], h_z)


def _shift(chunk, moving):
    """q + c - r, k - c, log v - b: none of them above 0 (real values stay as they are)."""
    (q, k, values, resets), (_, c, b) = chunk, moving
    c = _finite(c)[..., None, :]
    if q is not None:
        q = q + c
        q = q - _finite(jnp.max(q, axis=-1, keepdims=True))
    if k is not None:
        k = k - c
        values = values if b is None else values - _finite(b)[..., None, :]
    return q, k, values, resets


def _finite(shift):
    return jnp.where(shift == NEG_INF, 0.0, shift)


# ---- one chunk -------------------------------------------------------------------------------


class _Factors(NamedTuple):
    """The exponentials of a chunk; those of values have one more column, for Z. Masks are 0 or 1, or None: all ones."""

    qf: Array | None  # [*batch, C, K]
    kf: Array | None  # [*batch, C, K]
    vf: Array | None  # [*batch, C, V + 1]
    hf: Array  # [*batch, K, V + 1]
    seen: Array  # [*batch, C, C]: key s is visible to query t in the same chunk
    reads_state: Array | None  # [*batch, C, 1]: query t continues the document of the state
    enters_state: Array | None  # [*batch, C, 1]: key s is of the document that the chunk ends in
    keeps_state: Array | None  # [*batch, 1, 1]: the chunk has one document only


def _factors(chunk, moving, in_logs):
    q, k, values, resets = _shift(chunk, moving)
    state = moving.state
    hf_z = jnp.exp(state.h_z)[..., None]
    hf = jnp.concatenate([jnp.exp(state.h_s) if in_logs else hf_z * state.mean, hf_z], axis=-1)
    qf = None if q is None else jnp.exp(q)
    if k is None:
        return _Factors(qf, None, None, hf, None, None, None, None)
    v = jnp.exp(values) if in_logs else values
    vf = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
    seen, reads, enters, keeps = jnp.tril(jnp.ones((k.shape[-2],) * 2, k.dtype)), None, None, None
    if resets is not None:
        document = jnp.cumsum(resets, axis=-1)
        seen = seen * (document[..., :, None] == document[..., None, :])
        reads = (document == 0)[..., None].astype(k.dtype)
        enters = (document == document[..., -1:])[..., None].astype(k.dtype)
        keeps = (document[..., -1:] == 0)[..., None].astype(k.dtype)
    return _Factors(qf, jnp.exp(k), vf, hf, seen, reads, enters, keeps)


def _masked(x, mask):
    return x if mask is None else x * mask


# TPUs and GPUs would otherwise round float32 factors to bfloat16 or tf32.
_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _sums(f):
    """S [*batch, C, V + 1] that the queries read, and M [*batch, K, V + 1] at the chunk's end."""
    m = f.hf
    if f.kf is not None:
        m = _masked(f.hf, f.keeps_state) + _einsum("...sk,...sv->...kv", _masked(f.kf, f.enters_state), f.vf)
    if f.qf is None:
        return None, m
    s = _einsum("...tk,...kv->...tv", _masked(f.qf, f.reads_state), f.hf)
    if f.kf is not None:
        a = _einsum("...tk,...sk->...ts", f.qf, f.kf) * f.seen
        s = s + _einsum("...ts,...sv->...tv", a, f.vf)
    return s, m


def _lost(s, m, moving, in_logs):
    """Whether some sum is so small that underflow may have taken terms from it: one boolean for the whole chunk.

    What has no terms at all (no key feature, or no value, above -inf so far) is rightly 0. Running means are divided by
    their weights: only those can be too small.
    """
    some_key = (moving.c > NEG_INF)[..., :, None]
    if in_logs:
        some_value = jnp.pad(moving.b > NEG_INF, [(0, 0)] * (moving.b.ndim - 1) + [(0, 1)], constant_values=True)
        some_value = some_value[..., None, :]
    else:
        some_value, m, s = True, m[..., -1:], None if s is None else s[..., -1:]
    lost = jnp.any((m < _TINY) & some_key & some_value)
    if s is not None:
        lost |= jnp.any((s < _TINY) & jnp.any(some_key, axis=-2, keepdims=True) & some_value)
    return lost


def _ratio(a, b):
    """a / b, and 0 / 0 = 0."""
    return jnp.where(b == 0, 0.0, a / jnp.where(b == 0, 1.0, b))


def _outputs(s, in_logs):
    s, z = s[..., :-1], s[..., -1:]
    if not in_logs:
        return _ratio(s, z)
    return jnp.log(s) - jnp.log(jnp.where(z == 0, 1.0, z))  # where z is 0 so is s: -inf


def _state_of(m, in_logs):
    if in_logs:
        h = jnp.log(m)
        return LogState(h[..., :-1], h[..., -1])
    return MeanState(_ratio(m[..., :-1], m[..., -1:]), jnp.log(m[..., -1]))


def _exact_chunk(chunk, state):
    """(y, end state) in shifted coordinates, token by token."""
    q, k, values, resets = chunk
    return (query_state(state, q), state) if k is None else attend_sequentially(q, k, values, state, resets)


def _gradients(f, s, dy, dend, in_logs):
    """((dq, dk, dvalues), the gradient of the state before the chunk) from those of y and of the state after it."""
    _, m = _sums(f._replace(qf=None))
    m_v, m_z = m[..., :-1], m[..., -1:]
    if in_logs:
        dm = _ratio(jnp.concatenate([dend.h_s, dend.h_z[..., None]], axis=-1), m)
    else:
        dm_z = dend.h_z[..., None] - jnp.sum(dend.mean * _ratio(m_v, m_z), axis=-1, keepdims=True)
        dm = _ratio(jnp.concatenate([dend.mean, dm_z], axis=-1), m_z)
    dhf = _masked(dm, f.keeps_state)
    dq = dk = dvalues = None
    if f.qf is not None:
        s_v, s_z = s[..., :-1], s[..., -1:]
        if in_logs:
            ds = _ratio(jnp.concatenate([dy, -jnp.sum(dy, axis=-1, keepdims=True)], axis=-1), s)
        else:
            ds_z = -jnp.sum(dy * _ratio(s_v, s_z), axis=-1, keepdims=True)
            ds = _ratio(jnp.concatenate([dy, ds_z], axis=-1), s_z)
        qf_state = _masked(f.qf, f.reads_state)
        dhf = dhf + _einsum("...tk,...tv->...kv", qf_state, ds)
        dqf = _masked(_einsum("...tv,...kv->...tk", ds, f.hf), f.reads_state)
    if f.kf is not None:
        dkf = _masked(_einsum("...sv,...kv->...sk", f.vf, dm), f.enters_state)
        dvf = _einsum("...sk,...kv->...sv", _masked(f.kf, f.enters_state), dm)
        if f.qf is not None:
            a = _einsum("...tk,...sk->...ts", f.qf, f.kf) * f.seen
            da = _einsum("...tv,...sv->...ts", ds, f.vf) * f.seen
            dqf = dqf + _einsum("...ts,...sk->...tk", da, f.kf)
            dkf = dkf + _einsum("...ts,...tk->...sk", da, f.qf)
            dvf = dvf + _einsum("...ts,...tv->...sv", a, ds)
        dk = f.kf * dkf
        dvalues = (f.vf * dvf if in_logs else dvf)[..., :-1]
    if f.qf is not None:
        dq = f.qf * dqf
    dh = f.hf * dhf
    if in_logs:
        return (dq, dk, dvalues), LogState(dh[..., :-1], dh[..., -1])
    return (dq, dk, dvalues), MeanState(f.hf[..., -1:] * dhf[..., :-1], jnp.sum(dh, axis=-1))
