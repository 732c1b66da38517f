import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

CHUNK = 64
PIECES = 3
NEG_INF = -jnp.inf
MATRIX, ROWS, COLUMNS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


class Shape(NamedTuple):
    n_chunks: int
    d_key: int
    d_value: int
    log_values: bool
    decay: bool
    interpret: bool

    @property
    def rows(self) -> int:
        return max(64, self.d_key)

    @property
    def tile(self) -> int:
        return min(64, self.d_key, self.d_value)


def pieces_ref(shape, rows, columns):
    transforms = plgpu.TilingTransform((8, shape.tile)), plgpu.SwizzleTransform(2 * shape.tile)
    return plgpu.SMEM((1, PIECES, rows, columns), jnp.bfloat16, transforms=transforms)


def floats_ref(rows, columns):
    tile = min(32, columns)
    return plgpu.SMEM((1, rows, columns), jnp.float32, transforms=(plgpu.TilingTransform((8, tile)), plgpu.SwizzleTransform(4 * tile)))


def store_pieces(ref, x, columns=None):
    for i in range(PIECES):
        piece = x.astype(jnp.bfloat16)
        if columns is None:
            ref[i] = piece
        else:
            ref[i, :, pl.ds(0, columns)] = piece
        x = x - piece.astype(jnp.float32)


class Operand(NamedTuple):
    ref: Any
    rows: int
    columns: int
    transposed: bool = False

    @property
    def T(self):
        return self._replace(transposed=not self.transposed)

    @property
    def shape(self):
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)

    def piece(self, i):
        whole = self.ref.shape[1:] == (self.rows, self.columns)
        ref = self.ref.at[i] if whole else self.ref.at[i, pl.ds(0, self.rows), pl.ds(0, self.columns)]
        return ref

    def at(self, i):
        return plgpu.transpose_ref(self.piece(i), (1, 0)) if self.transposed else self.piece(i)

    def value(self, i):
        x = self.piece(i)[...].astype(jnp.float32)
        return x.T if self.transposed else x


TERMS = [(i, n - i) for n in reversed(range(PIECES)) for i in range(n + 1)]


def matmul(shape, *pairs):
    a, b = pairs[0]
    out = a.shape[0], b.shape[1]
    if shape.interpret:
        return sum(
            jnp.dot(a.value(i), b.value(j), precision=lax.Precision.HIGHEST) for i, j in TERMS for a, b in pairs
        )

    def accumulate(acc):
        for i, j in TERMS:
            for a, b in pairs:
                plgpu.wgmma(acc, a.at(i), b.at(j))
        return acc[...]

    return pl.run_scoped(accumulate, plgpu.ACC(out, jnp.float32))


def load(shape, ref, layout):
    return ref[...] if shape.interpret else plgpu.load(ref, (), layout=layout, optimized=False)


def index(shape, axis):
    size = (CHUNK, CHUNK)
    if shape.interpret:
        return lax.broadcasted_iota(jnp.int32, size, axis)
    return plgpu.broadcasted_iota(jnp.int32, size, axis, layout=MATRIX)


def rows(x, n):  # a number for each row
    return lax.broadcast_in_dim(x, (x.shape[0], n), [0])


def columns(x, n):
    return lax.broadcast_in_dim(x, (n, x.shape[0]), [1])


def finite(x):
    return jnp.where(x == NEG_INF, 0.0, x)


def two_sum(a, b):
    total = a + b
    a_part = finite(total) - finite(b)
    error = (finite(a) - a_part) + (finite(b) - (finite(total) - a_part))
    return total, jnp.where(total == NEG_INF, 0.0, error)


def query_factors(q, c):
    total, error = two_sum(q, columns(c, CHUNK))
    r = jnp.max(total, axis=1)
    return jnp.exp((total - rows(finite(r), q.shape[1])) + error), r


