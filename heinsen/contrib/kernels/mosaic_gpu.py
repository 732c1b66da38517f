"""The forward and the backward pass of the chunked form as one kernel each, for Hopper GPUs (Pallas Mosaic GPU).

A block of one warpgroup takes one head of one sequence, chunk after chunk, backwards in the backward pass. The sums M
before a chunk (or their gradient) stay in registers; queries, keys and values come by asynchronous copies, the next
chunk's while this one's products run; factors and pairwise weights never leave the chip. Written to global memory are
the outputs and what the backward pass needs: S and Z of every query, and M before every chunk.

XLA computes what is small, before the kernels: the shifts of every chunk (it reads the keys and values once more), the
factors between them (`shifts`), and the sums of log decays (`decays`). The mathematics is that of
`heinsen.ops.chunked.product_weights`, with these shifts, and without its condition: where sums lose terms to underflow,
which shows in S and Z, or where something is not finite, `heinsen.ops.chunked` computes the whole call.

A float32 product takes six products of bfloat16 pieces (`wgmma`). Where values are bfloat16, so are the factors of
products, one piece, and the outputs y. Gradients have the dtypes of their inputs. Arrays [B, T, H, F] lie as a model
has them: XLA leaves out the transposes of its [B, H, T, F]. Head sizes are filled up to 16, 32 or 64 features.

Addresses in shared memory are computed again in every step, from a zero that the compiler cannot see: left to itself it
moves them all out of the loop, where they fill the registers. A second such zero is in the addresses of what is loaded
in the layout of columns: of two equal loads jax keeps one from 0.11 on, and finds no layout that is both.

Axes: B sequences; H heads; G = B H; T tokens; N chunks; C tokens of a chunk; K key and V value features; R rows of M:
the K key features, filled up to the 64 rows that the matrix units need.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from heinsen import backend
from heinsen.contrib.kernels import interpret
from heinsen.contrib.kernels.decays import CHUNK, Decays, decay_grad, positions
from heinsen.contrib.kernels.shifts import (
    ChunkShifts,
    Scales,
    Shifts,
    chunk_shifts,
    following,
    kept_scales,
    preceding,
    shift_scales,
)
from heinsen.contrib.kernels.wgmma import (
    COLUMNS,
    EXACT_PIECES,
    MATRIX,
    ROWS,
    Operand,
    Ref,
    Registers,
    columns,
    rows,
    smem_matrix,
    smem_pieces,
)
from heinsen.errors import InputError
from heinsen.logspace import NEG_INF, finite, two_sum
from heinsen.ops import chunked
from heinsen.ops.arrays import ATTENTION, vary_together
from heinsen.ops.states import SMALLEST_SUM, State, Summary, init_state, log_rescaling

# An array; in a kernel, a reference to it in global memory; of an output, its shape and dtype.
KernelArray = Any

LARGEST_HEAD = 64  # features: what fits into the registers and the shared memory of a block


class Sizes(NamedTuple):
    """Static sizes of a kernel."""

    n_chunks: int
    d_key: int  # 16, 32 or 64
    d_value: int  # 16, 32 or 64
    log_values: bool
    exponents: Any  # dtype of queries and keys: float32 or bfloat16
    dtype: Any  # of values: float32 or bfloat16
    registers: Registers

    @property
    def n_rows(self) -> int:
        return max(64, self.d_key)

    @property
    def y_dtype(self) -> Any:
        """Logarithms are float32."""
        return jnp.float32 if self.log_values else self.dtype

    def pieces(self, n_rows: int, n_columns: int) -> Any:
        n_pieces = 1 if self.dtype == jnp.bfloat16 else EXACT_PIECES
        return smem_pieces(n_pieces, n_rows, n_columns, min(self.d_key, self.d_value))


# ---- what the kernels read of each chunk -------------------------------------------------------------


class DecayVectors(NamedTuple):
    """Vectors of each chunk for log decays or document starts; those of value features are None for real values."""

    kept_k: KernelArray  # [G, N, R]: factors of M_s, with kept_v, after the chunk
    kept_v: KernelArray  # [G, N, V]
    kept_z: KernelArray  # [G, N, R]: of M_z
    after_c: KernelArray  # [G, N, R]: shift of the keys as they enter the sums
    own_b: KernelArray  # [G, N, V]: shift of the values
    to_reading: KernelArray  # [G, N, V]: exp(own_b - b)
    to_after: KernelArray  # [G, N, V]: exp(own_b - b after the chunk)
    units: KernelArray  # [G, T]: `Decays`
    unit: KernelArray  # [G, T]
    rest: KernelArray  # [G, T]
    first: KernelArray  # [G, T]: position in the chunk of the first token of each query's document, or -1
    of_state: KernelArray  # [G, T]: factor of the sums before the chunk at each query
    until_end: KernelArray  # [G, T]: log decay of each key at the chunk's end


class ChunkVectors(NamedTuple):
    """Vectors of each chunk. Key features are filled up to the R rows of M."""

    c: KernelArray  # [G, N, R]: shifts of the sums that queries read
    b: KernelArray  # [G, N, V]
    moved_k: KernelArray  # [G, N, R]: factors that bring M, or in the backward pass its gradient, to the chunk's shifts
    moved_v: KernelArray  # [G, N, V]
    positions: KernelArray  # [N, C]: of tokens in their chunk
    decay: DecayVectors | None


class Inputs(NamedTuple):
    """A call's arrays as the kernels read them."""

    q: KernelArray  # [B, T, H, K]
    k: KernelArray  # [B, T, H, K]
    values: KernelArray  # [B, T, H, V]
    vectors: ChunkVectors


class KernelSums(NamedTuple):
    """Sums M or their gradients."""

    s: KernelArray  # [G, R, V]
    z: KernelArray  # [G, K]


