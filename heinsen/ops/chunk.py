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

from heinsen.logspace import NEG_INF, finite
from heinsen.ops.documents import ChunkMasks, chunk_masks
from heinsen.ops.values import Shifts, Sums, Values, safe_divide, safe_log, shift_decay

# Without HIGHEST, TPUs and GPUs round float32 factors to bfloat16 or TF32.
einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Tokens(NamedTuple):
    """Queries, keys, values and document starts. Without q no output is computed; without k the state is only read."""

    q: Array | None  # [*batch, C, K]
    k: Array | None  # [*batch, C, K]
    values: Array | None  # [*batch, C, V], with k
    starts: Array | None  # [*batch, C] bool; None: one document


class Factors(NamedTuple):
    """Exponentials of a chunk, and its masks; None where the tokens lack what they are made of."""

    qf: Array | None  # [*batch, C, K]
    r: Array | None  # [*batch, C], the shift of qf; -inf where a query sees nothing
    kf: Array | None  # [*batch, C, K]
    vf: Array | None  # [*batch, C, V]
    masks: ChunkMasks | None


def compute_factors(kind: Values[Any, Any], chunk: Tokens, shifts: Shifts) -> Factors:
    """Factors of a chunk relative to shifts that cover its keys and values."""
    qf = r = kf = vf = masks = None
    if chunk.q is not None:
        exponent = chunk.q + shifts.c[..., None, :]
        r = lax.stop_gradient(jnp.max(exponent, axis=-1))
        qf = jnp.exp(exponent - finite(r)[..., None])
    if chunk.k is not None:
        kf = jnp.exp(chunk.k - finite(shifts.c)[..., None, :])
        vf = kind.factor(chunk.values, shifts.b)
        masks = chunk_masks(chunk.k.shape[-2], chunk.starts, chunk.k.dtype)
    return Factors(qf, r, kf, vf, masks)


# ---- shifts and sums ------------------------------------------------------------------------------


def raise_shifts(kind: Values[Any, Any], shifts: Shifts, chunk: Tokens) -> Shifts:
    """Shifts that also cover a chunk's keys and values."""
    if chunk.k is None:
        return shifts
    return Shifts(jnp.maximum(shifts.c, jnp.max(chunk.k, axis=-2)), kind.raise_shift(shifts.b, chunk.values))


def rescale(kind: Values[Any, Any], sums: Sums, old: Shifts, new: Shifts) -> Sums:
    """Sums relative to the shifts `old`, made relative to `new` >= `old`; their gradients, the other way round."""
    decay = shift_decay(old.c, new.c)
    return Sums(kind.rescale(sums.s * decay[..., :, None], old.b, new.b), sums.z * decay)


def add_sums(sums: Sums, more: Sums | None) -> Sums:
    return sums if more is None else Sums(sums.s + more.s, sums.z + more.z)


def mask_sums(sums: Sums, keeps_state: Array | None) -> Sums:
    """A state's sums, or their gradients, where no document starts in the chunk; else 0."""
    return sums if keeps_state is None else Sums(sums.s * keeps_state[..., None], sums.z * keeps_state)


def query_sums(f: Factors, m: Sums) -> Sums:
    """S [*batch, C, V] and Z [*batch, C] of a chunk's queries; m is the state before the chunk."""
    qf = _mask(f.qf, f.masks and f.masks.reads_state)
    # Also products with vectors: XLA's CPU library takes five times as long for sums of elementwise products.
    s, z = einsum("...tk,...kv->...tv", qf, m.s), einsum("...tk,...k->...t", qf, m.z)
    if f.masks is None:
        return Sums(s, z)
    a = einsum("...tk,...sk->...ts", f.qf, f.kf) * f.masks.causal
    return Sums(s + einsum("...ts,...sv->...tv", a, f.vf), z + jnp.sum(a, axis=-1))


def query_log_z(f: Factors, sums: Sums) -> Array:
    """log Z [*batch, C] of a chunk's queries."""
    return safe_log(sums.z) + finite(f.r)