def forward_kernel(shape, q_ref, k_ref, v_ref, kvec, vvec, m0_s, m0_z, y_ref, s_ref, z_ref, r_ref, least_ref, before_s, before_z, end_s, end_z, q_s, k_s, v_s, q_p, k_p, v_p, m_p, a_p, stage, zero_s, bar):
    smem = q_s, k_s, v_s, q_p, k_p, v_p, m_p, a_p, stage
    zero_s[0] = 0
    g = lax.axis_index("g")
    n, K, V, R = shape.n_chunks, shape.d_key, shape.d_value, shape.rows
    fetch = functools.partial(load, shape)

    def copy(i, q_s, k_s, v_s):
        at = pl.ds(i * CHUNK, CHUNK)
        for ref, smem in ((q_ref, q_s), (k_ref, k_s), (v_ref, v_s)):
            plgpu.copy_gmem_to_smem(ref.at[g, at], smem, bar)

    copy(0, q_s.at[0], k_s.at[0], v_s.at[0])
    if R != K:
        zero = jnp.zeros((CHUNK, R), jnp.bfloat16)
        for i in range(PIECES):
            k_p[0, i] = zero if shape.interpret else plgpu.layout_cast(zero, MATRIX)
    def step(i, carry):
        m_s, m_z = carry
        zero = zero_s[0]
        q_s, k_s, v_s, q_p, k_p, v_p, m_p, a_p, stage = (x.at[zero] for x in smem)
        qf_, kf_, vf_ = Operand(q_p, CHUNK, K), Operand(k_p, CHUNK, K), Operand(v_p, CHUNK, V)
        kf_wide = Operand(k_p, CHUNK, R)
        m_, a_ = Operand(m_p, K, V), Operand(a_p, CHUNK, CHUNK)
        at = pl.ds(i * CHUNK, CHUNK)
        c = fetch(kvec.at[g, i, 0, pl.ds(0, K)], COLUMNS)
        moved_rows = fetch(kvec.at[g, i, 1], ROWS)
        m_z = m_z * fetch(kvec.at[g, i, 1, pl.ds(0, K)], COLUMNS)
        m_s = m_s * rows(moved_rows, V)
        if shape.log_values:
            b = fetch(vvec.at[g, i, 0], COLUMNS)
            m_s = m_s * columns(fetch(vvec.at[g, i, 1], COLUMNS), R)
        store_pieces(m_p, m_s)
        stage[...] = m_s
        before_z[g, i] = m_z
        plgpu.barrier_wait(bar)
        qf, r = query_factors(q_s[...], c)
        store_pieces(q_p, qf)
        z = jnp.sum(qf * columns(m_z, CHUNK), axis=1)
        kf = jnp.exp(k_s[...] - columns(finite(c), CHUNK))
        store_pieces(k_p, kf, K if R != K else None)
        m_z = m_z + jnp.sum(kf, axis=0)
        vf = v_s[...]
        store_pieces(v_p, jnp.exp(vf - columns(finite(b), CHUNK)) if shape.log_values else vf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stage.at[pl.ds(0, K)], before_s.at[g, i])
        pl.when(i + 1 < n)(lambda: copy(i + 1, q_s, k_s, v_s))
        a = jnp.where(index(shape, 0) >= index(shape, 1), matmul(shape, (qf_, kf_.T)), 0.0)
        z = z + jnp.sum(a, axis=1)
        store_pieces(a_p, a)
        plgpu.commit_smem()
        s = matmul(shape, (a_, vf_), (qf_, m_))
        seen = rows(r, V) != NEG_INF
        safe_z = jnp.where(z == 0, 1.0, z)
        if shape.log_values:
            y = jnp.log(jnp.where(s == 0, 1.0, s)) - rows(jnp.log(safe_z), V) + columns(finite(b), CHUNK)
            y = jnp.where((s == 0) | (rows(z, V) == 0), NEG_INF, y)
            s = jnp.where(seen & (columns(b, CHUNK) != NEG_INF), s, 1.0)
        else:
            y = jnp.where(rows(z, V) == 0, 0.0, s / rows(safe_z, V))
        z = jnp.where(r == NEG_INF, 1.0, z)
        y_ref[g, at] = y
        s_ref[g, at] = s
        z_ref[g, at] = z
        r_ref[g, at] = r
        least_ref[g, at] = jnp.minimum(jnp.min(s, axis=1), z) if shape.log_values else z
        m_s = m_s + matmul(shape, (kf_wide.T, vf_))
        plgpu.wait_smem_to_gmem(0)
        return m_s, m_z

    carry = fetch(m0_s.at[g], MATRIX), fetch(m0_z.at[g], COLUMNS)
    m_s, m_z = lax.fori_loop(0, n, step, carry)
    end_s[g] = m_s
    end_z[g] = m_z


