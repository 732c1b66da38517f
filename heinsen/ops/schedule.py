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
  * The repair overwrites the buffers of the sums between chunks, which are no longer needed (`repair.backward`).
  * `scan_chunks` keeps the chunks along their axis: `lax.scan` would move them to the front, which copies them.
  * GPUs launch kernels for each step of a loop: there the body of `scan_chunks` takes many steps. On TPUs that moves as
    many bytes, and their compiler ends with a failed check for a gate and 8 steps (jax 0.10.2, 120 sequences on a v5p).
  * `lax.optimization_barrier` on the empty state (`chunked`): XLA would spend seconds folding so large a constant.
tests/ops/test_memory.py looks for copies of buffers inside the compiled loops.

Axes: `*batch` any leading axes; T tokens; N chunks of a group; C tokens of a chunk; K key and V value features.
"""

import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen import platform
from heinsen.logspace import ShiftedLog
from heinsen.ops import chunk
from heinsen.ops.chunk import ChunkShifts, KeyFactors, Keys, QueryFactors, Tokens
from heinsen.ops.values import N, Shifts, Sums, Values

# Cotangents are divided by sums of at least values.SMALLEST_SUM = 1e-27, and some 1e4 quotients are added.
LARGE_COTANGENT = 1e6

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


class Call(NamedTuple):
    """What is known of a call when it is compiled."""

    kind: Values[Any]
    split: Split
    return_log_z: bool = False
    exact: bool = True  # False: lost terms are not repaired
    fused: bool = False  # True: one kernel for each pass, where there are queries with keys


class Output(NamedTuple, Generic[N]):
    """y or log y, and log Z if asked for, both None without queries; the state after all tokens."""

    y: Array | None  # [*batch, T, V]
    log_z: ShiftedLog | None  # of arrays [*batch, T]
    state: N  # normalized


class Residuals(NamedTuple):
    """What the forward pass saves for the backward pass."""

    sums: Sums | None  # S [*batch, T, V] and Z [*batch, T] of all queries; None without queries
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
    """Split of queries or keys of shape [*batch, T, K]; it may hold more tokens than T."""
    *batch, n_tokens, d_key = shape
    size = min(chunk_size(d_key), n_tokens)
    n_chunks = -(-n_tokens // size)
    limit = chunks_per_group(math.prod(batch) * size * d_key)
    for in_group in range(min(limit, n_chunks), limit // 2, -1):
        if n_chunks % in_group == 0:
            return Split(n_chunks // in_group, in_group, size)
    n_groups = -(-n_chunks // limit)
    return Split(n_groups, -(-n_chunks // n_groups), size)


def pad_tokens(kind: Values[Any], tokens: Tokens, n_missing: int) -> Tokens:
    """Tokens with n_missing more at the end: keys of no weight, queries to be cut off."""
    if n_missing == 0:
        return tokens

    def pad(x: Array, fill: float | bool) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[token_axis(x)] = (0, n_missing)
        return jnp.pad(x, widths, constant_values=fill)

    keys = tokens.keys
    if keys is not None:
        starts = None if keys.starts is None else pad(keys.starts, False)
        log_decay = None if keys.log_decay is None else pad(keys.log_decay, 0.0)
        keys = Keys(pad(keys.k, -jnp.inf), pad(keys.values, kind.zero), starts, log_decay)
    return Tokens(None if tokens.q is None else pad(tokens.q, 0.0), keys)


# ---- slices of arrays -----------------------------------------------------------------------------


def token_axis(x: Array) -> int:
    """Axis of the tokens: the last of document starts, else the last but one."""
    return x.ndim - (1 if x.dtype == bool else 2)


def slice_tokens(arrays: X, i: Array, size: int) -> X:
    """The i-th `size` tokens of every array."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * size, size, token_axis(x)), arrays)


def slice_last(x: Array, i: Array, size: int) -> Array:
    """The i-th `size` tokens of an array [*batch, T]."""
    return lax.dynamic_slice_in_dim(x, i * size, size, x.ndim - 1)


def write(arrays: X, parts: X, i: Array, axis: int = -2) -> X:
    """Arrays with their i-th part, of the parts' size, overwritten."""

    def write_one(x: Array, part: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, part, i * part.shape[axis], x.ndim + axis)

    return jax.tree.map(write_one, arrays, parts)


