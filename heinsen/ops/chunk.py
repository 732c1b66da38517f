"""The attention at matmul speed, exact at every dynamic range, in memory linear in T.

Tokens are taken a chunk of C at a time, with shifts c >= k and b >= log v, the largest exponents so far, and r[t] =
max_k(q[t,k] + c[k]). Every factor is then at most 1, and so are the sums carried from chunk to chunk, per token seen:

    qf = exp(q + c - r)     kf = exp(k - c)     vf = exp(log v - b)     A = tril(qf kf^T)
    S = A vf + qf M_s       Z = A 1 + qf M_z    (a query reads its own chunk, and the state for all before it)
    M_s' = M_s + kf^T vf    M_z' = M_z + kf^T 1 (and where c and b rise, M_s and M_z fall)

log y = log(S / Z) + b, and the state is h_s = log M_s + c + b, h_z = log M_z + c. Real values of either sign take the
same road with v in place of vf, b = 0 and y = S / Z.

Chunks are taken in groups, one group after the other: the products and exponentials of a group's chunks at once, the
states between them in turn. A group is large enough to keep a device busy, and small enough to stay in a CPU's cache.

Terms are lost only where a factor underflows, below 1e-38: at most (tokens) * K * 1e-38 of any sum, so sums that all
exceed `_TINY` are right to float32's rounding. That is checked once per call, and where it fails the call is repaired:
every chunk is taken again from a state in logarithms, and those that lose terms even so token by token, in normalised
form: as running averages and their weights. Inputs of ordinary range pay for the check alone.

The backward pass keeps the inputs, the sums S and Z, and the states between chunks. With dS = dL/dS = W / S and D =
dL/dM every gradient is a matmul whose terms are posterior weights <= 1 times cotangents.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import NEG_INF, finite, log_divide, logaddexp
from heinsen.ops.states import (
    LogState,
    MeanState,
    NormalizedState,
    denormalize_state,
    empty_state_for,
    log_shares,
    merge_normalized,
    normalize_state,
    normalized_token,
    read_normalized,
    read_normalized_per_token,
    shift_difference,
)

_TINY = 1e-27  # against what underflow takes from a sum: 1e-38 a term


def log_attention(q, k, log_v, causal, state, resets):
    """(log y [*batch, T, V], the `LogState` after all tokens)."""
    return _attend(q, k, log_v, causal, state, resets, True)


def attention(q, k, v, causal, state, resets):
    """(y [*batch, T, V], the `MeanState` after all tokens); v of either sign."""
    return _attend(q, k, v, causal, state, resets, False)


def state_after(k, log_v, state, resets):
    """The `LogState` after all tokens, which no query reads."""
    return _padded_run(_Tokens(None, k, log_v, resets), state, in_logs=True)[2]


def _attend(q, k, values, causal, state, resets, in_logs):
    if state is None:
        # XLA would spend seconds on folding what follows from so large a constant.
        state = lax.optimization_barrier(empty_state_for(k, values, in_logs))
    else:
        state = jax.tree.map(lambda part: part.astype(k.dtype), state)
    if causal:
        y, _, state = _padded_run(_Tokens(q, k, values, resets), state, in_logs)
        return y, state
    if resets is None:
        _, _, state = _padded_run(_Tokens(None, k, values, None), state, in_logs)
        y, _, _ = _padded_run(_Tokens(q, None, None, None), state, in_logs)
        return y, state
    return _within_documents(q, k, values, state, resets, in_logs)


def _within_documents(q, k, values, state, resets, in_logs):
    """Every query sees its whole document: the keys up to its own, and, in a run from the end, the later ones."""
    y_past, log_z_past, state = _padded_run(_Tokens(q, k, values, resets), state, in_logs, with_log_z=True)
    # From the end, each token takes the key of the token after it, unless that begins another document.
    later = lambda x, fill: jnp.concatenate([x[..., 1:, :], jnp.full_like(x[..., :1, :], fill)], axis=-2)
    begins_next = jnp.concatenate([resets[..., 1:], jnp.ones_like(resets[..., :1])], axis=-1)
    k_later = jnp.where(begins_next[..., None], NEG_INF, later(k, NEG_INF))
    tokens = _Tokens(q, k_later, later(values, NEG_INF if in_logs else 0.0), begins_next)
    tokens = jax.tree.map(lambda x: jnp.flip(x, axis=_token_axis(x)), tokens)
    y_future, log_z_future, _ = _padded_run(tokens, empty_state_for(k, values, in_logs), in_logs, with_log_z=True)
    y_future, log_z_future = jnp.flip(y_future, axis=-2), jnp.flip(log_z_future, axis=-1)
    past_share, future_share = (share[..., None] for share in log_shares(log_z_past, log_z_future))
    if in_logs:
        return logaddexp(y_past + past_share, y_future + future_share), state
    return jnp.exp(past_share) * y_past + jnp.exp(future_share) * y_future, state


class _Tokens(NamedTuple):
    """Queries, keys, values and where documents begin; parts that take no part are None."""

    q: Array | None  # [*batch, T, K]
    k: Array | None  # [*batch, T, K]
    values: Array | None  # [*batch, T, V]
    resets: Array | None  # [*batch, T] bool


def _padded_run(tokens, state, in_logs, with_log_z=False):
    """`_run` for any number of tokens: padding keys weigh nothing, padding queries are cut off."""
    x = tokens.k if tokens.q is None else tokens.q
    n_tokens = x.shape[-2]
    split = _split(x.shape)
    missing = split.n_tokens - n_tokens

    def pad(x, fill):
        if x is None or missing == 0:
            return x
        widths = [(0, 0)] * x.ndim
        widths[_token_axis(x)] = (0, missing)
        return jnp.pad(x, widths, constant_values=fill)

    fills = _Tokens(0.0, NEG_INF, NEG_INF if in_logs else 0.0, False)
    y, log_z, state = _run(_Tokens(*map(pad, tokens, fills)), state, split, in_logs, with_log_z)
    cut = lambda x, axis: None if x is None else lax.slice_in_dim(x, 0, n_tokens, axis=axis)
    return cut(y, -2), cut(log_z, -1), state


class _Split(NamedTuple):
    """How tokens are taken: in n_groups, one after the other, of n_chunks chunks each of `size` tokens."""

    n_groups: int
    n_chunks: int
    size: int

    @property
    def n_tokens(self):
        return self.n_groups * self.n_chunks * self.size


def chunk_size(d_key):
    """Tokens in a chunk, for d_key key features a head."""
    return 32 if d_key < 64 and jax.default_backend() == "cpu" else 64


def chunks_in_group(elements):
    """Chunks to take at once, if one has that many elements in its queries or keys, of all heads and sequences.

    On CPUs the arrays of a group stay in cache, and yet are large enough for several threads; accelerators rather want
    few large steps.
    """
    return max(1, (2**18 if jax.default_backend() == "cpu" else 2**26) // elements)


def _split(shape):
    """For queries or keys [*batch, T, K]; it may hold more tokens than T."""
    *batch, n_tokens, d_key = shape
    size = min(chunk_size(d_key), n_tokens)
    n_chunks = -(-n_tokens // size)
    at_most = chunks_in_group(math.prod(batch) * size * d_key)
    # Padding copies all inputs and outputs, so groups are rather up to half as large if that leaves nothing to pad.
    for in_group in range(min(at_most, n_chunks), at_most // 2, -1):
        if n_chunks % in_group == 0:
            return _Split(n_chunks // in_group, in_group, size)
    n_groups = -(-n_chunks // at_most)
    return _Split(n_groups, -(-n_chunks // n_groups), size)


def _token_axis(x):
    return x.ndim - (1 if x.dtype == bool else 2)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _run(tokens, state, split, in_logs, with_log_z):
    """Group by group: (y, log Z if asked for, the state after all).

    Without k and values the queries read `state`; without q there is no y and only the state goes on.
    """
    return _run_forward(tokens, state, split, in_logs, with_log_z, remember=False)[0]


def _run_forward(tokens, state, split, in_logs, with_log_z, remember=True):
    *out, before, sums, lost = _fast_forward(tokens, state, split, in_logs, with_log_z, remember)
    out = _repair_forward(tokens, state, split, in_logs, lost, tuple(out))
    return out, (tokens, state, before, sums, lost)


def _run_backward(split, in_logs, with_log_z, residuals, cotangents):
    tokens, state, before, sums, lost = residuals
    gradients = _fast_backward(tokens, state, before, sums, split, in_logs, cotangents)
    dtokens, dstate = _repair_backward(tokens, state, split, in_logs, lost, cotangents, gradients, before)
    return dtokens, dstate


_run.defvjp(_run_forward, _run_backward)


# ---- chunks, shifts, factors and sums ------------------------------------------------------------


def _slice(arrays, i, size):
    """Chunk i of every array."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * size, size, _token_axis(x)), arrays)


