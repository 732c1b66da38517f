"""How XLA is made to run the mathematics of `chunk` fast: groups, padding, loops and buffers, forward and backward.

Tokens are cut into chunks of C, and chunks are taken in groups, one group after the other (`lax.scan`). Within a group
the products and exponentials of all its chunks are computed at once, and the sums between them in turn.

What XLA forces, and why:
  * Groups. One chunk is too small to fill a device; all chunks at once leave a CPU's cache (`chunks_per_group`).
  * Padding copies all inputs and outputs; groups may be half as large if that leaves nothing to pad (`split_tokens`).
  * Loops write their outputs into buffers that they carry, in place, rather than stack them (`write`).
  * Buffers that are overwritten are filled differently: XLA merges equal constants, and then copies one for each use.
  * The backward pass overwrites the buffer of S by the gradient of the values, which saves a buffer. For real values
    XLA would copy the whole buffer in every group, so there it is not done.
  * `scan_chunks` keeps the chunks along their axis: `lax.scan` would move them to the front, which copies them.
  * GPUs launch kernels for each step of a loop: there the body of `scan_chunks` takes many steps. On TPUs that moves as
    many bytes, and their compiler ends with a failed check for a gate and 8 steps (jax 0.10.2, 120 sequences on a v5p).
tests/ops/test_memory.py looks for copies of buffers inside the compiled loops.

Axes: `*batch` any leading axes; T tokens; N chunks of a group; C tokens of a chunk; K key and V value features.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen import platform
from heinsen.logspace import ShiftedLog
from heinsen.ops import chunk, exact
from heinsen.ops.chunk import ChunkShifts, KeyFactors, Keys, QueryFactors
from heinsen.ops.exact import Output, multiply, vary_together, write
from heinsen.ops.values import N, Shifts, Sums, Values

_MOST_STEPS = 16  # of a loop over chunks that are written out, on GPUs

X = TypeVar("X")
Y = TypeVar("Y")
Carry = TypeVar("Carry")


class Split(NamedTuple):
    """How tokens are cut: n_groups, one after the other, of n_chunks chunks each, of chunk_size tokens."""

    n_groups: int
    n_chunks: int
    chunk_size: int

    @property
    def group_size(self) -> int:
        return self.n_chunks * self.chunk_size

    @property
    def n_tokens(self) -> int:
        return self.n_groups * self.group_size


class Residuals(NamedTuple):
    """What the forward pass saves for the backward pass."""

    sums: Sums  # S [*batch, T, V] and Z [*batch, T] of all queries
    before: Sums  # sums before each chunk, [n_groups, *batch, N, K, V] and [n_groups, *batch, N, K]
    shifts: ChunkShifts  # those of each chunk, [n_groups, *batch, N, ...]


# ---- splitting ------------------------------------------------------------------------------------


def chunk_size(d_key: int) -> int:
    """Tokens in a chunk, for d_key key features per head."""
    return 32 if d_key < 64 and platform.target() == "cpu" else 64


def chunks_per_group(elements: int) -> int:
    """Chunks to take at once, if one has so many elements in its queries or keys, over all heads and sequences.

    On CPUs the arrays of a group stay in cache and yet are large enough for several threads; accelerators want few
    large steps.
    """
    return max(1, (2**18 if platform.target() == "cpu" else 2**26) // elements)


def split_tokens(shape: tuple[int, ...]) -> Split:
    """Split of queries or keys of shape [*batch, T, K]; it may hold more tokens than T. The batch may be symbolic."""
    *batch, n_tokens, d_key = shape
    size = min(chunk_size(d_key), n_tokens)
    n_chunks = -(-n_tokens // size)
    limit = chunks_per_group(math.prod(n for n in batch if isinstance(n, int)) * size * d_key)
    for in_group in range(min(limit, n_chunks), limit // 2, -1):
        if n_chunks % in_group == 0:
            return Split(n_chunks // in_group, in_group, size)
    n_groups = -(-n_chunks // limit)
    return Split(n_groups, -(-n_chunks // n_groups), size)


# ---- slices of arrays -----------------------------------------------------------------------------


def take_group(arrays: X, i: Array | int, split: Split, axis: int = -2) -> X:
    """Group i of arrays [*batch, T, ...], as chunks [*batch, N, C, ...]; `axis` is that of the tokens."""

    def take(x: Array) -> Array:
        at = x.ndim + axis
        group = lax.dynamic_slice_in_dim(x, i * split.group_size, split.group_size, at)
        return group.reshape(*x.shape[:at], split.n_chunks, split.chunk_size, *x.shape[at + 1 :])

    return jax.tree.map(take, arrays)


def to_tokens(chunks: X, axis: int = -2) -> X:
    """A group's chunks as its tokens; `axis` is that of the tokens of a chunk."""
    reshape = lambda x: x.reshape(*x.shape[: axis - 1], -1, *x.shape[x.ndim + axis + 1 :])
    return jax.tree.map(reshape, chunks)