class _Head(NamedTuple):
    """The head that a block takes: where its arrays lie in global memory."""

    b: Array
    h: Array
    g: Array

    @classmethod
    def of(cls, n_heads: int) -> "_Head":
        b, h = lax.axis_index("b"), lax.axis_index("h")
        return cls(b, h, b * n_heads + h)

    def moved(self, by: Array) -> "_Head":
        """The same, from a zero that the compiler cannot see."""
        return _Head(*(x + by for x in self))

    def tokens_of(self, ref: Ref, i: Any) -> Ref:
        """The tokens [C, F] of chunk i of an array [B, T, H, F]."""
        return ref.at[self.b, pl.ds(i * CHUNK, CHUNK), self.h]


class _Chunk(NamedTuple):
    """One chunk within a kernel: reads its vectors from global memory."""

    sizes: Sizes
    vectors: ChunkVectors
    head: _Head
    i: Array
    apart: Array  # a zero that the compiler cannot see, in the addresses of what is loaded for columns

    @property
    def g(self) -> Array:
        return self.head.g

    @property
    def tokens(self) -> Any:
        return pl.ds(self.i * CHUNK, CHUNK)

    def tokens_of(self, ref: Ref) -> Ref:
        return self.head.tokens_of(ref, self.i)

    def keys_vector(self, ref: Ref) -> Array:
        """[K], for columns."""
        return self.sizes.registers.load(ref.at[self.g, self.i + self.apart, pl.ds(0, self.sizes.d_key)], COLUMNS)

    def keys_rows(self, ref: Ref) -> Array:
        """[R], for rows."""
        return self.sizes.registers.load(ref.at[self.g, self.i], ROWS)

    def values_vector(self, ref: Ref) -> Array:
        """[V], for columns."""
        return self.sizes.registers.load(ref.at[self.g, self.i + self.apart], COLUMNS)

    def tokens_vector(self, ref: Ref) -> Array:
        """[C], for rows."""
        return self.sizes.registers.load(ref.at[self.g, self.tokens], ROWS)

    def tokens_columns(self, ref: Ref) -> Array:
        """[C], for columns."""
        return self.sizes.registers.load(ref.at[self.g + self.apart, self.tokens], COLUMNS)

    def load_tokens(self, ref: Ref) -> Array:
        """[C, K] or [C, V], from global memory."""
        return self.sizes.registers.load(self.tokens_of(ref), MATRIX)

    def scale(self, m: Array, k: Ref, v: Ref | None) -> Array:
        """A matrix [R, V] times factors of its rows and columns."""
        m = m * rows(self.keys_rows(k), self.sizes.d_value)
        return m if v is None else m * columns(self.values_vector(v), self.sizes.n_rows)

    def scale_values(self, x: Array, ref: Ref | None) -> Array:
        """A matrix [any, V] times factors of its columns."""
        return x if ref is None else x * columns(self.values_vector(ref), x.shape[0])

    def query_factors(self, q: Array) -> tuple[Array, Array]:
        """(qf [C, K], r [C])."""
        c = columns(self.keys_vector(self.vectors.c), CHUNK)
        total, error = two_sum(q.astype(jnp.float32), c)
        r = jnp.max(total, axis=1)
        return jnp.exp((total - rows(finite(r), q.shape[1])) + error), r

    def key_factors(self, k: Array) -> Array:
        """kf [C, K], as queries see the keys."""
        return jnp.exp(k.astype(jnp.float32) - columns(finite(self.keys_vector(self.vectors.c)), CHUNK))

    def end_factors(self, k: Array) -> Array:
        """kf [C, K], as the keys enter the sums, with log decays."""
        assert self.vectors.decay is not None
        exponents = k.astype(jnp.float32) - columns(finite(self.keys_vector(self.vectors.decay.after_c)), CHUNK)
        return jnp.exp(exponents + rows(self.tokens_vector(self.vectors.decay.until_end), k.shape[1]))

    def value_factors(self, values: Array) -> Array:
        """vf [C, V]."""
        b = self.vectors.b if self.vectors.decay is None else self.vectors.decay.own_b
        values = values.astype(jnp.float32)
        return values if b is None else jnp.exp(values - columns(finite(self.values_vector(b)), CHUNK))

    def mask(self, pairs: Array) -> Array:
        """Pairs [C, C] of queries and keys times what is left of each key at each query."""
        load, positions = self.sizes.registers.load, self.vectors.positions
        position = columns(load(positions.at[self.i + self.apart], COLUMNS), CHUNK)
        visible = rows(load(positions.at[self.i], ROWS), CHUNK) >= position
        if (decay := self.vectors.decay) is None:
            return jnp.where(visible, pairs, 0.0)
        of_query = lambda ref: rows(self.tokens_vector(ref), CHUNK)
        of_key = lambda ref: columns(self.tokens_columns(ref), CHUNK)
        visible = visible & (position >= of_query(decay.first))
        left = (of_query(decay.units) - of_key(decay.units)) * of_query(decay.unit)
        left = left + (of_query(decay.rest) - of_key(decay.rest))
        return pairs * jnp.exp(jnp.where(visible, left, NEG_INF))


# ---- forward ------------------------------------------------------------------------------------------


class ForwardOutputs(NamedTuple):
    """Outputs of the forward kernel."""

    y: KernelArray  # [B, T, H, V]
    s: KernelArray  # [B, T, H, V]: S, with 1 where it is rightly 0
    z: KernelArray  # [G, T]: Z, the same
    least: KernelArray  # [G, T]: the smallest of each query's sums that must not lose terms
    before_s: KernelArray  # [G, N, K, V]: M_s before each chunk
    before_z: KernelArray  # [G, N, K]
    end: KernelSums