def _slice_last(x, i, size):
    return None if x is None else lax.dynamic_slice_in_dim(x, i * size, size, x.ndim - 1)


def _write(arrays, chunks, i, axis=-2):
    def write(x, part):
        return lax.dynamic_update_slice_in_dim(x, part, i * part.shape[axis], x.ndim + axis)

    return jax.tree.map(write, arrays, chunks)


def _part(arrays, split, last=False):
    """A group's tokens [*batch, n*C, ...] as its chunks [*batch, n, C, ...]; `last`: tokens are the last axis."""

    def part(x):
        axis = x.ndim - 1 if last else _token_axis(x)
        return x.reshape(*x.shape[:axis], split.n_chunks, split.size, *x.shape[axis + 1 :])

    return jax.tree.map(part, arrays)


def _join(chunks, axis=-2):
    """A group's chunks as its tokens."""
    join = lambda x: x.reshape(*x.shape[: axis - 1], -1, *x.shape[x.ndim + axis + 1 :])
    return jax.tree.map(join, chunks)


def _in_turn(step, carry, chunks, axis, reverse=False):
    """`lax.scan` over the chunks of a group, which stay along `axis`: what would be moved for lax.scan is not small."""
    n = jax.tree.leaves(chunks)[0].shape[axis]
    take = lambda i: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, axis, keepdims=False), chunks)

    def body(j, carry_and_out):
        carry, out = carry_and_out
        i = n - 1 - j if reverse else j
        carry, y = step(carry, take(i))
        return carry, jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, axis), out, y)

    shapes = jax.eval_shape(lambda: step(carry, take(0))[1])
    out = jax.tree.map(lambda y: jnp.zeros((*y.shape[:axis], n, *y.shape[axis:]), y.dtype), shapes)
    return lax.fori_loop(0, n, body, (carry, out))


