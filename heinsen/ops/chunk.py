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

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import NEG_INF, ShiftedLog, centered_sum, finite
from heinsen.ops.documents import ChunkMasks, chunk_masks
from heinsen.ops.values import Shifts, Sums, Values, safe_divide, safe_log, shift_decay

# Without HIGHEST, TPUs and GPUs round float32 factors to bfloat16 or TF32.
einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Keys(NamedTuple):
    """Keys with their values, and where documents start among them."""

    k: Array  # [*batch, C, K]
    values: Array  # [*batch, C, V]
    starts: Array | None  # [*batch, C] bool; None: one document


class Tokens(NamedTuple):
    """The tokens of a call or a chunk. Without q there is no output; without keys the state is only read."""

    q: Array | None  # [*batch, C, K]
    keys: Keys | None


class QueryFactors(NamedTuple):
    """Exponentials of a chunk's queries."""

    qf: Array  # [*batch, C, K]
    r: Array  # [*batch, C], the shift of qf; -inf where a query sees nothing


class KeyFactors(NamedTuple):
    """Exponentials of a chunk's keys, the factors of its values, and its masks."""

    kf: Array  # [*batch, C, K]
    vf: Array  # [*batch, C, V]
    masks: ChunkMasks


class Factors(NamedTuple):
    """Factors of a chunk, as far as it has queries and keys."""

    queries: QueryFactors | None
    keys: KeyFactors | None


def compute_factors(kind: Values[Any], chunk: Tokens, shifts: Shifts) -> Factors:
    """Factors of a chunk relative to shifts that cover its keys and values."""
    queries = keys = None
    if chunk.q is not None:
        exponents, r = centered_sum(chunk.q, shifts.c[..., None, :])
        queries = QueryFactors(jnp.exp(exponents), r)
    if chunk.keys is not None:
        k, values, starts = chunk.keys
        kf = jnp.exp(k - finite(shifts.c)[..., None, :])
        keys = KeyFactors(kf, kind.factor(values, shifts.b), chunk_masks(k.shape[-2], starts, k.dtype))
    return Factors(queries, keys)


# ---- shifts and sums ------------------------------------------------------------------------------


def raise_shifts(kind: Values[Any], shifts: Shifts, keys: Keys) -> Shifts:
    """Shifts that also cover a chunk's keys and values."""
    return Shifts(jnp.maximum(shifts.c, jnp.max(keys.k, axis=-2)), kind.raise_shift(shifts.b, keys.values))


def rescale(kind: Values[Any], sums: Sums, old: Shifts, new: Shifts) -> Sums:
    """Sums relative to the shifts `old`, made relative to `new` >= `old`; their gradients, the other way round."""
    decay = shift_decay(old.c, new.c)
    return Sums(kind.rescale(sums.s * decay[..., :, None], old.b, new.b), sums.z * decay)


def add_sums(sums: Sums, more: Sums | None) -> Sums:
    return sums if more is None else Sums(sums.s + more.s, sums.z + more.z)


def mask_sums(sums: Sums, keeps_state: Array | None) -> Sums:
    """A state's sums, or their gradients, where no document starts in the chunk; else 0."""
    return sums if keeps_state is None else Sums(sums.s * keeps_state[..., None], sums.z * keeps_state)


def query_sums(queries: QueryFactors, keys: KeyFactors | None, m: Sums) -> Sums:
    """S [*batch, C, V] and Z [*batch, C] of a chunk's queries; m are the sums before the chunk."""
    qf = _mask(queries.qf, keys and keys.masks.reads_state)
    # Also products with vectors: XLA's CPU library takes five times as long for sums of elementwise products.
    s, z = einsum("...tk,...kv->...tv", qf, m.s), einsum("...tk,...k->...t", qf, m.z)
    if keys is None:
        return Sums(s, z)
    a = einsum("...tk,...sk->...ts", queries.qf, keys.kf) * keys.masks.causal
    return Sums(s + einsum("...ts,...sv->...tv", a, keys.vf), z + jnp.sum(a, axis=-1))


def query_log_z(queries: QueryFactors, sums: Sums) -> ShiftedLog:
    """log Z [*batch, C] of a chunk's queries."""
    return ShiftedLog(safe_log(sums.z), queries.r)


