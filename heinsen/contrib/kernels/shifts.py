"""Shifts of all chunks, before the kernel for Hopper GPUs sums any of them.

The kernel keeps the sums M between chunks relative to shifts that XLA computes beforehand, in parallel over the chunks:
those that cover what a chunk's queries read (`ChunkShifts.reading`), and those of the sums after the chunk (`after`),
which are lower where much is forgotten. In `heinsen.ops.chunked` each chunk has shifts of its own instead.

Axes: `*batch` any leading axes; T tokens; N chunks; K key and V value features.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.contrib.kernels.decays import CHUNK, Decays
from heinsen.logspace import associative_scan, finite
from heinsen.ops.arrays import to_chunks
from heinsen.ops.states import log_rescaling


class Shifts(NamedTuple):
    """Numbers that sums are relative to, as in `heinsen.ops.states.Summary`."""

    c: Array  # [*batch, K]
    b: Array | None  # [*batch, V]; None for real values


class ChunkShifts(NamedTuple):
    """Shifts of each chunk [*batch, N, ...]. Where nothing is forgotten all are the same."""

    reading: Shifts  # of what queries read: of the sums before the chunk, and of its own keys and values
    after: Shifts  # of the sums after the chunk
    own_b: Array | None  # [*batch, N, V]: of the chunk's own values


def chunk_shifts(first: Shifts, k: Array, values: Array, decays: Decays | None) -> ChunkShifts:
    """Shifts of the chunks of keys [*batch, T, K] and values that follow, in turn, sums relative to `first`."""
    largest_of = lambda x: jnp.max(to_chunks(x, CHUNK, -2), axis=-2).astype(first.c.dtype)
    own = Shifts(largest_of(k), None if first.b is None else largest_of(values))
    if decays is None:
        reading = jax.tree.map(lambda x, own: running_max(x, None, own), first, own)
        return ChunkShifts(reading, reading, reading.b)
    log_decay = decays.before_at_end[..., None]
    c_end = largest_of(k + decays.keys_at_end.reshape(k.shape[:-1])[..., None])  # XLA transposes a sum in chunks
    cover = lambda first, after, own: jnp.maximum(preceding(after, first), own)
    after_c = running_max(first.c, log_decay, c_end)
    reading_c = cover(first.c, after_c, own.c)
    largest = largest_log_weight(reading_c, log_decay, after_c)
    after_b = jax.tree.map(lambda b, own: running_max(b, largest, own), first.b, own.b)
    reading_b = jax.tree.map(cover, first.b, after_b, own.b)
    return ChunkShifts(Shifts(reading_c, reading_b), Shifts(after_c, after_b), own.b)


def running_max(first: Array, fall: Array | None, x: Array) -> Array:
    """m[n] = max(m[n-1] + fall[n], x[n]) over chunks [*batch, N, ...], from m[-1] = first (fall None: 0)."""

    def combine(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        return left[0] + right[0], jnp.maximum(left[1] + right[0], right[1])

    axis, first = x.ndim - 2, first[..., None, :]
    if fall is None:
        return lax.cummax(jnp.maximum(first, x), axis=axis)
    total, top = associative_scan(combine, (fall, x), axis=axis)
    return jnp.maximum(first + total, top)


def preceding(x: Array, first: Array) -> Array:
    """The entry of the chunk before each, of x [*batch, N, ...], and `first` before the first one."""
    return jnp.concatenate([first[..., None, :], x[..., :-1, :]], axis=-2)


def following(x: Array, last: Array) -> Array:
    """The entry of the chunk after each, of x [*batch, N, ...], and `last` after the last one."""
    return jnp.concatenate([x[..., 1:, :], last[..., None, :]], axis=-2)


def largest_log_weight(c: Array, log_decay: Array, after_c: Array) -> Array:
    """Log [*batch, 1] of the largest weight, after a chunk, of all before it; their shift b falls by as much."""
    return jnp.max(log_rescaling(c, after_c, log_decay), axis=-1, keepdims=True)


class Scales(NamedTuple):
    """Factors <= 1 of sums M, for each key and each value feature."""

    k: Array  # [*batch, K]
    v: Array | None  # [*batch, V]; None: 1


def shift_scales(old: Shifts, new: Shifts) -> Scales:
    """Factors that make sums relative to the shifts `old` relative to `new` >= `old`; or gradients the other way."""
    return Scales(*jax.tree.map(lambda old, new: jnp.exp(log_rescaling(old, new)), old, new))


def kept_scales(log_decay: Array, old: Shifts, new: Shifts) -> Scales:
    """Factors of what is kept of M_s, with logarithm log_decay [*batch, 1], relative to `old`, relative to `new`.

    The shifts of weights and values move together, so that each factor is at most 1.
    """
    rescaled, top = log_rescaling(old.c, new.c, log_decay), largest_log_weight(old.c, log_decay, new.c)
    v = jax.tree.map(lambda old, new: jnp.exp(log_rescaling(old, new, top)), old.b, new.b)
    return Scales(jnp.exp(rescaled if v is None else rescaled - finite(top)), v)