def scan_chunks(
    step: Callable[[Carry, X], tuple[Carry, Y]], carry: Carry, chunks: X, axis: int, reverse: bool = False
) -> tuple[Carry, Y]:
    """`lax.scan` over the chunks of a group, which stay along `axis`."""
    n = jax.tree.leaves(chunks)[0].shape[axis]
    size = _steps_together(n)
    n_blocks = n // size
    block_of = lambda i: jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * size, size, axis), chunks)
    take = lambda block, i: jax.tree.map(lambda x: lax.index_in_dim(x, i, axis, keepdims=False), block)

    def body(j: Array, carry_and_out: tuple[Carry, Y]) -> tuple[Carry, Y]:
        carry, out = carry_and_out
        i = n_blocks - 1 - j if reverse else j
        block, ys = block_of(i), cast(list[Y], [None] * size)
        for at in reversed(range(size)) if reverse else range(size):
            carry, ys[at] = step(carry, take(block, at))
        write = lambda x, *parts: lax.dynamic_update_slice_in_dim(x, jnp.stack(parts, axis), i * size, axis)
        return carry, jax.tree.map(write, out, *ys)

    ys = jax.eval_shape(lambda: step(carry, take(block_of(0), 0))[1])
    out = jax.tree.map(lambda y: jnp.zeros((*y.shape[:axis], n, *y.shape[axis:]), y.dtype), ys)
    out, carry, _ = vary_together(out, carry, chunks)
    return lax.fori_loop(0, n_blocks, body, (carry, out))


def _steps_together(n: int) -> int:
    """Steps of n that the body of a loop over chunks takes: a divisor of n."""
    if platform.target() != "gpu":
        return 1
    return next(size for size in range(min(n, _MOST_STEPS), 0, -1) if n % size == 0)


# ---- both passes ----------------------------------------------------------------------------------


class _Buffers(NamedTuple):
    """What the groups write: y, S and Z (or their smallest so far), and log Z if asked for."""

    y: Array
    sums: Sums
    log_z: ShiftedLog | None


