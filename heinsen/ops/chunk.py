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

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import NEG_INF, ShiftedLog, associative_scan, centered_sum, finite
from heinsen.ops.decay import chunk_decay, decay_grad
from heinsen.ops.documents import ChunkMasks, chunk_masks
from heinsen.ops.values import Shifts, Sums, Values, safe_divide, safe_log, shift_decay

# Without HIGHEST, TPUs and GPUs round float32 factors to bfloat16 or TF32.
einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Keys(NamedTuple):
    """Keys with their values, where documents start among them, and what each leaves of the weights before it."""

    k: Array  # [*batch, C, K]
    values: Array  # [*batch, C, V]
    starts: Array | None  # [*batch, C] bool; None: one document
    log_decay: Array | None = None  # [*batch, C, 1], 0 where a document starts; None: all of it


class Tokens(NamedTuple):
    """The tokens of a call or a chunk. Without q there is no output; without keys the state is only read."""

    q: Array | None  # [*batch, C, K]
    keys: Keys | None


def with_decay(tokens: Tokens) -> Tokens:
    """Tokens with log decays of 0 if documents start without a forget gate, for kernels that know one way to forget."""
    keys = tokens.keys
    if keys is None or keys.starts is None or keys.log_decay is not None:
        return tokens
    return tokens._replace(keys=keys._replace(log_decay=jnp.zeros_like(keys.k[..., :1])))


# ---- shifts ---------------------------------------------------------------------------------------


class DecayShifts(NamedTuple):
    """Shifts of a chunk with log decays that may be lower than those of its queries."""

    after: Shifts  # of the sums after the chunk
    own_b: Array | None  # [*batch, V]: of its own values


class ChunkShifts(NamedTuple):
    """Shifts of a chunk's factors and of the sums around it. Without log decays all are the same, and only rise."""

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
    c_end: Array | None  # [*batch, K]: of its keys after the chunk; None without log decays
    log_decay: Array | None  # [*batch, 1]: of the sums before it


def own_shifts(kind: Values[Any], keys: Keys) -> OwnShifts:
    """Shifts of one chunk alone."""
    reading = Shifts(jnp.max(keys.k, axis=-2), kind.largest(keys.values))
    if keys.log_decay is None:
        return OwnShifts(reading, None, None)
    decay = chunk_decay(keys.log_decay[..., 0], keys.starts)
    return OwnShifts(reading, jnp.max(keys.k + decay.log_until_end[..., None], axis=-2), decay.log_total[..., None])


def move_shifts(before: Shifts, own: OwnShifts, axis: int) -> ChunkShifts:
    """Shifts of chunks that follow sums relative to `before`, in turn along `axis`."""
    if own.c_end is None or own.log_decay is None:
        return ChunkShifts(jax.tree.map(lambda x, own: running_max(x, own, None, axis), before, own.reading))
    cover = lambda x, after, own: jnp.maximum(preceding(after, x, axis), own)
    after_c = running_max(before.c, own.c_end, own.log_decay, axis)
    reading_c = cover(before.c, after_c, own.reading.c)
    # The share of older values in any mean falls at least so far, and so may their shift.
    largest = jnp.max(log_shares_kept(reading_c, own.log_decay, after_c), axis=-1, keepdims=True)
    after_b = jax.tree.map(lambda b, own_b: running_max(b, own_b, largest, axis), before.b, own.reading.b)
    reading_b = jax.tree.map(cover, before.b, after_b, own.reading.b)
    return ChunkShifts(Shifts(reading_c, reading_b), DecayShifts(Shifts(after_c, after_b), own.reading.b))


def move_shifts_once(before: Shifts, own: OwnShifts) -> ChunkShifts:
    """Shifts of one chunk that follows sums relative to `before`."""
    reading = jax.tree.map(jnp.maximum, before, own.reading)
    if own.c_end is None or own.log_decay is None:
        return ChunkShifts(reading)
    after_c = jnp.maximum(before.c + own.log_decay, own.c_end)
    # The share of older values in any mean falls at least so far, and so may their shift.
    largest = jnp.max(log_shares_kept(reading.c, own.log_decay, after_c), axis=-1, keepdims=True)
    after_b = jax.tree.map(lambda b, own_b: jnp.maximum(b + largest, own_b), before.b, own.reading.b)
    return ChunkShifts(reading, DecayShifts(Shifts(after_c, after_b), own.reading.b))


def log_shares_kept(c: Array, log_decay: Array, after_c: Array) -> Array:
    """Log of the factors [*batch, K] <= 1 that take weights relative to c to after_c >= c + log_decay.

    Differences of shifts are exact where their sums with a decay would be rounded.
    """
    return jnp.where(c == NEG_INF, NEG_INF, (finite(c) - finite(after_c)) + log_decay)


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


