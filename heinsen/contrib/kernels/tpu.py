"""The forward and the backward pass of the chunked form as one kernel each, for TPUs (Pallas).

A step of a kernel takes one chunk of a few heads; the chunks of a head follow one another, backwards in the backward
pass, with the sums M between them (or their gradient) and their shifts on chip. Factors and pairwise weights never
leave the chip. The mathematics is that of `chunk`, whose functions the kernels call; the functions here take the place
of those of `schedule`, and what they return goes through the same check (`exact`).

A TPU tiles the last axis of an array to 128 lanes, so that [..., T, 32] would take four times its bytes. The kernels
have arrays [..., K, T], with tokens in the lanes, and transpose each chunk on chip.

Axes: G heads of all sequences, P of them in a step; T tokens; N chunks; C tokens of a chunk; K key and V value
features, filled up to whole sublanes.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from heinsen.contrib.kernels import interpret
from heinsen.contrib.kernels.keys import with_decay
from heinsen.errors import InputError
from heinsen.logspace import NEG_INF, ShiftedLog
from heinsen.ops import chunk
from heinsen.ops.chunk import ChunkShifts, DecayShifts, Keys
from heinsen.ops.exact import Output, multiply
from heinsen.ops.schedule import Causal, Split
from heinsen.ops.values import REAL_VALUES, SMALLEST_SUM, Shifts, StateT, Sums, Values, safe_log

LANES = 128
CHUNK = LANES  # tokens
SUBLANES = 8
VMEM_BYTES = 32 * 2**20

Held = Any  # an array, its type and block, or a kernel's reference to it


class Inputs(NamedTuple):
    """A call's tokens."""

    q: Held  # [G, K, T]
    k: Held  # [G, K, T]
    values: Held  # [G, V, T]
    starts: Held  # [G, 1, T], 0 or 1; None: one document
    log_decay: Held  # [G, 1, T]; None: 0

    def read(self) -> tuple[Array, Keys]:
        """A chunk's queries and keys [C, ...]."""
        starts = None if self.starts is None else self.starts[:, 0][..., None] > 0
        log_decay = None if self.log_decay is None else self.log_decay[:, 0][..., None]
        return self.q[...].mT, Keys(self.k[...].mT, self.values[...].mT, starts, log_decay)


class State(NamedTuple):
    """Sums between chunks, or their gradients, and their shifts."""

    s: Held  # [G, K, V]
    z: Held  # [G, 1, K]
    c: Held  # [G, 1, K]
    b: Held  # [G, 1, V]; None for real values

    def read(self) -> tuple[Sums, Shifts]:
        return Sums(self.s[...], self.z[:, 0]), Shifts(self.c[:, 0], None if self.b is None else self.b[:, 0])

    def write(self, m: Sums, shifts: Shifts) -> None:
        self.s[...], self.z[:, 0], self.c[:, 0] = m.s, m.z, shifts.c
        if self.b is not None:
            self.b[:, 0] = shifts.b


class Before(NamedTuple):
    """Sums before each chunk, and the shifts around them. The P heads of a block share the lanes of M_s."""

    s: Held  # [G / P, N, K, P V]
    z: Held  # [G, N, 1, K]
    shifts: Any  # `ChunkShifts` of [G, N, 1, ...]

    def read(self) -> tuple[Sums, ChunkShifts]:
        z, shifts = jax.tree.map(lambda ref: ref[:, 0, 0], (self.z, self.shifts))
        s, d_value = self.s[0, 0], self.s.shape[-1] // len(z)
        return Sums(jnp.stack([s[:, i : i + d_value] for i in range(0, s.shape[1], d_value)]), z), shifts

    def write(self, m: Sums, shifts: ChunkShifts) -> None:
        def write_one(ref: Held, x: Array) -> None:
            ref[:, 0, 0] = x

        self.s[0, 0] = jnp.concatenate(list(m.s), axis=-1)
        jax.tree.map(write_one, (self.z, self.shifts), (m.z, shifts))


# ---- forward ------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """What the forward kernel writes for the backward kernel."""

    s: Held  # [G, V, T]: S of each query, with 1 where it is rightly 0
    before: Before


class Written(NamedTuple):
    """What the forward kernel writes."""

    y: Held  # [G, V, T]
    z: Held  # [G, 1, T]: Z of each query, with 1 where it is rightly 0
    r: Held  # [G, 1, T]; None unless log Z is asked for
    fine: Held  # [G, 1, C]: 0 where a sum may have lost terms, in any chunk, else 1
    end: State
    saved: Any  # `Saved`, or None


