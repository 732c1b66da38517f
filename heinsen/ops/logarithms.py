"""Attention to log values all in logarithms: exact where values spread so far that sums relative to a column's largest
underflow, and many times as slow as `chunked`, which calls it there. Tokens are taken a chunk at a time.

Axes: `*batch` any leading axes; T tokens; C tokens of a chunk; K key and V value features.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import NEG_INF, constant_difference, finite, log_divide, log_matmul, logaddexp, logsumexp, two_sum
from heinsen.ops.arrays import isolate_values, to_chunks
from heinsen.ops.decay import ChunkDecay
from heinsen.ops.states import LogState, log_rescaling


class LogSums(NamedTuple):
    """Logarithms of sums over tokens of weights times values, and of the weights: those of a last value of 1."""

    rest: Array  # [*batch, K, V + 1], relative to both shifts
    c: Array  # [*batch, K]
    b: Array  # [*batch, V + 1], whole numbers

    @classmethod
    def of(cls, state: LogState) -> "LogSums":
        c = lax.stop_gradient(state.h_z)
        log_means = _with_ones(state.h_s - finite(c)[..., None], state.h_z - finite(c))
        b = _whole(jnp.max(log_means, axis=-2))
        return cls(log_means - finite(b)[..., None, :], c, b)

    def to_state(self) -> LogState:
        shift = finite(self.c)[..., :, None] + finite(self.b)[..., None, :]
        h = jnp.where(self.rest == NEG_INF, NEG_INF, self.rest + shift)
        return LogState(h[..., :-1], h[..., -1])


def _with_ones(log_v: Array, one: Array | float = 0.0) -> Array:
    """Log values [..., V + 1], the last of a value of 1."""
    return jnp.concatenate([log_v, jnp.broadcast_to(one, log_v.shape[:-1])[..., None]], axis=-1)


def _whole(largest: Array) -> Array:
    """The smallest whole number at least the largest logarithm: moving it rounds nothing."""
    return lax.stop_gradient(jnp.ceil(largest))


class Chunk(NamedTuple):
    """Tokens of a chunk."""

    k: Array  # [*batch, C, K]
    log_v: Array  # [*batch, C, V + 1], the last column of ones
    taint: Array  # [*batch, C]: NaN where a value is NaN or inf, which is 0 in log_v; else 0
    decay: ChunkDecay


def attend(
    chunk_size: int,
    block: int,
    causal: bool,
    q: Array,
    k: Array,
    log_v: Array,
    log_decay: Array | None,
    state: LogState,
) -> tuple[Array, Array, Array, LogState]:
    """(log y [*batch, T, V], Z [*batch, T] relative to exp(r), r, the state after all tokens)."""
    log_v, taint = isolate_values(log_v.astype(k.dtype), signed=False)
    decays = jnp.zeros(k.shape[:-1], k.dtype) if log_decay is None else log_decay
    taint, decays = jnp.where(jnp.isnan(decays), jnp.nan, taint), jnp.where(jnp.isnan(decays), 0.0, decays)
    in_front = lambda x, fill=0.0: jnp.moveaxis(to_chunks(x, chunk_size, -2, constant_values=fill), x.ndim - 2, 0)
    chunks = in_front(k, NEG_INF), in_front(log_v, NEG_INF), in_front(taint[..., None]), in_front(decays[..., None])
    queries = in_front(q)

    def take(k: Array, log_v: Array, taint: Array, log_decay: Array) -> Chunk:
        return Chunk(k, _with_ones(log_v), taint[..., 0], ChunkDecay.of(log_decay[..., 0], block))

    def step(sums: LogSums, tokens: tuple[Array, ...]) -> tuple[LogSums, tuple[Array, ...]]:
        q, *rest = tokens
        chunk = take(*rest)
        return _next_sums(sums, chunk), _read(q, sums, chunk)

    first = LogSums.of(state)
    if causal:
        end, read = lax.scan(jax.checkpoint(step), first, (queries, *chunks))
    else:
        end, _ = lax.scan(jax.checkpoint(lambda sums, x: (_next_sums(sums, take(*x)), None)), first, chunks)
        read = lax.map(jax.checkpoint(lambda q: _read(q, end, None)), queries)
    y, z, r = (_tokens(x)[..., : q.shape[-2], :] for x in read)
    return y, z[..., 0], r[..., 0], end.to_state()


def _read(q: Array, before: LogSums, chunk: Chunk | None) -> tuple[Array, Array, Array]:
    """(log y [*batch, C, V], Z [*batch, C, 1], r [*batch, C, 1]) of queries [*batch, C, K]."""
    c, b, since = before.c[..., None, :], before.b, jnp.zeros((), q.dtype)
    r = jnp.max(q + c, axis=-1)
    if chunk is not None:
        since = chunk.decay.before_at_queries[..., None]
        visible = jnp.tril(jnp.ones((q.shape[-2],) * 2, bool))
        left = chunk.decay.keys_at_queries[..., None]
        pairs = lambda q: (q[..., :, None, :] + chunk.k[..., None, :, :]) + left
        largest = jnp.max(jnp.where(visible[..., None], pairs(q), NEG_INF), axis=(-2, -1))
        r = jnp.maximum(jnp.max((q + c) + since, axis=-1), largest)
        b = jnp.maximum(b, _whole(jnp.max(chunk.log_v, axis=-2)))
    r = lax.stop_gradient(r)
    q, error = two_sum(q, -finite(r)[..., None])
    error = lax.stop_gradient(error)
    log_weights = ((q + c) + error) + since
    columns = before.rest + constant_difference(before.b, b)[..., None, :]
    if chunk is not None:
        own = jnp.where(visible[..., None], pairs(q) + error[..., :, None, :], NEG_INF)
        own = jnp.where(visible, logsumexp(own, axis=-1) + chunk.taint[..., None, :], NEG_INF)
        log_weights = jnp.concatenate([log_weights, own], axis=-1)
        columns = jnp.concatenate([columns, chunk.log_v - finite(b)[..., None, :]], axis=-2)
    log_sums = log_matmul(log_weights, columns)
    log_y = log_divide(log_sums[..., :-1], log_sums[..., -1:]) + (finite(b)[..., None, :-1] - finite(b)[..., None, -1:])
    return log_y, jnp.exp(log_sums[..., -1:] + finite(b)[..., None, -1:]), r[..., None]


def _next_sums(sums: LogSums, chunk: Chunk) -> LogSums:
    """The sums after a chunk."""
    until_end, total = chunk.decay.keys_at_end[..., None], chunk.decay.before_at_end[..., None]
    c = lax.stop_gradient(jnp.maximum(sums.c + total, jnp.max(chunk.k + until_end, axis=-2)))
    b = jnp.maximum(sums.b, _whole(jnp.max(chunk.log_v, axis=-2)))
    weights = ((chunk.k - finite(c)[..., None, :]) + until_end) + chunk.taint[..., None]
    own = weights[..., None] + (chunk.log_v - finite(b)[..., None, :])[..., None, :]
    kept = log_rescaling(sums.c, c, total)[..., None] + constant_difference(sums.b, b)[..., None, :]
    return LogSums(logaddexp(sums.rest + kept, logsumexp(own, axis=-3)), c, b)


def _tokens(x: Array) -> Array:
    """[*batch, T, ...] of chunks [n, *batch, C, ...]."""
    x = jnp.moveaxis(x, 0, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])