class _ForwardOperands(NamedTuple):
    """Operands of the forward pass in shared memory."""

    q: Operand  # [C, K]
    k: Operand  # [C, K], as queries see the keys
    k_end: Operand  # [C, K], as they enter the sums
    values: Operand  # [C, V]
    pairs: Operand  # [C, C]
    sums: Operand  # [K, V]

    @classmethod
    def of(cls, sizes: Sizes, buffers: Any) -> "_ForwardOperands":
        k_end = "kf_end" if "kf_end" in buffers else "kf"
        of_tokens = ("qf", sizes.d_key), ("kf", sizes.d_key), (k_end, sizes.d_key), ("vf", sizes.d_value), ("a", CHUNK)
        operands = (Operand(buffers[name], CHUNK, width) for name, width in of_tokens)
        return cls._make([*operands, Operand(buffers["m"], sizes.d_key, sizes.d_value)])


def _forward_kernel(
    sizes: Sizes, inputs: Inputs, first: KernelSums, out: ForwardOutputs, *, copied: Any, zero: Ref, smem: Any
) -> None:
    head, n = _Head.of(inputs.q.shape[2]), sizes.n_chunks
    d_key, d_value, n_rows, registers = sizes.d_key, sizes.d_value, sizes.n_rows, sizes.registers
    store = registers.store
    vectors = inputs.vectors
    decay = vectors.decay

    def copy(i: Any, smem: Any) -> None:
        for source, to in ((inputs.q, smem["q"]), (inputs.k, smem["k"]), (inputs.values, smem["values"])):
            plgpu.copy_gmem_to_smem(head.tokens_of(source, i), to, copied)

    def step(i: Array, m: KernelSums) -> KernelSums:
        def addresses() -> tuple[_Chunk, Any, _ForwardOperands]:
            unseen = zero[0]
            buffers = jax.tree.map(lambda x: x.at[unseen], smem)
            return (
                _Chunk(sizes, vectors, head.moved(unseen), i + unseen, zero[1]),
                buffers,
                _ForwardOperands.of(sizes, buffers),
            )

        # The chunk's factors.
        at, buffers, (q, k, k_end, v, a, sums) = addresses()
        m_s = at.scale(m.s, vectors.moved_k, vectors.moved_v)
        m_z = m.z * at.keys_vector(vectors.moved_k)
        sums._replace(n_rows=n_rows).store(m_s)
        buffers["m_float32"][...] = m_s
        store(out.before_z.at[at.g, at.i], m_z)
        plgpu.barrier_wait(copied)
        qf, r = at.query_factors(buffers["q"][...])
        q.store(qf)
        z = jnp.sum(qf * columns(m_z, CHUNK), axis=1)
        at, buffers, (q, k, k_end, v, a, sums) = addresses()
        kf = at.key_factors(buffers["k"][...])
        k.store(kf)
        if decay is not None:
            kf = at.end_factors(buffers["k"][...])
            k_end.store(kf)
            m_z = m_z * at.keys_vector(decay.kept_z)
            z = z * at.tokens_vector(decay.of_state)
        m_z = m_z + jnp.sum(kf, axis=0)
        at, buffers, (q, k, k_end, v, a, sums) = addresses()
        v.store(at.value_factors(buffers["values"][...]))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffers["m_float32"].at[pl.ds(0, d_key)], out.before_s.at[at.g, at.i])
        pl.when(i + 1 < n)(lambda: copy(at.i + 1, buffers))

        # Queries.
        at, buffers, (q, k, k_end, v, a, sums) = addresses()
        weights = at.mask(registers.matmul((q, k.mT)))
        z = z + jnp.sum(weights, axis=1)
        a.store(weights)
        plgpu.commit_smem()
        at, buffers, (q, k, k_end, v, a, sums) = addresses()
        if decay is None:
            s = registers.matmul((a, v), (q, sums))
        else:
            s = registers.matmul((q, sums)) * rows(at.tokens_vector(decay.of_state), d_value)
            s = s + at.scale_values(registers.matmul((a, v)), decay.to_reading)
        _write_means(at, out, s, z, r)

        # The sums after the chunk.
        at, buffers, (q, k, k_end, v, a, sums) = addresses()
        more, m_s = registers.matmul((k_end._replace(n_columns=n_rows).mT, v)), buffers["m_float32"][...]
        if decay is not None:
            m_s = at.scale(m_s, decay.kept_k, decay.kept_v)
            more = at.scale_values(more, decay.to_after)
        plgpu.wait_smem_to_gmem(0)
        return KernelSums(m_s + more, m_z)

    zero[0] = zero[1] = 0
    copy(0, jax.tree.map(lambda x: x.at[0], smem))
    if n_rows != d_key:  # keys of the features that are missing, which the matrix units want
        Operand(smem["kf" if decay is None else "kf_end"].at[0], CHUNK, n_rows).store(registers.zeros(CHUNK, n_rows))
    m = KernelSums(registers.load(first.s.at[head.g], MATRIX), registers.load(first.z.at[head.g], COLUMNS))
    m = lax.fori_loop(0, n, step, m)
    store(out.end.s.at[head.g], m.s)
    store(out.end.z.at[head.g], m.z)


def _write_means(at: _Chunk, out: ForwardOutputs, s: Array, z: Array, r: Array) -> None:
    """Write what the chunk's queries read, and their sums, from S [C, V], Z [C] and r [C]."""
    d_value, store = at.sizes.d_value, at.sizes.registers.store
    empty = rows(z, d_value) == 0
    whole_z = jnp.where(z == 0, 1.0, z)
    z = jnp.where(r == NEG_INF, 1.0, z)
    if at.vectors.b is None:
        store(at.tokens_of(out.y), jnp.where(empty, 0.0, s / rows(whole_z, d_value)))
        least = z
    else:
        b = columns(at.values_vector(at.vectors.b), CHUNK)
        y = jnp.log(jnp.where(s == 0, 1.0, s)) - rows(jnp.log(whole_z), d_value) + finite(b)
        store(at.tokens_of(out.y), jnp.where(empty | (s == 0), NEG_INF, y))
        s = jnp.where((b == NEG_INF) | (rows(r, d_value) == NEG_INF), 1.0, s)
        least = jnp.minimum(jnp.min(s, axis=1), z)
    store(at.tokens_of(out.s), s)
    store(out.z.at[at.g, at.tokens], z)
    store(out.least.at[at.g, at.tokens], least)