def _forward_kernel(kind: Values[Any], inputs: Inputs, first: State, out: Written) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        out.end.write(*first.read())
        out.fine[...] = jnp.ones_like(out.fine)

    (q, keys), (m, before) = inputs.read(), out.end.read()
    shifts = chunk.move_shifts_once(before, chunk.own_shifts(kind, keys))
    queries, factors = chunk.query_factors(q, shifts), chunk.key_factors(kind, keys, shifts)
    m = chunk.scale(m, chunk.shift_scales(before, shifts.reading))
    sums = chunk.query_sums(queries, factors, m, shifts)
    filled = chunk.fill_empty_queries(kind, queries, sums, shifts)
    out.y[...], out.z[:, 0] = kind.mean(sums, shifts.reading.b).mT, filled.z
    if out.r is not None:
        out.r[:, 0] = queries.r
    if out.saved is not None:
        out.saved.s[...] = filled.s.mT
        out.saved.before.write(m, shifts)
    out.fine[:, 0] = out.fine[:, 0] * _are_fine(kind, filled, keys.values)
    out.end.write(chunk.next_sums(factors, m, shifts), shifts.after)


def _are_fine(kind: Values[Any], sums: Sums, values: Array) -> Array:
    """[P, C]: 0 where sums may have lost terms (`Values.has_lost_terms`) or values are not finite, else 1."""
    other = jnp.abs(values) < jnp.inf if kind is REAL_VALUES else sums.s >= SMALLEST_SUM
    return jnp.where(sums.z >= SMALLEST_SUM, jnp.min(jnp.where(other, 1.0, 0.0), axis=-1), 0.0)


# ---- backward -----------------------------------------------------------------------------------------


class Cotangents(NamedTuple):
    """What the backward kernel reads besides the inputs."""

    dy: Held  # [G, V, T]
    dlog_z: Held  # [G, 1, T]; None: 0
    z: Held  # [G, 1, T]
    saved: Saved
    factors: Held  # [2]: 1 / scale, scale


class Gradients(NamedTuple):
    """What the backward kernel writes."""

    q: Held  # [G, K, T]
    k: Held  # [G, K, T]
    values: Held  # [G, V, T]
    log_decay: Held  # [G, 1, T]; None without log decays
    first: State  # of the sums that the first chunk's queries read


def _backward_kernel(kind: Values[Any], inputs: Inputs, given: Cotangents, end: State, out: Gradients) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        out.first.write(*end.read())

    (q, keys), (m, shifts) = inputs.read(), given.saved.before.read()
    dm, later = out.first.read()
    queries, factors = chunk.query_factors(q, shifts), chunk.key_factors(kind, keys, shifts)
    dy = given.dy[...].mT * given.factors[0]
    dlog_z = None if given.dlog_z is None else given.dlog_z[:, 0] * given.factors[0]
    dsums = kind.mean_grad(Sums(given.saved.s[...].mT, given.z[:, 0]), dy, dlog_z)

    dend = chunk.scale(dm, chunk.shift_scales(shifts.after, later))
    kept = chunk.kept_scales(factors.log_kept, shifts.reading, shifts.after)
    dpairs = chunk.pair_grad(factors, dsums, shifts)
    dq = chunk.query_grad(queries, factors, m, dsums, dpairs)
    dq_total = chunk.query_grad_total(kind, dy, dlog_z, shifts)
    dq = chunk.correct_query_grad(dq, queries, factors, m, dq_total)
    dkey = chunk.key_grads(kind, queries, factors, dsums, dpairs, dend, shifts)
    dkept = None if kept is None else chunk.kept_product(kept, m, dend)
    dlog_decay = chunk.log_decay_grad(dq_total, dkey, dkept)

    for ref, x in ((out.q, dq), (out.k, dkey.k), (out.values, dkey.values)):
        ref[...] = x.mT * given.factors[1]
    if out.log_decay is not None and dlog_decay is not None:
        out.log_decay[:, 0] = dlog_decay[..., 0] * given.factors[1]
    dm = chunk.add_sums(chunk.scale(dend, kept), chunk.before_grad(queries, factors, dsums))
    out.first.write(dm, shifts.reading)


# ---- running a kernel ---------------------------------------------------------------------------------


