"""The exact forms of log values: what sums and queries see far below their column's largest, all in logarithms.

They take the place of the fast forms for the rows that lost terms (`exact.run`). Tokens are taken a chunk at a time.

Axes: `*batch` any leading axes; T tokens; C tokens of a chunk; K key and V value features.
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import ShiftedLog, constant_difference, finite, log_divide, log_matmul, logaddexp, logsumexp
from heinsen.ops import chunk
from heinsen.ops.chunk import Keys
from heinsen.ops.decay import ChunkDecay
from heinsen.ops.states import NormalizedState, read_all, whole_shift
from heinsen.ops.values import LOG_DOMAIN


class LogSums(NamedTuple):
    """Logarithms of sums over tokens of weights times values, and of the weights: those of a last value of 1."""

    rest: Array  # [*batch, K, V + 1], relative to both shifts
    c: Array  # [*batch, K]
    b: Array  # [*batch, V + 1], whole numbers

    @classmethod
    def of(cls, state: NormalizedState) -> "LogSums":
        log_mean, (rest, c), b = state
        return cls(_with_ones(log_mean) + rest[..., None], c, _with_ones(b))

    def to_state(self) -> NormalizedState:
        log_z = self.rest[..., -1]
        log_mean = log_divide(self.rest[..., :-1], log_z[..., None])
        return NormalizedState.of(log_mean, ShiftedLog(log_z, self.c), self.b[..., :-1])


def _with_ones(log_v: Array) -> Array:
    """Log values [..., V + 1], the last of a value of 1."""
    return jnp.pad(log_v, [(0, 0)] * (log_v.ndim - 1) + [(0, 1)])


def attend(chunk_size: int, q: Array, keys: Keys, state: NormalizedState) -> tuple[Array, NormalizedState]:
    """(log y, the state after all tokens) of log values, of a whole number of chunks, all in logarithms."""
    # A chunk at a time: the gradient has all exponents of one chunk, and the sums between chunks.
    in_chunks = jax.tree.map(partial(_chunks_first, size=chunk_size), (q, keys))
    after: tuple[LogSums, ...] = ()
    if keys.later is not None:  # those after each chunk, from the last to the first

        def step_back(sums: LogSums, keys: Keys) -> tuple[LogSums, LogSums]:
            return _next_sums(sums, keys, keys.decays()[1]), sums

        first = LogSums.of(state.empty())
        after = (lax.scan(jax.checkpoint(step_back), first, in_chunks[1], reverse=True)[1],)

    def step(sums: LogSums, tokens: tuple[Array, Keys, tuple[LogSums, ...]]) -> tuple[LogSums, Array]:
        q, keys, after = tokens
        return _next_sums(sums, keys, keys.decays()[0]), read_chunk(q, keys, (sums, *after))

    end, log_y = lax.scan(jax.checkpoint(step), LogSums.of(state), (*in_chunks, after))
    return _tokens(log_y), end.to_state()


def read_chunk(q: Array, keys: Keys, around: Sequence[LogSums]) -> Array:
    """log y of a chunk's queries, which read those of its keys that they see, and the sums before it (and after it)."""
    k, log_v, decays = keys.k, _with_ones(keys.values), keys.decays()
    log_decay = chunk.visible_log_decay(decay.keys_at_queries for decay in decays)[..., None]
    outside = [(sums, decay.before_at_queries[..., None]) for sums, decay in zip(around, decays, strict=True)]
    r = jnp.max(chunk.pairs(q, k) + log_decay, axis=(-2, -1))
    for sums, decay_outside in outside:
        r = jnp.maximum(r, jnp.max((q + sums.c[..., None, :]) + decay_outside, axis=-1))
    relative, error = chunk.center_queries(q, lax.stop_gradient(r))
    log_weights = [
        logsumexp((chunk.pairs(relative, k) + error[..., :, None, :]) + log_decay, axis=-1),
        *(((relative + sums.c[..., None, :]) + error) + decay_outside for sums, decay_outside in outside),
    ]
    shift = reduce(jnp.maximum, [*(sums.b for sums in around), whole_shift(jnp.max(log_v, axis=-2))])
    columns = [
        log_v - finite(shift)[..., None, :],
        *(sums.rest + constant_difference(sums.b, shift)[..., None, :] for sums in around),
    ]
    log_sums = log_matmul(jnp.concatenate(log_weights, axis=-1), jnp.concatenate(columns, axis=-2))
    return log_divide(log_sums[..., :-1], log_sums[..., -1:]) + finite(shift)[..., None, :-1]


def _next_sums(sums: LogSums, keys: Keys, decay: ChunkDecay) -> LogSums:
    """The sums after a chunk, in the direction of the decay."""
    k, log_v = keys.k, _with_ones(keys.values)
    until_end, log_decay = decay.keys_at_end[..., None], decay.before_at_end[..., None]
    c = lax.stop_gradient(jnp.maximum(sums.c + log_decay, jnp.max(k + until_end, axis=-2)))
    b = jnp.maximum(sums.b, whole_shift(jnp.max(log_v, axis=-2)))
    own = ((k - finite(c)[..., None, :]) + until_end)[..., None] + (log_v - finite(b)[..., None, :])[..., None, :]
    older = (sums.rest + chunk.log_rescaling(sums.c, c, log_decay)[..., None]) + constant_difference(sums.b, b)[
        ..., None, :
    ]
    return LogSums(logaddexp(older, logsumexp(own, axis=-3)), c, b)


def summarize(chunk_size: int, keys: Keys, state: NormalizedState) -> NormalizedState:
    """Normalized state after any number of keys of log values."""
    in_chunks = jax.tree.map(
        partial(_chunks_first, size=chunk_size), chunk.pad_keys(LOG_DOMAIN, keys, -keys.k.shape[-2] % chunk_size)
    )
    step = lambda sums, keys: (_next_sums(sums, keys, keys.decays()[0]), None)
    return lax.scan(jax.checkpoint(step), LogSums.of(state), in_chunks)[0].to_state()


def read(chunk_size: int, q: Array, state: NormalizedState) -> Array:
    """log y of any number of queries that read one normalized state."""
    n_tokens = q.shape[-2]
    padded = jnp.pad(q, [(0, 0)] * (q.ndim - 2) + [(0, -n_tokens % chunk_size), (0, 0)])
    y = lax.map(jax.checkpoint(lambda q: read_all(state, q)[0]), _chunks_first(padded, chunk_size))
    return _tokens(y)[..., :n_tokens, :]


def _chunks_first(x: Array, size: int) -> Array:
    """[n, *batch, C, ...] of [*batch, T, ...]."""
    return jnp.moveaxis(x.reshape(*x.shape[:-2], -1, size, x.shape[-1]), -3, 0)


def _tokens(x: Array) -> Array:
    """[*batch, T, ...] of [n, *batch, C, ...]."""
    x = jnp.moveaxis(x, 0, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])