def forward(shape, q, k, v, kvec, vvec, m0_s, m0_z):
    G, T, K = q.shape
    V, N, R = shape.d_value, shape.n_chunks, shape.rows
    f32 = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    out = f32(G, T, V), f32(G, T, V), f32(G, T), f32(G, T), f32(G, T), f32(G, N, K, V), f32(G, N, K), f32(G, R, V), f32(G, K)
    p = functools.partial(pieces_ref, shape)
    scratch = [floats_ref(CHUNK, K), floats_ref(CHUNK, K), floats_ref(CHUNK, V), p(CHUNK, K), p(CHUNK, R), p(CHUNK, V), p(R, V), p(CHUNK, CHUNK), floats_ref(R, V), plgpu.SMEM((1,), jnp.int32), plgpu.Barrier(num_arrivals=3)]
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    kw = {"interpret": InterpretGPUParams(detect_races=True)} if shape.interpret else {}
    return plgpu.kernel(functools.partial(forward_kernel, shape), out_type=out, grid=(G,), grid_names=("g",), scratch_types=scratch, **kw)(q, k, v, kvec, vvec, m0_s, m0_z)


def load_pieces(ref, columns=None):
    at = lambda i: ref[i] if columns is None else ref[i, :, pl.ds(0, columns)]
    return sum(at(i).astype(jnp.float32) for i in reversed(range(PIECES)))


