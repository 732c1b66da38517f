"""Sigmoid attention: a sum over the visible keys, each with a weight of its own, divided by a power of their number n.

    y[t] = n[t]^-alpha sum_{s visible to t} sigmoid(q[t] . k[s] / sqrt(K) + bias) v[s]

As n grows the output converges with alpha = 1, grows with alpha < 1 and vanishes with alpha > 1: as n^(1 - alpha), so
that every token twice multiplies it by 2^(1 - alpha). The other usual choice, bias = -log n with alpha = 0, is another
model: its weights go up to 1, those here up to n^-alpha.

What a query sees is a range of keys, from `first` to before `stop`: causal masks, packed documents and the filled part
of a buffer are all of that kind. Blocks of queries meet blocks of keys one pair after the other, those between the
smallest `first` and the largest `stop`, so that memory is linear in T. The backward pass keeps the inputs alone, and
makes every pair's weights again. Nothing overflows, however large a logit: weights and slopes come from exp(-|logit|).

Axes: `*batch` any leading axes; T queries, S keys (S = T if causal); K key and V value features.
"""

import math
from functools import partial
from numbers import Real
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from heinsen.ops.checks import check_inputs

_SMALLEST_BLOCK, _LARGEST_BLOCK = 64, 512  # tokens
_PAIRS = 2**21  # of a query and a key in two blocks and all their leading axes, unless the blocks are the smallest


def sigmoid_attention(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch S K"],
    v: Float[Array, "*batch S V"],
    *,
    causal: bool = True,
    alpha: float = 1.0,
    bias: float | Literal["-log_n"] = 0.0,
    segment_ids: Int[Array, "*#batch T"] | None = None,
) -> Float[Array, "*batch T V"]:
    """y [*batch, T, V] = n^-alpha sum_s sigmoid(q . k[s] / sqrt(K) + bias) v[s] over the n keys that a query sees.

    Args:
      q, k, v: queries, keys and values of either sign.
      causal: whether query t sees keys up to t only (then S = T, n = t + 1), or all keys (n = S).
      alpha: the power of n that the sum is divided by; any finite number.
      bias: added to every logit; any finite number, or "-log_n" for -log n, each query's own.
      segment_ids: packed documents. Tokens see each other only within a run of equal ids, and n counts those alone.
        Needs S = T.

    Arithmetic is in float32, or float64 for float64 inputs; y has v's dtype. Differentiable in reverse mode.
    Raises TypeError for dtypes that are not floating point and for an alpha or bias that is no number, ValueError for
    shapes that do not fit and numbers that are not finite.
    """
    check_inputs(q, k, v, causal, segment_ids, "v")
    return _of_ranges(q, k, v, *_visible(q.shape[-2], k.shape[-2], causal, segment_ids), alpha, bias)


def sigmoid_attention_cached(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch S K"],
    v: Float[Array, "*batch S V"],
    n: Int[Array, "*#batch"] | int,
    *,
    offset: Int[Array, "*#batch"] | int | None = None,
    first: Int[Array, "*#batch #T"] | int = 0,
    causal: bool = True,
    alpha: float = 1.0,
    bias: float | Literal["-log_n"] = 0.0,
) -> Float[Array, "*batch T V"]:
    """`sigmoid_attention` of T queries on a buffer of S keys and values, of which the first n are filled.

    Equal to the same queries' rows of `sigmoid_attention` on all tokens so far. Time grows with the largest n, not S.

    Args:
      q: the queries; query t is token offset + t and, if causal, sees no key after itself.
      k, v: the buffer, with the queries' own keys already in it; what is not filled may hold any finite numbers.
      n: how many keys are filled, at most S; it may be traced, and may differ from sequence to sequence.
      offset: the position of the first query; None: n - T, the queries being the newest tokens.
      first: the first key that a query sees, such as the beginning of its document; broadcasts to [*batch, T].
      causal, alpha, bias: as in `sigmoid_attention`, with the number of keys that are seen. Who sees none gets 0.

    Raises as `sigmoid_attention` does.
    """
    check_inputs(q, k, v, False, None, "v")
    batch, n_queries = q.shape[:-2], q.shape[-2]
    n = _positions("n", n, batch)[..., None]
    offset = n - n_queries if offset is None else _positions("offset", offset, batch)[..., None]
    first = _positions("first", first, (*batch, n_queries))
    stop = jnp.minimum(n, k.shape[-2])
    if causal:
        stop = jnp.minimum(stop, offset + jnp.arange(n_queries) + 1)
    shape = jnp.broadcast_shapes(first.shape, stop.shape, (n_queries,))
    first, stop = jnp.broadcast_to(jnp.maximum(first, 0), shape), jnp.broadcast_to(stop, shape)
    return _of_ranges(q, k, v, first, stop, alpha, bias)


