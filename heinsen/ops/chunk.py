"""The mathematics of one chunk of tokens: no loops, no buffers. Derivation: docs/attention.md.

Three things happen. Keys are summed up (`key_factors`, `own_sums`). Summaries are merged (`merge`: the log-sum-exp
monoid). Queries read the keys of their own chunk, up to their own, and a summary of all tokens before it
(`query_sums`). Where they see later tokens too (`Later`), they read all of their chunk's keys, and a summary of all
tokens after it as well.

A summary has sums M relative to shifts: c, the largest exponent of each key feature, and b, such that no product of a
weight and a value exceeds exp(b). The largest weight is 1, so that M_z is at least 1:

    M_s = sum_s exp(k[s] - c) exp(log v[s] - b)         M_z = sum_s exp(k[s] - c)

A query's weights are relative to a number r of its own, at least about its largest exponent:

    P[t,k] = exp(q[t,k] + c[k] - r[t])                  of the summary before the chunk (and likewise of that after it)
    A[t,s] = sum_k exp(q[t,k] + k[s,k] - r[t])          of the keys s <= t of its own chunk (or of all)
    S = A exp(log v - b) + P M_s,   Z = A 1 + P M_z     log y = log(S / Z) + b,   log Z + r

`fast_weights` computes P and A as products of factors <= 1, one of queries and one of keys. Where the exponents of a
chunk spread by more than some 60, underflow takes terms from them, which shows in Z. Then `exact_weights` takes their
place. JAX differentiates both; shifts are constants, and every gradient is a sum of weights <= 1 times cotangents.

A forget gate multiplies weights by their decay (`decay`). For real values v itself is summed, and b is None.
What differs between the two kinds is in `values`. `naive_chunk` has the same mathematics on one page.

Axes: C tokens of the chunk, K key features, V value features; `*batch` is any leading axes, the chunks of a group too.
"""

from collections.abc import Iterable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import NEG_INF, centered_sum, finite, two_sum
from heinsen.ops.decay import ChunkDecay, chunk_decay, chunk_decay_after
from heinsen.ops.values import Domain, Shifts, Sums, einsum, safe_divide

SUBCHUNK = 8  # tokens at most, if C is a multiple, whose weights are computed pair by pair


def as_column(x: Array | None) -> Array | None:
    """Numbers of tokens [*batch, C] as a column [*batch, C, 1]."""
    return None if x is None else x[..., None]


def from_column(x: Array | None) -> Array | None:
    return None if x is None else x[..., 0]


class Later(NamedTuple):
    """How the weights of later tokens decay, for queries that see them. Causal attention has none of this."""

    # [*batch, C, 1] bool: a document starts, so earlier queries see neither this token nor any after it; None: nowhere.
    starts: Array | None = None
    resets: Array | None = None  # [*batch, C, 1] bool: true where a token erases all later ones; None: no token does
    log_decay: Array | None = None  # [*batch, C, 1]: log factor of all later weights, 0 at resets; None: no gate


class Keys(NamedTuple):
    """Keys with their values, and how each makes earlier weights decay. All are sliced along axis -2."""

    k: Array  # [*batch, C, K]
    values: Array  # [*batch, C, V]
    resets: Array | None = None  # [*batch, C, 1] bool: true where a token erases all earlier ones; None: no token does
    log_decay: Array | None = None  # [*batch, C, 1]: log factor of all earlier weights, 0 at resets; None: no gate
    later: Later | None = None  # None: queries see keys up to their own

    @classmethod
    def of_tokens(cls, k: Array, values: Array, resets: Array | None, log_decay: Array | None) -> "Keys":
        """Keys [*batch, T, ...] with resets and log decays [*batch, T]."""
        return cls(k, values, as_column(resets), as_column(log_decay))

    def per_token(self) -> tuple[Array | None, Array | None]:
        """Resets and log decays, [*batch, T] each."""
        return from_column(self.resets), from_column(self.log_decay)

    @property
    def forgets(self) -> bool:
        """Whether anything may be left out or counted less."""
        return self.resets is not None or self.log_decay is not None or self.later is not None

    def log_decays(self) -> list[Array]:
        """The log decay of earlier tokens, and that of later ones, without those that are None."""
        found = self.log_decay, None if self.later is None else self.later.log_decay
        return [x for x in found if x is not None]

    def decays(self) -> tuple[ChunkDecay, ...]:
        """Decay of the keys of a chunk and of all before it; and, if queries see later tokens, of all after it."""
        like = self.k.shape[-2], self.k.dtype
        before = chunk_decay(*self.per_token(), *like)
        if self.later is None:
            return (before,)
        starts, resets, log_decay = map(from_column, self.later)
        return before, chunk_decay_after(starts, resets, log_decay, *like)