def backward_kernel(shape, q_ref, k_ref, v_ref, dy_ref, s_ref, z_ref, dlog_z_ref, scale_ref, kvec, vvec, before_s, before_z, dend_s, dend_z, dq_ref, dk_ref, dv_ref, dfirst_s, dfirst_z, q_s, k_s, v_s, dy_s, m_s, q_p, k_p, v_p, ds_p, m_p, a_p, zero_s, bar):
    smem = q_s, k_s, v_s, dy_s, m_s, q_p, k_p, v_p, ds_p, m_p, a_p
    zero_s[0] = 0
    g = lax.axis_index("g")
    n, K, V, R = shape.n_chunks, shape.d_key, shape.d_value, shape.rows
    fetch = functools.partial(load, shape)

    def copy(i, q_s, k_s, v_s, dy_s, m_s):
        at = pl.ds(i * CHUNK, CHUNK)
        for ref, to in ((q_ref, q_s), (k_ref, k_s), (v_ref, v_s), (dy_ref, dy_s)):
            plgpu.copy_gmem_to_smem(ref.at[g, at], to, bar)
        plgpu.copy_gmem_to_smem(before_s.at[g, i], m_s.at[pl.ds(0, K)], bar)

    copy(n - 1, *(x.at[0] for x in smem[:5]))
    if R != K:
        zero = jnp.zeros((CHUNK, R), jnp.bfloat16)
        for i in range(PIECES):
            q_p[0, i] = zero if shape.interpret else plgpu.layout_cast(zero, MATRIX)

    def step(j, carry):
        dm_s, dm_z = carry
        i = n - 1 - j
        zero = zero_s[0]
        q_s, k_s, v_s, dy_s, m_s, q_p, k_p, v_p, ds_p, m_p, a_p = (x.at[zero] for x in smem)
        qf_, kf_, vf_, ds_ = Operand(q_p, CHUNK, K), Operand(k_p, CHUNK, K), Operand(v_p, CHUNK, V), Operand(ds_p, CHUNK, V)
        qf_wide, m_, a_ = Operand(q_p, CHUNK, R), Operand(m_p, K, V), Operand(a_p, CHUNK, CHUNK)
        at = pl.ds(i * CHUNK, CHUNK)
        c = fetch(kvec.at[g, i, 0, pl.ds(0, K)], COLUMNS)
        m_z = fetch(before_z.at[g, i], COLUMNS)
        dm_z = dm_z * fetch(kvec.at[g, i, 2, pl.ds(0, K)], COLUMNS)
        dm_s = dm_s * rows(fetch(kvec.at[g, i, 2], ROWS), V)
        z, factor, scale = fetch(z_ref.at[g, at], ROWS), scale_ref[0], scale_ref[1]
        dlog_z = fetch(dlog_z_ref.at[g, at], ROWS) * factor
        if shape.log_values:
            b = fetch(vvec.at[g, i, 0], COLUMNS)
            dm_s = dm_s * columns(fetch(vvec.at[g, i, 2], COLUMNS), R)
        plgpu.barrier_wait(bar)
        store_pieces(m_p, m_s[...])
        dy = dy_s[...] * factor
        s = fetch(s_ref.at[g, at], MATRIX)
        total = dlog_z
        if shape.log_values:
            ds, dz = dy / s, (dlog_z - jnp.sum(dy, axis=1)) / z
            total = total - jnp.sum(jnp.where(columns(b, CHUNK) == NEG_INF, dy, 0.0), axis=1)
        else:
            ds, dz = dy / rows(z, V), (dlog_z - jnp.sum(dy * (s / rows(z, V)), axis=1)) / z
        store_pieces(ds_p, ds)
        qf, _ = query_factors(q_s[...], c)
        store_pieces(q_p, qf, K if R != K else None)
        kf = jnp.exp(k_s[...] - columns(finite(c), CHUNK))
        store_pieces(k_p, kf)
        weights_z = m_z + jnp.sum(kf, axis=0)
        vf = v_s[...]
        store_pieces(v_p, jnp.exp(vf - columns(finite(b), CHUNK)) if shape.log_values else vf)
        plgpu.commit_smem()
        pl.when(i > 0)(lambda: copy(i - 1, q_s, k_s, v_s, dy_s, m_s))
        visible = index(shape, 0) >= index(shape, 1)
        store_pieces(a_p, jnp.where(visible, matmul(shape, (ds_, vf_.T)) + rows(dz, CHUNK), 0.0))
        plgpu.commit_smem()
        qf = load_pieces(q_p, K if R != K else None)
        dq = qf * (matmul(shape, (a_, kf_), (ds_, m_.T)) + rows(dz, K) * columns(m_z, CHUNK))
        weights = qf * columns(weights_z, CHUNK)
        surplus, weight = jnp.sum(dq, axis=1) - total, jnp.sum(weights, axis=1)
        surplus = jnp.where(weight == 0, 0.0, surplus / jnp.where(weight == 0, 1.0, weight))
        dq_ref[g, at] = (dq - weights * rows(surplus, K)) * scale
        dm_z_next = dm_z + jnp.sum(qf * rows(dz, K), axis=0)
        store_pieces(m_p, dm_s)
        plgpu.commit_smem()
        dk = matmul(shape, (a_.T, qf_), (vf_, m_.T)) + columns(dm_z, CHUNK)
        dk_ref[g, at] = load_pieces(k_p) * dk * scale
        store_pieces(a_p, jnp.where(visible, matmul(shape, (qf_, kf_.T)), 0.0))
        plgpu.commit_smem()
        dv = matmul(shape, (a_.T, ds_), (kf_, m_))
        dv = load_pieces(v_p) * dv if shape.log_values else dv
        dv_ref[g, at] = dv * scale
        return dm_s + matmul(shape, (qf_wide.T, ds_)), dm_z_next

    carry = fetch(dend_s.at[g], MATRIX), fetch(dend_z.at[g], COLUMNS)
    dm_s, dm_z = lax.fori_loop(0, n, step, carry)
    dfirst_s[g] = dm_s
    dfirst_z[g] = dm_z


def backward(shape, q, k, v, dy, s, z, dlog_z, scales, kvec, vvec, before_s, before_z, dend_s, dend_z):
    G, T, K = q.shape
    V, R = shape.d_value, shape.rows
    f32 = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    out = f32(G, T, K), f32(G, T, K), f32(G, T, V), f32(G, R, V), f32(G, K)
    p = functools.partial(pieces_ref, shape)
    scratch = [floats_ref(CHUNK, K), floats_ref(CHUNK, K), floats_ref(CHUNK, V), floats_ref(CHUNK, V), floats_ref(R, V), p(CHUNK, R), p(CHUNK, K), p(CHUNK, V), p(CHUNK, V), p(R, V), p(CHUNK, CHUNK), plgpu.SMEM((1,), jnp.int32), plgpu.Barrier(num_arrivals=5)]
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    kw = {"interpret": InterpretGPUParams(detect_races=True)} if shape.interpret else {}
    return plgpu.kernel(functools.partial(backward_kernel, shape), out_type=out, grid=(G,), grid_names=("g",), scratch_types=scratch, **kw)(q, k, v, dy, s, z, dlog_z, scales, kvec, vvec, before_s, before_z, dend_s, dend_z)