class Kept(NamedTuple):
    """What a chunk leaves of the sums before it."""

    mask: Array | None = None  # [*batch, 1]: 0 where a document starts in the chunk, else 1
    log_decay: Array | None = None  # [*batch, 1]: in logarithms


class KeyFactors(NamedTuple):
    """Exponentials of a chunk's keys, the factors of its values, and what queries and sums have of them."""

    kf: Array  # [*batch, C, K], as its queries see them
    kf_end: Array  # [*batch, C, K], as they enter the sums
    vf: Array  # [*batch, C, V]
    masks: ChunkMasks
    kept: Kept


class Factors(NamedTuple):
    """Factors of a chunk, as far as it has queries and keys."""

    queries: QueryFactors | None
    keys: KeyFactors | None


def compute_factors(kind: Values[Any], chunk: Tokens, shifts: ChunkShifts) -> Factors:
    """Factors of a chunk relative to shifts that cover its keys and values."""
    queries = keys = None
    if chunk.q is not None:
        exponents, r = centered_sum(chunk.q, shifts.reading.c[..., None, :])
        queries = QueryFactors(jnp.exp(exponents), r)
    if chunk.keys is not None:
        keys = _key_factors(kind, chunk.keys, shifts)
    return Factors(queries, keys)


def _key_factors(kind: Values[Any], keys: Keys, shifts: ChunkShifts) -> KeyFactors:
    k, values, starts, log_decay = keys
    kf, vf = jnp.exp(k - finite(shifts.reading.c)[..., None, :]), kind.factor(values, shifts.own_b)
    if log_decay is None:
        masks = chunk_masks(k.shape[-2], starts, k.dtype)
        return KeyFactors(kf, _mask_tokens(kf, masks.enters_state), vf, masks, Kept(mask=masks.keeps_state))
    decay = chunk_decay(log_decay[..., 0], starts)
    kf_end = jnp.exp((k - finite(shifts.after.c)[..., None, :]) + decay.log_until_end[..., None])
    masks = ChunkMasks(decay.of_keys, decay.of_state, None, None)
    return KeyFactors(kf, kf_end, vf, masks, Kept(log_decay=decay.log_total[..., None]))


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


def kept_scales(kept: Kept, shifts: ChunkShifts) -> Scales | None:
    """Factors of what is left after a chunk of the sums before it; of gradients the other way round."""
    if kept.mask is not None:
        return Scales(kept.mask, None, kept.mask)
    if kept.log_decay is None:
        return None
    old, new = shifts.reading, shifts.after
    log_share = log_shares_kept(old.c, kept.log_decay, new.c)
    if old.b is None or new.b is None:
        return Scales(jnp.exp(log_share), None, jnp.exp(log_share))
    # The shifts of weights and values move together: each factor is at most 1.
    largest = lax.stop_gradient(jnp.max(log_share, axis=-1, keepdims=True))
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


def add_sums(sums: Sums, more: Sums | None) -> Sums:
    return sums if more is None else Sums(sums.s + more.s, sums.z + more.z)


def query_sums(queries: QueryFactors, keys: KeyFactors | None, m: Sums, shifts: ChunkShifts) -> Sums:
    """S [*batch, C, V] and Z [*batch, C] of a chunk's queries, from the sums m before it."""
    # Also products with vectors: XLA's CPU library takes five times as long for sums of elementwise products.
    s, z = einsum("...tk,...kv->...tv", queries.qf, m.s), einsum("...tk,...k->...t", queries.qf, m.z)
    if keys is None:
        return Sums(s, z)
    if (reads_state := keys.masks.reads_state) is not None:
        s, z = s * reads_state[..., None], z * reads_state
    a = einsum("...tk,...sk->...ts", queries.qf, keys.kf) * keys.masks.causal
    own = _move_b(einsum("...ts,...sv->...tv", a, keys.vf), shifts, shifts.reading)
    return Sums(s + own, z + jnp.sum(a, axis=-1))


def query_log_z(queries: QueryFactors, sums: Sums) -> ShiftedLog:
    """log Z [*batch, C] of a chunk's queries."""
    return ShiftedLog(safe_log(sums.z), queries.r)


def chunk_sums(keys: KeyFactors | None, shifts: ChunkShifts) -> Sums | None:
    """What a chunk adds to M_s [*batch, K, V] and M_z [*batch, K]."""
    if keys is None:
        return None
    s = einsum("...sk,...sv->...kv", keys.kf_end, keys.vf)
    return Sums(_move_b(s, shifts, shifts.after), jnp.sum(keys.kf_end, axis=-2))


def next_sums(keys: KeyFactors | None, m: Sums, shifts: ChunkShifts) -> Sums:
    """M_s and M_z after a chunk, from those before it."""
    return m if keys is None else add_sums(scale(m, kept_scales(keys.kept, shifts)), chunk_sums(keys, shifts))


