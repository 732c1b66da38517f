"""Sigmoid attention: a sum over the n visible keys, each with an independent weight, divided by a power of n.

    y[t] = n[t]^-alpha sum_{s visible to t} sigmoid(q[t] . k[s] / sqrt(K) + bias) v[s]

As n grows, the output converges for alpha = 1, diverges for alpha < 1 and vanishes for alpha > 1: it scales as
n^(1 - alpha), so doubling every token multiplies it by 2^(1 - alpha). The common alternative, bias = -log n with
alpha = 0, is a different model: its weights go up to 1, those here up to n^-alpha.

Each query sees one range of keys, `first` to `stop` - 1. Causal masks, packed documents and the filled part of a buffer
are all of this form. Blocks of queries meet one block of keys after the other, from the smallest `first` to the largest
`stop`, so memory is linear in T. The backward pass saves only the inputs and recomputes the weights of each pair of
blocks. Nothing overflows, however large a logit: weights and slopes are computed from exp(-|logit|).

Axes: `*batch` any leading axes; T queries, S keys (S = T if causal); K key and V value features; C queries and D keys
of one pair of blocks.
"""

import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from heinsen.ops.arrays import einsum, on_automatic_axes, promote, vary_together
from heinsen.ops.checks import check_array, check_inputs, check_integer, check_known_tokens
from heinsen.ops.segments import document_ranges, document_starts
from heinsen.promotion import usual_promotion

Bias = float | Literal["-log_n"]

_SMALLEST_BLOCK, _LARGEST_BLOCK = 64, 512  # tokens
_PAIRS = 2**21  # target number of (query, key) pairs in two blocks, over all leading axes


@usual_promotion
def sigmoid_attention(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch S K"],
    v: Float[Array, "*batch S V"],
    *,
    causal: bool = True,
    alpha: float = 1.0,
    bias: Bias = 0.0,
    segment_ids: Int[Array, "*#batch T"] | None = None,
) -> Float[Array, "*batch T V"]:
    """y [*batch, T, V] = n^-alpha sum_s sigmoid(q . k[s] / sqrt(K) + bias) v[s] over the n keys that a query sees.

    Args:
      q, k, v: queries, keys and values of either sign.
      causal: whether query t sees only keys up to t (then S = T, n = t + 1), or all keys (n = S).
      alpha: the power of n by which the sum is divided; any finite number.
      bias: added to every logit; any finite number, or "-log_n" for each query's own -log n.
      segment_ids: packed documents. Tokens see each other only within a run of equal ids, and n counts only those.
        Requires S = T.

    Computes in float32, or float64 for float64 inputs; y has v's dtype. Differentiable in reverse mode.
    Raises TypeError for dtypes that are not floating point and for an alpha or bias that is not a number, ValueError
    for shapes that do not match and numbers that are not finite.
    """
    check_inputs(q, k, v, causal, segment_ids, "v")
    first, stop = _visible_range(q.shape[-2], k.shape[-2], causal, segment_ids)
    return _attend_range(q, k, v, first, stop, alpha, bias)


@usual_promotion
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
    bias: Bias = 0.0,
) -> Float[Array, "*batch T V"]:
    """`sigmoid_attention` of T queries over a buffer of S keys and values, of which the first n are filled.

    Equals the same queries' rows of `sigmoid_attention` over all tokens so far. Time grows with the largest n, not S.

    Args:
      q: the queries; query t is token offset + t and, if causal, sees no later key.
      k, v: the buffer, which already holds the queries' own keys; unfilled slots may hold any finite numbers.
      n: the number of filled keys, at most S; may be traced, and may differ between sequences.
      offset: the position of the first query; None: n - T, which makes the queries the newest tokens.
      first: the first key that a query sees, such as the start of its document; broadcasts to [*batch, T].
      causal, alpha, bias: as in `sigmoid_attention`, where n is the number of visible keys. A query that sees no key
        gets 0.

    Raises the errors of `sigmoid_attention`.
    """
    check_inputs(q, k, v, False, None, "v")
    batch, n_queries = q.shape[:-2], q.shape[-2]
    n_filled = _as_positions("n", n, batch)[..., None]
    start = n_filled - n_queries if offset is None else _as_positions("offset", offset, batch)[..., None]
    first = _as_positions("first", first, (*batch, n_queries))
    stop = jnp.minimum(n_filled, k.shape[-2])
    if causal:
        stop = jnp.minimum(stop, start + jnp.arange(n_queries) + 1)
    shape = jnp.broadcast_shapes(first.shape, stop.shape, (n_queries,))
    first, stop = jnp.broadcast_to(jnp.maximum(first, 0), shape), jnp.broadcast_to(stop, shape)
    return _attend_range(q, k, v, first, stop, alpha, bias)


