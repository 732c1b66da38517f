"""Linear attention, normalised, with the feature map elu + 1: the usual attention of constant cost per token.

    y[t] = sum_s (f(q[t]) . f(k[s])) v[s] / sum_s f(q[t]) . f(k[s])     over the visible s
    f(x) = x + 1 where x > 0, else exp(x)

The sums over s factor: what is kept of all tokens is sum_s f(k[s]) v[s]^T and sum_s f(k[s]), of one size whatever their
number. The denominator is the numerator of a value that is 1 everywhere, so both are one sum of a column more.

Tokens are taken a chunk of C at a time: a query reads its own chunk by a masked C x C product and all before it from
the sums at the chunk's beginning. Memory is linear in T. All features are positive: nothing cancels but in v.

Axes: `*batch` any leading axes; T queries, S keys (S = T if causal); K key and V value features; N chunks of C tokens.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from heinsen.ops.checks import check_inputs

_CHUNK = 64  # tokens


class LinearState(NamedTuple):
    """The sums over the tokens seen, in float32 at least: of f(k) v^T, and of f(k) in the last column."""

    sums: Float[Array, "*batch K V+1"]


def init_linear_state(batch_shape: tuple[int, ...], d_key: int, d_value: int, dtype: Any = jnp.float32) -> LinearState:
    """The state before any token."""
    return LinearState(jnp.zeros((*batch_shape, d_key, d_value + 1), dtype))


def linear_attention(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch S K"],
    v: Float[Array, "*batch S V"],
    *,
    causal: bool = True,
    state: LinearState | None = None,
    segment_ids: Int[Array, "*#batch T"] | None = None,
    return_state: bool = False,
) -> Any:
    """y [*batch, T, V] = sum_s f(q) . f(k[s]) v[s] / sum_s f(q) . f(k[s]), f = elu + 1.

    Args:
      q, k, v: queries, keys and values of either sign; -inf in k is a feature of zero.
      causal: whether query t sees keys up to t only (then S = T), or all keys.
      state: the sums over what came before the first token; all queries of the first document see it.
      segment_ids: packed documents. Tokens see each other only within a run of equal ids; `state` continues into the
        first run, and the state returned is the last run's. Needs S = T.
      return_state: also return the `LinearState` after all tokens.

    Arithmetic is in float32, or float64 for float64 inputs; y has v's dtype. A query that sees nothing gets 0.
    Raises TypeError for dtypes that are not floating point, ValueError for shapes that do not fit.
    """
    check_inputs(q, k, v, causal, segment_ids, "v")
    dtype = jnp.promote_types(jnp.result_type(q, k, v), jnp.float32)
    fq, fk = _features(q.astype(dtype)), _features(k.astype(dtype))
    v1 = jnp.concatenate([v.astype(dtype), jnp.ones((*v.shape[:-1], 1), dtype)], axis=-1)
    first = init_linear_state(k.shape[:-2], k.shape[-1], v.shape[-1], dtype).sums if state is None else state.sums
    run = None if segment_ids is None else _runs(segment_ids)
    if causal or run is not None:
        read, end = _causal(fq, fk, v1, first.astype(dtype), run)
    else:
        end = first.astype(dtype) + _einsum("...sk,...sv->...kv", fk, v1)
        read = _einsum("...tk,...kv->...tv", fq, end)
    if run is not None and not causal:
        # The later tokens of each run, read from the end; both passes have counted a query's own token.
        from_end = [jnp.flip(x, axis=-2) for x in (fq, fk, v1)]
        later, _ = _causal(*from_end, jnp.zeros_like(first, dtype), _runs(jnp.flip(segment_ids, axis=-1)))
        own = _einsum("...tk,...tk->...t", fq, fk)[..., None] * v1
        read = read + jnp.flip(later, axis=-2) - own
    z = read[..., -1:]
    y = jnp.where(z > 0, read[..., :-1] / jnp.where(z > 0, z, 1.0), 0.0).astype(v.dtype)
    return (y, LinearState(end)) if return_state else y


def _features(x):
    """elu(x) + 1, without the rounding of expm1(x) + 1 far below 0."""
    return jnp.where(x > 0, x + 1.0, jnp.exp(jnp.minimum(x, 0.0)))


def _runs(segment_ids):
    """[*#batch, T]: 0 0 1 1 2 ..., a new number whenever the id changes."""
    changes = segment_ids[..., 1:] != segment_ids[..., :-1]
    return jnp.cumsum(jnp.pad(changes, [(0, 0)] * (changes.ndim - 1) + [(1, 0)]), axis=-1)


def _causal(fq, fk, v1, first, run):
    """What each query reads of its run's tokens up to itself, [*batch, T, V + 1], and the last run's sums."""
    n_tokens = fq.shape[-2]
    size = min(_CHUNK, n_tokens)
    n_chunks = -(-n_tokens // size)

    def chunks(x, axis, mode="constant"):
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, n_chunks * size - n_tokens)
        axis += x.ndim
        return jnp.pad(x, widths, mode=mode).reshape(*x.shape[:axis], n_chunks, size, *x.shape[axis + 1 :])

    fq, fk, v1 = (chunks(x, -2) for x in (fq, fk, v1))  # [*batch, N, C, ...]: padded keys have no features
    seen = jnp.tril(jnp.ones((size, size), bool))
    reads_before = stays = ends_last = None
    if run is not None:
        run = chunks(run, -1, "edge")  # [*#batch, N, C]
        seen = seen & (run[..., :, None] == run[..., None, :])
        before = jnp.pad(run[..., :-1, -1], [(0, 0)] * (run.ndim - 2) + [(1, 0)])  # the run that a chunk begins in
        reads_before = run == before[..., None]
        stays = before == run[..., -1]
        ends_last = run == run[..., -1:]
    of_last = fk if ends_last is None else jnp.where(ends_last[..., None], fk, 0.0)
    own = _einsum("...sk,...sv->...kv", of_last, v1)  # [*batch, N, K, V + 1]

    def step(sums, chunk):
        own, stays = chunk
        return (sums if stays is None else jnp.where(stays[..., None, None], sums, 0.0)) + own, sums

    in_turn = jnp.moveaxis(own, -3, 0), None if stays is None else jnp.moveaxis(stays, -1, 0)
    end, before = lax.scan(step, first, in_turn)
    weights = jnp.where(seen, _einsum("...tk,...sk->...ts", fq, fk), 0.0)
    if reads_before is not None:
        fq = jnp.where(reads_before[..., None], fq, 0.0)
    read = _einsum("...ts,...sv->...tv", weights, v1)
    read = read + _einsum("...tk,...kv->...tv", fq, jnp.moveaxis(before, 0, -3))
    return read.reshape(*read.shape[:-3], n_chunks * size, -1)[..., :n_tokens, :], end


_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