def chunk_sums(f: Factors) -> Sums | None:
    """What a chunk adds to M_s [*batch, K, V] and M_z [*batch, K]."""
    if f.masks is None:
        return None
    kf = _mask(f.kf, f.masks.enters_state)
    return Sums(einsum("...sk,...sv->...kv", kf, f.vf), jnp.sum(kf, axis=-2))


def next_sums(f: Factors, m: Sums) -> Sums:
    """M_s and M_z after a chunk, from those before it."""
    return add_sums(mask_sums(m, f.masks and f.masks.keeps_state), chunk_sums(f))


def fill_empty_queries(kind: Values[Any, Any], f: Factors, sums: Sums, shifts: Shifts) -> Sums:
    """S and Z with 1 where a query sees nothing; their gradients are multiplied by factors that are 0."""
    return kind.fill_empty(sums, f.r > NEG_INF, shifts.b)


def fill_empty_features(kind: Values[Any, Any], m: Sums, shifts: Shifts) -> Sums:
    """M_s and M_z with 1 where a key feature has seen nothing."""
    return kind.fill_empty(m, shifts.c > NEG_INF, shifts.b)


# ---- gradients ------------------------------------------------------------------------------------


def query_sums_grad(f: Factors, dsums: Sums | None) -> Sums | None:
    """What a chunk's queries add to the gradient of the sums before it: qf^T dS, qf^T dZ."""
    if dsums is None:
        return None
    qf = _mask(f.qf, f.masks and f.masks.reads_state)
    return Sums(einsum("...tk,...tv->...kv", qf, dsums.s), einsum("...tk,...t->...k", qf, dsums.z))


def token_grads(kind: Values[Any, Any], f: Factors, m: Sums, dsums: Sums | None, dend: Sums) -> Tokens:
    """Gradients of a chunk's tokens.

    Args:
      m: the sums before the chunk.
      dsums: gradients of its queries' S and Z; None without queries.
      dend: gradients of the sums after the chunk.
    """
    dq = dk = dvalues = None
    if dsums is not None:
        ds, dz = dsums.s, dsums.z[..., None]
        dqf = einsum("...tv,...kv->...tk", ds, m.s) + dz * m.z[..., None, :]
        dqf = _mask(dqf, f.masks and f.masks.reads_state)
    if f.masks is not None:
        enters_state = f.masks.enters_state
        dkf = _mask(einsum("...sv,...kv->...sk", f.vf, dend.s) + dend.z[..., None, :], enters_state)
        dvf = einsum("...sk,...kv->...sv", _mask(f.kf, enters_state), dend.s)
        if dsums is not None:
            a = einsum("...sk,...tk->...st", f.kf, f.qf) * jnp.swapaxes(f.masks.causal, -1, -2)
            da = (einsum("...tv,...sv->...ts", ds, f.vf) + dz) * f.masks.causal
            dqf = dqf + einsum("...ts,...sk->...tk", da, f.kf)
            dkf = dkf + einsum("...ts,...tk->...sk", da, f.qf)
            dvf = dvf + einsum("...st,...tv->...sv", a, ds)
        dk, dvalues = f.kf * dkf, kind.factor_grad(f.vf, dvf)
    if dsums is not None:
        dq = f.qf * dqf
    return Tokens(dq, dk, dvalues, None)


def correct_query_grad(
    kind: Values[Any, Any], f: Factors, m: Sums, shifts: Shifts, dq: Array, dy: Array, dlog_z: Array | None
) -> Array:
    """dq, corrected to its exact sum over features: a shift of a query leaves y as it is and shifts its log Z.

    Where weights and values hardly differ, dq is small beside its rounding error, which this removes.
    """
    total = (0.0 if dlog_z is None else dlog_z) - kind.always_zero_grad(dy, shifts.b)
    z = m.z if f.kf is None else m.z + jnp.sum(f.kf, axis=-2)
    weights = f.qf * z[..., None, :]
    surplus = jnp.sum(dq, axis=-1) - total
    return dq - weights * safe_divide(surplus, jnp.sum(weights, axis=-1))[..., None]


def _mask(x: Array, mask: Array | None) -> Array:
    return x if mask is None else x * mask