class _Shifts(NamedTuple):
    """The largest exponent so far of each key feature and of each log value; -inf before any."""

    c: Array  # [*batch, K]
    b: Array | None  # [*batch, V]; None for real values


class _Sums(NamedTuple):
    """Sums over keys of weights times values, and of weights: in a state for each key feature, else for each query."""

    s: Array  # [*batch, K or C, V]
    z: Array  # [*batch, K or C]


def _raise(shifts, chunk):
    """The shifts that cover a chunk's keys and values too."""
    if chunk.k is None:
        return shifts
    b = None if shifts.b is None else jnp.maximum(shifts.b, jnp.max(chunk.values, axis=-2))
    return _Shifts(jnp.maximum(shifts.c, jnp.max(chunk.k, axis=-2)), b)


def _rescale(sums, old, new):
    """Sums relative to the shifts `old`, or their gradients relative to `new`, in terms of the other: factors <= 1."""
    fall = lambda x, y: jnp.exp(jnp.where(x == y, 0.0, x - y))
    of_c = fall(old.c, new.c)
    s = sums.s * of_c[..., :, None]
    return _Sums(s if old.b is None else s * fall(old.b, new.b)[..., None, :], sums.z * of_c)


class _Factors(NamedTuple):
    """A chunk's exponentials. Masks are 0 or 1, or None: all ones."""

    qf: Array | None  # [*batch, C, K]
    r: Array | None  # [*batch, C], the shift of qf; -inf where a query sees nothing
    kf: Array | None  # [*batch, C, K]
    vf: Array | None  # [*batch, C, V]
    seen: Array | None  # [*batch, C, C]: key s is visible to query t in the same chunk
    reads: Array | None  # [*batch, C, 1]: query t continues the document of the state
    enters: Array | None  # [*batch, C, 1]: key s is of the document that the chunk ends in
    keeps: Array | None  # [*batch, 1]: the chunk has one document only