def pad_keys(domain: Domain[Any], keys: Keys, n_missing: int) -> Keys:
    """Keys with n_missing more at their end, which add nothing."""
    if n_missing == 0:
        return keys

    def pad(x: Any, value: float) -> Any:
        widths = [(0, 0)] * (keys.k.ndim - 2) + [(0, n_missing), (0, 0)]
        return None if x is None else jnp.pad(x, widths, constant_values=value)

    k, values, resets, log_decay, later = keys
    if later is not None:
        later = Later(pad(later.starts, False), pad(later.resets, False), pad(later.log_decay, 0.0))
    return Keys(pad(k, NEG_INF), pad(values, domain.zero), pad(resets, False), pad(log_decay, 0.0), later)


# ---- summaries ------------------------------------------------------------------------------------


class KeyFactors(NamedTuple):
    """Factors of a chunk's own summary, and its shifts."""

    kf: Array  # [*batch, C, K]: weights of keys at the end of the chunk, relative to c
    vf: Array  # [*batch, C, V]: factors of values, relative to b
    shifts: Shifts
    own: Shifts  # as `own_shifts`: c without a decay


def own_shifts(domain: Domain[Any], keys: Keys) -> Shifts:
    """The largest key of each feature and the shift of the values."""
    return Shifts(lax.stop_gradient(jnp.max(keys.k, axis=-2)), domain.value_shift(keys.values))


def key_factors(domain: Domain[Any], keys: Keys, decay: ChunkDecay) -> KeyFactors:
    """Factors of a chunk's keys and values, relative to shifts of their own."""
    own, until_end = own_shifts(domain, keys), decay.keys_at_end[..., None]
    c = lax.stop_gradient(jnp.max(keys.k + until_end, axis=-2)) if keys.forgets else own.c
    kf = jnp.exp((keys.k - finite(c)[..., None, :]) + until_end)
    return KeyFactors(kf, domain.factor(keys.values, own.b), Shifts(c, own.b), own)


def own_sums(factors: KeyFactors) -> Sums:
    """A chunk's own M_s [*batch, K, V] and M_z [*batch, K]."""
    return Sums(einsum("...sk,...sv->...kv", factors.kf, factors.vf), jnp.sum(factors.kf, axis=-2))


class Scales(NamedTuple):
    """Factors of sums, at most 1: of M_s for each key and each value feature, and of M_z for each key feature."""

    s: Array  # [*batch, K]
    v: Array | None  # [*batch, V]; None: 1
    z: Array  # [*batch, K]


class Merged(NamedTuple):
    """The shifts of a merged summary, and the factors of the sums of both parts."""

    shifts: Shifts
    scale_older: Scales
    scale_newer: Scales


def merge(older: Shifts, log_decay: Array, newer: Shifts) -> Merged:
    """How summaries merge, the older one's weights multiplied by exp(log_decay [*batch]) <= 1.

    Where all weights of a part become smaller, what its values add does too, so its shift b falls by as much as its
    largest weight. Shifts are constants.
    """
    c = lax.stop_gradient(jnp.maximum(older.c + log_decay[..., None], newer.c))
    factors = log_rescaling(older.c, c, log_decay[..., None]), log_rescaling(newer.c, c)
    if older.b is None or newer.b is None:
        return Merged(Shifts(c, None), *(Scales(jnp.exp(x), None, jnp.exp(x)) for x in factors))
    tops = [jnp.max(x, axis=-1, keepdims=True) for x in factors]
    b = lax.stop_gradient(jnp.maximum(older.b + tops[0], newer.b + tops[1]))
    scales = [
        Scales(jnp.exp(x - finite(top)), jnp.exp(log_rescaling(old, b, top)), jnp.exp(x))
        for old, x, top in zip((older.b, newer.b), factors, tops, strict=True)
    ]
    return Merged(Shifts(c, b), *scales)


def log_rescaling(old: Array, new: Array, log_decay: Array | float = 0.0) -> Array:
    """Logarithm of the factor <= 1 that takes what is relative to `old` to `new` >= old + log_decay.

    Differences of shifts are exact where their sums with a decay would be rounded.
    """
    return jnp.where(old == NEG_INF, NEG_INF, (finite(old) - finite(new)) + log_decay)