class _Block:
    """Type of an array, and its blocks."""

    def __init__(self, shape: tuple[int, ...], block: tuple[int, ...], index: Callable[[Any, Any], tuple[Any, ...]]):
        self.type = jax.ShapeDtypeStruct(shape, jnp.float32)
        self.spec = pl.BlockSpec(block, index)


class _Layout(NamedTuple):
    """How arrays [*batch, ...] become those of the kernels, and back."""

    kind: Values[Any]
    split: Split
    batch: tuple[int, ...]
    d_key: int
    d_value: int
    starts: bool
    log_decay: bool

    @classmethod
    def of(cls, kind: Values[Any], split: Split, keys: Keys) -> "_Layout":
        sizes = keys.k.shape[-1], keys.values.shape[-1]
        return cls(kind, split, keys.k.shape[:-2], *sizes, keys.resets is not None, keys.log_decay is not None)

    @property
    def n_heads(self) -> int:
        return math.prod(self.batch)

    @property
    def heads_per_block(self) -> int:
        """As many as share the lanes of M_s."""
        most = max(1, LANES // self.value_features)
        return next(n for n in range(most, 0, -1) if self.n_heads % n == 0)

    @property
    def key_features(self) -> int:
        return -(-self.d_key // SUBLANES) * SUBLANES

    @property
    def value_features(self) -> int:
        return -(-self.d_value // SUBLANES) * SUBLANES

    # ---- arrays ----

    def tokens(self, x: Array, size: int, fill: float = 0.0) -> Array:
        """[G, size, T] of x [*batch, T, at most size]."""
        return jnp.swapaxes(self.features(x, size, fill), -1, -2)

    def of_tokens(self, x: Array, size: int) -> Array:
        """[*batch, T, size] of x [G, at least size, T]."""
        return jnp.swapaxes(self.cut(x), -1, -2)[..., :size]

    def features(self, x: Array, size: int, fill: float = 0.0) -> Array:
        """[G, ..., size] of x [*batch, ..., at most size]."""
        return _fill(x.reshape(self.n_heads, *x.shape[len(self.batch) :]), size, -1, fill)

    def row(self, x: Array) -> Array:
        """[G, 1, T] of x [*batch, T]."""
        return x.reshape(self.n_heads, 1, -1)

    def cut(self, x: Array, *sizes: int) -> Array:
        """[*batch, ..., *sizes] of x [G, ...], which may have more in its last axes."""
        return x.reshape(*self.batch, *x.shape[1:])[(..., *map(slice, sizes))]

    def inputs(self, q: Array, keys: Keys) -> Inputs:
        k, values, starts, log_decay = keys
        return Inputs(
            self.tokens(q, self.key_features),
            self.tokens(k, self.key_features, NEG_INF),
            self.tokens(values, self.value_features, self.kind.zero),
            None if starts is None else self.row(starts.astype(k.dtype)),
            None if log_decay is None else self.row(log_decay),
        )

    def state(self, m: Sums, shifts: Shifts) -> State:
        s = _fill(self.features(m.s, self.value_features), self.key_features, -2, 0.0)
        row = lambda x, size, fill: None if x is None else self.features(x, size, fill)[:, None]
        c, b = row(shifts.c, self.key_features, NEG_INF), row(shifts.b, self.value_features, NEG_INF)
        return State(s, row(m.z, self.key_features, 0.0), c, b)

    def sums(self, state: State) -> tuple[Sums, Shifts]:
        c, b = self.cut(state.c[:, 0], self.d_key), None if state.b is None else self.cut(state.b[:, 0], self.d_value)
        return Sums(self.cut(state.s, self.d_key, self.d_value), self.cut(state.z[:, 0], self.d_key)), Shifts(c, b)

    # ---- blocks ----

    def blocks_of_tokens(self, width: int, backwards: bool = False) -> _Block:
        """Of an array [G, width, T]."""
        at, size = self._chunk(backwards), self.split.chunk_size
        shape, block = (width, self.split.n_tokens), (width, size)
        return _Block((self.n_heads, *shape), (self.heads_per_block, *block), lambda g, i: (g, 0, at(i)))

    def blocks_of_chunks(self, rows: int, columns: int, backwards: bool = False, heads: int = 1) -> _Block:
        """Of an array [G / heads, N, rows, columns]."""
        at, shape = self._chunk(backwards), (rows, columns)
        whole, block = (self.n_heads // heads, self.split.n_chunks), (self.heads_per_block // heads, 1)
        return _Block((*whole, *shape), (*block, *shape), lambda g, i: (g, at(i), 0, 0))

    def blocks_of_heads(self, rows: int, columns: int) -> _Block:
        """Of an array [G, rows, columns]."""
        shape = rows, columns
        return _Block((self.n_heads, *shape), (self.heads_per_block, *shape), lambda g, i: (g, 0, 0))

    def blocks_of_inputs(self, backwards: bool = False) -> Inputs:
        tokens = partial(self.blocks_of_tokens, backwards=backwards)
        starts, log_decay = tokens(1) if self.starts else None, tokens(1) if self.log_decay else None
        return Inputs(
            tokens(self.key_features), tokens(self.key_features), tokens(self.value_features), starts, log_decay
        )

    def blocks_of_state(self) -> State:
        key_features, value_features = self.key_features, self.value_features
        row = partial(self.blocks_of_heads, 1)
        b = None if self.kind is REAL_VALUES else row(value_features)
        return State(self.blocks_of_heads(key_features, value_features), row(key_features), row(key_features), b)

    def blocks_of_saved(self, backwards: bool = False) -> Saved:
        key_features, value_features, heads = self.key_features, self.value_features, self.heads_per_block
        chunks = partial(self.blocks_of_chunks, backwards=backwards)
        c: Any = chunks(1, key_features)
        b: Any = None if self.kind is REAL_VALUES else chunks(1, value_features)
        shifts = ChunkShifts(Shifts(c, b), DecayShifts(Shifts(c, b), b) if self.log_decay else None)
        before = Before(chunks(key_features, heads * value_features, heads=heads), c, shifts)
        return Saved(self.blocks_of_tokens(value_features, backwards), before)

    def _chunk(self, backwards: bool) -> Callable[[Any], Any]:
        return (lambda i: self.split.n_chunks - 1 - i) if backwards else (lambda i: i)


def _fill(x: Array, size: int, axis: int, fill: float) -> Array:
    """x with `axis` filled up to `size`."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=fill)


def _run_kernel(
    kernel: Any, layout: _Layout, inputs: Any, blocks: Any, out: Any, *, pair_products: int, sum_products: int
) -> Any:
    """What a kernel writes to `out`, from `inputs` in `blocks`.

    It makes so many products with matrices [C, C], and with M [K, V], of each chunk.
    """
    leaves, tree = jax.tree.flatten(inputs)
    out_leaves, out_tree = jax.tree.flatten(out)
    key_features, value_features, n_tokens = (
        layout.key_features,
        layout.value_features,
        layout.n_heads * layout.split.n_tokens,
    )
    of_pairs = pair_products * layout.split.chunk_size * (key_features + value_features) // 2
    cost = pl.CostEstimate(
        flops=2 * n_tokens * (of_pairs + sum_products * key_features * value_features),
        bytes_accessed=4 * sum(x.size for x in leaves) + 4 * sum(math.prod(block.type.shape) for block in out_leaves),
        transcendentals=2 * n_tokens * (key_features + value_features),
    )

    def body(*refs: Any) -> None:
        arguments, written = refs[: len(leaves)], refs[len(leaves) :]
        kernel(layout.kind, *jax.tree.unflatten(tree, arguments), jax.tree.unflatten(out_tree, written))

    written = pl.pallas_call(
        body,
        grid=(layout.n_heads // layout.heads_per_block, layout.split.n_chunks),
        in_specs=[block.spec if isinstance(block, _Block) else block for block in jax.tree.leaves(blocks)],
        out_specs=[block.spec for block in out_leaves],
        out_shape=[block.type for block in out_leaves],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=cost,
        interpret=interpret.params() or False,
        name=kernel.__name__.strip("_"),
    )(*leaves)
    return jax.tree.unflatten(out_tree, written)


# ---- in the place of `schedule` -----------------------------------------------------------------------


class _Residuals(NamedTuple):
    """What the forward pass saves for the backward pass, as the kernels have it."""

    saved: Saved
    z: Array  # [G, 1, T]
    end: State


@dataclasses.dataclass(frozen=True)
class Fused(Causal[StateT]):
    """`Causal` by one kernel for each pass."""

    interpret: Any  # InterpretParams, or None: compiled

    @classmethod
    def of(cls, kind: Values[StateT], keys: Keys, return_log_z: bool) -> "Fused[StateT]":
        """All chunks are in one group. Raises InputError for what the kernels do not take."""
        if keys.k.dtype != jnp.float32:
            raise InputError(
                f'implementation="pallas" computes in float32, not {keys.k.dtype}: pass implementation="chunked"'
            )
        return cls(kind, Split(1, -(-keys.k.shape[-2] // CHUNK), CHUNK), return_log_z, "tpu", interpret.params())

    def forward(
        self, q: Array, keys: Keys, state: StateT, save_residuals: bool
    ) -> tuple[Output[StateT], _Residuals | None, Array]:
        kind, keys = self.kind, with_decay(keys)
        layout = _Layout.of(kind, self.split, keys)
        shifts = kind.state_shifts(state)
        m = kind.state_to_sums(state, shifts)
        inputs = layout.inputs(q, keys), layout.state(m, shifts)
        blocks = layout.blocks_of_inputs(), layout.blocks_of_state()
        row = layout.blocks_of_tokens(1)
        out = Written(
            y=layout.blocks_of_tokens(layout.value_features),
            z=row,
            r=row if self.return_log_z else None,
            fine=layout.blocks_of_heads(1, self.split.chunk_size),
            end=layout.blocks_of_state(),
            saved=layout.blocks_of_saved() if save_residuals else None,
        )
        y, z, r, fine, end, saved = _run_kernel(
            _forward_kernel, layout, inputs, blocks, out, pair_products=2, sum_products=2
        )

        m_end, after = layout.sums(end)
        lost = kind.has_lost_terms(chunk.fill_empty_features(kind, m_end, after)) | kind.has_non_finite(m.s)
        log_z = None
        if r is not None:
            r = layout.cut(r[:, 0])
            log_z = ShiftedLog(jnp.where(r == NEG_INF, NEG_INF, safe_log(layout.cut(z[:, 0]))), r)
        residuals = _Residuals(saved, z, end) if save_residuals else None
        output = Output(layout.of_tokens(y, layout.d_value), log_z, kind.sums_to_state(m_end, after))
        return output, residuals, lost | ~jnp.all(fine == 1)

    def backward(
        self, q: Array, keys: Keys, state: StateT, residuals: Any, grads: Output[StateT], scale: Array
    ) -> tuple[Array, Keys, StateT]:
        kind, is_gated = self.kind, keys.log_decay is not None
        keys = with_decay(keys)
        layout = _Layout.of(kind, self.split, keys)
        m, shifts = layout.sums(residuals.end)
        (dm,) = jax.vjp(lambda m: kind.sums_to_state(m, shifts), m)[1](multiply(grads.state, 1 / scale))
        given = Cotangents(
            dy=layout.tokens(grads.y, layout.value_features),
            dlog_z=None if grads.log_z is None else layout.row(grads.log_z.rest),
            z=residuals.z,
            saved=residuals.saved,
            factors=jnp.stack([1 / scale, scale]).astype(jnp.float32),
        )
        inputs = layout.inputs(q, keys), given, layout.state(dm, shifts)

        of_tokens = partial(layout.blocks_of_tokens, backwards=True)
        of_keys, of_values, row = of_tokens(layout.key_features), of_tokens(layout.value_features), of_tokens(1)
        saved, in_smem = layout.blocks_of_saved(backwards=True), pl.BlockSpec(memory_space=pltpu.SMEM)
        cotangents = Cotangents(of_values, None if given.dlog_z is None else row, row, saved, in_smem)
        blocks = layout.blocks_of_inputs(backwards=True), cotangents, layout.blocks_of_state()
        out = Gradients(of_keys, of_keys, of_values, row if layout.log_decay else None, layout.blocks_of_state())
        dq, dk, dvalues, dlog_decay, first = _run_kernel(
            _backward_kernel, layout, inputs, blocks, out, pair_products=5, sum_products=4
        )

        dlog_decay = layout.cut(dlog_decay[:, 0])[..., None] if is_gated else None
        dkeys = Keys(layout.of_tokens(dk, layout.d_key), layout.of_tokens(dvalues, layout.d_value), None, dlog_decay)
        before = kind.state_shifts(state)
        dm, reading = layout.sums(first)
        dstate = jax.vjp(lambda state: kind.state_to_sums(state, before), state)[1](
            chunk.scale(dm, chunk.shift_scales(before, reading))
        )[0]
        return layout.of_tokens(dq, layout.d_key), dkeys, multiply(dstate, scale)