@dataclasses.dataclass(frozen=True)
class Causal(Generic[N]):
    """Causal attention over a whole number of groups, as `exact.run` takes it: what is known when it is compiled."""

    kind: Values[N]
    split: Split
    return_log_z: bool
    device: str  # the platform, on which chunks, groups and loops depend: what was traced for another is not used

    def exact(self, q: Array, keys: Keys, state: N, out: Output[N]) -> Output[N]:
        return exact.attend(self.kind, self.split.chunk_size, q, keys, state, out)

    def exact_backward(
        self, q: Array, keys: Keys, state: N, grads: Output[N], scale: Array, out: tuple[Array, Keys, N]
    ) -> tuple[Array, Keys, N]:
        return exact.attend_backward(self.kind, self.split.chunk_size, q, keys, state, grads, scale, out)

    def forward(self, q: Array, keys: Keys, state: N, save_residuals: bool) -> tuple[Output[N], Any, Array]:
        """(the output, what the backward pass needs if it is saved, whether terms were lost)."""
        kind, split = self.kind, self.split

        def step(carry: Any, i: Array) -> Any:
            m, shifts, buffers, spreads = carry
            group_q, group_keys = take_group((q, keys), i, split)
            own = move_in_turn(kind, shifts, group_keys)
            queries, key_factors = chunk.query_factors(group_q, own), chunk.key_factors(kind, group_keys, own)
            before, m, shifts = _sums_between(key_factors, m, shifts, own)
            buffers = self._write_queries(queries, key_factors, before, own, buffers, i, save_residuals)
            spreads |= kind.spreads(group_keys.values)
            return (m, shifts, buffers, spreads), (before, own) if save_residuals else None

        shifts = kind.state_shifts(state)
        m = kind.state_to_sums(state, shifts)
        carry = m, shifts, self._make_buffers(m, save_residuals), kind.spreads(m.s)
        carry = vary_together(carry, (q, keys))[0]
        (m, shifts, buffers, spreads), before = lax.scan(step, carry, jnp.arange(split.n_groups))
        y, sums, log_z = buffers
        # Sums between chunks need no check: what they lost is as little to the queries that read them, and to the end.
        lost = spreads | kind.has_lost_terms(sums) | kind.has_lost_terms(chunk.fill_empty_features(kind, m, shifts))
        residuals = Residuals(sums, *before) if save_residuals else None
        return Output(y, log_z, kind.sums_to_state(m, shifts)), residuals, lost

    def backward(
        self, q: Array, keys: Keys, state: N, residuals: Any, grads: Output[N], scale: Array
    ) -> tuple[Array, Keys, N]:
        """Gradients of the tokens and of the state before them; cotangents are divided by `scale` meanwhile."""
        kind, split = self.kind, self.split

        def step(carry: Any, xs: Any) -> Any:
            dm, after, dq, dkeys = carry
            i, (before, own) = xs
            group_q, group_keys = take_group((q, keys), i, split)
            queries, key_factors = chunk.query_factors(group_q, own), chunk.key_factors(kind, group_keys, own)
            s = dkeys.values if kind.grad_overwrites_sums else residuals.sums.s
            dy, dlog_z, dsums = self._query_sums_grad(Sums(s, residuals.sums.z), grads, i, 1 / scale)
            more = chunk.before_grad(queries, key_factors, dsums)
            dpairs = chunk.pair_grad(key_factors, dsums, own)
            group_dq = chunk.query_grad(queries, key_factors, before, dsums, dpairs)
            dq_total = chunk.query_grad_total(kind, dy, dlog_z, own)
            group_dq = chunk.correct_query_grad(group_dq, queries, key_factors, before, dq_total)
            dends, dkept, dm, after = _sums_between_grad(key_factors, before, more, dm, own, after)
            dkey = chunk.key_grads(kind, queries, key_factors, dsums, dpairs, dends, own)
            dlog_decay = None if keys.log_decay is None else chunk.log_decay_grad(dq_total, dkey, dkept)
            group = group_dq, Keys(dkey.k, dkey.values, None, dlog_decay)
            dq, dkeys = write((dq, dkeys), multiply(to_tokens(group), scale), i)
            return (dm, after, dq, dkeys), None

        m, shifts = end_sums(kind, keys, residuals)
        (dm,) = jax.vjp(lambda m: kind.sums_to_state(m, shifts), m)[1](multiply(grads.state, 1 / scale))
        carry = dm, shifts, *self._make_grad_buffers(q, keys, residuals.sums)
        carry = vary_together(carry, (q, keys, residuals, grads))[0]
        xs = jnp.arange(split.n_groups), (residuals.before, residuals.shifts)
        (dm, shifts, dq, dkeys), _ = lax.scan(step, carry, xs, reverse=True)
        first = kind.state_shifts(state)
        to_state = jax.vjp(lambda state: kind.state_to_sums(state, first), state)[1]
        return dq, dkeys, multiply(to_state(chunk.scale(dm, chunk.shift_scales(first, shifts)))[0], scale)

    def _make_buffers(self, m: Sums, save_residuals: bool) -> _Buffers:
        """Buffers for the groups to overwrite, filled differently: see the module's top."""
        n_tokens, (*batch, _, d_value) = self.split.n_tokens, m.s.shape
        n_sums = n_tokens if save_residuals else self.split.group_size
        make = lambda fill, *last: jnp.full((*batch, *last), fill, m.s.dtype)
        log_z = ShiftedLog(make(2, n_tokens), make(3, n_tokens)) if self.return_log_z else None
        return _Buffers(make(0, n_tokens, d_value), Sums(make(1, n_sums, d_value), make(1, n_sums)), log_z)

    def _write_queries(
        self,
        queries: QueryFactors,
        keys: KeyFactors,
        before: Sums,
        shifts: ChunkShifts,
        buffers: _Buffers,
        i: Array,
        save_residuals: bool,
    ) -> _Buffers:
        """The buffers with what group i's queries read."""
        y, (s, z), log_z = buffers
        sums = chunk.query_sums(queries, keys, before, shifts)
        filled = chunk.fill_empty_queries(self.kind, queries, sums, shifts)
        group_s, group_z = to_tokens(filled.s), to_tokens(filled.z, axis=-1)
        y = write(y, to_tokens(self.kind.mean(sums, shifts.reading.b)), i)
        if save_residuals:
            s, z = write(s, group_s, i), write(z, group_z, i, axis=-1)
        else:
            s, z = jnp.minimum(s, group_s), jnp.minimum(z, group_z)
        if log_z is not None:
            log_z = write(log_z, to_tokens(chunk.log_z(queries, sums), axis=-1), i, axis=-1)
        return _Buffers(y, Sums(s, z), log_z)

    def _make_grad_buffers(self, q: Array, keys: Keys, sums: Sums) -> tuple[Array, Keys]:
        """Buffers for the groups to overwrite, filled differently; for the gradient of the values that of S, or not."""
        dvalues = sums.s if self.kind.grad_overwrites_sums else jnp.full_like(keys.values, 2)
        dlog_decay = None if keys.log_decay is None else jnp.full_like(keys.log_decay, 3)
        return jnp.full_like(q, 0), Keys(jnp.full_like(keys.k, 1), dvalues, None, dlog_decay)

    def _query_sums_grad(
        self, sums: Sums, grads: Output[N], i: Array, factor: Array
    ) -> tuple[Array, Array | None, Sums]:
        """Group i's gradients of y, of log Z and of S and Z, as chunks, times `factor`."""
        split = self.split
        s, dy = take_group((sums.s, grads.y), i, split)
        of_queries = sums.z, None if grads.log_z is None else grads.log_z.rest
        z, dlog_z = take_group(of_queries, i, split, axis=-1)
        dy, dlog_z = multiply((dy, dlog_z), factor)
        return dy, dlog_z, self.kind.mean_grad(Sums(s, z), dy, dlog_z)