def scale(sums: Sums, scales: Scales) -> Sums:
    """Sums times their factors; of gradients of what is scaled, the way back."""
    return Sums(scale_values(sums.s * scales.s[..., :, None], scales.v), sums.z * scales.z)


def scale_values(s: Array, factor: Array | None) -> Array:
    """s [*batch, N, V] times a factor of each value feature (None: 1)."""
    return s if factor is None else s * factor[..., None, :]


def add(sums: Sums, more: Sums) -> Sums:
    return Sums(sums.s + more.s, sums.z + more.z)


def side_by_side(sums: Sequence[Sums], shifts: Sequence[Shifts]) -> tuple[Sums, Array | None]:
    """(the sums of n summaries as those of one with n K key features, its shift b); of one summary its own."""
    bs = [each.b for each in shifts if each.b is not None]
    b = reduce(jnp.maximum, bs) if bs else None
    if len(sums) == 1:
        return sums[0], b
    s = [scale_values(each.s, rescaling(part.b, b)) for each, part in zip(sums, shifts, strict=True)]
    return Sums(jnp.concatenate(s, axis=-2), jnp.concatenate([each.z for each in sums], axis=-1)), b


# ---- what queries read ----------------------------------------------------------------------------


class Weights(NamedTuple):
    """Weights of all that a chunk's queries see, relative to exp(r)."""

    outside: Array  # [*batch, C, K]: of the summary before the chunk; [*batch, C, 2K] with that after it
    inside: Array  # [*batch, C, C]: of the chunk's keys; 0 of those that a query does not see


class QueryWeights(NamedTuple):
    """The exponent that the weights of each query are relative to, and their sums by key feature."""

    r: Array  # [*batch, C]: about the largest exponent; -inf where a query sees nothing
    by_feature: Array  # [*batch, C, K]: about the weight of each feature


def fast_weights(
    q: Array, k: Array, decays: Sequence[ChunkDecay], own_c: Array, cs: Sequence[Array]
) -> tuple[Weights, QueryWeights]:
    """Weights by products, for keys whose largest are own_c [*batch, K], and a summary with shifts c per decay."""
    top = reduce(jnp.maximum, (*cs, own_c))
    exponents, r = centered_sum(q, top[..., None, :])
    qf, kf = jnp.exp(exponents), jnp.exp(k - finite(own_c)[..., None, :])
    factor = lambda shift: jnp.exp(log_rescaling(shift, top))[..., None, :]
    between = jnp.exp(visible_log_decay(decay.keys_at_queries for decay in decays))
    inside = einsum("...tk,...sk->...ts", qf * factor(own_c), kf) * between
    parts = zip(decays, cs, strict=True)
    outside = [(qf * factor(c)) * jnp.exp(decay.before_at_queries)[..., None] for decay, c in parts]
    return Weights(jnp.concatenate(outside, axis=-1), inside), QueryWeights(r, qf)


def visible_log_decay(each: Iterable[Array]) -> Array:
    """Log decay of each key at each query, from that in each direction: -inf in all but the one that it is seen in."""
    return reduce(jnp.maximum, each)


class _Outside(NamedTuple):
    """All that the queries of a subchunk see outside of it in one direction, with log decays.

    A key of another subchunk decays by to_start until the start of the query's subchunk, then by from_start.
    """

    c: Array  # [*batch, 1, K]: shifts of the sums outside of the chunk
    log_decay: Array  # [*batch, C, 1]: of these, at queries
    to_start: Array  # [*batch, N, C, 1]
    from_start: Array  # [*batch, N, M, 1]
    largest: Array  # [*batch, N, 1, K]: of the keys of other subchunks, at the start of this one

    @classmethod
    def of(cls, k: Array, decay: ChunkDecay, c: Array, size: int) -> "_Outside":
        start = decay.subchunk_starts(size)
        to_start = start.log_decay_since(decay.keys.tokens(lambda x: x[..., None, :]))[..., None]
        from_start = decay.queries.tokens(lambda x: _subchunks(x, size)).log_decay_since(start)[..., None]
        largest = lax.stop_gradient(jnp.max(k[..., None, :, :] + to_start, axis=-2, keepdims=True))
        return cls(c[..., None, :], decay.before_at_queries[..., None], to_start, from_start, largest)


def _subchunks(x: Array, size: int) -> Array:
    """[..., N, M] of [..., C], in subchunks of M = `size` tokens."""
    return x.reshape(*x.shape[:-1], -1, size)