def _factors(chunk, shifts, in_logs):
    q, k, values, resets = chunk
    qf = r = kf = vf = seen = reads = enters = keeps = None
    if q is not None:
        q = q + shifts.c[..., None, :]
        r = lax.stop_gradient(jnp.max(q, axis=-1))
        qf = jnp.exp(q - finite(r)[..., None])
    if k is not None:
        kf = jnp.exp(k - finite(shifts.c)[..., None, :])
        vf = jnp.exp(values - finite(shifts.b)[..., None, :]) if in_logs else values
        seen = jnp.tril(jnp.ones((k.shape[-2],) * 2, k.dtype))
        if resets is not None:
            document = jnp.cumsum(resets, axis=-1)
            seen = seen * (document[..., :, None] == document[..., None, :])
            reads = (document == 0)[..., None].astype(k.dtype)
            enters = (document == document[..., -1:])[..., None].astype(k.dtype)
            keeps = (document[..., -1:] == 0).astype(k.dtype)
    return _Factors(qf, r, kf, vf, seen, reads, enters, keeps)


def _masked(x, mask):
    return x if mask is None else x * mask


# TPUs and GPUs would otherwise round float32 factors to bfloat16 or tf32.
_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _kept(sums, keeps):
    """A state's sums, or their gradients, as far as they pass the chunk's document boundaries."""
    return sums if keeps is None else _Sums(sums.s * keeps[..., None], sums.z * keeps)


def _plus(sums, more):
    return sums if more is None else _Sums(sums.s + more.s, sums.z + more.z)


def _query_sums(f, m):
    """S and Z of a chunk's queries, which see the state m."""
    qf = _masked(f.qf, f.reads)
    # Products, also with vectors: sums of elementwise products take XLA five times as long on a CPU.
    s, z = _einsum("...tk,...kv->...tv", qf, m.s), _einsum("...tk,...k->...t", qf, m.z)
    if f.kf is None:
        return _Sums(s, z)
    a = _einsum("...tk,...sk->...ts", f.qf, f.kf) * f.seen
    return _Sums(s + _einsum("...ts,...sv->...tv", a, f.vf), z + jnp.sum(a, axis=-1))


def _own_sums(f):
    """What a chunk adds to M_s and M_z."""
    if f.kf is None:
        return None
    kf = _masked(f.kf, f.enters)
    return _Sums(_einsum("...sk,...sv->...kv", kf, f.vf), jnp.sum(kf, axis=-2))


def _next_state(f, m):
    """M_s and M_z after a chunk."""
    return _plus(_kept(m, f.keeps), _own_sums(f))


@jax.custom_jvp
def _ratio(a, b):
    """a / b, and 0 / 0 = 0."""
    return jnp.where(b == 0, 0.0, a / jnp.where(b == 0, 1.0, b))


@_ratio.defjvp
def _ratio_jvp(primals, tangents):
    (a, b), (da, db) = primals, tangents
    ratio = _ratio(a, b)
    return ratio, _ratio(da - ratio * db, b)  # JAX's own divides by b * b, which underflows


def _log(x):
    """log x, with a gradient of 0 at 0."""
    return jnp.where(x == 0, NEG_INF, jnp.log(jnp.where(x == 0, 1.0, x)))


def _mean(sums, b):
    """s / z for real values, log s - log z + b for logarithms: what queries read."""
    if b is None:
        return _ratio(sums.s, sums.z[..., None])
    return log_divide(_log(sums.s), _log(sums.z)[..., None]) + finite(b)[..., None, :]


def _one_for_none(sums, some_weight, b):
    """The sums with 1 in place of those that are rightly 0: no weights (of a query or key feature), or no values."""
    z = jnp.where(some_weight, sums.z, 1.0)
    if b is None:
        return _Sums(sums.s, z)
    return _Sums(jnp.where(some_weight[..., None] & (b > NEG_INF)[..., None, :], sums.s, 1.0), z)


def _lost(sums, in_logs):
    """Whether some sum, of `_one_for_none`, is so small that underflow may have taken terms from it.

    Averages of real values are divided by their weights: only those can be too small.
    """
    lost = jnp.min(sums.z) < _TINY
    return lost | (jnp.min(sums.s) < _TINY) if in_logs else lost


# ---- the fast pass -------------------------------------------------------------------------------


def _begin(state, in_logs):
    """A state's sums and the shifts that they are relative to: c = h_z, and b the largest average."""
    z = (state.h_z > NEG_INF).astype(state.h_z.dtype)
    if not in_logs:
        return _Sums(state.mean * z[..., None], z), _Shifts(state.h_z, None)
    log_mean = log_divide(state.h_s, state.h_z[..., None])
    b = jnp.max(log_mean, axis=-2)
    return _Sums(jnp.exp(log_mean - finite(b)[..., None, :]), z), _Shifts(state.h_z, b)


