"""What a forget gate leaves of the keys of a chunk and of the state before it, in logarithms.

A token's log decay g <= 0 multiplies the weights of all tokens before it by exp(g). So key s keeps exp(G[t] - G[s]) at
query t >= s, where G[t] = sum_{r<=t} g[r], and nothing across the start of a document.

A float32 sum of 64 numbers of very different size is off by some 1e-5, which a difference of two such sums keeps.
Here G is a pair: multiples of a common unit, whose sums are exact, and the small rest.

Axes: `*batch` is any leading axes; C tokens of a chunk.
"""

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
    document: Array | None  # [*batch, C]: numbers of documents; None: one document


def decay_sums(log_decay: Array, starts: Array | None) -> DecaySums:
    """Sums of log_decay [*batch, C], all finite, up to each token; `starts` [*batch, C] or None for one document."""
    unit = lax.stop_gradient(jnp.max(jnp.abs(log_decay), axis=-1, keepdims=True)) * (log_decay.shape[-1] / _MOST_UNITS)
    units = jnp.round(lax.stop_gradient(log_decay) / jnp.where(unit > 0, unit, 1.0))
    document = None if starts is None else prefix_sums(starts.astype(log_decay.dtype))
    return DecaySums(prefix_sums(units), unit, prefix_sums(log_decay - units * unit), document)


class ChunkDecay(NamedTuple):
    """What is left of weights: as factors, and as logarithms (-inf: nothing)."""

    of_keys: Array  # [*batch, C, C]: factor of key s at query t >= s; 0 for t < s
    of_state: Array  # [*batch, C]: factor of the state before the chunk, at query t
    log_until_end: Array  # [*batch, C]: of key s after the chunk
    log_total: Array  # [*batch]: of the state before the chunk, after it


def chunk_decay(log_decay: Array, starts: Array | None) -> ChunkDecay:
    """Decay in a chunk from log_decay [*batch, C], all finite, and `starts` [*batch, C] or None for one document."""
    n_tokens = log_decay.shape[-1]
    n, unit, rest, document = decay_sums(log_decay, starts)
    of_keys = (n[..., :, None] - n[..., None, :]) * unit[..., None] + (rest[..., :, None] - rest[..., None, :])
    of_state = n * unit + rest
    until_end = (n[..., -1:] - n) * unit + (rest[..., -1:] - rest)
    visible = lax.broadcasted_iota(int, (n_tokens,) * 2, 0) >= lax.broadcasted_iota(int, (n_tokens,) * 2, 1)
    if document is not None:
        visible = visible & (document[..., :, None] == document[..., None, :])
        of_state = jnp.where(document == 0, of_state, NEG_INF)
        until_end = jnp.where(document == document[..., -1:], until_end, NEG_INF)
    return ChunkDecay(jnp.exp(jnp.where(visible, of_keys, NEG_INF)), jnp.exp(of_state), until_end, of_state[..., -1])


def log_kept_until_end(starts: Array | None, log_decay: Array | None) -> tuple[Array, Array]:
    """Logs of what is left at the end of each token [*batch, T, 1], and of the state before them [*batch, 1].

    log_decay (finite) and starts are [*batch, T, 1], or None. Where much is left the sums have few large terms, and are
    hardly rounded.
    """
    until_end = total = jnp.zeros(())
    if log_decay is not None:
        later = lax.cumsum(log_decay, axis=log_decay.ndim - 2, reverse=True)
        until_end = jnp.concatenate([later[..., 1:, :], jnp.zeros_like(later[..., :1, :])], axis=-2)
        total = later[..., 0, :]
    if starts is not None:
        later = lax.cumsum(starts.astype(jnp.int32), axis=starts.ndim - 2, reverse=True)
        until_end = jnp.where(later > starts, NEG_INF, until_end)
        total = jnp.where(later[..., 0, :] > 0, NEG_INF, total)
    return until_end, total


def document_decay(starts: Array, dtype: jnp.dtype) -> ChunkDecay:
    """`chunk_decay` where nothing is forgotten but at the start of a document."""
    document = prefix_sums(starts.astype(dtype))
    same = (document[..., :, None] == document[..., None, :]).astype(dtype)
    until_end = jnp.where(document == document[..., -1:], 0.0, NEG_INF).astype(dtype)
    total = jnp.where(document[..., -1] == 0, 0.0, NEG_INF).astype(dtype)
    return ChunkDecay(jnp.tril(same), (document == 0).astype(dtype), until_end, total)


def prefix_sums(x: Array, reverse: bool = False) -> Array:
    """Sums of x [*batch, C] up to each token, or from each on: a product, which XLA computes once for all users."""
    triangle = (jnp.tril if reverse else jnp.triu)(jnp.ones((x.shape[-1],) * 2, x.dtype))
    return jnp.einsum("...s,st->...t", x, triangle, precision=lax.Precision.HIGHEST)


def decay_grad(dsums: Array, dtotal: Array) -> Array:
    """Gradient of log_decay [*batch, C] from those of its sums G [*batch, C] and of the last of them [*batch]."""
    return prefix_sums(dsums, reverse=True) + dtotal[..., None]
