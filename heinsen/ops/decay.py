"""The decay of the keys of a chunk and of the state before it by a forget gate, in logarithms.

A token's log decay g <= 0 multiplies the weights of all tokens before it by exp(g). So key s keeps exp(G[t] - G[s]) at
query t >= s, where G[t] = sum_{r<=t} g[r], and nothing across the start of a document.

A float32 sum of 64 numbers of very different size is off by some 1e-5, which a difference of two such sums keeps.
Here G is a pair: multiples of a common unit, whose sums are exact, and the small rest.

Axes: `*batch` is any leading axes; C tokens of a chunk.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import NEG_INF

# Units in the sum of a chunk's decays, at most: float32 holds every whole number up to 2^24.
_MAX_UNITS = 2.0**22


def take_resets(starts: Array | None, log_decay: Array) -> tuple[Array, Array]:
    """(where a token erases all earlier ones: a document starts, or log_decay is -inf; log_decay with 0 there).

    All are [*batch, T].
    """
    resets = log_decay == NEG_INF
    resets = resets if starts is None else resets | starts
    return resets, jnp.where(resets, 0.0, log_decay)


class DecaySums(NamedTuple):
    """Sums G of log decays in a chunk, in two parts whose differences are hardly rounded: G = units * unit + rest."""

    units: Array  # [*batch, C], whole numbers
    unit: Array  # [*batch, 1]
    rest: Array  # [*batch, C]


def decay_sums(log_decay: Array) -> DecaySums:
    """Sums of log_decay [*batch, C], all finite, up to each token."""
    unit = lax.stop_gradient(jnp.max(jnp.abs(log_decay), axis=-1, keepdims=True)) * (log_decay.shape[-1] / _MAX_UNITS)
    units = jnp.round(lax.stop_gradient(log_decay) / jnp.where(unit > 0, unit, 1.0))
    return DecaySums(prefix_sums(units), unit, prefix_sums(log_decay - units * unit))


class DecayPositions(NamedTuple):
    """Positions along one direction. `a.log_decay_since(b)` is the log of what remains at a of a weight written at b.

    Without a gate or resets there is no `*batch`.
    """

    sums: DecaySums
    document: Array  # [*batch, C], numbers of documents
    position: Array  # [C]

    def tokens(self, cut: Callable[[Array], Array]) -> "DecayPositions":
        """Some of the positions, or all in another shape: `cut` acts on their axis, the last one."""
        (units, unit, rest), document, position = self
        unit = jnp.broadcast_to(unit, units.shape)  # one for each position
        return DecayPositions(DecaySums(*map(cut, (units, unit, rest))), cut(document), cut(position))

    def log_decay_since(self, earlier: "DecayPositions") -> Array:
        """Log of what remains here of weights written at `earlier`, whose shape broadcasts; -inf if it is later."""
        (units, unit, rest), document, position = self
        log_decay = (units - earlier.sums.units) * unit + (rest - earlier.sums.rest)
        seen = (position >= earlier.position) & (document == earlier.document)
        return jnp.where(seen, log_decay, NEG_INF)


class ChunkDecay(NamedTuple):
    """Decay along one direction through a chunk: of its keys, and of all before the chunk in that direction.

    A key decays from its own position on, all before the chunk from `start` on.
    """

    queries: DecayPositions  # [*batch, C]
    keys: DecayPositions  # [*batch, C]
    start: DecayPositions  # [*batch, 1], or without axes
    end: DecayPositions  # [*batch, 1]
    backwards: bool  # whether the direction is from the last token to the first

    @property
    def keys_at_queries(self) -> Array:
        """Log decay of each key at each query, [*batch, C, C]; -inf where the query does not see it."""
        return self.queries.tokens(lambda x: x[..., :, None]).log_decay_since(
            self.keys.tokens(lambda x: x[..., None, :])
        )

    @property
    def before_at_queries(self) -> Array:
        """Log decay of all before the chunk at each query, [*batch, C]."""
        return self.queries.log_decay_since(self.start)

    @property
    def keys_at_end(self) -> Array:
        """Log decay of each key at the end of the chunk, [*batch, C]."""
        return self.end.log_decay_since(self.keys)

    @property
    def before_at_end(self) -> Array:
        """Log decay of all before the chunk at its end, [*batch]."""
        return self.end.log_decay_since(self.start)[..., 0]

    def subchunk_starts(self, size: int) -> DecayPositions:
        """Where all before each subchunk of `size` tokens comes in, [*batch, N, 1]; before the first is nothing."""
        ends = self.queries.tokens(lambda x: x.reshape(*x.shape[:-1], -1, size)[..., -1:])
        if self.backwards:  # what the last token sees is all after its subchunk
            return ends
        return ends.tokens(
            lambda x: jnp.pad(x[..., :-1, :], [(0, 0)] * (x.ndim - 2) + [(1, 0), (0, 0)], constant_values=-1)
        )


def chunk_decay(resets: Array | None, log_decay: Array | None, n_tokens: int, dtype: jnp.dtype) -> ChunkDecay:
    """Decay from the first token of a chunk to its last.

    `resets` and log_decay [*batch, C], all finite, act on all before a token; None: nothing decays.
    """
    none = jnp.zeros(n_tokens, dtype)
    sums = DecaySums(none, none[:1], none) if log_decay is None else decay_sums(log_decay)
    document = none if resets is None else prefix_sums(resets.astype(dtype))
    positions = DecayPositions(sums, document, jnp.arange(n_tokens))
    zero = jnp.zeros((), dtype)
    start = DecayPositions(DecaySums(zero, zero, zero), zero, jnp.zeros((), int))
    return ChunkDecay(positions, positions, start, positions.tokens(lambda x: x[..., -1:]), backwards=False)


def chunk_decay_after(
    starts: Array | None, resets: Array | None, log_decay: Array | None, n_tokens: int, dtype: jnp.dtype
) -> ChunkDecay:
    """Decay from the last token of a chunk to its first, of keys at queries before them.

    A token's `resets` and log_decay, finite, act on the weights of all after it, for all queries before it: key s has
    log decay G[s-1] - G[t] at query t < s. What `starts` a document at s is not seen before s. Each is [*batch, C], or
    None.
    """
    none, before = jnp.zeros(n_tokens, dtype), _preceding
    up_to, unit, rest = DecaySums(none, none[:1], none) if log_decay is None else decay_sums(log_decay)
    gates, documents = (none if x is None else prefix_sums(x.astype(dtype)) for x in (resets, starts))
    position = jnp.arange(n_tokens)
    queries = DecayPositions(DecaySums(-up_to, unit, -rest), gates + documents, -position)
    keys = DecayPositions(DecaySums(-before(up_to), unit, -before(rest)), before(gates) + documents, 1 - position)
    zero = jnp.zeros(1, dtype)
    end = DecayPositions(DecaySums(zero, unit, zero), zero, jnp.ones(1, int))
    return ChunkDecay(queries, keys, queries.tokens(lambda x: x[..., -1:]), end, backwards=True)


def _preceding(x: Array) -> Array:
    """The entry of the token before each, of x [*batch, C], and 0 before the first."""
    return jnp.pad(x[..., :-1], [(0, 0)] * (x.ndim - 1) + [(1, 0)])


def log_decay_until_end(resets: Array | None, log_decay: Array | None, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Log decay until the end, (of each token [*batch, T, 1], of the state before the first [*batch]).

    log_decay (finite) and resets are [*batch, T, 1], or None. Where little decays the sums have few large terms, and
    are hardly rounded.
    """
    until_end = total = jnp.zeros((), dtype)
    if log_decay is not None:
        later = lax.cumsum(log_decay, axis=log_decay.ndim - 2, reverse=True)
        until_end = jnp.concatenate([later[..., 1:, :], jnp.zeros_like(later[..., :1, :])], axis=-2)
        total = later[..., 0, 0]
    if resets is not None:
        later = lax.cumsum(resets.astype(jnp.int32), axis=resets.ndim - 2, reverse=True)
        until_end = jnp.where(later > resets, NEG_INF, until_end)
        total = jnp.where(later[..., 0, 0] > 0, NEG_INF, total)
    return until_end, total


def prefix_sums(x: Array, reverse: bool = False) -> Array:
    """Sums of x [*batch, C] up to each token, or from each on: a product, which XLA computes once for all users."""
    triangle = (jnp.tril if reverse else jnp.triu)(jnp.ones((x.shape[-1],) * 2, x.dtype))
    return jnp.einsum("...s,st->...t", x, triangle, precision=lax.Precision.HIGHEST)


def decay_grad(dsums: Array, dtotal: Array) -> Array:
    """Gradient of log_decay [*batch, C] from those of its sums G [*batch, C] and of the last of them [*batch].

    G enters as q + G and k - G, and its last entry in the decay until the end of the chunk (`chunk.end_total`).
    """
    return prefix_sums(dsums, reverse=True) + dtotal[..., None]


def decay_after_grad(dq_total: Array, dk_total: Array, dtotal: Array | float) -> Array:
    """As `decay_grad`, of `chunk_decay_after`: from the sums over features [*batch, C] of dq and dk."""
    return (_preceding(prefix_sums(dq_total)) - prefix_sums(dk_total)) + dtotal
