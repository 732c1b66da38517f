"""The mathematics of one chunk of tokens, forward and backward: no loops, no buffers. Derivation: docs/attention.md.

Let c >= k and b >= log v be shifts, the largest exponents so far, and r[t] = max_k(q[t,k] + c[k]). Then every factor is
at most 1, and the sums M of all tokens before the chunk are at most 1 per token:

    qf = exp(q + c - r)     kf = exp(k - c)     vf = exp(log v - b)     A = tril(qf kf^T)
    S = A vf + qf M_s       Z = A 1 + qf M_z    (a query reads its own chunk, and the sums of all before it)
    M_s' = M_s + kf^T vf    M_z' = M_z + kf^T 1 (where c and b rise, M_s and M_z are scaled down)

log y = log(S / Z) + b; the state is h_s = log M_s + c + b, h_z = log M_z + c. For real values vf = v, b = 0, y = S / Z.
What differs between the two is in `values`.

The backward pass has S, Z and M. With dS = dL/dS = (dL/dlog y) / S and D = dL/dM, every gradient is a matmul whose
terms are posterior weights <= 1 times cotangents.

Axes: C tokens of the chunk, K key features, V value features; `*batch` is any leading axes, the chunks of a group too.
`naive_chunk` has the same mathematics on one page.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import NEG_INF, ShiftedLog, associative_scan, centered_sum, finite
from heinsen.ops.decay import ChunkDecay, chunk_decay, decay_grad, document_decay
from heinsen.ops.values import Shifts, Sums, Values, einsum, safe_divide, safe_log, shift_decay


class Keys(NamedTuple):
    """Keys with their values, and what each leaves of the weights before it. All are sliced along axis -2."""

    k: Array  # [*batch, C, K]
    values: Array  # [*batch, C, V]
    resets: Array | None = None  # [*batch, C, 1] bool: nothing, as where a document starts; None: nowhere
    log_decay: Array | None = None  # [*batch, C, 1], 0 at resets; None: all of it

    def decay(self) -> ChunkDecay | None:
        """What is left of the keys of a chunk, and of the sums before it; None: all."""
        resets = None if self.resets is None else self.resets[..., 0]
        if self.log_decay is not None:
            return chunk_decay(self.log_decay[..., 0], resets)
        return None if resets is None else document_decay(resets, self.k.dtype)


def pad_keys(kind: Values[Any], keys: Keys, n_missing: int) -> Keys:
    """Keys with n_missing more at their end, which add nothing."""
    if n_missing == 0:
        return keys

    def pad(x: Any, value: float) -> Any:
        widths = [(0, 0)] * (keys.k.ndim - 2) + [(0, n_missing), (0, 0)]
        return None if x is None else jnp.pad(x, widths, constant_values=value)

    k, values, resets, log_decay = keys
    return Keys(pad(k, NEG_INF), pad(values, kind.zero), pad(resets, False), pad(log_decay, 0.0))


# ---- shifts ---------------------------------------------------------------------------------------


class DecayShifts(NamedTuple):
    """Shifts of a chunk that forgets, which may be lower than those of its queries."""

    after: Shifts  # of the sums after the chunk
    own_b: Array | None  # [*batch, V]: of its own values


class ChunkShifts(NamedTuple):
    """Shifts of a chunk's factors and of the sums around it. Where nothing is forgotten all are the same."""

    reading: Shifts  # of what queries read: of the sums before the chunk, and of its own keys and values
    decay: DecayShifts | None = None

    @property
    def after(self) -> Shifts:
        return self.reading if self.decay is None else self.decay.after

    @property
    def own_b(self) -> Array | None:
        return self.reading.b if self.decay is None else self.decay.own_b


class OwnShifts(NamedTuple):
    """Shifts that cover a chunk's own keys and values."""

    reading: Shifts
    c_end: Array | None  # [*batch, K]: of its keys after the chunk; None where nothing is forgotten
    log_kept: Array | None  # [*batch, 1]: log of what the chunk leaves of the sums before it


