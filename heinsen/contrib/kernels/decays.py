"""What a forget gate and the starts of documents leave of earlier weights, as the kernel for Hopper GPUs reads it.

Key s keeps exp(G[t] - G[s]) at query t >= s, where G sums up the log decays of its chunk, and nothing across a start.
`heinsen.ops.decay` has a number for each pair of them; the kernel forms it of two vectors. A float32 sum of 64 numbers
of very different size is off by some 1e-5, which a difference of two such sums keeps. So G is in two parts here:
multiples of a common unit, whose sums are exact, and the small rest.

Axes: `*batch` any leading axes; T tokens, a whole number of chunks; N chunks; C tokens of a chunk.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import NEG_INF
from heinsen.ops.arrays import einsum, to_chunks

CHUNK = 64  # tokens: the rows of the matrix units

# Units in the sum of a chunk's decays, at most: float32 holds every whole number up to 2^24.
_MAX_UNITS = 2.0**22


class Decays(NamedTuple):
    """Sums of log decays up to each token of a chunk, G = units * unit + rest, and where documents start."""

    units: Array  # [*batch, N, C], whole numbers
    unit: Array  # [*batch, N, 1]
    rest: Array  # [*batch, N, C]
    first: Array  # [*batch, N, C]: position in the chunk of the first token of each one's document; -1 before the chunk

    @classmethod
    def of(cls, log_decay: Array) -> "Decays":
        """Of log_decay [*batch, T]: at most 0, and -inf where a document starts."""
        log_decay = to_chunks(log_decay, CHUNK, -1)
        starts = log_decay == NEG_INF
        numbers = jnp.where(starts, 0.0, log_decay)
        unit = jnp.max(jnp.abs(numbers), axis=-1, keepdims=True) * (CHUNK / _MAX_UNITS)
        units = jnp.round(numbers / jnp.where(unit > 0, unit, 1.0))
        first = lax.cummax(jnp.where(starts, positions(), -1.0), axis=starts.ndim - 1)
        return cls(_prefix_sums(units), unit, _prefix_sums(numbers - units * unit), first)

    @property
    def before_at_queries(self) -> Array:
        """Log decay at each query of what came before its chunk, [*batch, N, C]."""
        return jnp.where(self.first < 0, self.units * self.unit + self.rest, NEG_INF)

    @property
    def before_at_end(self) -> Array:
        """Log decay at the end of each chunk of what came before it, [*batch, N]."""
        return self.before_at_queries[..., -1]

    @property
    def keys_at_end(self) -> Array:
        """Log decay of each key at the end of its chunk, [*batch, N, C]."""
        left = (self.units[..., -1:] - self.units) * self.unit + (self.rest[..., -1:] - self.rest)
        return jnp.where(positions() >= self.first[..., -1:], left, NEG_INF)


def decay_grad(log_decay: Array, dsums: Array, dtotal: Array) -> Array:
    """Gradient of log_decay [*batch, T] from those of the sums G [*batch, T] and of the last of each chunk [*batch, N].

    G enters as q + G and k - G, and its last entry in the decay until the end of the chunk.
    """
    grad = _prefix_sums(to_chunks(dsums, CHUNK, -1), reverse=True) + dtotal[..., None]
    return jnp.where(log_decay == NEG_INF, 0.0, grad.reshape(log_decay.shape))


def positions() -> Array:
    """Of tokens in their chunk, [C]."""
    return jnp.arange(CHUNK, dtype=jnp.float32)


def _prefix_sums(x: Array, reverse: bool = False) -> Array:
    """Sums of x [*batch, N, C] up to each token, or from each on: a product, which XLA computes once for all users."""
    triangle = (jnp.tril if reverse else jnp.triu)(jnp.ones((CHUNK, CHUNK), x.dtype))
    return einsum("...s,st->...t", x, triangle)