def _as_positions(name: str, x: Array | int, shape: tuple[int, ...]) -> Array:
    """Convert to an integer array that broadcasts to `shape`. Raises TypeError and ValueError if x is none."""
    x = jnp.asarray(x) if isinstance(x, int | float) else x
    check_array(name, x, check_integer)
    try:
        fits = jnp.broadcast_shapes(x.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name} {x.shape} does not broadcast to {shape}")
    return x


def _visible_range(n_queries: int, n_keys: int, causal: bool, segment_ids: Array | None) -> tuple[Array, Array]:
    """(first, stop), each [*#batch, T]: query t sees the keys first[t] to stop[t] - 1."""
    t = jnp.arange(n_queries)
    first, stop = jnp.zeros_like(t), jnp.full_like(t, n_keys)
    if segment_ids is not None:
        first, stop = document_ranges(document_starts(segment_ids))
    return first, jnp.broadcast_to(t + 1, first.shape) if causal else stop


def _attend_range(q: Array, k: Array, v: Array, first: Array, stop: Array, alpha: float, bias: Bias) -> Array:
    _check_number("alpha", alpha)
    if bias != "-log_n":
        _check_number("bias", bias, ', or "-log_n"')
    out_dtype, (q, k, v) = v.dtype, promote(q, k, v)
    q = q * k.shape[-1] ** -0.5
    check_known_tokens(q.shape[-2], k.shape[-2])
    options = _Options(alpha, bias, _block_size(math.prod(n for n in k.shape[:-2] if isinstance(n, int))))
    attend = lambda *arrays: (_attend_jitted(options, *arrays), ())
    return on_automatic_axes(attend, q, k, v, first, stop)[0].astype(out_dtype)


@partial(jax.jit, static_argnums=0)
def _attend_jitted(options: "_Options", *arrays: Array) -> Array:
    """Jitted, so that a second call outside jit compiles nothing."""
    return _attend(*vary_together(*arrays), options)


def _check_number(name: str, x: object, alternative: str = "") -> None:
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"{name} = {x!r}: expected a finite Python number{alternative}")
    if not math.isfinite(x):
        raise ValueError(f"{name} = {x!r}: expected a finite number{alternative}")


def _block_size(n_rows: int) -> int:
    """Tokens per block, a power of 2: enough pairs to keep a device busy, few enough to stay in a CPU's cache."""
    block = _LARGEST_BLOCK
    while block > _SMALLEST_BLOCK and n_rows * block**2 > _PAIRS:
        block //= 2
    return block


# ---- blocks of queries against blocks of keys ------------------------------------------------------


class _Options(NamedTuple):
    """The static part of the computation."""

    alpha: float
    bias: Bias
    block: int  # tokens per block


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q: Array, k: Array, v: Array, first: Array, stop: Array, options: _Options) -> Array:
    """y of queries that are already scaled, where query t sees the keys first[t] to stop[t] - 1."""
    return _sum_keys(q, k, v, first, stop, options)


def _sum_keys(q: Array, k: Array, v: Array, first: Array, stop: Array, options: _Options) -> Array:

    def query_block(i: Array, y: Array) -> Array:
        queries = _query_block(i, q, first, stop, k.shape[-2], options)

        def key_block(j: Array, y_i: Array) -> Array:
            keys = _key_block(j, k, v, options.block)
            weights, _ = _sigmoid(queries, keys)
            return y_i + einsum("...ts,...sv->...tv", weights * queries.scale, keys.v)

        zeros = vary_together(jnp.zeros((*queries.q.shape[:-1], v.shape[-1]), v.dtype), q)[0]
        return _add(y, lax.fori_loop(queries.first_block, queries.stop_block, key_block, zeros), queries.start)

    y = vary_together(jnp.zeros((*q.shape[:-1], v.shape[-1]), v.dtype), q)[0]
    return lax.fori_loop(0, _count(q.shape[-2], options.block), query_block, y)


_Residuals = tuple[Array, Array, Array, Array, Array]  # the arrays that `_attend` takes
_Grads = tuple[Array, Array, Array]  # of q, k, v


@usual_promotion
def _attend_fwd(q: Array, k: Array, v: Array, first: Array, stop: Array, options: _Options) -> tuple[Array, _Residuals]:
    return _sum_keys(q, k, v, first, stop, options), (q, k, v, first, stop)