def _end(m, shifts, in_logs):
    h_z = jnp.log(m.z) + finite(shifts.c)
    if not in_logs:
        return MeanState(_mean(m, None), h_z)
    return LogState(jnp.log(m.s) + finite(shifts.c)[..., :, None] + finite(shifts.b)[..., None, :], h_z)


def _fast_forward(tokens, state, split, in_logs, with_log_z, remember):
    """(y, log Z, end state, the sums and shifts before each chunk, the queries' sums, whether terms were lost).

    Unless it is to `remember` them for the backward pass, the sums are the lowest of all groups.
    """

    def step(carry, i):
        m, shifts, out = carry
        chunks = _part(_slice(tokens, i, split.n_chunks * split.size), split)
        raised = _raise_in_turn(shifts, chunks, split)
        f = _factors(chunks, raised, in_logs)
        before, m, shifts = _states(f, m, shifts, raised)
        if f.qf is not None:
            sums = _query_sums(f, before)
            y, s, z, log_z = out
            # Sums over nothing count as 1 from here on; their gradients are multiplied by features that are 0.
            own = _one_for_none(sums, f.r > NEG_INF, raised.b)
            own_s, own_z = _join(own.s), _join(own.z, axis=-1)
            y = _write(y, _join(_mean(sums, raised.b)), i)
            if remember:
                s, z = _write(s, own_s, i), _write(z, own_z, i, axis=-1)
            else:
                s, z = jnp.minimum(s, own_s), jnp.minimum(z, own_z)
            if with_log_z:
                log_z = _write(log_z, _join(jnp.log(sums.z) + finite(f.r), axis=-1), i, axis=-1)
            out = y, s, z, log_z
        return (m, shifts, out), (before, raised) if remember else None

    m, shifts = _begin(state, in_logs)
    out = None
    if tokens.q is not None:
        *batch, n_tokens, _ = tokens.q.shape
        d_value, n_sums = m.s.shape[-1], n_tokens if remember else split.n_chunks * split.size
        # To be overwritten. Buffers filled alike would be one for XLA, and then be copied.
        full = lambda fill, *last: jnp.full((*batch, *last), fill, m.z.dtype)
        out = full(0, n_tokens, d_value), full(1, n_sums, d_value), full(1, n_sums)
        out += (full(0, n_tokens) if with_log_z else None,)
    (m, shifts, out), before = lax.scan(step, (m, shifts, out), jnp.arange(split.n_groups))
    y, s, z, log_z = (None,) * 4 if out is None else out
    # States between chunks need no check: what they lost is as little to the queries that read them, and to the end.
    lost = _lost(_one_for_none(m, shifts.c > NEG_INF, shifts.b), in_logs)
    if out is not None:
        lost |= _lost(_Sums(s, z), in_logs)
    return y, log_z, _end(m, shifts, in_logs), before, _Sums(s, z), lost


def _raise_in_turn(shifts, chunks, split):
    """The shifts that cover each chunk of a group and all before it: [*batch, n, K or V]."""
    raised = _raise(jax.tree.map(lambda x: x[..., None, :], shifts), chunks)
    if chunks.k is None:
        return jax.tree.map(lambda x: jnp.repeat(x, split.n_chunks, axis=-2), raised)
    return jax.tree.map(lambda x: lax.cummax(x, axis=x.ndim - 2), raised)


def _states(f, m, shifts, raised):
    """The sums before each chunk of a group, relative to the shifts `raised`; the sums and shifts after the last."""

    def step(carry, chunk):
        m, shifts = carry
        raised, own, keeps = chunk
        m = _rescale(m, shifts, raised)
        return (_plus(_kept(m, keeps), own), raised), m

    (m, shifts), before = _in_turn(step, (m, shifts), (raised, _own_sums(f), f.keeps), shifts.c.ndim - 1)
    return before, m, shifts


def _state_gradients(f, own, dm, shifts, after):
    """The gradients of the sums after each chunk of a group; those of the sums before the first, and their shifts.

    `own` is what the queries of each chunk add to the gradient of the sums before it, `dm` is relative to `after`.
    """

    def step(carry, chunk):
        dm, after = carry
        shifts, own, keeps = chunk
        dm = _rescale(dm, shifts, after)
        return (_plus(_kept(dm, keeps), own), shifts), dm

    (dm, shifts), dends = _in_turn(step, (dm, after), (shifts, own, f.keeps), after.c.ndim - 1, reverse=True)
    return dends, dm, shifts