def _positions(name, x, shape):
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {x.dtype}: expected integers")
    try:
        fits = jnp.broadcast_shapes(x.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name} {x.shape} does not broadcast to {shape}")
    return x


def _visible(n_queries, n_keys, causal, segment_ids):
    """(first, stop), [*#batch, T]: query t sees the keys first[t] to stop[t] - 1."""
    t = jnp.arange(n_queries)
    first, stop = jnp.zeros_like(t), jnp.full_like(t, n_keys)
    if segment_ids is not None:
        changes = segment_ids[..., 1:] != segment_ids[..., :-1]
        pad = lambda *widths: jnp.pad(changes, [(0, 0)] * (changes.ndim - 1) + [widths])
        axis = changes.ndim - 1
        first = lax.cummax(jnp.where(pad(1, 0), t, 0), axis=axis)
        stop = lax.cummin(jnp.where(pad(0, 1), t + 1, n_keys), axis=axis, reverse=True)
    return first, jnp.broadcast_to(t + 1, first.shape) if causal else stop


def _of_ranges(q, k, v, first, stop, alpha, bias):
    _check_number("alpha", alpha)
    if bias != "-log_n":
        _check_number("bias", bias, ', or "-log_n"')
    dtype = jnp.promote_types(jnp.result_type(q, k, v), jnp.float32)
    q = q.astype(dtype) * k.shape[-1] ** -0.5
    block = _block(math.prod(k.shape[:-2]))
    return _attend(q, k.astype(dtype), v.astype(dtype), first, stop, alpha, bias, block).astype(v.dtype)


def _check_number(name, x, alternative=""):
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"{name} = {x!r}: expected a finite Python number{alternative}")
    if not math.isfinite(x):
        raise ValueError(f"{name} = {x!r}: expected a finite number{alternative}")


def _block(n_rows):
    """Tokens in a block, a power of 2: enough pairs to keep a device busy, few enough to stay in a CPU's cache."""
    block = _LARGEST_BLOCK
    while block > _SMALLEST_BLOCK and n_rows * block**2 > _PAIRS:
        block //= 2
    return block


# ---- blocks of queries against blocks of keys ------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attend(q, k, v, first, stop, alpha, bias, block):
    """y of queries that are scaled already, each of which sees the keys `first` to `stop` - 1."""
    n_queries, n_keys = q.shape[-2], k.shape[-2]

    def of_queries(i, y):
        start, q_i, seen, shift, scale, key_blocks = _queries(i, q, first, stop, n_keys, alpha, bias, block)

        def of_keys(j, y_i):
            start, (k_j, v_j), positions = _keys(j, k, v, block)
            weights, _ = _sigmoid(q_i, k_j, shift, seen(positions))
            return y_i + _einsum("...ts,...sv->...tv", weights * scale, v_j)

        none = jnp.zeros((*q_i.shape[:-1], v.shape[-1]), v.dtype)
        return _add(y, lax.fori_loop(*key_blocks, of_keys, none), start)

    y = jnp.zeros((*q.shape[:-1], v.shape[-1]), v.dtype)
    return lax.fori_loop(0, _count(n_queries, block), of_queries, y)