def _run_forward(sizes: Sizes, inputs: Inputs, first: KernelSums) -> ForwardOutputs:
    n_batch, n_tokens, n_heads, d_key = inputs.q.shape
    d_value, n_chunks = sizes.d_value, sizes.n_chunks
    array = lambda *shape: jax.ShapeDtypeStruct((n_batch * n_heads, *shape), jnp.float32)
    values = lambda dtype: jax.ShapeDtypeStruct((n_batch, n_tokens, n_heads, d_value), dtype)
    tokens, before = array(n_tokens), (array(n_chunks, d_key, d_value), array(n_chunks, d_key))
    out = ForwardOutputs(
        values(sizes.y_dtype), values(jnp.float32), tokens, tokens, *before, KernelSums(*map(_like, first))
    )
    smem = {
        "q": smem_matrix(CHUNK, d_key, sizes.exponents),
        "k": smem_matrix(CHUNK, d_key, sizes.exponents),
        "values": smem_matrix(CHUNK, d_value, sizes.dtype),
        "m_float32": smem_matrix(sizes.n_rows, d_value),
        "qf": sizes.pieces(CHUNK, d_key),
        "kf": sizes.pieces(CHUNK, sizes.n_rows if inputs.vectors.decay is None else d_key),
        "vf": sizes.pieces(CHUNK, d_value),
        "m": sizes.pieces(sizes.n_rows, d_value),
        "a": sizes.pieces(CHUNK, CHUNK),
    }
    if inputs.vectors.decay is not None:
        smem["kf_end"] = sizes.pieces(CHUNK, sizes.n_rows)
    return _run_kernel(_forward_kernel, sizes, (inputs, first), out, smem, n_copies=3)


# ---- backward -----------------------------------------------------------------------------------------


class Cotangents(NamedTuple):
    """Inputs of the backward kernel beside those of the forward kernel; `moved_k`, `moved_v` are after each chunk."""

    dy: KernelArray  # [B, T, H, V]
    s: KernelArray  # [B, T, H, V], as written by the forward kernel
    z: KernelArray  # [G, T]
    before_s: KernelArray  # [G, N, K, V]
    before_z: KernelArray  # [G, N, K]
    factors: KernelArray  # [2]: of the cotangents in the kernel, and of the gradients that it writes


class Gradients(NamedTuple):
    """Outputs of the backward kernel."""

    q: KernelArray  # [B, T, H, K]
    k: KernelArray  # [B, T, H, K]
    values: KernelArray  # [B, T, H, V]
    first: KernelSums  # of the sums before the first chunk, relative to its shifts
    decay: Any  # DecayGradients, or None


class _BackwardOperands(NamedTuple):
    """Operands of the backward pass in shared memory."""

    q: Operand  # [C, K]
    k: Operand  # [C, K]
    values: Operand  # [C, V]
    ds: Operand  # [C, V]
    pairs: Operand  # [C, C]
    sums: Operand  # [K, V]

    @classmethod
    def of(cls, sizes: Sizes, buffers: Any) -> "_BackwardOperands":
        of_tokens = {"qf": sizes.d_key, "kf": sizes.d_key, "vf": sizes.d_value, "ds": sizes.d_value, "a": CHUNK}
        operands = (Operand(buffers[name], CHUNK, width) for name, width in of_tokens.items())
        return cls._make([*operands, Operand(buffers["m"], sizes.d_key, sizes.d_value)])


class DecayGradients(NamedTuple):
    """Gradients of the sums of log decays, before they are scaled."""

    sums: KernelArray  # [G, T]: of the sum up to each token
    ends_s: KernelArray  # [G, N, R]: of the last sum of each chunk: the total of these two
    ends_z: KernelArray  # [G, N, K]