def _fast_backward(tokens, state, before, sums, split, in_logs, cotangents):
    """The gradients of the tokens and of the state before them."""
    dy, dlog_z, dend = cotangents
    group = split.n_chunks * split.size

    def step(carry, xs):
        dm, after, gradients = carry
        i, (m, shifts) = xs
        chunks, dy_chunks = _part(_slice((tokens, dy), i, group), split)
        f = _factors(chunks, shifts, in_logs)
        dsums = dlog_z_chunks = None
        if f.qf is not None:
            s = _part(_slice(gradients.values if overwrites else sums.s, i, group), split)
            z, dlog_z_chunks = _part((_slice_last(sums.z, i, group), _slice_last(dlog_z, i, group)), split, last=True)
            dsums = _of_mean(_Sums(s, z), dy_chunks, dlog_z_chunks, in_logs)
        dends, dm, after = _state_gradients(f, _from_queries(f, dsums), dm, shifts, after)
        dchunks = _gradients(f, m, dsums, dends, in_logs)
        if f.qf is not None:
            total = 0.0 if dlog_z is None else dlog_z_chunks
            if in_logs:  # log y of a value that was always zero changes only by its log Z
                total -= jnp.sum(jnp.where((shifts.b == NEG_INF)[..., None, :], dy_chunks, 0.0), axis=-1)
            z = m.z if f.kf is None else m.z + jnp.sum(f.kf, axis=-2)
            dchunks = dchunks._replace(q=_summing_to(total, dchunks.q, f.qf * z[..., None, :]))
        return (dm, after, _write(gradients, _join(dchunks), i)), None

    m, shifts = _end_sums(tokens, before, split, in_logs)
    dm = _of_mean(m, dend.h_s if in_logs else dend.mean, dend.h_z, in_logs, state=True)
    full = lambda x, fill: None if x is None else jnp.full_like(x, fill)
    gradients = _Tokens(full(tokens.q, 0), full(tokens.k, 1), full(tokens.values, 2), None)  # not alike: see above
    # Group by group S gives way to the gradient. (Of real values XLA would copy the whole of S for every group.)
    overwrites = in_logs and tokens.q is not None and tokens.k is not None
    if overwrites:
        gradients = gradients._replace(values=sums.s)
    xs = jnp.arange(split.n_groups), before
    (dm, shifts, gradients), _ = lax.scan(step, (dm, shifts, gradients), xs, reverse=True)

    m, first = _begin(state, in_logs)
    dm = _rescale(dm, first, shifts)
    if in_logs:
        return gradients, LogState(m.s * dm.s, m.z * dm.z)
    return gradients, MeanState(m.z[..., None] * dm.s, m.z * dm.z + jnp.sum(m.s * dm.s, axis=-1))


def _state_before(states, i, split, axis):
    """The state before chunk i, from all [n_groups, *batch, n_chunks, ...]; there are `axis` batch axes."""
    group, chunk = i // split.n_chunks, i % split.n_chunks
    pick = lambda x, i, axis: lax.dynamic_index_in_dim(x, i, axis, keepdims=False)
    return jax.tree.map(lambda x: pick(pick(x, group, 0), chunk, axis), states)


