"""Softmax attention, the baseline: quadratic in the tokens, with a key-value cache that grows with them.

    y[t] = sum_s softmax_s(q[t] . k[s] / sqrt(K) + sum_{s < u <= t} log_decay[u]) v[s]     over the visible s

The forget gate, log_decay, is that of the Forgetting Transformer (Lin et al., 2025). It is optional. Its sums are
differences of running sums since the first token, which float32 rounds: where these reach 1e4 nats, weights are off by
some 1e-3.

Axes: B batch, H heads, T tokens, K key and V value features, C the cache's capacity in tokens.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from heinsen import backend
from heinsen.ops.segments import document_numbers, document_starts, mask_cross_document

# Scores of one block of queries against a whole cache, in elements.
_BLOCK_SCORES = 1 << 25

# On a CPU, the smallest block of queries, and the largest number of blocks: each is compiled separately.
_SMALLEST_BLOCK, _MOST_BLOCKS = 128, 16
_MASKED = -1e30  # a score; finite, so that gradients are finite


class KVCache(NamedTuple):
    """Keys, values and sums of log decays by slot. The caller keeps track of which slots are filled."""

    k: Float[Array, "B H C K"]
    v: Float[Array, "B H C V"]
    decayed: Float[Array, "B H C 1"] | None = None  # the sum of the log decays up to each slot; None: no gate


def init_cache(batch_size: int, n_heads: int, capacity: int, d_key: int, d_value: int, dtype: DTypeLike) -> KVCache:
    """Cache with no token and no gate."""
    return KVCache(
        jnp.zeros((batch_size, n_heads, capacity, d_key), dtype),
        jnp.zeros((batch_size, n_heads, capacity, d_value), dtype),
    )


def append(cache: KVCache, tokens: KVCache, slots: Int[Array, "B T"], valid: Bool[Array, "B T"] | None) -> KVCache:
    """Write tokens into their slots of the cache, except those that are not valid or lie beyond its capacity."""
    if valid is not None:
        slots = jnp.where(valid, slots, cache.k.shape[-2])

    def write_row(buffer: Array, x: Array, slots: Array) -> Array:
        return buffer.at[:, slots].set(x.astype(buffer.dtype), mode="drop", unique_indices=True)

    return jax.tree.map(lambda buffer, x: jax.vmap(write_row)(buffer, x, slots), cache, tokens)


def sum_decays(cache: KVCache | None, log_decay: Float[Array, "B H T"], slots: Int[Array, "B T"]) -> Array:
    """`KVCache.decayed` [B, H, T, 1] of tokens that follow those of a cache."""
    sums = jnp.cumsum(log_decay, axis=-1)[..., None]
    if cache is None:
        return sums
    assert cache.decayed is not None
    first = slots[:, None, :1, None]
    before = jnp.take_along_axis(cache.decayed, jnp.maximum(first - 1, 0), axis=2)
    return sums + jnp.where(first > 0, before, 0.0)


def softmax_attention(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H T K"],
    v: Float[Array, "B H T V"],
    segment_ids: Int[Array, "#B #H T"] | None = None,
    causal: bool = True,
    log_decay: Float[Array, "B H T"] | None = None,
) -> Float[Array, "B H T V"]:
    """Softmax attention over whole sequences; segment_ids and, if causal, log_decay as in `heinsen.log_attention`,
    but finite.

    Requires K = V except on CPUs. On GPUs it is cuDNN's flash attention where `is_fused` says so. Otherwise all T x T
    scores are in memory at once, except on CPUs.
    """
    bias = None if log_decay is None else -jnp.cumsum(log_decay, axis=-1)  # up to a number for each query
    if backend.current() == "cpu":
        return _attend_in_blocks(q, k, v, bias, segment_ids, causal)
    mask = None if segment_ids is None else mask_cross_document(document_starts(segment_ids))
    implementation: Literal["cudnn"] | None = "cudnn" if is_fused(q.dtype, q.shape[-1], bias is not None) else None
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    if bias is not None:
        bias = bias[:, :, None]
    y = jax.nn.dot_product_attention(q, k, v, bias, mask, is_causal=causal, implementation=implementation)
    return y.swapaxes(1, 2)


def is_fused(dtype: DTypeLike, d_head: int, has_gate: bool) -> bool:
    """Whether cuDNN computes the attention of whole sequences: on GPUs, in 16 bits, without a forget gate.

    Heads must have a multiple of 8 features, at most 128.

    cuDNN takes a gate only as a bias of T x T numbers. As further features of the keys it would cost little, but its
    gradient would be a sum over all later tokens of numbers that cuDNN rounds to bfloat16.
    """
    fits = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16) and d_head % 8 == 0 and d_head <= 128
    return backend.current() == "gpu" and fits and not has_gate


def _attend_visible(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch S K"],
    v: Float[Array, "*batch S V"],
    bias: Float[Array, "*batch S"] | None,
    visible: Bool[Array, "*#batch #T #S"],
) -> Float[Array, "*batch T V"]:
    """Softmax attention to the visible keys, with all scores in memory at once. bias: added to the scores of a key."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("...tk,...sk->...ts", q, k, preferred_element_type=dtype) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias[..., None, :]
    scores = jnp.where(visible, scores, _MASKED)
    p = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    y = jnp.einsum("...ts,...sv->...tv", p.astype(v.dtype), v, preferred_element_type=dtype)
    return (y / jnp.sum(p, axis=-1, keepdims=True)).astype(v.dtype)