def _backward_kernel(
    sizes: Sizes,
    inputs: Inputs,
    given: Cotangents,
    end: KernelSums,
    out: Gradients,
    *,
    copied: Any,
    zero: Ref,
    smem: Any,
) -> None:
    head, n = _Head.of(inputs.q.shape[2]), sizes.n_chunks
    d_key, n_rows, registers = sizes.d_key, sizes.n_rows, sizes.registers
    store = registers.store
    decay = inputs.vectors.decay

    def copy(i: Any, smem: Any) -> None:
        sources = {"q": inputs.q, "k": inputs.k, "values": inputs.values, "dy": given.dy}
        for name, source in sources.items():
            plgpu.copy_gmem_to_smem(head.tokens_of(source, i), smem[name], copied)
        plgpu.copy_gmem_to_smem(given.before_s.at[head.g, i], smem["m_float32"].at[pl.ds(0, d_key)], copied)

    def step(j: Array, dm: KernelSums) -> KernelSums:
        def addresses() -> tuple[_Chunk, Any, _BackwardOperands]:
            unseen = zero[0]
            buffers = jax.tree.map(lambda x: x.at[unseen], smem)
            return (
                _Chunk(sizes, inputs.vectors, head.moved(unseen), n - 1 - j + unseen, zero[1]),
                buffers,
                _BackwardOperands.of(sizes, buffers),
            )

        # The chunk's factors.
        at, buffers, (q, k, v, ds, a, sums) = addresses()
        dm_s = at.scale(dm.s, at.vectors.moved_k, at.vectors.moved_v)
        dm_z = dm.z * at.keys_vector(at.vectors.moved_k)
        plgpu.barrier_wait(copied)
        m_s = buffers["m_float32"][...]
        sums._replace(n_rows=n_rows).store(m_s)
        if decay is not None:
            store(out.decay.ends_s.at[at.g, at.i], jnp.sum(at.scale(m_s, decay.kept_k, decay.kept_v) * dm_s, axis=1))
        ds_value, dz, dq_total = _query_sums_grad(at, given, buffers["dy"][...])
        ds.store(ds_value)
        at, buffers, (q, k, v, ds, a, sums) = addresses()
        q.store(at.query_factors(buffers["q"][...])[0])
        at, buffers, (q, k, v, ds, a, sums) = addresses()
        kf = at.key_factors(buffers["k"][...])
        k.store(kf)
        of_keys = jnp.sum(kf, axis=0)
        at, buffers, (q, k, v, ds, a, sums) = addresses()
        vf = at.value_factors(buffers["values"][...])
        v.store(vf if decay is None else at.scale_values(vf, decay.to_reading))
        plgpu.commit_smem()
        pl.when(j + 1 < n)(lambda: copy(at.i - 1, buffers))

        # Queries.
        at, buffers, (q, k, v, ds, a, sums) = addresses()
        a.store(at.mask(registers.matmul((ds, v.mT)) + rows(dz, CHUNK)))
        plgpu.commit_smem()
        at, buffers, (q, k, v, ds, a, sums) = addresses()
        m_z = registers.load(given.before_z.at[at.g, at.i], COLUMNS)
        of_sums = rows(dz, d_key) * columns(m_z, CHUNK)
        if decay is None:
            dq = registers.matmul((a, k), (ds, sums.mT)) + of_sums
        else:
            of_sums = of_sums + registers.matmul((ds, sums.mT))
            dq = registers.matmul((a, k)) + of_sums * rows(at.tokens_vector(decay.of_state), d_key)
        qf = q.load()
        dq = qf * dq
        weights = qf * columns(m_z + of_keys, CHUNK)
        surplus, weight = jnp.sum(dq, axis=1) - dq_total, jnp.sum(weights, axis=1)
        surplus = jnp.where(weight == 0, 0.0, surplus / jnp.where(weight == 0, 1.0, weight))
        store(at.tokens_of(out.q), (dq - weights * rows(surplus, d_key)) * given.factors[1])

        # Keys.
        at, buffers, (q, k, v, ds, a, sums) = addresses()
        sums._replace(n_rows=n_rows).store(dm_s)
        if decay is None:
            plgpu.commit_smem()
            dk = registers.matmul((a.mT, q), (v, sums.mT)) + columns(dm_z, CHUNK)
            dk = k.load() * dk
        else:
            v.store(at.scale_values(at.value_factors(at.load_tokens(inputs.values)), decay.to_after))
            plgpu.commit_smem()
            dk = registers.matmul((v, sums.mT)) + columns(dm_z, CHUNK)
            dk = at.end_factors(at.load_tokens(inputs.k)) * dk
            m_z = registers.load(given.before_z.at[at.g, at.i], COLUMNS)
            store(out.decay.ends_z.at[at.g, at.i], jnp.sum(dk, axis=0) + m_z * at.keys_vector(decay.kept_z) * dm_z)
            at, buffers, (q, k, v, ds, a, sums) = addresses()
            dk = dk + k.load() * registers.matmul((a.mT, q))
            store(out.decay.sums.at[at.g, at.tokens], dq_total - jnp.sum(dk, axis=1))
        store(at.tokens_of(out.k), dk * given.factors[1])

        # Values.
        at, buffers, (q, k, v, ds, a, sums) = addresses()
        a.store(at.mask(registers.matmul((q, k.mT))))
        at, buffers, (q, k, v, ds, a, sums) = addresses()
        if decay is None:
            plgpu.commit_smem()
            dv = registers.matmul((a.mT, ds), (k, sums))
        else:
            k.store(at.end_factors(at.load_tokens(inputs.k)))
            plgpu.commit_smem()
            dv = at.scale_values(registers.matmul((a.mT, ds)), decay.to_reading)
            dv = dv + at.scale_values(registers.matmul((k, sums)), decay.to_after)
        if at.vectors.b is not None:
            dv = dv * (v.load() if decay is None else at.value_factors(at.load_tokens(inputs.values)))
        store(at.tokens_of(out.values), dv * given.factors[1])

        # The sums before the chunk.
        at, buffers, (q, k, v, ds, a, sums) = addresses()
        qf, dm_s = q.load(), sums._replace(n_rows=n_rows).load()
        if decay is not None:
            qf = qf * rows(at.tokens_vector(decay.of_state), d_key)
            q.store(qf)
            plgpu.commit_smem()
            dm_s = at.scale(dm_s, decay.kept_k, decay.kept_v)
            dm_z = dm_z * at.keys_vector(decay.kept_z)
        dm_s = dm_s + registers.matmul((q._replace(n_columns=n_rows).mT, ds))
        return KernelSums(dm_s, dm_z + jnp.sum(qf * rows(dz, d_key), axis=0))

    zero[0] = zero[1] = 0
    copy(n - 1, jax.tree.map(lambda x: x.at[0], smem))
    if n_rows != d_key:
        Operand(smem["qf"].at[0], CHUNK, n_rows).store(registers.zeros(CHUNK, n_rows))
    dm = KernelSums(registers.load(end.s.at[head.g], MATRIX), registers.load(end.z.at[head.g], COLUMNS))
    dm = lax.fori_loop(0, n, step, dm)
    store(out.first.s.at[head.g], dm.s)
    store(out.first.z.at[head.g], dm.z)