def _write_state(states, state, i, split, axis):
    at = {0: i // split.n_chunks, 1 + axis: i % split.n_chunks}

    def write(x, part):
        starts = [at.get(axis, 0) for axis in range(x.ndim)]
        return lax.dynamic_update_slice(x, jnp.expand_dims(part, tuple(at)), starts)

    return jax.tree.map(write, states, state)


def _end_sums(tokens, before, split, in_logs):
    """The sums after the last chunk, and their shifts."""
    n_chunks = split.n_groups * split.n_chunks
    m, shifts = _state_before(before, n_chunks - 1, split, before[0].z.ndim - 3)
    last = _slice(tokens._replace(q=None), n_chunks - 1, split.size)
    return _next_state(_factors(last, shifts, in_logs), m), shifts


def _of_mean(sums, dmean, dlog_weight, in_logs, state=False):
    """Gradients of sums s, z from those of the averages and of log z.

    The averages are s / z, or in logarithms log s - log z; a state in logarithms holds log s itself.
    """
    s, z = sums
    if in_logs:
        ds, dlog_z = _ratio(dmean, s), 0.0 if state else -jnp.sum(dmean, axis=-1)
    else:
        ds, dlog_z = _ratio(dmean, z[..., None]), -jnp.sum(dmean * _ratio(s, z[..., None]), axis=-1)
    return _Sums(ds, _ratio(dlog_z if dlog_weight is None else dlog_z + dlog_weight, z))


def _summing_to(total, dq, weights):
    """A query's gradient, corrected to its sum over features: that of log Z, since a shift of a query leaves y.

    Where weights and values hardly differ, what is left of the gradient is small beside the rounding that this removes.
    """
    surplus = jnp.sum(dq, axis=-1) - total
    return dq - weights * _ratio(surplus, jnp.sum(weights, axis=-1))[..., None]


def _from_queries(f, dsums):
    """The gradient of the sums before a chunk by those of its queries."""
    if dsums is None:
        return None
    qf = _masked(f.qf, f.reads)
    return _Sums(_einsum("...tk,...tv->...kv", qf, dsums.s), _einsum("...tk,...t->...k", qf, dsums.z))


def _gradients(f, m, dsums, dend, in_logs):
    """Gradients of a chunk's tokens, from those of its queries' sums and of the sums after it."""
    dq = dk = dvalues = None
    if f.qf is not None:
        ds, dz = dsums.s, dsums.z[..., None]
        dqf = _masked(_einsum("...tv,...kv->...tk", ds, m.s) + dz * m.z[..., None, :], f.reads)
    if f.kf is not None:
        dkf = _masked(_einsum("...sv,...kv->...sk", f.vf, dend.s) + dend.z[..., None, :], f.enters)
        dvf = _einsum("...sk,...kv->...sv", _masked(f.kf, f.enters), dend.s)
        if f.qf is not None:
            a = _einsum("...sk,...tk->...st", f.kf, f.qf) * jnp.swapaxes(f.seen, -1, -2)
            da = (_einsum("...tv,...sv->...ts", ds, f.vf) + dz) * f.seen
            dqf = dqf + _einsum("...ts,...sk->...tk", da, f.kf)
            dkf = dkf + _einsum("...ts,...tk->...sk", da, f.qf)
            dvf = dvf + _einsum("...st,...tv->...sv", a, ds)
        dk, dvalues = f.kf * dkf, f.vf * dvf if in_logs else dvf
    if f.qf is not None:
        dq = f.qf * dqf
    return _Tokens(dq, dk, dvalues, None)


# ---- the repair: each chunk from an exact state, token by token where it must be -------------------


def _token_by_token(chunk, state):
    """((y, log Z), the state after) in normalised form."""
    if chunk.k is None:
        return read_normalized(state, chunk.q), state
    empty = jax.tree.map(lambda part: jnp.full_like(part, NEG_INF), state)
    if state.b is None:
        empty = empty._replace(mean=jnp.zeros_like(state.mean))

    def step(state, token):
        if token.resets is not None:
            begins = lambda x: token.resets.reshape(token.resets.shape + (1,) * (x.ndim - token.resets.ndim))
            state = jax.tree.map(lambda old, new: jnp.where(begins(old), new, old), state, empty)
        state = merge_normalized(state, normalized_token(token.k, token.values, state.b is not None))
        if token.q is None:
            return state, None
        return state, read_normalized_per_token(state, token.q)

    state, out = lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, _token_axis(x), 0), chunk))
    if out is None:
        return (None, None), state
    return (jnp.moveaxis(out[0], 0, -2), jnp.moveaxis(out[1], 0, -1)), state