def to_chunks(arrays: X, split: Split, axis: int | None = None) -> X:
    """A group's tokens [*batch, N C, ...] as its chunks [*batch, N, C, ...]; `axis` of the tokens, if not the usual."""

    def reshape(x: Array) -> Array:
        at = token_axis(x) if axis is None else x.ndim + axis
        return x.reshape(*x.shape[:at], split.n_chunks, split.chunk_size, *x.shape[at + 1 :])

    return jax.tree.map(reshape, arrays)


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

    shapes = jax.eval_shape(lambda: step(carry, take(block_of(0), 0))[1])
    out = jax.tree.map(lambda y: jnp.zeros((*y.shape[:axis], n, *y.shape[axis:]), y.dtype), shapes)
    return lax.fori_loop(0, n_blocks, body, (carry, out))


def _steps_together(n: int) -> int:
    """Steps of n that the body of a loop over chunks takes: a divisor of n."""
    if platform.target() != "gpu":
        return 1
    return next(size for size in range(min(n, _MOST_STEPS), 0, -1) if n % size == 0)


def pick_chunk(states: X, i: Array, split: Split, axis: int) -> X:
    """Chunk i of arrays [n_groups, *batch, N, ...] with `axis` batch axes."""
    group, place = i // split.n_chunks, i % split.n_chunks
    pick = lambda x, i, axis: lax.dynamic_index_in_dim(x, i, axis, keepdims=False)
    return jax.tree.map(lambda x: pick(pick(x, group, 0), place, axis), states)


