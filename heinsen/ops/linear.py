"""Linear attention, normalized, with the feature map elu + 1: the usual attention with constant cost per token.

    y[t] = sum_s (f(q[t]) . f(k[s])) v[s] / sum_s f(q[t]) . f(k[s])     over the visible s
    f(x) = x + 1 where x > 0, else exp(x)

The sums over s factor, so that sum_s f(k[s]) v[s]^T and sum_s f(k[s]) summarize any number of tokens in constant size.
The denominator is the numerator of a value that is 1 everywhere: appending that column to v gives both as one sum.

Tokens are processed in chunks of C: a query reads its own chunk by a masked C x C product, and all earlier tokens from
the sums at the beginning of the chunk. Memory is linear in T. All features are positive, so only v can cancel.

Axes: `*batch` any leading axes; T queries, S keys (S = T if causal); K key and V value features; N chunks of C tokens.
"""

import math
from functools import partial
from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from heinsen.logspace import NEG_INF
from heinsen.ops.arrays import einsum, on_automatic_axes, promote, to_chunks, vary_together
from heinsen.ops.checks import check_decay, check_fits, check_float, check_inputs, check_known_tokens, check_state
from heinsen.ops.decay import ChunkDecay, with_starts
from heinsen.ops.segments import document_ends, starts_of_documents
from heinsen.promotion import usual_promotion

_CHUNK, _BLOCK = 64, 8  # tokens


class LinearState(NamedTuple):
    """Sums over the tokens seen, in float32 or wider: f(k) v^T, and f(k) in the last column."""

    sums: Float[Array, "*batch K V+1"]


def init_linear_state(
    batch_shape: tuple[int, ...], d_key: int, d_value: int, dtype: DTypeLike = jnp.float32
) -> LinearState:
    """State before any token. Raises TypeError for a dtype that is not floating point."""
    check_float("the state", dtype)
    return LinearState(jnp.zeros((*batch_shape, d_key, d_value + 1), dtype))


@overload
def linear_attention(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch S K"],
    v: Float[Array, "*batch S V"],
    *,
    log_decay: Float[Array, "*batch T"] | None = ...,
    causal: bool = ...,
    state: LinearState | None = ...,
    segment_ids: Int[Array, "*#batch T"] | None = ...,
    return_state: Literal[False] = ...,
) -> Float[Array, "*batch T V"]: ...


@overload
def linear_attention(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch S K"],
    v: Float[Array, "*batch S V"],
    *,
    log_decay: Float[Array, "*batch T"] | None = ...,
    causal: bool = ...,
    state: LinearState | None = ...,
    segment_ids: Int[Array, "*#batch T"] | None = ...,
    return_state: Literal[True],
) -> tuple[Float[Array, "*batch T V"], LinearState]: ...


@usual_promotion
def linear_attention(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch S K"],
    v: Float[Array, "*batch S V"],
    *,
    log_decay: Float[Array, "*batch T"] | None = None,
    causal: bool = True,
    state: LinearState | None = None,
    segment_ids: Int[Array, "*#batch T"] | None = None,
    return_state: bool = False,
) -> Float[Array, "*batch T V"] | tuple[Float[Array, "*batch T V"], LinearState]:
    """y [*batch, T, V] = sum_s f(q) . f(k[s]) v[s] / sum_s f(q) . f(k[s]), f = elu + 1.

    Args:
      q, k, v: queries, keys and values of either sign; -inf in k gives a feature of zero.
      log_decay: as in `heinsen.log_attention`: token t multiplies what all before it weigh by exp(log_decay[t]) <= 1.
      causal: whether query t sees only keys up to t (then S = T), or all keys.
      state: the sums over everything before the first token, visible to all queries of the first document.
      segment_ids: packed documents. Tokens see each other only within a run of equal ids. `state` continues into the
        first run, and the returned state is that of the last run. Requires S = T.
      return_state: also return the `LinearState` after all tokens.

    Computes in float32, or float64 for float64 inputs; y has v's dtype. A query that sees nothing gets 0. A value that
    is not finite reaches some queries before it, too: those of its chunk.

    Raises TypeError for dtypes that are not floating point, ValueError for shapes that do not match.
    """
    check_inputs(q, k, v, causal, segment_ids, "v")
    check_decay("log_decay", log_decay, k, causal)
    out_dtype, (q, k, v) = v.dtype, promote(q, k, v)
    log_decay = with_starts(log_decay, starts_of_documents(segment_ids, k), k)
    check_known_tokens(q.shape[-2], k.shape[-2])
    if state is None:
        state = init_linear_state(k.shape[:-2], k.shape[-1], v.shape[-1], v.dtype)
    check_state("state", state, LinearState)
    check_fits(state, ((*k.shape[:-2], k.shape[-1], v.shape[-1] + 1),), k, v)
    attend = partial(_attend, causal=causal)
    initial = state.sums.astype(v.dtype)
    numerators, final = on_automatic_axes(attend, _features(q), _features(k), v, initial, log_decay)
    z = numerators[..., -1:]
    y = jnp.where(z > 0, numerators[..., :-1] / jnp.where(z > 0, z, 1.0), 0.0).astype(out_dtype)
    return (y, LinearState(final)) if return_state else y