def _attend_fwd(q, k, v, first, stop, alpha, bias, block):
    return _attend(q, k, v, first, stop, alpha, bias, block), (q, k, v, first, stop)


def _attend_bwd(alpha, bias, block, residuals, g):
    """With dx = scale sigmoid'(x) g . v by the logit x: dq = dx k, dk = dx^T q, dv = (scale weights)^T g."""
    q, k, v, first, stop = residuals
    n_queries, n_keys = q.shape[-2], k.shape[-2]

    def of_queries(i, gradients):
        start, q_i, seen, shift, scale, key_blocks = _queries(i, q, first, stop, n_keys, alpha, bias, block)
        g_i = _slice(g, start, q_i.shape[-2]) * scale

        def of_keys(j, gradients):
            dq_i, dk, dv = gradients
            start, (k_j, v_j), positions = _keys(j, k, v, block)
            weights, slopes = _sigmoid(q_i, k_j, shift, seen(positions))
            dx = slopes * _einsum("...tv,...sv->...ts", g_i, v_j)
            dq_i = dq_i + _einsum("...ts,...sk->...tk", dx, k_j)
            dk = _add(dk, _einsum("...ts,...tk->...sk", dx, q_i), start)
            return dq_i, dk, _add(dv, _einsum("...ts,...tv->...sv", weights, g_i), start)

        dq, dk, dv = gradients
        dq_i, dk, dv = lax.fori_loop(*key_blocks, of_keys, (jnp.zeros_like(q_i), dk, dv))
        return _add(dq, dq_i, start), dk, dv

    gradients = tuple(map(jnp.zeros_like, (q, k, v)))
    return *lax.fori_loop(0, _count(n_queries, block), of_queries, gradients), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _queries(i, q, first, stop, n_keys, alpha, bias, block):
    """Block i of the queries: where it begins, the queries, the mask of the keys they see by the keys' positions, the
    shift of their logits, the factor of their weights (both [*#batch, C, 1] or a number) and their range of key blocks.
    """
    start, positions, fresh = _place(i, block, q.shape[-2])
    first, stop = _slice(first, start, len(positions), axis=-1), _slice(stop, start, len(positions), axis=-1)
    n = jnp.maximum(stop - first, 1).astype(q.dtype)[..., None]
    shift = -jnp.log(n) if bias == "-log_n" else bias
    stop = jnp.where(fresh, stop, 0)
    seen = lambda keys: (first[..., None] <= keys) & (keys < stop[..., None])
    size = min(block, n_keys)
    key_blocks = jnp.min(first) // size, (jnp.max(stop) + size - 1) // size
    return start, _slice(q, start, len(positions)), seen, shift, n**-alpha, key_blocks


def _keys(j, k, v, block):
    """Block j of keys and values: where it begins, both, and the keys' positions, -1 for those of the block before."""
    start, positions, fresh = _place(j, block, k.shape[-2])
    return start, [_slice(x, start, len(positions)) for x in (k, v)], jnp.where(fresh, positions, -1)


def _sigmoid(q, k, shift, seen):
    """sigmoid(x) and its slope at the logits x = q . k + shift, [*batch, C, D]; 0 for keys that are not seen."""
    x = _einsum("...tk,...sk->...ts", q, k) + shift
    e = jnp.exp(-jnp.abs(x))
    weights = jnp.where(x < 0, e, 1.0) / (1.0 + e)
    return jnp.where(seen, weights, 0.0), jnp.where(seen, e / (1.0 + e) ** 2, 0.0)


def _count(total, block):
    return -(-total // min(block, total))


def _place(i, block, total):
    """Where block i begins, its positions, and whether they are its own: the last one may overlap that before it."""
    size = min(block, total)
    start = jnp.minimum(i * size, total - size)
    positions = start + jnp.arange(size)
    return start, positions, positions >= i * size


def _slice(x, start, size, axis=-2):
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _add(x, part, start):
    """x with `part` added to its tokens from `start` on."""
    part = part + _slice(x, start, part.shape[-2])
    return lax.dynamic_update_slice_in_dim(x, part, start, axis=-2)


_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