def _query_sums_grad(at: _Chunk, given: Cotangents, dy: Array) -> tuple[Array, Array, Array | float]:
    """(dS [C, V], dZ [C], the sum of dq over features [C]) from dy [C, V]."""
    dy, z = dy.astype(jnp.float32) * given.factors[0], at.tokens_vector(given.z)
    s = at.load_tokens(given.s)
    whole_z = rows(z, at.sizes.d_value)
    if at.vectors.b is None:
        return dy / whole_z, -jnp.sum(dy * (s / whole_z), axis=1) / z, 0.0
    always_zero = columns(at.values_vector(at.vectors.b), CHUNK) == NEG_INF
    return dy / s, -jnp.sum(dy, axis=1) / z, -jnp.sum(jnp.where(always_zero, dy, 0.0), axis=1)


def _run_backward(sizes: Sizes, inputs: Inputs, given: Cotangents, end: KernelSums) -> Gradients:
    d_key, d_value = sizes.d_key, sizes.d_value
    decay = None
    if inputs.vectors.decay is not None:
        decay = DecayGradients(*map(_like, (given.z, inputs.vectors.c, given.before_z)))
    out = Gradients(_like(inputs.q), _like(inputs.k), _like(inputs.values), KernelSums(*map(_like, end)), decay)
    smem = {
        "q": smem_matrix(CHUNK, d_key, sizes.exponents),
        "k": smem_matrix(CHUNK, d_key, sizes.exponents),
        "values": smem_matrix(CHUNK, d_value, sizes.dtype),
        "dy": smem_matrix(CHUNK, d_value, sizes.y_dtype),
        "m_float32": smem_matrix(sizes.n_rows, d_value),
        "qf": sizes.pieces(CHUNK, sizes.n_rows),
        "kf": sizes.pieces(CHUNK, d_key),
        "vf": sizes.pieces(CHUNK, d_value),
        "ds": sizes.pieces(CHUNK, d_value),
        "m": sizes.pieces(sizes.n_rows, d_value),
        "a": sizes.pieces(CHUNK, CHUNK),
    }
    return _run_kernel(_backward_kernel, sizes, (inputs, given, end), out, smem, n_copies=5)


# ---- running kernels ----------------------------------------------------------------------------------


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _run_kernel(kernel: Any, sizes: Sizes, inputs: Any, out: Any, smem: dict[str, Any], n_copies: int) -> Any:
    """Run `kernel`, which writes arrays of the shapes `out`: one block for each head."""
    leaves, out_leaves = jax.tree.leaves(inputs), jax.tree.leaves(out)
    unflatten = lambda like, leaves: jax.tree.unflatten(jax.tree.structure(like), leaves)

    def body(*refs: Ref, zero: Ref, copied: Any, **buffers: Ref) -> None:
        read, write = unflatten(inputs, refs[: len(leaves)]), unflatten(out, refs[len(leaves) :])
        kernel(sizes, *read, write, copied=copied, zero=zero, smem=buffers)

    scratch = {**smem, "zero": plgpu.SMEM((2,), jnp.int32), "copied": plgpu.Barrier(num_arrivals=n_copies)}
    written = plgpu.kernel(
        body,
        out_type=out_leaves,
        grid=leaves[0].shape[::2][:2],
        grid_names=("b", "h"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=1024),
        interpret=sizes.registers.interpret,
        kernel_name=kernel.__name__.strip("_"),
    )(*leaves)
    return unflatten(out, written)


# ---- attention ----------------------------------------------------------------------------------------