def own_shifts(kind: Values[Any], keys: Keys) -> OwnShifts:
    """Shifts of one chunk alone."""
    reading = Shifts(jnp.max(keys.k, axis=-2), kind.largest(keys.values))
    decay = keys.decay()
    if decay is None:
        return OwnShifts(reading, None, None)
    c_end = jnp.max(keys.k + decay.log_until_end[..., None], axis=-2)
    return OwnShifts(reading, c_end, decay.log_total[..., None])


def move_shifts(before: Shifts, own: OwnShifts, axis: int) -> ChunkShifts:
    """Shifts of chunks that follow sums relative to `before`, in turn along `axis`."""
    if own.c_end is None or own.log_kept is None:
        return ChunkShifts(jax.tree.map(lambda x, own: running_max(x, own, None, axis), before, own.reading))
    cover = lambda x, after, own: jnp.maximum(preceding(after, x, axis), own)
    after_c = running_max(before.c, own.c_end, own.log_kept, axis)
    reading_c = cover(before.c, after_c, own.reading.c)
    largest = largest_share(reading_c, own.log_kept, after_c)
    after_b = jax.tree.map(lambda b, own_b: running_max(b, own_b, largest, axis), before.b, own.reading.b)
    reading_b = jax.tree.map(cover, before.b, after_b, own.reading.b)
    return ChunkShifts(Shifts(reading_c, reading_b), DecayShifts(Shifts(after_c, after_b), own.reading.b))


def move_shifts_once(before: Shifts, own: OwnShifts) -> ChunkShifts:
    """Shifts of one chunk that follows sums relative to `before`."""
    reading = jax.tree.map(jnp.maximum, before, own.reading)
    if own.c_end is None or own.log_kept is None:
        return ChunkShifts(reading)
    after_c = jnp.maximum(before.c + own.log_kept, own.c_end)
    largest = largest_share(reading.c, own.log_kept, after_c)
    after_b = jax.tree.map(lambda b, own_b: jnp.maximum(b + largest, own_b), before.b, own.reading.b)
    return ChunkShifts(reading, DecayShifts(Shifts(after_c, after_b), own.reading.b))


def log_shares_kept(c: Array, log_kept: Array, after_c: Array) -> Array:
    """Log of the factors [*batch, K] <= 1 that take weights relative to c to after_c >= c + log_kept.

    Differences of shifts are exact where their sums with a decay would be rounded.
    """
    return jnp.where(c == NEG_INF, NEG_INF, (finite(c) - finite(after_c)) + log_kept)


def largest_share(c: Array, log_kept: Array, after_c: Array) -> Array:
    """Log [*batch, 1] of the largest of these factors.

    No mean keeps a larger share of its older values, so their shift b may fall by as much.
    """
    return lax.stop_gradient(jnp.max(log_shares_kept(c, log_kept, after_c), axis=-1, keepdims=True))