def write_chunk(states: X, state: X, i: Array, split: Split, axis: int) -> X:
    """Arrays [n_groups, *batch, N, ...] with `axis` batch axes, with chunk i overwritten."""
    at = {0: i // split.n_chunks, 1 + axis: i % split.n_chunks}

    def write_one(x: Array, part: Array) -> Array:
        starts = [at.get(axis, 0) for axis in range(x.ndim)]
        return lax.dynamic_update_slice(x, jnp.expand_dims(part, tuple(at)), starts)

    return jax.tree.map(write_one, states, state)


# ---- forward --------------------------------------------------------------------------------------


class _Written(NamedTuple):
    """What the groups write: y, S and Z (or their smallest so far), and log Z if asked for."""

    y: Array
    sums: Sums
    log_z: ShiftedLog | None


def forward(call: Call, tokens: Tokens, state: N, save_residuals: bool) -> tuple[Output[N], Residuals | None, Array]:
    """(the output, what the backward pass needs if it is saved, whether terms were lost)."""
    kind, split = call.kind, call.split

    def step(carry: Any, i: Array) -> Any:
        m, shifts, written, spreads = carry
        chunks = to_chunks(slice_tokens(tokens, i, split.group_size), split)
        own = move_in_turn(kind, shifts, chunks.keys, split)
        f = chunk.compute_factors(kind, chunks, own)
        before, m, shifts = _sums_between(f.keys, m, shifts, own)
        if f.queries is not None:
            written = _write_queries(call, f.queries, f.keys, before, own, written, i, save_residuals)
        if chunks.keys is not None:
            spreads |= kind.spreads(chunks.keys.values)
        return (m, shifts, written, spreads), (before, own) if save_residuals else None

    shifts = kind.state_shifts(state)
    m = kind.state_to_sums(state, shifts)
    buffers = None if tokens.q is None else _make_buffers(call, tokens.q, m, save_residuals)
    carry = m, shifts, buffers, kind.spreads(m.s)
    (m, shifts, written, spreads), before = lax.scan(step, carry, jnp.arange(split.n_groups))
    # Sums between chunks need no check: what they lost is as little to the queries that read them, and to the end.
    lost = kind.has_lost_terms(chunk.fill_empty_features(kind, m, shifts)) | spreads
    y = log_z = sums = None
    if written is not None:
        y, sums, log_z = written
        lost |= kind.has_lost_terms(sums)
    residuals = Residuals(sums, *before) if save_residuals else None
    return Output(y, log_z, kind.sums_to_state(m, shifts)), residuals, lost


def _make_buffers(call: Call, q: Array, m: Sums, save_residuals: bool) -> _Written:
    """Buffers for the groups to overwrite, filled differently: see the module's top."""
    *batch, n_tokens, _ = q.shape
    d_value, n_sums = m.s.shape[-1], n_tokens if save_residuals else call.split.group_size
    full = lambda fill, *last: jnp.full((*batch, *last), fill, m.z.dtype)
    log_z = ShiftedLog(full(2, n_tokens), full(3, n_tokens)) if call.return_log_z else None
    return _Written(full(0, n_tokens, d_value), Sums(full(1, n_sums, d_value), full(1, n_sums)), log_z)


def _write_queries(
    call: Call,
    queries: QueryFactors,
    keys: KeyFactors | None,
    before: Sums,
    shifts: ChunkShifts,
    written: _Written,
    i: Array,
    save_residuals: bool,
) -> _Written:
    """The buffers with what group i's queries read."""
    y, (s, z), log_z = written
    sums = chunk.query_sums(queries, keys, before, shifts)
    filled = chunk.fill_empty_queries(call.kind, queries, sums, shifts)
    group_s, group_z = to_tokens(filled.s), to_tokens(filled.z, axis=-1)
    y = write(y, to_tokens(call.kind.mean(sums, shifts.reading.b)), i)
    if save_residuals:
        s, z = write(s, group_s, i), write(z, group_z, i, axis=-1)
    else:
        s, z = jnp.minimum(s, group_s), jnp.minimum(z, group_z)
    if log_z is not None:
        log_z = write(log_z, to_tokens(chunk.query_log_z(queries, sums), axis=-1), i, axis=-1)
    return _Written(y, Sums(s, z), log_z)


def move_in_turn(kind: Values[Any], shifts: Shifts, keys: Keys | None, split: Split) -> ChunkShifts:
    """Shifts of each chunk of a group, [*batch, N, ...], after sums relative to `shifts`."""
    if keys is None:
        return ChunkShifts(jax.tree.map(lambda x: jnp.repeat(x[..., None, :], split.n_chunks, axis=-2), shifts))
    return chunk.move_shifts(shifts, chunk.own_shifts(kind, keys), shifts.c.ndim - 1)


def _sums_between(keys: KeyFactors | None, m: Sums, shifts: Shifts, own: ChunkShifts) -> tuple[Sums, Sums, Shifts]:
    """The sums before each chunk of a group, relative to `own.reading`; the sums and shifts after the last."""
    axis = shifts.c.ndim - 1

    def step(m: Sums, xs: Any) -> tuple[Sums, Sums]:
        moved, kept, more = xs
        before = chunk.scale(m, moved)
        return chunk.add_sums(chunk.scale(before, kept), more), before

    earlier = jax.tree.map(lambda x, first: chunk.preceding(x, first, axis), own.after, shifts)
    moved = chunk.shift_scales(earlier, own.reading)
    kept = None if keys is None else chunk.kept_scales(keys.kept, own)
    m, before = scan_chunks(step, m, (moved, kept, chunk.chunk_sums(keys, own)), axis)
    return before, m, jax.tree.map(lambda x: lax.index_in_dim(x, -1, axis, keepdims=False), own.after)


# ---- backward -------------------------------------------------------------------------------------


def cotangent_scale(grads: Output[Any]) -> Array:
    """A divisor of the cotangents that keeps their quotients by sums in range: 1 unless some are very large."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(g)) for g in jax.tree.leaves(grads)]))
    return jnp.where(jnp.isfinite(largest) & (largest > LARGE_COTANGENT), largest, 1.0)


def multiply(arrays: X, factor: Array) -> X:
    """Every array times a factor."""
    return jax.tree.map(lambda x: x * factor, arrays)


def backward(
    call: Call, tokens: Tokens, state: N, residuals: Residuals, grads: Output[N], scale: Array
) -> tuple[Tokens, N]:
    """Gradients of the tokens and of the state before them, from those of the output, divided by `scale` meanwhile."""
    kind, split = call.kind, call.split
    overwrites_s = kind.grad_overwrites_sums and tokens.q is not None and tokens.keys is not None

    def step(carry: Any, xs: Any) -> Any:
        dm, after, dtokens = carry
        i, (before, own) = xs
        chunks = to_chunks(slice_tokens(tokens, i, split.group_size), split)
        f = chunk.compute_factors(kind, chunks, own)
        dsums = dpairs = more = dq = dkeys = None
        dq_total: Array | float = 0.0
        if f.queries is not None:
            s = dtokens.keys.values if overwrites_s else None
            dy, dlog_z, dsums = _query_sums_grad(call, residuals, s, grads, i, 1 / scale)
            more = chunk.query_sums_grad(f.queries, f.keys, dsums)
            dpairs = chunk.pair_grad(f.keys, dsums, own)
            dq = chunk.query_grad(f.queries, f.keys, before, dsums, dpairs)
            dq_total = chunk.query_grad_total(kind, dy, dlog_z, own)
            dq = chunk.correct_query_grad(dq, f.queries, f.keys, before, dq_total)
        dends, dkept, dm, after = _sums_between_grad(f.keys, before, more, dm, own, after)
        if f.keys is not None:
            dkey = chunk.key_grads(kind, f.queries, f.keys, dsums, dpairs, dends, own)
            dlog_decay = chunk.log_decay_grad(dq_total, dkey, dkept)
            dkeys = Keys(dkey.k, dkey.values, None, dlog_decay)
        return (dm, after, write(dtokens, multiply(to_tokens(Tokens(dq, dkeys)), scale), i)), None

    m, shifts = end_sums(call, tokens, residuals)
    (dm,) = jax.vjp(lambda m: kind.sums_to_state(m, shifts), m)[1](multiply(grads.state, 1 / scale))
    dtokens = _make_grad_buffers(tokens, residuals.sums if overwrites_s else None)
    xs = jnp.arange(split.n_groups), (residuals.before, residuals.shifts)
    (dm, shifts, dtokens), _ = lax.scan(step, (dm, shifts, dtokens), xs, reverse=True)
    first = kind.state_shifts(state)
    to_state = jax.vjp(lambda state: kind.state_to_sums(state, first), state)[1]
    return dtokens, multiply(to_state(chunk.scale(dm, chunk.shift_scales(first, shifts)))[0], scale)


def _make_grad_buffers(tokens: Tokens, sums: Sums | None) -> Tokens:
    """Buffers for the groups to overwrite, filled differently; that of S, if given, for the gradient of the values."""
    keys = None
    if tokens.keys is not None:
        dvalues = jnp.full_like(tokens.keys.values, 2) if sums is None else sums.s
        log_decay = tokens.keys.log_decay
        dlog_decay = None if log_decay is None else jnp.full_like(log_decay, 3)
        keys = Keys(jnp.full_like(tokens.keys.k, 1), dvalues, None, dlog_decay)
    return Tokens(None if tokens.q is None else jnp.full_like(tokens.q, 0), keys)


def _query_sums_grad(
    call: Call, residuals: Residuals, s: Array | None, grads: Output[Any], i: Array, factor: Array
) -> tuple[Array, Array | None, Sums]:
    """Group i's gradients of y, of log Z and of S and Z, as chunks, times `factor`.

    `s` stands in for the residual S where given.
    """
    assert residuals.sums is not None and grads.y is not None
    tokens = residuals.sums.s if s is None else s, grads.y
    s, dy = to_chunks(slice_tokens(tokens, i, call.split.group_size), call.split)
    last = residuals.sums.z, grads.log_z and grads.log_z.rest
    last = jax.tree.map(lambda x: slice_last(x, i, call.split.group_size), last)
    z, dlog_z = to_chunks(last, call.split, axis=-1)
    dy, dlog_z = multiply((dy, dlog_z), factor)
    return dy, dlog_z, call.kind.mean_grad(Sums(s, z), dy, dlog_z)


def _sums_between_grad(
    keys: KeyFactors | None, before: Sums, more: Sums | None, dm: Sums, own: ChunkShifts, later: Shifts
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
    kept = None if keys is None else chunk.kept_scales(keys.kept, own)
    xs = chunk.shift_scales(own.after, next_reading), kept, more
    dm, dends = scan_chunks(step, dm, xs, axis, reverse=True)
    dkept = None if own.decay is None or kept is None else chunk.kept_product(kept, before, dends)
    return dends, dkept, dm, jax.tree.map(lambda x: lax.index_in_dim(x, 0, axis, keepdims=False), own.reading)


def end_sums(call: Call, tokens: Tokens, residuals: Residuals) -> tuple[Sums, Shifts]:
    """The sums after the last chunk, and their shifts."""
    split = call.split
    last = jnp.asarray(split.n_groups * split.n_chunks - 1)
    m, own = pick_chunk((residuals.before, residuals.shifts), last, split, residuals.before.z.ndim - 3)
    keys = slice_tokens(tokens.keys, last, split.chunk_size)
    f = chunk.compute_factors(call.kind, Tokens(None, keys), own)
    return chunk.next_sums(f.keys, m, own), own.after