def chunk_sums(keys: KeyFactors | None) -> Sums | None:
    """What a chunk adds to M_s [*batch, K, V] and M_z [*batch, K]."""
    if keys is None:
        return None
    kf = _mask(keys.kf, keys.masks.enters_state)
    return Sums(einsum("...sk,...sv->...kv", kf, keys.vf), jnp.sum(kf, axis=-2))


def next_sums(keys: KeyFactors | None, m: Sums) -> Sums:
    """M_s and M_z after a chunk, from those before it."""
    return add_sums(mask_sums(m, keys and keys.masks.keeps_state), chunk_sums(keys))


def fill_empty_queries(kind: Values[Any], queries: QueryFactors, sums: Sums, shifts: Shifts) -> Sums:
    """S and Z with 1 where a query sees nothing; their gradients are multiplied by factors that are 0."""
    return kind.fill_empty(sums, queries.r != NEG_INF, shifts.b)


def fill_empty_features(kind: Values[Any], m: Sums, shifts: Shifts) -> Sums:
    """M_s and M_z with 1 where a key feature has seen nothing."""
    return kind.fill_empty(m, shifts.c != NEG_INF, shifts.b)


# ---- gradients ------------------------------------------------------------------------------------


def query_sums_grad(queries: QueryFactors, keys: KeyFactors | None, dsums: Sums) -> Sums:
    """What a chunk's queries add to the gradient of the sums before it: qf^T dS, qf^T dZ."""
    qf = _mask(queries.qf, keys and keys.masks.reads_state)
    return Sums(einsum("...tk,...tv->...kv", qf, dsums.s), einsum("...tk,...t->...k", qf, dsums.z))


def query_grad(queries: QueryFactors, keys: KeyFactors | None, m: Sums, dsums: Sums) -> Array:
    """dq [*batch, C, K], from the sums m before the chunk and the gradients of the queries' S and Z."""
    dqf = einsum("...tv,...kv->...tk", dsums.s, m.s) + dsums.z[..., None] * m.z[..., None, :]
    dqf = _mask(dqf, keys and keys.masks.reads_state)
    if keys is not None:
        dqf = dqf + einsum("...ts,...sk->...tk", _pair_grad(keys, dsums), keys.kf)
    return queries.qf * dqf


def key_grads(
    kind: Values[Any], queries: QueryFactors | None, keys: KeyFactors, dsums: Sums | None, dend: Sums
) -> Keys:
    """Gradients of a chunk's keys and values.

    Args:
      dsums: gradients of the queries' S and Z; None without queries.
      dend: gradients of the sums after the chunk.
    """
    kf, vf, masks = keys
    dkf = _mask(einsum("...sv,...kv->...sk", vf, dend.s) + dend.z[..., None, :], masks.enters_state)
    dvf = einsum("...sk,...kv->...sv", _mask(kf, masks.enters_state), dend.s)
    if queries is not None and dsums is not None:
        a = einsum("...sk,...tk->...st", kf, queries.qf) * jnp.swapaxes(masks.causal, -1, -2)
        dkf = dkf + einsum("...ts,...tk->...sk", _pair_grad(keys, dsums), queries.qf)
        dvf = dvf + einsum("...st,...tv->...sv", a, dsums.s)
    return Keys(kf * dkf, kind.factor_grad(vf, dvf), None)


def _pair_grad(keys: KeyFactors, dsums: Sums) -> Array:
    """Gradient [*batch, C, C] of the weight A of each query and key of a chunk. XLA computes it once for both users."""
    return (einsum("...tv,...sv->...ts", dsums.s, keys.vf) + dsums.z[..., None]) * keys.masks.causal


def query_grad_total(kind: Values[Any], dy: Array, dlog_z: Array | None, shifts: Shifts) -> Array | float:
    """Sum of dq over features: a shift of a query leaves y as it is, and shifts its log Z."""
    return (0.0 if dlog_z is None else dlog_z) - kind.always_zero_grad(dy, shifts.b)


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


def _mask(x: Array, mask: Array | None) -> Array:
    return x if mask is None else x * mask