def running_max(first: Array, x: Array, fall: Array | None, axis: int) -> Array:
    """m[n] = max(m[n-1] + fall[n], x[n]) along `axis`, from m[-1] = first, which lacks the axis (fall None: 0)."""

    def combine(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        return left[0] + right[0], jnp.maximum(left[1] + right[0], right[1])

    first = jnp.expand_dims(first, axis)
    if fall is None:
        return lax.cummax(jnp.maximum(first, x), axis=axis)
    total, largest = associative_scan(combine, (fall, x), axis=axis)
    return jnp.maximum(first + total, largest)


def preceding(x: Array, first: Array, axis: int) -> Array:
    """The entry before each of x along `axis`, and `first`, which lacks the axis, before the first one."""
    return jnp.concatenate([jnp.expand_dims(first, axis), lax.slice_in_dim(x, 0, -1, axis=axis)], axis)


def following(x: Array, last: Array, axis: int) -> Array:
    """The entry after each of x along `axis`, and `last`, which lacks the axis, after the last one."""
    return jnp.concatenate([lax.slice_in_dim(x, 1, None, axis=axis), jnp.expand_dims(last, axis)], axis)


# ---- factors --------------------------------------------------------------------------------------


class QueryFactors(NamedTuple):
    """Exponentials of a chunk's queries."""

    qf: Array  # [*batch, C, K]
    r: Array  # [*batch, C], the shift of qf; -inf where a query sees nothing


class KeyFactors(NamedTuple):
    """Exponentials of a chunk's keys, the factors of its values, and what queries and sums have of them."""

    kf: Array  # [*batch, C, K], as its queries see them
    kf_end: Array  # [*batch, C, K], as they enter the sums
    vf: Array  # [*batch, C, V]
    pairs: Array  # [*batch, C, C]: what each query sees of each key's weight; 0 above the diagonal
    of_before: Array | None  # [*batch, C]: what each query sees of the sums before the chunk; None: all
    log_kept: Array | None  # [*batch, 1]: log of what the chunk leaves of those sums; None: all


def query_factors(q: Array, shifts: ChunkShifts) -> QueryFactors:
    """Factors of a chunk's queries relative to shifts that cover its keys."""
    exponents, r = centered_sum(q, shifts.reading.c[..., None, :])
    return QueryFactors(jnp.exp(exponents), r)


def key_factors(kind: Values[Any], keys: Keys, shifts: ChunkShifts) -> KeyFactors:
    """Factors of a chunk's keys and values relative to shifts that cover them."""
    kf = jnp.exp(keys.k - finite(shifts.reading.c)[..., None, :])
    vf = kind.factor(keys.values, shifts.own_b)
    decay = keys.decay()
    if decay is None:
        return KeyFactors(kf, kf, vf, jnp.tril(jnp.ones((keys.k.shape[-2],) * 2, keys.k.dtype)), None, None)
    kf_end = jnp.exp((keys.k - finite(shifts.after.c)[..., None, :]) + decay.log_until_end[..., None])
    return KeyFactors(kf, kf_end, vf, decay.of_keys, decay.of_state, decay.log_total[..., None])


# ---- sums -----------------------------------------------------------------------------------------


class Scales(NamedTuple):
    """Factors of sums, at most 1: of M_s for each key and each value feature, and of M_z for each key feature."""

    s: Array  # [*batch, K]
    v: Array | None  # [*batch, V]; None: 1
    z: Array  # [*batch, K]


def scale(sums: Sums, scales: Scales | None) -> Sums:
    """Sums times their factors (None: 1)."""
    if scales is None:
        return sums
    return Sums(_scale_values(sums.s * scales.s[..., :, None], scales.v), sums.z * scales.z)


def shift_scales(old: Shifts, new: Shifts) -> Scales:
    """Factors that make sums relative to the shifts `old` relative to `new` >= `old`; or gradients the other way."""
    c = shift_decay(old.c, new.c)
    return Scales(c, jax.tree.map(shift_decay, old.b, new.b), c)


def kept_scales(log_kept: Array | None, old: Shifts, new: Shifts) -> Scales | None:
    """Factors of what is kept of sums relative to the shifts `old`, relative to `new`; None: all, and `old` is `new`.

    log_kept [*batch, 1] is its logarithm. Of gradients, the other way round.
    """
    if log_kept is None:
        return None
    log_share = log_shares_kept(old.c, log_kept, new.c)
    if old.b is None or new.b is None:
        return Scales(jnp.exp(log_share), None, jnp.exp(log_share))
    # The shifts of weights and values move together: each factor is at most 1.
    largest = largest_share(old.c, log_kept, new.c)
    v = jnp.exp(lax.stop_gradient(log_shares_kept(old.b, largest, new.b)))
    return Scales(jnp.exp(log_share - finite(largest)), v, jnp.exp(log_share))


def _scale_values(s: Array, v: Array | None) -> Array:
    return s if v is None else s * v[..., None, :]


def kept_product(kept: Scales, m: Sums, dend: Sums) -> Array:
    """Sum [*batch] over all features of what is kept of the sums m, times the gradients of the sums after the chunk."""
    v = jnp.ones(m.s.shape[-1:], m.s.dtype) if kept.v is None else kept.v
    # The factors first: where nothing is kept, the gradient times the sum may be beyond float32.
    s = einsum("...kv,...v->...k", (m.s * kept.s[..., None]) * dend.s, v)
    return sum_features(s + (m.z * kept.z) * dend.z)


def add_sums(sums: Sums, more: Sums) -> Sums:
    return Sums(sums.s + more.s, sums.z + more.z)


def read_sums(qf: Array, m: Sums) -> Sums:
    """S [*batch, C, V] and Z [*batch, C] of queries that read the sums m alone."""
    # Also products with vectors: XLA's CPU library takes five times as long for sums of elementwise products.
    return Sums(einsum("...tk,...kv->...tv", qf, m.s), einsum("...tk,...k->...t", qf, m.z))


def query_sums(queries: QueryFactors, keys: KeyFactors, m: Sums, shifts: ChunkShifts) -> Sums:
    """S [*batch, C, V] and Z [*batch, C] of a chunk's queries, which read their chunk and the sums m before it."""
    s, z = read_sums(queries.qf, m)
    if keys.of_before is not None:
        s, z = s * keys.of_before[..., None], z * keys.of_before
    a = einsum("...tk,...sk->...ts", queries.qf, keys.kf) * keys.pairs
    own = move_b(einsum("...ts,...sv->...tv", a, keys.vf), shifts.own_b, shifts.reading.b)
    return Sums(s + own, z + jnp.sum(a, axis=-1))


def log_z(queries: QueryFactors, sums: Sums) -> ShiftedLog:
    """log Z [*batch, C] of a chunk's queries."""
    return ShiftedLog(safe_log(sums.z), queries.r)


def chunk_sums(keys: KeyFactors, shifts: ChunkShifts) -> Sums:
    """What a chunk adds to M_s [*batch, K, V] and M_z [*batch, K]."""
    s = einsum("...sk,...sv->...kv", keys.kf_end, keys.vf)
    return Sums(move_b(s, shifts.own_b, shifts.after.b), jnp.sum(keys.kf_end, axis=-2))


def next_sums(keys: KeyFactors, m: Sums, shifts: ChunkShifts) -> Sums:
    """M_s and M_z after a chunk, from those before it."""
    return add_sums(scale(m, kept_scales(keys.log_kept, shifts.reading, shifts.after)), chunk_sums(keys, shifts))


def move_b(s: Array, old: Array | None, new: Array | None) -> Array:
    """Sums of values relative to the shift `old`, made relative to `new`; their gradients, the other way round."""
    return s if old is None or new is None or old is new else _scale_values(s, shift_decay(old, new))


def fill_empty_queries(kind: Values[Any], queries: QueryFactors, sums: Sums, shifts: ChunkShifts) -> Sums:
    """S and Z with 1 where a query sees nothing; their gradients are multiplied by factors that are 0."""
    return kind.fill_empty(sums, queries.r != NEG_INF, shifts.reading.b)


def fill_empty_features(kind: Values[Any], m: Sums, shifts: Shifts) -> Sums:
    """M_s and M_z with 1 where a key feature has seen nothing."""
    return kind.fill_empty(m, shifts.c != NEG_INF, shifts.b)


# ---- gradients ------------------------------------------------------------------------------------


def before_grad(queries: QueryFactors, keys: KeyFactors, dsums: Sums) -> Sums:
    """What a chunk's queries add to the gradient of the sums before it: qf^T dS, qf^T dZ."""
    qf = _mask_tokens(queries.qf, keys.of_before)
    return Sums(einsum("...tk,...tv->...kv", qf, dsums.s), einsum("...tk,...t->...k", qf, dsums.z))


def query_grad(queries: QueryFactors, keys: KeyFactors, m: Sums, dsums: Sums, dpairs: Array) -> Array:
    """dq [*batch, C, K], from the sums m before the chunk and the gradients of the queries' S and Z."""
    dqf = einsum("...tv,...kv->...tk", dsums.s, m.s) + dsums.z[..., None] * m.z[..., None, :]
    dqf = _mask_tokens(dqf, keys.of_before) + einsum("...ts,...sk->...tk", dpairs, keys.kf)
    return queries.qf * dqf


def pair_grad(keys: KeyFactors, dsums: Sums, shifts: ChunkShifts) -> Array:
    """Gradient [*batch, C, C] of the products of a chunk's queries and keys, from those of the queries' S and Z."""
    ds = move_b(dsums.s, shifts.own_b, shifts.reading.b)
    return (einsum("...tv,...sv->...ts", ds, keys.vf) + dsums.z[..., None]) * keys.pairs


class KeyGrads(NamedTuple):
    """Gradients of a chunk's keys and values, and what remains to be added for its log decays."""

    k: Array
    values: Array
    end: Array | None  # [*batch]: sum over keys and features of that part of dk which the sums after the chunk make


def key_grads(
    kind: Values[Any],
    queries: QueryFactors,
    keys: KeyFactors,
    dsums: Sums,
    dpairs: Array,
    dend: Sums,
    shifts: ChunkShifts,
) -> KeyGrads:
    """Gradients of a chunk's keys and values.

    Args:
      dsums, dpairs: gradients of the queries' S and Z, and of their products with keys.
      dend: gradients of the sums after the chunk.
    """
    dend_s = move_b(dend.s, shifts.own_b, shifts.after.b)
    dk = keys.kf_end * (einsum("...sv,...kv->...sk", keys.vf, dend_s) + dend.z[..., None, :])
    dvf = einsum("...sk,...kv->...sv", keys.kf_end, dend_s)
    end = None if keys.log_kept is None else jnp.sum(sum_features(dk), axis=-1)
    a = einsum("...sk,...tk->...st", keys.kf, queries.qf) * jnp.swapaxes(keys.pairs, -1, -2)
    dk = dk + keys.kf * einsum("...ts,...tk->...sk", dpairs, queries.qf)
    dvf = dvf + einsum("...st,...tv->...sv", a, move_b(dsums.s, shifts.own_b, shifts.reading.b))
    return KeyGrads(dk, kind.factor_grad(keys.vf, dvf), end)


def log_decay_grad(dq_total: Array | float, grads: KeyGrads, dkept: Array | None) -> Array | None:
    """Gradient [*batch, C, 1] of a chunk's log decays.

    Their sums G enter as q + G, k - G, and in the sums after the chunk.

    Args:
      dq_total: sum of dq over features.
      dkept: sum [*batch] of the sums kept from before the chunk, times their gradients.
    """
    if grads.end is None or dkept is None:
        return None
    return decay_grad(dq_total - sum_features(grads.k), dkept + grads.end)[..., None]


def query_grad_total(kind: Values[Any], dy: Array, dlog_z: Array | None, shifts: ChunkShifts) -> Array | float:
    """Sum of dq over features: a shift of a query leaves y as it is, and shifts its log Z."""
    return (0.0 if dlog_z is None else dlog_z) - kind.always_zero_grad(dy, shifts.reading.b)


def correct_query_grad(dq: Array, queries: QueryFactors, keys: KeyFactors, m: Sums, total: Array | float) -> Array:
    """dq, corrected to its exact sum `total` [*batch, C] over features (`query_grad_total`).

    Where weights and values hardly differ, dq is small beside its rounding error, which this removes.
    """
    weights = queries.qf * (m.z + jnp.sum(keys.kf, axis=-2))[..., None, :]
    surplus = jnp.sum(dq, axis=-1) - total
    return dq - weights * safe_divide(surplus, jnp.sum(weights, axis=-1))[..., None]


def sum_features(x: Array) -> Array:
    """Sum over the last axis, as a product: see `query_sums`."""
    return einsum("...k,k->...", x, jnp.ones(x.shape[-1], x.dtype))


def _mask_tokens(x: Array, mask: Array | None) -> Array:
    return x if mask is None else x * mask[..., None]
