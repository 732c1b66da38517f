"""Softmax attention, the baseline: quadratic in the tokens, with a key-value cache that grows with them.

    y[t] = sum_s softmax_s(q[t] . k[s] / sqrt(K)) v[s]     over the visible s

Axes: B batch, H heads, T tokens, K features of keys and values alike, C the cache's capacity in tokens.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Scores of one block of queries against a whole cache, in elements.
_BLOCK_SCORES = 1 << 25

# Queries of one block on a CPU, and how many blocks there are at most: each is compiled by itself.
_SMALLEST_BLOCK, _MOST_BLOCKS = 128, 16
_UNSEEN = -1e30  # a score; finite, so that gradients are


class KVCache(NamedTuple):
    """Keys and values by slot; whoever holds it knows which slots are filled."""

    k: Float[Array, "B H C K"]
    v: Float[Array, "B H C K"]


def init_cache(batch_size: int, n_heads: int, capacity: int, d_key: int, d_value: int, dtype: str) -> KVCache:
    return KVCache(
        jnp.zeros((batch_size, n_heads, capacity, d_key), dtype),
        jnp.zeros((batch_size, n_heads, capacity, d_value), dtype),
    )


def with_capacity(cache: KVCache, capacity: int) -> KVCache:
    """The same cache with room for `capacity` tokens; never with less than it has."""
    room = max(capacity - cache.k.shape[-2], 0)
    return jax.tree.map(lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, room), (0, 0)]), cache)


def append(
    cache: KVCache,
    k: Float[Array, "B H T K"],
    v: Float[Array, "B H T V"],
    slots: Int[Array, "B T"],
    valid: Bool[Array, "B T"] | None,
) -> KVCache:
    """The cache with these tokens in their slots; those that are not valid, or have no room, are left out."""
    if valid is not None:
        slots = jnp.where(valid, slots, cache.k.shape[-2])

    def write(buffer, x):
        put = lambda buffer, x, slots: buffer.at[:, slots].set(x.astype(buffer.dtype), mode="drop", unique_indices=True)
        return jax.vmap(put)(buffer, x, slots)

    return KVCache(write(cache.k, k), write(cache.v, v))


def softmax_attention(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H T K"],
    v: Float[Array, "B H T K"],
    segment_ids: Int[Array, "B 1 T"] | None = None,
    causal: bool = True,
) -> Float[Array, "B H T K"]:
    """Of whole sequences; segment_ids as in `heinsen.log_attention`. On GPUs bfloat16 goes to cuDNN's flash kernel."""
    if jax.default_backend() == "cpu":
        return _by_blocks(q, k, v, segment_ids, causal)
    mask = None if segment_ids is None else segment_ids[..., :, None] == segment_ids[..., None, :]
    fused = jax.default_backend() == "gpu" and q.dtype in (jnp.bfloat16, jnp.float16)
    y = jax.nn.dot_product_attention(
        *(x.swapaxes(1, 2) for x in (q, k, v)), mask=mask, is_causal=causal, implementation="cudnn" if fused else None
    )
    return y.swapaxes(1, 2)


