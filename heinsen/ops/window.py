"""Softmax attention to the last tokens: each sees the W latest of its document, itself included.

    y[t] = sum_s softmax_s(q[t] . k[s] / sqrt(K)) v[s]     over t - W < s <= t (|t - s| < W if not causal)

The state is a ring: the keys and values of the last W tokens, token s in place s mod W. Time and memory per token are
independent of T: queries are read in blocks of C >= W, each with the keys of its own block and of the one before (and
of the one after if not causal).

Axes: B batch, H heads, T tokens, K key and V value features, W window, N blocks of C queries, S keys of a block.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from heinsen import backend
from heinsen.ops.documents import document_ranges, document_starts
from heinsen.ops.softmax import KVCache, append, attend_visible, init_cache, read_and_append

_SMALLEST_BLOCK = 128  # queries
# Scores that are in memory at once, in elements: as many as fit a CPU's cache, or as keep an accelerator busy.
_SCORES, _SCORES_CPU = 1 << 25, 1 << 17


def init_ring(batch_size: int, n_heads: int, window: int, d_key: int, d_value: int, dtype: DTypeLike) -> KVCache:
    """Ring with no token."""
    return init_cache(batch_size, n_heads, window, d_key, d_value, dtype)


def window_attention(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H T K"],
    v: Float[Array, "B H T V"],
    window: int,
    ring: KVCache | None,
    slots: Int[Array, "B T"],
    first: Int[Array, "B T"],
) -> Float[Array, "B H T V"]:
    """Attend causally to the last `window` tokens, of which `ring` holds those before the first one here (None: none).

    Each row's `slots` are consecutive; a token sees none before the slot `first`.
    """
    n_tokens, n_before = k.shape[2], _block_size(k.shape[2], window)[1]
    n_missing = n_before - (0 if ring is None else window)
    if ring is not None:
        k, v = (jnp.concatenate([_unroll(x, slots[:, 0]), new], axis=2) for x, new in zip(ring, (k, v), strict=True))
    k, v = (jnp.pad(x, [(0, 0), (0, 0), (n_missing, 0), (0, 0)]) for x in (k, v))
    index = jnp.arange(n_tokens) + n_before
    low = jnp.maximum(first - slots[:, :1] + n_before, index - window + 1)
    return _attend_ranges(q, k, v, low, jnp.broadcast_to(index + 1, low.shape), window, 0)


def window_attention_both_ways(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H T K"],
    v: Float[Array, "B H T V"],
    window: int,
    segment_ids: Int[Array, "B 1 T"] | None,
) -> Float[Array, "B H T V"]:
    """Attend to the tokens less than `window` before and after; segment_ids as in `heinsen.log_attention`."""
    n_batch, _, n_tokens, _ = q.shape
    n_around = _block_size(n_tokens, window)[1]
    ids = jnp.zeros((n_batch, n_tokens), jnp.int32) if segment_ids is None else segment_ids[:, 0]
    start, stop = document_ranges(document_starts(ids))
    index = jnp.arange(n_tokens)
    low, high = jnp.maximum(start, index - window + 1), jnp.minimum(stop, index + window)
    k, v = (jnp.pad(x, [(0, 0), (0, 0), (n_around, n_around), (0, 0)]) for x in (k, v))
    return _attend_ranges(q, k, v, low + n_around, high + n_around, window, n_around)


def _block_size(n_tokens: int, window: int) -> tuple[int, int]:
    """Return the number of queries in a block, and that of keys before its first query."""
    size = max(window, _SMALLEST_BLOCK)
    return (n_tokens, window) if n_tokens <= size else (size, size)


def _unroll(x: Array, slots: Array) -> Array:
    """Bring a ring [B, H, W, K] into the order of its tokens, of which `slots` [B] come next."""
    window = x.shape[2]
    order = (slots[:, None] + jnp.arange(window)) % window
    return jnp.take_along_axis(x, order[:, None, :, None], axis=2)


def _attend_ranges(q: Array, k: Array, v: Array, low: Array, high: Array, window: int, n_after: int) -> Array:
    """y of queries [B, H, T, K], each of which sees the keys from `low` to before `high`, both [B, T].

    Before the key of the first query stand as many others as `_block_size` says; after that of the last one, n_after.
    """
    (n_batch, n_heads, n_tokens, _), (size, n_before) = q.shape, _block_size(q.shape[2], window)
    n_blocks = -(-n_tokens // size)
    n_keys = n_before + size + n_after

    def split(x: Array, axis: int) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, n_blocks * size - n_tokens)
        return jnp.pad(x, widths)

    def keys_of_blocks(x: Array) -> Array:  # [B, H, N, S, K]; without a gather, whose gradient would be a scatter
        if n_blocks == 1:
            return x[:, :, None]
        x = split(x, 2).reshape(n_batch, n_heads, -1, size, x.shape[-1])
        n_neighbors = n_keys // size
        return jnp.concatenate([x[:, :, i : i + n_blocks] for i in range(n_neighbors)], axis=3)

    # The backward pass computes the scores again.
    @jax.checkpoint
    def block(arrays: tuple[Array, ...]) -> Array:
        q, k, v, low, high = arrays  # [C, K], [S, K], [S, V], [C], [C]
        index = jnp.arange(n_keys)
        return attend_visible(q, k, v, (low[:, None] <= index) & (index < high[:, None]))

    starts = jnp.arange(n_blocks)[:, None] * size
    ranges = (split(x, 1).reshape(n_batch, 1, n_blocks, size) - starts for x in (low, high))
    ranges = (jnp.broadcast_to(x, (n_batch, n_heads, n_blocks, size)) for x in ranges)
    blocks = split(q, 2).reshape(n_batch, n_heads, n_blocks, size, -1), keys_of_blocks(k), keys_of_blocks(v), *ranges
    blocks = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), blocks)
    n_scores = _SCORES_CPU if backend.current() == "cpu" else _SCORES
    y = lax.map(block, blocks, batch_size=max(1, n_scores // (size * n_keys)))
    return y.reshape(n_batch, n_heads, n_blocks * size, -1)[:, :, :n_tokens]


def append_ring(
    ring: KVCache,
    k: Float[Array, "B H T K"],
    v: Float[Array, "B H T V"],
    slots: Int[Array, "B T"],
    valid: Bool[Array, "B T"] | None,
) -> KVCache:
    """Write the last tokens into the ring, except those that are not valid."""
    window = ring.k.shape[2]
    valid = jnp.ones(slots.shape, bool) if valid is None else valid
    n_seen = slots[:, :1] + jnp.sum(valid, axis=1, keepdims=True)
    return append(ring, k, v, slots % window, valid & (slots >= n_seen - window))


def step_window(
    q: Float[Array, "B H 1 K"],
    k: Float[Array, "B H 1 K"],
    v: Float[Array, "B H 1 V"],
    ring: KVCache,
    slots: Int[Array, "B 1"],
    first: Int[Array, "B 1"],
) -> tuple[Float[Array, "B H 1 V"], KVCache]:
    """`window_attention` of one token, and the ring with it, without copying that."""
    window = ring.k.shape[2]
    held = slots - 1 - (slots - 1 - jnp.arange(window)) % window  # the slot of the token in each place
    visible = held >= jnp.maximum(first, slots - window + 1)
    return read_and_append(q, k, v, ring, visible[:, None], slots % window)