@usual_promotion
def _attend_bwd(options: _Options, residuals: _Residuals, g: Array) -> tuple[Array, Array, Array, None, None]:
    """For each logit x let dx = scale sigmoid'(x) g . v. Then dq = dx k, dk = dx^T q, dv = (scale weights)^T g."""
    q, k, v, first, stop = residuals

    def query_block(i: Array, grads: _Grads) -> _Grads:
        queries = _query_block(i, q, first, stop, k.shape[-2], options)
        g_i = _slice(g, queries.start, queries.q.shape[-2]) * queries.scale

        def key_block(j: Array, grads: _Grads) -> _Grads:
            dq_i, dk, dv = grads
            keys = _key_block(j, k, v, options.block)
            weights, slopes = _sigmoid(queries, keys)
            dx = slopes * einsum("...tv,...sv->...ts", g_i, keys.v)
            dq_i = dq_i + einsum("...ts,...sk->...tk", dx, keys.k)
            dk = _add(dk, einsum("...ts,...tk->...sk", dx, queries.q), keys.start)
            return dq_i, dk, _add(dv, einsum("...ts,...tv->...sv", weights, g_i), keys.start)

        dq, dk, dv = grads
        dq_i = vary_together(jnp.zeros_like(queries.q), q)[0]
        dq_i, dk, dv = lax.fori_loop(queries.first_block, queries.stop_block, key_block, (dq_i, dk, dv))
        return _add(dq, dq_i, queries.start), dk, dv

    zeros = vary_together(jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v), q)[:3]
    grads = lax.fori_loop(0, _count(q.shape[-2], options.block), query_block, zeros)
    return *grads, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


class _QueryBlock(NamedTuple):
    start: Array  # the first query's position
    q: Array  # [*batch, C, K]
    mask: Callable[[Array], Array]  # the visible ones of the keys at given positions, [*#batch, C, D]
    shift: Array | float  # added to the logits, [*#batch, C, 1] or a number
    scale: Array  # of the weights, [*#batch, C, 1]
    first_block: Array  # the key blocks that some query of the block sees
    stop_block: Array


class _KeyBlock(NamedTuple):
    start: Array  # the first key's position
    k: Array  # [*batch, D, K]
    v: Array  # [*batch, D, V]
    positions: Array  # [D]; -1 for keys that belong to the block before


def _query_block(i: Array, q: Array, first: Array, stop: Array, n_keys: int, options: _Options) -> _QueryBlock:
    start, positions, own = _locate(i, options.block, q.shape[-2])
    first, stop = _slice(first, start, len(positions), axis=-1), _slice(stop, start, len(positions), axis=-1)
    n = jnp.maximum(stop - first, 1).astype(q.dtype)[..., None]
    shift = -jnp.log(n) if options.bias == "-log_n" else options.bias
    stop = jnp.where(own, stop, 0)
    mask = lambda keys: (first[..., None] <= keys) & (keys < stop[..., None])
    size = min(options.block, n_keys)
    first_block, stop_block = jnp.min(first) // size, (jnp.max(stop) + size - 1) // size
    return _QueryBlock(start, _slice(q, start, len(positions)), mask, shift, n**-options.alpha, first_block, stop_block)


def _key_block(j: Array, k: Array, v: Array, block: int) -> _KeyBlock:
    start, positions, own = _locate(j, block, k.shape[-2])
    k, v = _slice(k, start, len(positions)), _slice(v, start, len(positions))
    return _KeyBlock(start, k, v, jnp.where(own, positions, -1))


def _sigmoid(queries: _QueryBlock, keys: _KeyBlock) -> tuple[Array, Array]:
    """sigmoid(x) and its slope at the logits x = q . k + shift, [*batch, C, D]; 0 for keys that are not visible."""
    mask = queries.mask(keys.positions)
    x = einsum("...tk,...sk->...ts", queries.q, keys.k) + queries.shift
    e = jnp.exp(-jnp.abs(x))
    weights = jnp.where(x < 0, e, 1.0) / (1.0 + e)
    return jnp.where(mask, weights, 0.0), jnp.where(mask, e / (1.0 + e) ** 2, 0.0)


def _count(n_tokens: int, block: int) -> int:
    """Number of blocks."""
    return -(-n_tokens // min(block, n_tokens))


def _locate(i: Array, block: int, n_tokens: int) -> tuple[Array, Array, Array]:
    """Start and positions of block i, and which positions are its own: the last block may overlap the one before."""
    size = min(block, n_tokens)
    start = jnp.minimum(i * size, n_tokens - size)
    positions = start + jnp.arange(size)
    return start, positions, positions >= i * size


def _slice(x: Array, start: Array, size: int, axis: int = -2) -> Array:
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _add(x: Array, part: Array, start: Array) -> Array:
    """Add `part` to the tokens of x from `start` on."""
    part = part + _slice(x, start, part.shape[-2])
    return lax.dynamic_update_slice_in_dim(x, part, start, axis=-2)