def _by_blocks(q, k, v, segment_ids, causal):
    """`softmax_attention` in the pieces that a CPU's cache holds: a head and some queries at a time, scores made twice.

    Two to eight times as fast there as `jax.nn.dot_product_attention`, whose scores are all in memory at once.
    """
    n_tokens, d_key = q.shape[-2:]
    size = max(_SMALLEST_BLOCK, -(-n_tokens // _MOST_BLOCKS))
    dtype = jnp.promote_types(q.dtype, jnp.float32)

    # Products have a batch axis, so that no policy of remat keeps the scores.
    @partial(jax.checkpoint, static_argnums=(4,))
    def block(q, k, v, ids, start):  # [1, T, K], [1, T, K], [1, T, V], [1, T] or None
        here = slice(start, min(start + size, n_tokens))
        seen = slice(0, here.stop if causal else n_tokens)
        scores = jnp.einsum("htk,hsk->hts", q[:, here], k[:, seen], preferred_element_type=dtype) * d_key**-0.5
        if causal:
            sees = jnp.arange(here.start, here.stop)[:, None] >= jnp.arange(seen.stop)
            scores = jnp.where(sees, scores, _UNSEEN)
        if ids is not None:
            scores = jnp.where(ids[:, here, None] == ids[:, None, seen], scores, _UNSEEN)
        p = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
        y = jnp.einsum("hts,hsv->htv", p.astype(v.dtype), v[:, seen], preferred_element_type=dtype)
        return (y / jnp.sum(p, axis=-1, keepdims=True)).astype(v.dtype)

    def head(arrays):
        return jnp.concatenate([block(*arrays, start) for start in range(0, n_tokens, size)], axis=1)

    ids = None if segment_ids is None else jnp.broadcast_to(segment_ids, q.shape[:-1])
    heads = jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[2:]), (q, k, v, ids))
    return lax.map(head, heads).reshape(v.shape)


def attend_cached(
    q: Float[Array, "B H T K"], cache: KVCache, slots: Int[Array, "B T"], first: Int[Array, "B T"]
) -> Float[Array, "B H T K"]:
    """Each query sees the cache's slots from `first` to its own, which `append` has filled."""
    n_batch, n_heads, n_tokens, d_key = q.shape
    capacity = cache.k.shape[-2]

    def block(queries):
        q, slots, first = queries  # [B, H, t, K], [B, t], [B, t]
        scores = jnp.einsum("bhtk,bhck->bhtc", q, cache.k, preferred_element_type=jnp.float32) * d_key**-0.5
        place = jnp.arange(capacity)
        seen = (first[..., None] <= place) & (place <= slots[..., None])
        p = jax.nn.softmax(jnp.where(seen[:, None], scores, jnp.finfo(scores.dtype).min), axis=-1)
        return jnp.einsum("bhtc,bhcv->bhtv", p.astype(cache.v.dtype), cache.v, preferred_element_type=q.dtype)

    size = max(1, _BLOCK_SCORES // (n_batch * n_heads * capacity))
    if n_tokens <= size:
        return block((q, slots, first))
    pad = -n_tokens % size
    split = lambda x, axis: jnp.moveaxis(
        jnp.pad(x, [(0, pad if i == axis else 0) for i in range(x.ndim)]).reshape(
            *x.shape[:axis], -1, size, *x.shape[axis + 1 :]
        ),
        axis,
        0,
    )
    y = lax.map(block, (split(q, 2), split(slots, 1), split(first, 1)))  # [blocks, B, H, size, V]
    return jnp.moveaxis(y, 0, 2).reshape(n_batch, n_heads, -1, y.shape[-1])[:, :, :n_tokens]


def step_cached(
    q: Float[Array, "B H 1 K"],
    k: Float[Array, "B H 1 K"],
    v: Float[Array, "B H 1 K"],
    cache: KVCache,
    slots: Int[Array, "B 1"],
    first: Int[Array, "B 1"],
) -> tuple[Float[Array, "B H 1 K"], KVCache]:
    """`append` of one token and `attend_cached` of its query, without a copy of the cache."""
    to_scores = lambda k: jnp.einsum("bhtk,bhck->bhtc", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores, own = to_scores(cache.k), to_scores(k)
    place = jnp.arange(cache.k.shape[-2])
    seen = (first[..., None] <= place) & (place < slots[..., None])
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), own)
    p, p_own = jnp.exp(scores - top), jnp.exp(own - top)
    y = jnp.einsum("bhtc,bhcv->bhtv", p.astype(v.dtype), cache.v, preferred_element_type=jnp.float32) + p_own * v
    y = y / (jnp.sum(p, axis=-1, keepdims=True) + p_own)
    # What is written depends on what was read, so that XLA writes in place: else it reads from a copy.
    later = (0 * y).astype(k.dtype)
    return y.astype(q.dtype), append(cache, k + later, v + later, slots, None)
