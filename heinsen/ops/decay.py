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
_MOST_UNITS = 2.0**22


def take_resets(log_decay: Array, starts: Array | None) -> tuple[Array, Array]:
    """(log_decay [*batch, T] with 0 where nothing is left of the tokens before, where that is).

    There a document starts, or log_decay is -inf.
    """
    resets = log_decay == NEG_INF
    resets = resets if starts is None else resets | starts
    return jnp.where(resets, 0.0, log_decay), resets


class DecaySums(NamedTuple):
    """Sums G of log decays in a chunk, in two parts whose differences are hardly rounded: G = units * unit + rest."""

    units: Array  # [*batch, C], whole numbers
    unit: Array  # [*batch, 1]
    rest: Array  # [*batch, C]


def decay_sums(log_decay: Array) -> DecaySums:
    """Sums of log_decay [*batch, C], all finite, up to each token."""
    unit = lax.stop_gradient(jnp.max(jnp.abs(log_decay), axis=-1, keepdims=True)) * (log_decay.shape[-1] / _MOST_UNITS)
    units = jnp.round(lax.stop_gradient(log_decay) / jnp.where(unit > 0, unit, 1.0))
    return DecaySums(prefix_sums(units), unit, prefix_sums(log_decay - units * unit))


class ChunkDecay(NamedTuple):
    """Decay of all weights before each token of a chunk. Where all is left, axes are missing."""

    sums: DecaySums
    document: Array  # [*batch, C], numbers of documents; 0 is that of what is before the chunk
    position: Array  # [C]

    def tokens(self, cut: Callable[[Array], Array]) -> "ChunkDecay":
        """Some of the tokens, or all in another shape: `cut` acts on their axis, the last one."""
        (units, unit, rest), document, position = self
        unit = jnp.broadcast_to(unit, units.shape)  # one for each token
        return ChunkDecay(DecaySums(*map(cut, (units, unit, rest))), cut(document), cut(position))

    def left_of(self, earlier: "ChunkDecay") -> Array:
        """Log of what is left at these tokens of the keys of others, whose shape broadcasts; -inf for later ones."""
        (units, unit, rest), document, position = self
        left = (units - earlier.sums.units) * unit + (rest - earlier.sums.rest)
        seen = (position >= earlier.position) & (document == earlier.document)
        return jnp.where(seen, left, NEG_INF)

    @property
    def of_keys(self) -> Array:
        """Of each key at each query, [*batch, C, C]."""
        return self.tokens(lambda x: x[..., :, None]).left_of(self.tokens(lambda x: x[..., None, :]))

    @property
    def of_before(self) -> Array:
        """Of all before the chunk at each token, [*batch, C]."""
        (units, unit, rest), document, _ = self
        return jnp.where(document == 0, units * unit + rest, NEG_INF)

    @property
    def until_end(self) -> Array:
        """Of each key after the chunk, [*batch, C]."""
        return self.tokens(lambda x: x[..., -1:]).left_of(self)

    @property
    def kept(self) -> Array:
        """Of all before the chunk, after it, [*batch]."""
        return self.of_before[..., -1]


def chunk_decay(log_decay: Array | None, resets: Array | None, n_tokens: int, dtype: jnp.dtype) -> ChunkDecay:
    """Decay in a chunk from log_decay [*batch, C], all finite, and `resets` [*batch, C]; None: all is left."""
    none = jnp.zeros(n_tokens, dtype)
    sums = DecaySums(none, none[:1], none) if log_decay is None else decay_sums(log_decay)
    document = none if resets is None else prefix_sums(resets.astype(dtype))
    return ChunkDecay(sums, document, jnp.arange(n_tokens))


def log_kept_until_end(resets: Array | None, log_decay: Array | None) -> tuple[Array, Array]:
    """(log of the weight that each token [*batch, T, 1] keeps to the end, that which the state before keeps [*batch]).

    log_decay (finite) and resets are [*batch, T, 1], or None. Where much is left the sums have few large terms, and are
    hardly rounded.
    """
    until_end = total = jnp.zeros(())
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
    """Gradient of log_decay [*batch, C] from those of its sums G [*batch, C] and of the last of them [*batch]."""
    return prefix_sums(dsums, reverse=True) + dtotal[..., None]