def _attend_in_blocks(
    q: Array, k: Array, v: Array, bias: Array | None, segment_ids: Array | None, causal: bool
) -> Array:
    """`softmax_attention` in pieces that fit a CPU's cache: one head and one block of queries at a time.

    The backward pass recomputes the scores. Two to eight times as fast on CPUs as `jax.nn.dot_product_attention`, which
    holds all scores in memory at once.
    """
    n_tokens = q.shape[-2]
    size = max(_SMALLEST_BLOCK, -(-n_tokens // _MOST_BLOCKS))

    # Products have a batch axis, so that no remat policy saves the scores.
    @partial(jax.checkpoint, static_argnums=(5,))
    def block(q: Array, k: Array, v: Array, bias: Array | None, ids: Array | None, start: int) -> Array:
        """y of the queries from `start` on, with q [1, T, K], k [1, T, K], v [1, T, V], bias [1, T] and ids [1, T]."""
        here = slice(start, min(start + size, n_tokens))
        keys = slice(0, here.stop if causal else n_tokens)
        visible = jnp.ones((1, 1), bool)
        if causal:
            visible = jnp.arange(here.start, here.stop)[:, None] >= jnp.arange(keys.stop)
        if ids is not None:
            visible = visible & (ids[:, here, None] == ids[:, None, keys])
        bias = None if bias is None else bias[:, keys]
        return _attend_visible(q[:, here], k[:, keys], v[:, keys], bias, visible)

    def head(arrays: tuple[Array, Array, Array, Array | None, Array | None]) -> Array:
        return jnp.concatenate([block(*arrays, start) for start in range(0, n_tokens, size)], axis=1)

    ids = None
    if segment_ids is not None:
        ids = jnp.broadcast_to(document_numbers(document_starts(segment_ids)), q.shape[:-1])
    heads = jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[2:]), (q, k, v, bias, ids))
    return lax.map(head, heads).reshape(v.shape)


def attend_cached(
    q: Float[Array, "B H T K"], cache: KVCache, slots: Int[Array, "B T"], first: Int[Array, "B T"]
) -> Float[Array, "B H T V"]:
    """Attend to the cache: each query sees the slots from `first` to its own, all filled by `append`."""
    n_batch, n_heads, n_tokens, _ = q.shape
    capacity = cache.k.shape[-2]
    bias = None if cache.decayed is None else -cache.decayed[..., 0]

    def block(queries: tuple[Array, Array, Array]) -> Array:
        q, slots, first = queries  # [B, H, t, K], [B, t], [B, t]
        position = jnp.arange(capacity)
        visible = (first[..., None] <= position) & (position <= slots[..., None])
        return _attend_visible(q, cache.k, cache.v, bias, visible[:, None])

    size = max(1, _BLOCK_SCORES // (n_batch * n_heads * capacity))
    if n_tokens <= size:
        return block((q, slots, first))
    blocks = _split(q, size, 2), _split(slots, size, 1), _split(first, size, 1)
    y = lax.map(block, blocks)  # [blocks, B, H, size, V]
    return jnp.moveaxis(y, 0, 2).reshape(n_batch, n_heads, -1, y.shape[-1])[:, :, :n_tokens]


def _split(x: Array, size: int, axis: int) -> Array:
    """Split an axis into blocks, padded with zeros; the axis of blocks comes first."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % size)
    blocks = jnp.pad(x, widths).reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(blocks, axis, 0)


def step_cached(
    q: Float[Array, "B H 1 K"], token: KVCache, cache: KVCache, slots: Int[Array, "B 1"], first: Int[Array, "B 1"]
) -> tuple[Float[Array, "B H 1 V"], KVCache]:
    """`append` one token and `attend_cached` its query, without copying the cache."""
    k, v, decayed = token
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    position = jnp.arange(cache.k.shape[-2])
    visible = (first[..., None] <= position) & (position < slots[..., None])
    score = lambda k: jnp.einsum("bhtk,bhck->bhtc", q, k, preferred_element_type=dtype) * q.shape[-1] ** -0.5
    scores, own = score(cache.k), score(k)
    if decayed is not None and cache.decayed is not None:
        scores = scores + (decayed - cache.decayed).swapaxes(2, 3)
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), own)
    p, p_own = jnp.exp(scores - top), jnp.exp(own - top)
    y = jnp.einsum("bhtc,bhcv->bhtv", p.astype(v.dtype), cache.v, preferred_element_type=dtype) + p_own * v
    y = y / (jnp.sum(p, axis=-1, keepdims=True) + p_own)
    # The write depends on the read, so that XLA updates the cache in place instead of reading from a copy.
    zero = jnp.where(jnp.isfinite(y[..., :1]), 0 * y[..., :1], 0)
    token = jax.tree.map(lambda x: x + zero.astype(x.dtype), token)
    return y.astype(q.dtype), append(cache, token, slots, None)