def exact_weights(
    q: Array, k: Array, decays: Sequence[ChunkDecay], cs: Sequence[Array]
) -> tuple[Weights, QueryWeights]:
    """As `fast_weights`, exact at every dynamic range. Underflow takes nothing that matters beside a query's Z.

    Among the few tokens of a subchunk, every exponent of a query, a key and a feature is formed before its exponential.
    All keys of earlier subchunks are seen by all queries of one, so that there a product of factors, relative to the
    largest of these keys, takes nothing from the largest weight. So are those of later subchunks, if they are seen.

    Axes: N subchunks of M tokens.
    """
    n_tokens = k.shape[-2]
    size = next(size for size in range(min(SUBCHUNK, n_tokens), 0, -1) if n_tokens % size == 0)
    at = lambda positions, expand: positions.tokens(lambda x: expand(_subchunks(x, size)))
    within = visible_log_decay(
        at(x.queries, lambda x: x[..., :, None]).log_decay_since(at(x.keys, lambda x: x[..., None, :])) for x in decays
    )[..., None]  # [*batch, N, M, M, 1], of a key of the query's subchunk
    outside = [_Outside.of(k, decay, c, size) for decay, c in zip(decays, cs, strict=True)]
    r = _largest_exponents(q, k, within, outside)

    relative, error = center_queries(q, r)
    cut = partial(_subchunks_of_tokens, size=size)
    weights_outside = [jnp.exp(((relative + x.c) + error) + x.log_decay) for x in outside]
    weights_within = jnp.exp((pairs(cut(relative), cut(k)) + cut(error)[..., :, None, :]) + within)
    # Chosen, not multiplied: with a batch of 1, jaxlib 0.10.2 crashes on CPUs in the gradient of a product by a mask.
    is_own_subchunk = jnp.eye(n_tokens // size, dtype=bool)[:, None, :, None]
    inside = jnp.where(is_own_subchunk, jnp.sum(weights_within, axis=-1)[..., None, :], 0)
    inside = inside.reshape(*q.shape[:-1], n_tokens)
    features = jnp.sum(weights_within, axis=-2)
    for x in outside:
        qf = jnp.exp(((cut(relative) + x.largest) + cut(error)) + x.from_start)
        kf = jnp.exp((k[..., None, :, :] - finite(x.largest)) + x.to_start)
        inside = einsum("...tk,...sk->...ts", qf, kf).reshape(*q.shape[:-1], n_tokens) + inside
        features = qf + features
    by_feature = reduce(jnp.add, weights_outside) + features.reshape(q.shape)
    return Weights(jnp.concatenate(weights_outside, axis=-1), inside), QueryWeights(r, by_feature)


def _largest_exponents(q: Array, k: Array, within: Array, outside: Sequence[_Outside]) -> Array:
    """The largest exponent that each query sees, [*batch, C]: in its subchunk, of others, and outside the chunk."""
    cut = partial(_subchunks_of_tokens, size=within.shape[-2])
    r = jnp.max(pairs(cut(q), cut(k)) + within, axis=(-2, -1))
    for x in outside:
        r = jnp.maximum(r, jnp.max(cut(q) + x.largest + x.from_start, axis=-1))
    r = r.reshape(q.shape[:-1])
    for x in outside:
        r = jnp.maximum(r, jnp.max(q + x.c + x.log_decay, axis=-1))
    return lax.stop_gradient(r)


def _subchunks_of_tokens(x: Array, size: int) -> Array:
    """[*batch, N, M, K] of [*batch, C, K]."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def pairs(q: Array, k: Array) -> Array:
    """Exponents of all pairs of a query and a key, by feature: [..., M, M, K] of [..., M, K]."""
    return q[..., :, None, :] + k[..., None, :, :]


def center_queries(q: Array, r: Array) -> tuple[Array, Array]:
    """q - r [*batch, C, K] in two parts, as if it were not rounded; the second has no gradient.

    Added to a key, which is about as large, the first part is exact.
    """
    relative, error = two_sum(q, -finite(r)[..., None])
    return relative, lax.stop_gradient(error)


def read_sums(weights: Array, m: Sums) -> Sums:
    """S [*batch, C, V] and Z [*batch, C] of queries with weights [*batch, C, K] of the sums m alone."""
    # Also products with vectors: XLA's CPU library takes five times as long for sums of elementwise products.
    return Sums(einsum("...tk,...kv->...tv", weights, m.s), einsum("...tk,...k->...t", weights, m.z))


class ValueScales(NamedTuple):
    """The shift of values that queries read, and the factors of both parts; None for real values."""

    b: Array | None  # [*batch, V]
    outside: Array | None
    own: Array | None

    @classmethod
    def of(cls, outside: Array | None, own: Array | None) -> "ValueScales":
        b = None if outside is None or own is None else jnp.maximum(outside, own)
        return cls(b, rescaling(outside, b), rescaling(own, b))


def rescaling(old: Array | None, new: Array | None) -> Array | None:
    """The factor that makes what is relative to the shift `old` relative to `new` >= `old`."""
    return None if old is None or new is None else jnp.exp(log_rescaling(old, new))


def query_sums(weights: Weights, vf: Array, m: Sums, scales: ValueScales) -> Sums:
    """S [*batch, C, V] and Z [*batch, C]."""
    s, z = read_sums(weights.outside, m)
    own = scale_values(einsum("...ts,...sv->...tv", weights.inside, vf), scales.own)
    return Sums(scale_values(s, scales.outside) + own, z + jnp.sum(weights.inside, axis=-1))


# ---- gradients ------------------------------------------------------------------------------------


def weights_grad(dsums: Sums, vf: Array, m: Sums, scales: ValueScales) -> Weights:
    """Gradients of the weights, from those of the queries' S and Z."""
    outside = einsum("...tv,...kv->...tk", scale_values(dsums.s, scales.outside), m.s)
    inside = einsum("...tv,...sv->...ts", scale_values(dsums.s, scales.own), vf)
    return Weights(outside + dsums.z[..., None] * m.z[..., None, :], inside + dsums.z[..., None])


def outside_grad(weights: Weights, dsums: Sums, scales: ValueScales) -> Sums:
    """Part of the gradient of the sums around a chunk that comes from its queries."""
    s = einsum("...tk,...tv->...kv", weights.outside, scale_values(dsums.s, scales.outside))
    return Sums(s, einsum("...tk,...t->...k", weights.outside, dsums.z))


class KeyGrads(NamedTuple):
    """Gradients of a chunk's keys and values."""

    k: Array
    values: Array


def summary_grad(factors: KeyFactors, dsums: Sums) -> KeyGrads:
    """Gradients of keys and of the factors of values, from those of the chunk's own sums."""
    dk = factors.kf * (einsum("...sv,...kv->...sk", factors.vf, dsums.s) + dsums.z[..., None, :])
    return KeyGrads(dk, einsum("...sk,...kv->...sv", factors.kf, dsums.s))


def values_grad(weights: Weights, dsums: Sums, scales: ValueScales) -> Array:
    """Gradient of the factors of values, from that of the queries' S."""
    return einsum("...ts,...tv->...sv", weights.inside, scale_values(dsums.s, scales.own))


def later_totals(weights: Weights, dweights: Weights) -> tuple[Array, Array]:
    """Sums [*batch, C] over features of dq and dk, of what queries read of later tokens alone."""
    inside = jnp.triu(weights.inside * dweights.inside, 1)
    _, after = jnp.split(weights.outside * dweights.outside, 2, axis=-1)
    return sum_features(after) + jnp.sum(inside, axis=-1), jnp.sum(inside, axis=-2)


def end_total(scales: Scales, m: Sums, dend: Sums, dk: Array) -> Array:
    """Gradient [*batch] of the log decay until the end of a chunk, of the sums m before it and of its keys alike.

    Args:
      scales: the factors of the sums m in those after the chunk.
      dend: gradient of the sums after the chunk; dk: the part [*batch, C, K] of the keys' gradient that it makes.
    """
    v = jnp.ones(m.s.shape[-1:], m.s.dtype) if scales.v is None else scales.v
    # The factors first: where nothing is kept, the gradient times the sum may be beyond float32.
    s = einsum("...kv,...v->...k", (m.s * scales.s[..., None]) * dend.s, v)
    return sum_features(s + (m.z * scales.z) * dend.z) + jnp.sum(sum_features(dk), axis=-1)


def correct_query_grad(dq: Array, feature_weights: Array, total: Array | float) -> Array:
    """dq, corrected to its exact sum `total` [*batch, C] over features, which have about these weights [*batch, C, K].

    Where weights and values hardly differ, dq is small beside its rounding error, which this removes.
    """
    surplus = jnp.sum(dq, axis=-1) - total
    return dq - feature_weights * safe_divide(surplus, jnp.sum(feature_weights, axis=-1))[..., None]


def sum_features(x: Array) -> Array:
    """Sum over the last axis, as a product: see `read_sums`."""
    return einsum("...k,k->...", x, jnp.ones(x.shape[-1], x.dtype))
