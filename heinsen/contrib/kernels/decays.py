"""What a forget gate and the starts of documents leave of earlier weights, as the kernel for Hopper GPUs reads it.

Key s keeps exp(G[t] - G[s]) at query t >= s, where G sums up the log decays of its chunk, and nothing across a start.
`heinsen.ops.decay` has a number for each pair of them; the kernel forms it of two vectors. A float32 sum of 64 numbers
of very different size is off by some 1e-5, which a difference of two such sums keeps. So G is in two parts here:
multiples of a common unit, whose sums are exact, and the small rest.

Axes: `*batch` any leading axes; C tokens of a chunk.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import NEG_INF
from heinsen.ops.arrays import einsum

# Units in the sum of a chunk's decays, at most: float32 holds every whole number up to 2^24.
_MAX_UNITS = 2.0**22


class Decays(NamedTuple):
    """Sums of log decays up to each token of a chunk, G = units * unit + rest, and where documents start."""

    units: Array  # [*batch, C], whole numbers
    unit: Array  # [*batch, 1]
    rest: Array  # [*batch, C]
    first: Array  # [*batch, C]: position of the first token of each token's document; -1 before the chunk

    @classmethod
    def of(cls, log_decay: Array) -> "Decays":
        """Of log_decay [*batch, C]: at most 0, and -inf where a document starts."""
        starts = log_decay == NEG_INF
        numbers = jnp.where(starts, 0.0, log_decay)
        unit = jnp.max(jnp.abs(numbers), axis=-1, keepdims=True) * (numbers.shape[-1] / _MAX_UNITS)
        units = jnp.round(numbers / jnp.where(unit > 0, unit, 1.0))
        first = lax.cummax(jnp.where(starts, _positions(starts), -1.0), axis=starts.ndim - 1)
        return cls(_prefix_sums(units), unit, _prefix_sums(numbers - units * unit), first)

    @property
    def before_at_queries(self) -> Array:
        """Log decay at each query of what came before the chunk, [*batch, C]."""
        return jnp.where(self.first < 0, self.units * self.unit + self.rest, NEG_INF)

    @property
    def before_at_end(self) -> Array:
        """Log decay at the chunk's end of what came before it, [*batch]."""
        return self.before_at_queries[..., -1]

    @property
    def keys_at_end(self) -> Array:
        """Log decay of each key at the chunk's end, [*batch, C]."""
        left = (self.units[..., -1:] - self.units) * self.unit + (self.rest[..., -1:] - self.rest)
        return jnp.where(_positions(left) >= self.first[..., -1:], left, NEG_INF)


def decay_grad(log_decay: Array, dsums: Array, dtotal: Array) -> Array:
    """Gradient of log_decay [*batch, C] from those of its sums G [*batch, C] and of the last of them [*batch].

    G enters as q + G and k - G, and its last entry in the decay until the end of the chunk.
    """
    return jnp.where(log_decay == NEG_INF, 0.0, _prefix_sums(dsums, reverse=True) + dtotal[..., None])


def _positions(x: Array) -> Array:
    """Of the tokens of x [*batch, C] in their chunk, [C]."""
    return jnp.arange(x.shape[-1], dtype=jnp.float32)


def _prefix_sums(x: Array, reverse: bool = False) -> Array:
    """Sums of x [*batch, C] up to each token, or from each on: a product, which XLA computes once for all users."""
    triangle = (jnp.tril if reverse else jnp.triu)(jnp.ones((x.shape[-1],) * 2, x.dtype))
    return einsum("...s,st->...t", x, triangle)