@partial(jax.jit, static_argnames="causal")
def _attend(
    fq: Array, fk: Array, v: Array, initial: Array, log_decay: Array | None, causal: bool
) -> tuple[Array, Array]:
    """Sums that each query reads, the denominator last, and those after all tokens. Jitted: see `chunked`."""
    fq, fk, v, initial, log_decay = vary_together(fq, fk, v, initial, log_decay)
    v1 = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
    if causal:
        return _causal(fq, fk, v1, initial, log_decay)
    if log_decay is not None:
        return _within_documents(fq, fk, v1, initial, log_decay)
    final = initial + einsum("...sk,...sv->...kv", fk, v1)
    return einsum("...tk,...kv->...tv", fq, final), final


def _features(x: Array) -> Array:
    """elu(x) + 1, without the rounding error of expm1(x) + 1 far below 0."""
    return jnp.where(x > 0, x + 1.0, jnp.exp(jnp.minimum(x, 0.0)))


def _within_documents(fq: Array, fk: Array, v1: Array, initial: Array, log_decay: Array) -> tuple[Array, Array]:
    """Non-causal attention within documents: `_causal` once in each direction. Results as in `_causal`."""
    numerators, final = _causal(fq, fk, v1, initial, log_decay)
    flip = partial(jnp.flip, axis=-2)
    from_end = jnp.flip(document_ends(log_decay == NEG_INF), axis=-1)
    later, _ = _causal(
        flip(fq), flip(fk), flip(v1), jnp.zeros_like(initial), jnp.where(from_end, NEG_INF, jnp.zeros_like(log_decay))
    )
    # Both directions have counted the query's own token.
    own = einsum("...tk,...tk->...t", fq, fk)[..., None] * v1
    return numerators + jnp.flip(later, axis=-2) - own, final


def _causal(fq: Array, fk: Array, v1: Array, initial: Array, log_decay: Array | None) -> tuple[Array, Array]:
    """Sum over each document's tokens up to the query's own, chunk by chunk.

    Returns what each query reads, [*batch, T, V + 1] with the denominator last, and the sums of the last document.
    """
    n_tokens = fq.shape[-2]
    size = min(_CHUNK, n_tokens)
    fq, fk, v1 = (to_chunks(x, size, -2) for x in (fq, fk, v1))  # [*batch, N, C, ...]; padded keys have zero features
    decays = jnp.zeros(size, fq.dtype) if log_decay is None else to_chunks(log_decay, size, -1)  # [*batch, N, C]
    decay = ChunkDecay.of(decays, math.gcd(size, _BLOCK))

    def step(sums: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        own, kept = chunk
        return _scale(sums, kept[..., None, None]) + own, sums

    own = einsum("...sk,...sv->...kv", _scale(fk, decay.keys_at_end[..., None]), v1)  # [*batch, N, K, V + 1]
    kept = jnp.broadcast_to(decay.before_at_end, own.shape[:-2])
    final, before = lax.scan(step, initial, (jnp.moveaxis(own, -3, 0), jnp.moveaxis(kept, -1, 0)))
    weights = _scale(einsum("...tk,...sk->...ts", fq, fk), decay.keys_at_queries)
    read = einsum("...ts,...sv->...tv", weights, v1)
    fq_before = _scale(fq, decay.before_at_queries[..., None])
    read = read + einsum("...tk,...kv->...tv", fq_before, jnp.moveaxis(before, 0, -3))
    return read.reshape(*read.shape[:-3], -1, v1.shape[-1])[..., :n_tokens, :], final


def _scale(x: Array, log_decay: Array) -> Array:
    """x times exp(log_decay), and 0 where that is 0, of inf too."""
    decay = jnp.exp(log_decay)
    return jnp.where(decay > 0, x, 0.0) * decay