def _exact_chunk(chunk, state, in_logs):
    """((y, log Z), the state after) of a `NormalizedState`, by matmuls if they lose nothing; JAX differentiates it."""
    shifts = _raise(lax.stop_gradient(_Shifts(state.h, state.b)), lax.stop_gradient(chunk))
    if in_logs:
        shifts = shifts._replace(b=jnp.ceil(shifts.b))  # whole, as in `NormalizedState`
    f = _factors(chunk, shifts, in_logs)
    z = jnp.exp(state.h - finite(shifts.c))
    mean = jnp.exp(state.mean + shift_difference(state.b, shifts.b)[..., None, :]) if in_logs else state.mean
    m = _Sums(mean * z[..., None], z)
    end = _next_state(f, m)
    lost = _lost(_one_for_none(end, shifts.c > NEG_INF, shifts.b), in_logs)
    if chunk.q is not None:
        sums = _query_sums(f, m)
        lost |= _lost(_one_for_none(sums, f.r > NEG_INF, shifts.b), in_logs)

    def by_matmuls():
        out = (None, None)
        if chunk.q is not None:
            out = _mean(sums, shifts.b), _log(sums.z) + finite(f.r)
        if chunk.k is None:
            return out, state
        mean = _ratio(end.s, end.z[..., None])
        return out, NormalizedState(_log(mean) if in_logs else mean, _log(end.z) + finite(shifts.c), shifts.b)

    return lax.cond(lost, lambda: _token_by_token(chunk, state), by_matmuls)


def _repair_forward(tokens, state, split, in_logs, lost, out):
    """The results of the fast pass, or, if it lost terms, exact ones: a loop that then runs at all."""

    def step(i, carry):
        state, y, log_z = carry
        (y_chunk, log_z_chunk), state = _exact_chunk(_slice(tokens, i, split.size), state, in_logs)
        y = y if y is None else _write(y, y_chunk, i)
        log_z = log_z if log_z is None else _write(log_z, log_z_chunk, i, axis=-1)
        return state, y, log_z

    y, log_z, end = out
    n_chunks = jnp.where(lost, split.n_groups * split.n_chunks, 0)
    state, y, log_z = lax.fori_loop(0, n_chunks, step, (normalize_state(state), y, log_z))
    end = jax.tree.map(lambda exact, fast: jnp.where(lost, exact, fast), denormalize_state(state), end)
    return y, log_z, end


def _repair_backward(tokens, state, split, in_logs, lost, cotangents, gradients, before):
    """The gradients of the fast pass, or, if terms were lost, exact ones."""
    dy, dlog_z, dend = cotangents
    size, n_chunks = split.size, split.n_groups * split.n_chunks
    n_repaired = jnp.where(lost, n_chunks, 0)

    def remember(i, carry):
        now, states = carry
        states = _write_state(states, now, i, split, axis)
        return _exact_chunk(_slice(tokens._replace(q=None), i, size), now, in_logs)[1], states

    def step(j, carry):
        i = n_chunks - 1 - j
        dafter, dtokens = carry
        *inputs, resets = _slice(tokens, i, size)
        begin = _state_before(states, i, split, axis)
        run = lambda inputs, mean, h: _exact_chunk(_Tokens(*inputs, resets), NormalizedState(mean, h, begin.b), in_logs)
        ((_, log_z), _), pull = jax.vjp(run, tuple(inputs), begin.mean, begin.h)
        dlog_z_chunk = jnp.zeros_like(log_z) if dlog_z is None and log_z is not None else _slice_last(dlog_z, i, size)
        dinputs, *dbegin = pull(((_slice(dy, i, size), dlog_z_chunk), _gradient_of(begin, *dafter)))
        return tuple(dbegin), _write(dtokens, _Tokens(*dinputs, None), i)

    first, to_first = jax.vjp(normalize_state, state)
    axis = first.h.ndim - 1
    sums, shifts = before  # needed no more: arrays of the right shape
    states = NormalizedState(sums.s, sums.z, shifts.b)
    if tokens.k is None:
        end, states = (
            first,
            jax.tree.map(lambda x, part: jnp.broadcast_to(jnp.expand_dims(part, axis), x.shape), states, first),
        )
    else:
        end, states = lax.fori_loop(0, n_repaired, remember, (first, states))
    dmeans = jax.vjp(denormalize_state, end)[1](dend)[0]
    dtokens, dstate = gradients
    (*dmeans,), dtokens = lax.fori_loop(0, n_repaired, step, ((dmeans.mean, dmeans.h), dtokens))
    exact = to_first(_gradient_of(first, *dmeans))[0]
    return dtokens, jax.tree.map(lambda exact, fast: jnp.where(lost, exact, fast), exact, dstate)


def _gradient_of(like, dmean, dh):
    """A gradient in the form of `NormalizedState`; none is taken by b, to which all the rest is relative."""
    return NormalizedState(dmean, dh, None if like.b is None else jnp.zeros_like(like.b))