def _move_b(s: Array, shifts: ChunkShifts, new: Shifts) -> Array:
    """Sums of a chunk's own values, made relative to the shifts `new`; their gradients, the other way round."""
    if shifts.decay is None or shifts.own_b is None or new.b is None:
        return s
    return _scale_values(s, shift_decay(shifts.own_b, new.b))


def fill_empty_queries(kind: Values[Any], queries: QueryFactors, sums: Sums, shifts: ChunkShifts) -> Sums:
    """S and Z with 1 where a query sees nothing; their gradients are multiplied by factors that are 0."""
    return kind.fill_empty(sums, queries.r != NEG_INF, shifts.reading.b)


def fill_empty_features(kind: Values[Any], m: Sums, shifts: Shifts) -> Sums:
    """M_s and M_z with 1 where a key feature has seen nothing."""
    return kind.fill_empty(m, shifts.c != NEG_INF, shifts.b)


# ---- gradients ------------------------------------------------------------------------------------


def query_sums_grad(queries: QueryFactors, keys: KeyFactors | None, dsums: Sums) -> Sums:
    """What a chunk's queries add to the gradient of the sums before it: qf^T dS, qf^T dZ."""
    qf = _mask_tokens(queries.qf, keys and keys.masks.reads_state)
    return Sums(einsum("...tk,...tv->...kv", qf, dsums.s), einsum("...tk,...t->...k", qf, dsums.z))


def query_grad(queries: QueryFactors, keys: KeyFactors | None, m: Sums, dsums: Sums, dpairs: Array | None) -> Array:
    """dq [*batch, C, K], from the sums m before the chunk and the gradients of the queries' S and Z."""
    dqf = einsum("...tv,...kv->...tk", dsums.s, m.s) + dsums.z[..., None] * m.z[..., None, :]
    dqf = _mask_tokens(dqf, keys and keys.masks.reads_state)
    if keys is not None and dpairs is not None:
        dqf = dqf + einsum("...ts,...sk->...tk", dpairs, keys.kf)
    return queries.qf * dqf


def pair_grad(keys: KeyFactors | None, dsums: Sums, shifts: ChunkShifts) -> Array | None:
    """Gradient [*batch, C, C] of the products of a chunk's queries and keys, from those of the queries' S and Z."""
    if keys is None:
        return None
    ds = _move_b(dsums.s, shifts, shifts.reading)
    return (einsum("...tv,...sv->...ts", ds, keys.vf) + dsums.z[..., None]) * keys.masks.causal


class KeyGrads(NamedTuple):
    """Gradients of a chunk's keys and values, and what remains to be added for its log decays."""

    k: Array
    values: Array
    end: Array | None  # [*batch]: the share of the sums after the chunk in the sum of dk over keys and features


def key_grads(
    kind: Values[Any],
    queries: QueryFactors | None,
    keys: KeyFactors,
    dsums: Sums | None,
    dpairs: Array | None,
    dend: Sums,
    shifts: ChunkShifts,
) -> KeyGrads:
    """Gradients of a chunk's keys and values.

    Args:
      dsums, dpairs: gradients of the queries' S and Z, and of their products with keys; None without queries.
      dend: gradients of the sums after the chunk.
    """
    kf, kf_end, vf, masks, kept = keys
    dend_s = _move_b(dend.s, shifts, shifts.after)
    dk = kf_end * (einsum("...sv,...kv->...sk", vf, dend_s) + dend.z[..., None, :])
    dvf = einsum("...sk,...kv->...sv", kf_end, dend_s)
    end = None if kept.log_decay is None else jnp.sum(sum_features(dk), axis=-1)
    if queries is not None and dsums is not None:
        a = einsum("...sk,...tk->...st", kf, queries.qf) * jnp.swapaxes(masks.causal, -1, -2)
        dk = dk + kf * einsum("...ts,...tk->...sk", dpairs, queries.qf)
        dvf = dvf + einsum("...st,...tv->...sv", a, _move_b(dsums.s, shifts, shifts.reading))
    return KeyGrads(dk, kind.factor_grad(vf, dvf), end)


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


def correct_query_grad(
    dq: Array, queries: QueryFactors, keys: KeyFactors | None, m: Sums, total: Array | float
) -> Array:
    """dq, corrected to its exact sum `total` [*batch, C] over features (`query_grad_total`).

    Where weights and values hardly differ, dq is small beside its rounding error, which this removes.
    """
    z = m.z if keys is None else m.z + jnp.sum(keys.kf, axis=-2)
    weights = queries.qf * z[..., None, :]
    surplus = jnp.sum(dq, axis=-1) - total
    return dq - weights * safe_divide(surplus, jnp.sum(weights, axis=-1))[..., None]


def sum_features(x: Array) -> Array:
    """Sum over the last axis, as a product: see `query_sums`."""
    return einsum("...k,k->...", x, jnp.ones(x.shape[-1], x.dtype))


def _mask_tokens(x: Array, mask: Array | None) -> Array:
    return x if mask is None else x * mask[..., None]