def move_in_turn(kind: Values[Any], shifts: Shifts, keys: Keys) -> ChunkShifts:
    """Shifts of each chunk of a group, [*batch, N, ...], after sums relative to `shifts`."""
    return chunk.move_shifts(shifts, chunk.own_shifts(kind, keys), shifts.c.ndim - 1)


def _sums_between(keys: KeyFactors, m: Sums, shifts: Shifts, own: ChunkShifts) -> tuple[Sums, Sums, Shifts]:
    """The sums before each chunk of a group, relative to `own.reading`; the sums and shifts after the last."""
    axis = shifts.c.ndim - 1

    def step(m: Sums, xs: Any) -> tuple[Sums, Sums]:
        moved, kept, more = xs
        before = chunk.scale(m, moved)
        return chunk.add_sums(chunk.scale(before, kept), more), before

    earlier = jax.tree.map(lambda x, first: chunk.preceding(x, first, axis), own.after, shifts)
    moved = chunk.shift_scales(earlier, own.reading)
    xs = moved, chunk.kept_scales(keys.log_kept, own.reading, own.after), chunk.chunk_sums(keys, own)
    m, before = scan_chunks(step, m, xs, axis)
    return before, m, jax.tree.map(lambda x: lax.index_in_dim(x, -1, axis, keepdims=False), own.after)


def _sums_between_grad(
    keys: KeyFactors, before: Sums, more: Sums, dm: Sums, own: ChunkShifts, later: Shifts
) -> tuple[Sums, Array | None, Sums, Shifts]:
    """The gradients of the sums after each chunk of a group, and their products with the sums `before` that are kept.

    Last come the gradients of the sums before the first chunk, and their shifts. `more` is what each chunk's queries
    add to the gradient of the sums before it; `dm` is relative to `later`.
    """
    axis = later.c.ndim - 1

    def step(dm: Sums, xs: Any) -> tuple[Sums, Sums]:
        moved, kept, more = xs
        dend = chunk.scale(dm, moved)
        return chunk.add_sums(chunk.scale(dend, kept), more), dend

    next_reading = jax.tree.map(lambda x, last: chunk.following(x, last, axis), own.reading, later)
    kept = chunk.kept_scales(keys.log_kept, own.reading, own.after)
    xs = chunk.shift_scales(own.after, next_reading), kept, more
    dm, dends = scan_chunks(step, dm, xs, axis, reverse=True)
    dkept = None if kept is None else chunk.kept_product(kept, before, dends)
    return dends, dkept, dm, jax.tree.map(lambda x: lax.index_in_dim(x, 0, axis, keepdims=False), own.reading)


def end_sums(kind: Values[Any], keys: Keys, residuals: Residuals) -> tuple[Sums, Shifts]:
    """The sums after the last chunk, and their shifts."""
    axis = residuals.before.z.ndim - 3
    n_chunks = residuals.before.z.shape[-2]
    last = lambda x: lax.index_in_dim(lax.index_in_dim(x, -1, 0, keepdims=False), -1, axis, keepdims=False)
    m, own = jax.tree.map(last, (residuals.before, residuals.shifts))
    size = keys.k.shape[-2] // (residuals.before.z.shape[0] * n_chunks)
    last_keys = jax.tree.map(lambda x: lax.slice_in_dim(x, x.shape[-2] - size, None, axis=x.ndim - 2), keys)
    return chunk.next_sums(chunk.key_factors(kind, last_keys, own), m, own), own.after