def attend(
    signed: bool, q: Array, k: Array, values: Array, log_decay: Array | None, causal: bool, state: State | None
) -> tuple[Array, State]:
    """As `chunked.attend`, which computes attention that is not causal.

    Raises InputError for what the kernels do not take, or a device that cannot run them.
    """
    _check(k, values)
    if not causal:
        return chunked.attend(signed, *_as_float32(q, k), values, log_decay, causal, state)
    if state is None:
        state = init_state(k.shape[:-2], k.shape[-1], values.shape[-1], signed=signed)
    state = jax.tree.map(lambda x: x.astype(jnp.float32), state)
    n_tokens = k.shape[-2]
    fill = partial(pad_axis, size=-(-n_tokens // CHUNK) * CHUNK, axis=-2)
    q, k, values = fill(q), fill(k, with_=NEG_INF), fill(values, with_=0.0 if signed else NEG_INF)
    log_decay = None if log_decay is None else fill(log_decay[..., None])[..., 0]
    y, end = _jitted(_Layout.of(signed, k, values), *vary_together(q, k, values, log_decay, state))
    return lax.slice_in_dim(y, 0, n_tokens, axis=-2), end


def _check(k: Array, values: Array) -> None:
    """Raise InputError for what the kernels do not take, or a device that cannot run them."""
    instead = 'pass implementation="chunked"'
    if interpret.params() is None:
        device = backend.current()
        if device == "gpu" and jax.default_backend() == "gpu":
            device = f"a GPU of compute capability {jax.devices()[0].compute_capability}"
        if device not in ("gpu", "a GPU of compute capability 9.0"):
            needed = "a Hopper GPU (H100, H200: compute capability 9.0)"
            raise InputError(f'implementation="pallas" needs {needed}, not {device}: {instead}')
    if k.dtype not in (jnp.float32, jnp.bfloat16):
        raise InputError(f'implementation="pallas" computes in float32, not {k.dtype}: {instead}')
    for name, x in (("K", k), ("V", values)):
        if x.shape[-1] > LARGEST_HEAD:
            most = f"at most {LARGEST_HEAD} features"
            raise InputError(f'implementation="pallas" takes heads of {most}, not {name} = {x.shape[-1]}: {instead}')


@jax.custom_jvp
def _in_reverse_mode(args: Any) -> Any:
    """The arguments of `_attend`, which has gradients alone: derivatives of its forward pass are an error."""
    return args


@_in_reverse_mode.defjvp
def _in_reverse_mode_jvp(primals: Any, tangents: Any) -> Any:
    raise TypeError('implementation="pallas" has gradients, but no other derivatives: pass implementation="chunked"')


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    layout: "_Layout", q: Array, k: Array, values: Array, log_decay: Array | None, state: State
) -> tuple[Array, State]:
    """As `attend`, causal, of whole chunks."""
    return _forward(layout, q, k, values, log_decay, state)[0]


def _forward(layout: "_Layout", *args: Any) -> tuple[tuple[Array, State], Any]:
    args = _in_reverse_mode(args)
    out, residuals, lost = _forward_by_kernel(layout, *args)
    out = lax.cond(lost, lambda: layout.in_turn(partial(_by_chunks, layout), *args), lambda: out)
    return out, (args, *checkpoint_name((residuals, lost), ATTENTION))


def _backward(layout: "_Layout", saved: Any, grads: tuple[Array, State]) -> tuple[Any, ...]:
    args, residuals, lost = saved
    pull = lambda grads, *args: jax.vjp(partial(_by_chunks, layout), *args)[1](grads)
    by_kernel = lambda: _backward_by_kernel(layout, args, residuals, grads)
    return lax.cond(lost, lambda: layout.in_turn(pull, grads, *args), by_kernel)


_attend.defvjp(_forward, _backward)
_jitted = jax.jit(_attend, static_argnums=0)  # so that a second call outside jit compiles nothing


def _by_chunks(
    layout: "_Layout", q: Array, k: Array, values: Array, log_decay: Array | None, state: State
) -> tuple[Array, State]:
    """As `_attend`, by the chunked form."""
    y, end = chunked.attend(not layout.sizes.log_values, *_as_float32(q, k), values, log_decay, True, state)
    return y.astype(layout.sizes.y_dtype), end


def _as_float32(q: Array, k: Array) -> tuple[Array, Array]:
    return q.astype(jnp.float32), k.astype(jnp.float32)


class _Residuals(NamedTuple):
    """Arrays that the forward pass saves for the backward pass; tokens are as the kernels have them."""

    s: Array  # [B, T, H, V]
    z: Array  # [G, T]
    before_s: Array  # [G, N, K, V]
    before_z: Array  # [G, N, K]
    shifts: ChunkShifts
    end: Summary


def _forward_by_kernel(
    layout: "_Layout", q: Array, k: Array, values: Array, log_decay: Array | None, state: State
) -> tuple[tuple[Array, State], _Residuals, Array]:
    """(the output, what the backward pass needs, whether the output is not exact)."""
    first, decays = Summary.of(state), None if log_decay is None else Decays.of(log_decay)
    first_shifts = Shifts(first.c, first.b)
    shifts = chunk_shifts(first_shifts, k, values, decays)
    earlier = jax.tree.map(preceding, shifts.after, first_shifts)
    inputs = layout.inputs(q, k, values, decays, shifts, shift_scales(earlier, shifts.reading))
    written = _run_forward(layout.sizes, inputs, layout.state(KernelSums(first.s, first.z)))

    end = Summary(*layout.sums(written.end), *jax.tree.map(lambda x: x[..., -1, :], shifts.after))
    # What is not finite in the state, keys and values is so in the sums at the end, too: no factor makes it a number.
    is_exact = jnp.all(written.least >= SMALLEST_SUM) & jnp.all(jnp.isfinite(end.s)) & jnp.all(jnp.isfinite(end.z))
    lost = ~is_exact | jnp.any(end.lost_terms())
    y = layout.from_tokens(written.y, layout.d_value)
    residuals = _Residuals(written.s, written.z, written.before_s, written.before_z, shifts, end)
    return (y, end.to_state()), residuals, lost


def _backward_by_kernel(
    layout: "_Layout", args: Any, residuals: _Residuals, grads: tuple[Array, State]
) -> tuple[Any, ...]:
    """Gradients of the arguments of `_attend`."""
    (q, k, values, log_decay, state), (dy, dstate) = args, grads
    s, z, before_s, before_z, shifts, end = residuals
    decays = None if log_decay is None else Decays.of(log_decay)
    divisor = _cotangent_divisor(grads)
    dstate = jax.tree.map(lambda x: x / divisor, dstate)
    dend = jax.vjp(lambda s, z: end._replace(s=s, z=z).to_state(), end.s, end.z)[1](dstate)
    later = jax.tree.map(following, shifts.reading, Shifts(end.c, end.b))
    inputs = layout.inputs(q, k, values, decays, shifts, shift_scales(shifts.after, later))
    dy, factors = (
        layout.to_tokens(dy.astype(layout.sizes.y_dtype), layout.sizes.d_value),
        jnp.stack([1 / divisor, divisor]),
    )
    given = Cotangents(dy, s, z, before_s, before_z, factors)
    written = _run_backward(layout.sizes, inputs, given, layout.state(KernelSums(*dend)))

    cut = lambda x, size: layout.unflatten(x)[..., :size]
    dlog_decay = None
    if log_decay is not None:
        ends = jnp.sum(cut(written.decay.ends_s, layout.d_key) + cut(written.decay.ends_z, layout.d_key), axis=-1)
        dlog_decay = divisor * decay_grad(log_decay, layout.unflatten(written.decay.sums), ends)
    first, to_state = jax.vjp(Summary.of, state)
    moved = shift_scales(Shifts(first.c, first.b), jax.tree.map(lambda x: x[..., 0, :], shifts.reading))
    dfirst = layout.sums(written.first)
    ds = dfirst.s * moved.k[..., None] * (1.0 if moved.v is None else moved.v[..., None, :])
    zeros = jax.tree.map(jnp.zeros_like, first)
    (dfirst_state,) = to_state(zeros._replace(s=divisor * ds, z=divisor * dfirst.z * moved.k))
    sizes = layout.d_key, layout.d_key, layout.d_value
    dq, dk, dvalues = map(layout.from_tokens, (written.q, written.k, written.values), sizes)
    return dq, dk, dvalues, dlog_decay, dfirst_state


def _cotangent_divisor(grads: Any) -> Array:
    """A divisor of the cotangents that keeps their quotients by sums in range: 1 unless some are very large."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(g)) for g in jax.tree.leaves(grads)]))
    # Cotangents are divided by sums of at least SMALLEST_SUM = 1e-27, and some 1e4 quotients are added.
    return jnp.where(jnp.isfinite(largest) & (largest > 1e6), largest, 1.0)


def pad_axis(x: Array, size: int, axis: int = -1, with_: float = 0.0) -> Array:
    """x with `axis` filled up to `size`."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=with_)


class _Layout(NamedTuple):
    """How arrays [*batch, ...] become those of the kernels, and back. A constant when they are compiled."""

    batch: tuple[int, ...]
    d_key: int
    d_value: int
    sizes: Sizes

    @classmethod
    def of(cls, signed: bool, k: Array, values: Array) -> "_Layout":
        d_key, d_value = k.shape[-1], values.shape[-1]
        whole = lambda d: max(16, 2 ** math.ceil(math.log2(d)))
        registers = Registers(interpret.params())
        chunks, dtypes = k.shape[-2] // CHUNK, (k.dtype, values.dtype)
        sizes = Sizes(chunks, whole(d_key), whole(d_value), not signed, *dtypes, registers)
        return cls(k.shape[:-2], d_key, d_value, sizes)

    def flatten(self, x: Array) -> Array:
        return x.reshape(-1, *x.shape[len(self.batch) :])

    def unflatten(self, x: Array) -> Array:
        return x.reshape(*self.batch, *x.shape[1:])

    def to_tokens(self, x: Array, size: int, with_: float = 0.0) -> Array:
        """[B, T, H, size] of [*batch, H, T, F]."""
        x = pad_axis(x, size, with_=with_)
        return jnp.swapaxes(x.reshape(-1, *(self.batch[-1:] or (1,)), *x.shape[-2:]), 1, 2)

    def from_tokens(self, x: Array, size: int) -> Array:
        """[*batch, H, T, size] of [B, T, H, F]."""
        x = jnp.swapaxes(x, 1, 2)[..., :size]
        return x.reshape(*self.batch, *x.shape[-2:])

    def fill(self, x: Array, size: int, axis: int = -1, with_: float = 0.0) -> Array:
        """An array, flattened, with `axis` filled up to `size`."""
        return pad_axis(self.flatten(x), size, axis, with_)

    def in_turn(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """function(*arrays) of one entry of the first batch axis after the other, which takes little memory."""
        return lax.map(lambda some: function(*some), arrays) if self.batch else function(*arrays)

    def keys_vectors(self, x: Array) -> Array:
        return self.fill(x, self.sizes.n_rows)

    def exponents(self, c: Array) -> Array:
        return pad_axis(self.fill(c, self.sizes.d_key, with_=NEG_INF), self.sizes.n_rows)

    def values_vectors(self, x: Array | None, with_: float = 0.0) -> Array | None:
        return None if x is None else self.fill(x, self.sizes.d_value, with_=with_)

    def state(self, m: KernelSums) -> KernelSums:
        s = pad_axis(self.fill(m.s, self.sizes.n_rows, axis=-2), self.sizes.d_value)
        return KernelSums(s, self.fill(m.z, self.sizes.d_key))

    def sums(self, m: KernelSums) -> KernelSums:
        return KernelSums(
            self.unflatten(m.s)[..., : self.d_key, : self.d_value], self.unflatten(m.z)[..., : self.d_key]
        )

    def inputs(
        self, q: Array, k: Array, values: Array, decays: Decays | None, own: ChunkShifts, moved: Scales
    ) -> Inputs:
        vectors = ChunkVectors(
            c=self.exponents(own.reading.c),
            b=self.values_vectors(own.reading.b, NEG_INF),
            moved_k=self.keys_vectors(moved.k),
            moved_v=self.values_vectors(moved.v),
            positions=jnp.broadcast_to(positions(), (self.sizes.n_chunks, CHUNK)),
            decay=None if decays is None else self._decay_vectors(decays, own),
        )
        return Inputs(
            self.to_tokens(q, self.sizes.d_key),
            self.to_tokens(k, self.sizes.d_key, NEG_INF),
            self.to_tokens(values, self.sizes.d_value, NEG_INF if self.sizes.log_values else 0.0),
            vectors,
        )

    def _decay_vectors(self, decays: Decays, own: ChunkShifts) -> DecayVectors:
        log_decay = decays.before_at_end[..., None]
        kept = kept_scales(log_decay, own.reading, own.after)
        scale = lambda b: None if own.own_b is None else jnp.exp(log_rescaling(own.own_b, b))
        in_tokens = lambda x: self.flatten(jnp.broadcast_to(x, decays.units.shape).reshape(*self.batch, -1))
        return DecayVectors(
            kept_k=self.keys_vectors(kept.k),
            kept_v=self.values_vectors(kept.v),
            kept_z=self.keys_vectors(jnp.exp(log_rescaling(own.reading.c, own.after.c, log_decay))),
            after_c=self.exponents(own.after.c),
            own_b=self.values_vectors(own.own_b, NEG_INF),
            to_reading=self.values_vectors(scale(own.reading.b)),
            to_after=self.values_vectors(scale(own.after.b)),
            units=in_tokens(decays.units),
            unit=in_tokens(decays.unit),
            rest=in_tokens(decays.rest),
            first=in_tokens(decays.first),
            of_state=in_tokens(jnp.exp(decays.before_at_queries)),
            until_end=in_tokens(decays.keys_at_end),
        )
