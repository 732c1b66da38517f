"""Checksums of trees of arrays, computed on the devices that hold them."""

from typing import Any

import jax
import jax.numpy as jnp


@jax.jit
def checksums(tree: Any) -> list[jax.Array]:
    """Return a uint32 for each array, of its words and their places; the same for every sharding.

    A single changed word always changes the checksum; any other change does but for one in 2^32.
    """
    return [_checksum(x) for x in jax.tree.leaves(tree)]


def _checksum(x: jax.Array) -> jax.Array:
    """Return Σ_i mix(w_i + i·odd) mod 2^32 over the words w_i: one pass, no gather, independent of the order of sums.

    `mix` is a bijection. Without it (Σ w_i·odd_i) flipping the highest bit of any two words would go unnoticed.
    """
    words = _words(x)
    index, stride = jnp.uint32(0), 1
    for axis in reversed(range(words.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    mixed = words + index * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # the finalizer of MurmurHash3
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """Return the bits as uint32: narrower types widened, wider ones and complex as several words on a last axis."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype.itemsize <= 4 and (x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer)):
        return x.astype(jnp.uint32)
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)
