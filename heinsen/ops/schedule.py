"""How XLA is made to run the mathematics of `chunk` fast: groups, padding, loops and buffers, forward and backward.

Tokens are cut into chunks of C, and chunks are taken in groups, one group after the other (`lax.scan`). Within a group
the products and exponentials of all its chunks are computed at once, and the sums between them in turn.

Where queries see later tokens too (`both_ways`), tuples of decays, of summaries and of what is not finite have an
element for each direction.

What XLA forces, and why:
  * Groups. One chunk is too small to fill a device; all chunks at once leave a CPU's cache (`chunks_per_group`).
  * Padding copies all inputs and outputs; groups may be half as large if that leaves nothing to pad (`split_tokens`).
  * Loops write their outputs into buffers that they carry, in place, rather than stack them (`write`).
  * Buffers that are overwritten are filled differently: XLA merges equal constants, and then copies one for each use.
  * The backward pass overwrites the buffer of S by the gradient of the values, which saves a buffer. For real values
    XLA would copy the whole buffer in every group, so there it is not done. Where queries see later tokens, it
    overwrites the sums before each chunk by the gradients of those after it.
  * `scan_chunks` keeps the chunks along their axis: `lax.scan` would move them to the front, which copies them.
  * GPUs launch kernels for each step of a loop: there the body of `scan_chunks` takes many steps. On TPUs that moves as
    many bytes, and their compiler ends with a failed check for a gate and 8 steps (jax 0.10.2, 120 sequences on a v5p).
tests/ops/test_memory.py looks for copies of buffers inside the compiled loops.

Axes: `*batch` any leading axes; T tokens; N chunks of a group; C tokens of a chunk; K key and V value features.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen import backend
from heinsen.logspace import NEG_INF
from heinsen.ops import chunk, logarithms
from heinsen.ops.chunk import KeyFactors, Keys, Later, QueryWeights, Scales, ValueScales, Weights
from heinsen.ops.decay import ChunkDecay, decay_after_grad, decay_grad
from heinsen.ops.exact import (
    Output,
    Rows,
    fill_where,
    for_rows,
    is_nonfinite_state,
    isolate,
    isolate_if_any,
    multiply,
    replace_state,
    rows_together,
    vary_together,
)
from heinsen.ops.values import SMALLEST_SUM, Domain, Shifts, StateT, Summary, Sums

# Weights of queries and keys: what `chunk.fast_weights` and `chunk.exact_weights` return.
Weigh = Callable[[Array, Array], tuple[Weights, QueryWeights]]

_SMALL_WEIGHTS = 1e-9  # sums of weights that are relative to more than the largest exponent that a query sees
_MAX_UNROLL = 16  # of a loop over chunks that are written out, on GPUs

X = TypeVar("X")
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
    """Saved by the forward pass for the backward pass."""

    sums: Sums  # S [*batch, T, V] and Z [*batch, T] of all queries
    before: Summary  # of all before each chunk, [n_groups, *batch, N, ...]
    after: tuple[Summary, ...]  # of all after each group, [n_groups, *batch, ...], if its queries see them
    tainted: tuple[Array, ...]  # [n_groups, *batch]: whether what is not finite is seen before a group; after it
    underflowed: Array  # [n_groups, *batch]: rows whose weights underflowed, and took `chunk.exact_weights`
    lost_chunks: Array | None  # [n_groups, *batch, N], as `Group.lost_chunks`
    end: Summary


# ---- splitting ------------------------------------------------------------------------------------


def choose_chunk_size(d_key: int) -> int:
    """Tokens in a chunk, for d_key key features per head."""
    return 32 if d_key < 64 and backend.current() == "cpu" else 64


def chunks_per_group(elements: int) -> int:
    """Chunks to take at once, if one has so many elements in its queries or keys, over all heads and sequences.

    On CPUs the arrays of a group stay in cache and yet are large enough for several threads; accelerators want few
    large steps.
    """
    return max(1, (2**18 if backend.current() == "cpu" else 2**26) // elements)


def split_tokens(shape: tuple[int, ...]) -> Split:
    """Split of queries or keys of shape [*batch, T, K]; it may hold more tokens than T. The batch may be symbolic."""
    *batch, n_tokens, d_key = shape
    size = min(choose_chunk_size(d_key), n_tokens)
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


def write(arrays: X, parts: X, i: Array, axis: int = -2) -> X:
    """Arrays with their i-th part, of the parts' size, overwritten."""

    def write_one(x: Array, part: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, part, i * part.shape[axis], x.ndim + axis)

    return jax.tree.map(write_one, arrays, parts)


def to_tokens(chunks: X, axis: int = -2) -> X:
    """A group's chunks as its tokens; `axis` is that of the tokens of a chunk."""
    reshape = lambda x: x.reshape(*x.shape[: axis - 1], -1, *x.shape[x.ndim + axis + 1 :])
    return jax.tree.map(reshape, chunks)


def scan_chunks(
    step: Callable[[Carry, X], Carry], carry: Carry, chunks: X, axis: int, reverse: bool = False
) -> tuple[Carry, Carry]:
    """(the carry after all chunks of a group, which stay along `axis`, and that before each step)."""
    n = jax.tree.leaves(chunks)[0].shape[axis]
    unroll = _unroll_factor(n)
    n_iterations = n // unroll
    take_some = lambda i: jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * unroll, unroll, axis), chunks)
    take_one = lambda some, i: jax.tree.map(lambda x: lax.index_in_dim(x, i, axis, keepdims=False), some)

    def body(j: Array, carry_and_out: tuple[Carry, Carry]) -> tuple[Carry, Carry]:
        carry, out = carry_and_out
        i = n_iterations - 1 - j if reverse else j
        some, before = take_some(i), cast(list[Carry], [None] * unroll)
        for at in reversed(range(unroll)) if reverse else range(unroll):
            before[at] = carry
            carry = step(carry, take_one(some, at))
        store = lambda x, *parts: lax.dynamic_update_slice_in_dim(x, jnp.stack(parts, axis), i * unroll, axis)
        return carry, jax.tree.map(store, out, *before)

    out = jax.tree.map(lambda x: jnp.zeros((*x.shape[:axis], n, *x.shape[axis:]), x.dtype), carry)
    out, carry, _ = vary_together(out, carry, chunks)
    return lax.fori_loop(0, n_iterations, body, (carry, out))


def _unroll_factor(n: int) -> int:
    """Steps of n that the body of a loop over chunks takes: a divisor of n."""
    if backend.current() != "gpu":
        return 1
    return next(size for size in range(min(n, _MAX_UNROLL), 0, -1) if n % size == 0)


# ---- one group of chunks --------------------------------------------------------------------------


class Group(NamedTuple):
    """Results of the forward pass over a group of chunks, [*batch, N, C, ...]."""

    y: Array
    sums: Sums  # S and Z of its queries
    before: Summary  # of all before each chunk, [*batch, N, ...]
    end: Summary  # of all before and in the group
    underflowed: Array  # [*batch]: rows whose weights underflowed, and took `chunk.exact_weights`
    lost_chunks: Array | None  # [*batch, N]: their sums of log values lost terms nevertheless: read by logarithms
    lost: Array  # [*batch]: rows of which a summary has lost terms, too


class Around(NamedTuple):
    """The summaries before and, if its queries see it, after each chunk, as they read them."""

    sums: Sums  # side by side
    cs: list[Array]
    scales: ValueScales


class ReadInputs(NamedTuple):
    """All that a group's queries sum, of which a few rows are taken to be computed exactly."""

    q: Array
    keys: Keys
    vf: Array  # factors of values
    around: Around

    def exact_weights(self, q: Array, k: Array) -> tuple[Weights, QueryWeights]:
        return chunk.exact_weights(q, k, self.keys.decays(), self.around.cs)


def _max_rows(shape: tuple[int, ...]) -> int:
    """Rows that take `chunk.exact_weights` together, of queries of this shape, [*batch, N, C, K]."""
    return rows_together(math.prod(shape[-3:]) * chunk.SUBCHUNK)


def _max_chunks(shape: tuple[int, ...]) -> int:
    """Chunks that are read by logarithms together, of queries of this shape, [*batch, N, C, K]."""
    return rows_together(shape[-2] ** 3)  # pairs of a chunk's tokens, with features


def read_group(domain: Domain[Any], q: Array, keys: Keys, summary: Summary, after: tuple[Summary, ...]) -> Group:
    """Let the queries of a group read its own keys and the summaries before and after it. All inputs are finite."""
    decays = keys.decays()
    factors = chunk.key_factors(domain, keys, decays[0])
    before, end = summarize_in_turn(factors, decays[0], summary)
    around, _ = _side_by_side((before, *summaries_after(domain, keys, after)), factors.own)
    inputs = ReadInputs(q, keys, factors.vf, around)
    weights, query_weights = chunk.fast_weights(q, keys.k, decays, factors.own.c, around.cs)
    sums = chunk.query_sums(weights, inputs.vf, around.sums, around.scales)
    inexact, sees = ~domain.is_exact(sums, around.scales.b), query_weights.r > NEG_INF
    # Exact weights raise S by about 1 / Z; where Z is not small, only logarithms hold what S has lost.
    is_below = lambda bound: jnp.any((sums.z < bound) & sees, axis=-1)
    underflowed = jnp.any(is_below(SMALLEST_SUM) | (inexact & is_below(_SMALL_WEIGHTS)), axis=-1)

    def read_exactly(rows: Rows, out: tuple[Sums, Array]) -> tuple[Sums, Array]:
        some = rows.take(inputs)
        weights, _ = some.exact_weights(some.q, some.keys.k)
        sums = chunk.query_sums(weights, some.vf, some.around.sums, some.around.scales)
        return rows.write(out, (sums, ~domain.is_exact(sums, some.around.scales.b)))

    sums, inexact = for_rows(underflowed, read_exactly, (sums, inexact), _max_rows(q.shape))
    y, lost_chunks = domain.mean(sums, around.scales.b), None
    if domain.can_lose_terms and keys.later is None:
        lost_chunks = inexact & domain.is_exact(before.sums, before.shifts.b)
        inexact &= ~lost_chunks
        read = lambda rows, y: rows.write(y, _read_by_logarithms(domain, *rows.take((q, keys, before))))
        y = for_rows(lost_chunks, read, y, _max_chunks(q.shape))
    return Group(y, sums, before, end, underflowed, lost_chunks, jnp.any(inexact, axis=-1))


def _read_by_logarithms(domain: Domain[Any], q: Array, keys: Keys, before: Summary) -> Array:
    """log y of the queries of chunks, of log values."""
    return logarithms.read_chunk(q, keys, (logarithms.LogSums.of(domain.to_state(before)),))


class SumsGrads(NamedTuple):
    """Gradients of the sums around the chunks of a group, in the direction in which they are summed."""

    ends: Sums  # of those after each chunk, [*batch, N, ...]
    first: Sums  # of those before the first chunk


# (what each chunk keeps of the sums before it, what its queries add to their gradient) -> gradients.
PassBack = Callable[[Scales, Sums], SumsGrads]


class GroupGrads(NamedTuple):
    """Gradients of a group's tokens, and of the sums around it."""

    q: Array
    keys: Keys  # without what the sums after earlier chunks make: see `both_ways`
    first: Sums  # of the sums before the group
    ends_after: list[Sums]  # of those after each chunk, in one element, if queries read them


def group_grad(
    domain: Domain[Any],
    q: Array,
    keys: Keys,
    before: Summary,
    after: tuple[Summary, ...],
    sums: Sums,
    dy: Array,
    pass_back: PassBack,
    underflowed: Array | None = None,
    lost_chunks: Array | None = None,
) -> GroupGrads:
    """Gradients from those of the outputs.

    Args:
      before: the summary before each chunk.
      after: that after the group, if its queries see it.
      sums: S and Z of the queries.
      pass_back: maps (the factors of the sums before each chunk, what its queries add to their gradient) to
        `SumsGrads`; the gradient of the sums after the last chunk is bound in it.
      underflowed: the rows [*batch] that take `chunk.exact_weights`; None: none does.
      lost_chunks: the chunks [*batch, N] whose queries are read by logarithms; None: none is.
    """
    decays = keys.decays()
    factors = chunk.key_factors(domain, keys, decays[0])
    around, side_by_side_vjp = _side_by_side((before, *summaries_after(domain, keys, after)), factors.own)
    dsums = domain.mean_grad(sums, dy)
    dq_total = jnp.zeros_like(dsums.z) - domain.always_zero_grad(dy, around.scales.b)
    weigh = lambda q, k: chunk.fast_weights(q, k, decays, factors.own.c, around.cs)
    grads = _read_grads(domain, weigh, ReadInputs(q, keys, factors.vf, around), dsums, dq_total, underflowed)
    if lost_chunks is not None:
        read = partial(_read_by_logarithms_grads, domain)
        write_grads = lambda rows, out: rows.write(out, read(*rows.take((q, keys, before, dy))))
        grads = for_rows(lost_chunks, write_grads, grads, _max_chunks(q.shape))
    from_queries, *dafter = side_by_side_vjp(grads.m)
    _, scale_older, scale_newer = chunk.merge(before.shifts, decays[0].before_at_end, factors.shifts)
    dends, dfirst = pass_back(scale_older, from_queries)
    more = chunk.summary_grad(factors, chunk.scale(dends, scale_newer))
    dk, dvalues = grads.k + more.k, grads.values + domain.factor_grad(factors.vf, more.values)
    dkeys = Keys(dk, dvalues, None, None, None if keys.later is None else Later())
    if keys.log_decay is not None:
        dk_total = chunk.sum_features(dk)
        if grads.later is not None:
            dq_total, dk_total = dq_total - grads.later[0], dk_total - grads.later[1]
            dkeys = dkeys._replace(later=Later(log_decay=decay_after_grad(*grads.later, 0.0)[..., None]))
        total = chunk.end_total(scale_older, before.sums, dends, more.k)
        dkeys = dkeys._replace(log_decay=decay_grad(dq_total - dk_total, total)[..., None])
    return GroupGrads(grads.q, dkeys, dfirst, dafter)


def summaries_after(domain: Domain[Any], keys: Keys, after: tuple[Summary, ...]) -> list[Summary]:
    """The summary after each chunk of a group, [*batch, N, ...], from that after the group, if queries see it."""
    each = zip(keys.decays()[1:], after, strict=True)
    return [summarize_in_turn(chunk.key_factors(domain, keys, decay), decay, x)[0] for decay, x in each]


def _side_by_side(summaries: tuple[Summary, ...], own: Shifts) -> tuple[Around, Callable[[Sums], tuple[Sums, ...]]]:
    """The summaries side by side; and from the gradient of their sums to that of the sums of each."""
    shifts = [summary.shifts for summary in summaries]
    side_by_side = lambda *sums: chunk.side_by_side(sums, shifts)
    sums, side_by_side_vjp, b = jax.vjp(side_by_side, *(summary.sums for summary in summaries), has_aux=True)
    return Around(sums, [x.c for x in shifts], ValueScales.of(b, own.b)), side_by_side_vjp


class _ReadGrads(NamedTuple):
    """Gradients of a group's queries, keys, the sums m around each chunk and the values, of what its queries read."""

    q: Array
    k: Array
    m: Sums
    values: Array
    later: tuple[Array, Array] | None  # `chunk.later_totals`, for the gradients of log decays


def _read_grads(
    domain: Domain[Any],
    weigh: Weigh,
    inputs: ReadInputs,
    dsums: Sums,
    dq_total: Array,
    underflowed: Array | None,
) -> _ReadGrads:
    """As `_read_vjp`, by exact weights for the rows that underflowed."""

    def read_exactly(rows: Rows, out: Any) -> Any:
        some, row_dsums, row_total = rows.take((inputs, dsums, dq_total))
        return rows.write(out, _read_vjp(domain, some.exact_weights, some, row_dsums, row_total))

    grads = _read_vjp(domain, weigh, inputs, dsums, dq_total)
    return grads if underflowed is None else for_rows(underflowed, read_exactly, grads, _max_rows(inputs.q.shape))


def _read_by_logarithms_grads(domain: Domain[Any], q: Array, keys: Keys, before: Summary, dy: Array) -> _ReadGrads:
    def read(q: Array, k: Array, m: Sums, values: Array) -> Array:
        return _read_by_logarithms(domain, q, keys._replace(k=k, values=values), before._replace(sums=m))

    dq, dk, dm, dvalues = jax.vjp(read, q, keys.k, before.sums, keys.values)[1](dy)
    return _ReadGrads(dq, dk, dm, dvalues, None)


def _read_vjp(domain: Domain[Any], weigh: Weigh, inputs: ReadInputs, dsums: Sums, dq_total: Array) -> _ReadGrads:
    """Gradients from those of S and Z."""
    keys, m, scales = inputs.keys, inputs.around.sums, inputs.around.scales
    weights, pull, query_weights = jax.vjp(weigh, inputs.q, keys.k, has_aux=True)
    dweights = chunk.weights_grad(dsums, inputs.vf, m, scales)
    dq, dk = pull(dweights)
    dq = chunk.correct_query_grad(dq, query_weights.by_feature, dq_total)
    is_gated = keys.later is not None and keys.log_decay is not None
    later = chunk.later_totals(weights, dweights) if is_gated else None
    dm = chunk.outside_grad(weights, dsums, scales)
    dvalues = domain.factor_grad(inputs.vf, chunk.values_grad(weights, dsums, scales))
    return _ReadGrads(dq, dk, dm, dvalues, later)


def summarize_in_turn(factors: KeyFactors, decay: ChunkDecay, summary: Summary) -> tuple[Summary, Summary]:
    """The summaries before each chunk of a group, [*batch, N, ...], and after the last, in the decay's direction."""
    axis = summary.shifts.c.ndim - 1
    own = chunk.own_sums(factors)
    log_decay = jnp.broadcast_to(decay.before_at_end, own.z.shape[:-1])
    scan = partial(scan_chunks, axis=axis, reverse=decay.backwards)
    merge = lambda shifts, xs: chunk.merge(shifts, *xs).shifts
    end, before = scan(merge, summary.shifts, (log_decay, factors.shifts))
    _, *scales = chunk.merge(before, log_decay, factors.shifts)

    def add(sums: Sums, xs: Any) -> Sums:
        (scale_older, scale_newer), own = xs
        return chunk.add(chunk.scale(sums, scale_older), chunk.scale(own, scale_newer))

    end_sums, sums = scan(add, summary.sums, (scales, own))
    return Summary(sums, before), Summary(end_sums, end)


def pass_back_in_turn(dend: Sums, scale_older: Scales, from_queries: Sums, backwards: bool = False) -> SumsGrads:
    """`pass_back` of `group_grad`, from the gradient of the sums after the last chunk (backwards: before the first)."""

    def step(dend: Sums, xs: Any) -> Sums:
        scale_older, from_queries = xs
        return chunk.add(chunk.scale(dend, scale_older), from_queries)

    dfirst, dends = scan_chunks(step, dend, (scale_older, from_queries), dend.z.ndim - 1, reverse=not backwards)
    return SumsGrads(dends, dfirst)


# ---- both passes ----------------------------------------------------------------------------------


class _Buffers(NamedTuple):
    """Arrays that the groups write: y, and S and Z if they are saved."""

    y: Array
    sums: Sums | None


class _Carry(NamedTuple):
    """Handed from one group to the next, forward."""

    summary: Summary
    tainted: Array  # [*batch]: whether something that is not finite is seen from there on
    lost: Array  # [*batch]: whether terms were lost
    buffers: _Buffers


class _GradCarry(NamedTuple):
    """Handed from one group to the one before it, backward.

    before: the sums before each chunk of all groups; where queries see later tokens, a group that is done leaves there
    the gradients of the sums after its chunks.
    """

    dend: Sums  # gradient of the sums after the group
    dq: Array
    dkeys: Keys
    before: Sums


@dataclasses.dataclass(frozen=True)
class InOrder(Generic[StateT]):
    """Attention in the order of tokens over a whole number of groups, causal; `both_ways.BothWays` sees later ones.

    A form for `exact.run`: its fields are constants when it is compiled.
    """

    domain: Domain[StateT]
    split: Split
    platform: str  # chunks, groups and loops depend on it: what was traced for another is not used

    @property
    def max_rows(self) -> int:
        return rows_together(self.split.chunk_size**3)  # pairs of a chunk's tokens, with features

    def recompute(self, q: Array, keys: Keys, state: Any) -> Output[Any]:
        bad_state = is_nonfinite_state(self.domain, state)
        first = (bad_state,) if keys.later is None else (bad_state, jnp.zeros_like(bad_state))
        whole = Split(1, self.split.n_groups * self.split.n_chunks, self.split.chunk_size)
        clean = isolate(self.domain, *take_group((q, keys), 0, whole), first)
        q, keys = to_tokens((clean.q, clean.keys))
        y, end = logarithms.attend(self.split.chunk_size, q, keys, replace_state(state, bad_state))
        return Output(fill_where(to_tokens(clean.tainted, axis=-1), y), fill_where(clean.beyond[0], end))

    def forward(
        self, q: Array, keys: Keys, state: StateT, save_residuals: bool
    ) -> tuple[Output[StateT], Residuals | None, Array | None]:
        """(the output, what the backward pass needs if it is saved, the rows that lost terms)."""
        domain, split = self.domain, self.split

        def step(carry: _Carry, xs: Any) -> Any:
            i, after, tainted_after = xs
            tainted = (carry.tainted,) + tainted_after
            clean = isolate_if_any(domain, *take_group((q, keys), i, split), tainted)
            group = read_group(domain, clean.q, clean.keys, carry.summary, after)
            buffers = self._write(carry.buffers, group._replace(y=fill_where(clean.tainted, group.y)), i)
            carry = _Carry(group.end, clean.beyond[0], carry.lost | group.lost, buffers)
            return carry, (group.before, tainted, group.underflowed, group.lost_chunks) if save_residuals else None

        bad_state = is_nonfinite_state(domain, state)
        summary = domain.to_summary(replace_state(state, bad_state))
        lost = ~domain.is_exact(summary.sums, summary.shifts.b)
        carry = _Carry(summary, bad_state, lost, self._make_buffers(summary.sums, save_residuals))
        carry = vary_together(carry, (q, keys))[0]
        after, tainted_after = self.summarize_after(keys, state)
        xs = jnp.arange(split.n_groups), after, tainted_after
        last, saved = lax.scan(step, carry, xs)
        end, (y, sums) = last.summary, last.buffers
        lost = last.lost | ~domain.is_exact(end.sums, end.shifts.b)
        residuals = None
        if sums is not None:
            before, tainted, underflowed, lost_chunks = saved
            residuals = Residuals(sums, before, after, tainted, underflowed, lost_chunks, end)
        out = Output(y, fill_where(last.tainted, domain.to_state(end)))
        return out, residuals, lost if domain.can_lose_terms else None

    def summarize_after(self, keys: Keys, state: StateT) -> tuple[tuple[Summary, ...], tuple[Array, ...]]:
        """(the summary after each group, whether something there is not finite), [n_groups, *batch, ...], if read."""
        return (), ()

    def backward(
        self, q: Array, keys: Keys, state: StateT, residuals: Residuals, grads: Output[StateT], divisor: Array
    ) -> tuple[Array, Keys, StateT]:
        """Gradients of the tokens and of the state before them, computed from cotangents divided by `divisor`."""
        domain, split = self.domain, self.split

        def step(carry: _GradCarry, xs: Any) -> tuple[_GradCarry, None]:
            i, shifts, after, tainted, underflowed, lost_chunks = xs
            _, dq, dkeys, all_sums = carry
            sums = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), all_sums)
            before = Summary(sums, shifts)
            clean = isolate_if_any(domain, *take_group((q, keys), i, split), tainted)
            s = dkeys.values if domain.grad_overwrites_sums else residuals.sums.s
            take = partial(take_group, i=i, split=split)
            sums = Sums(take(s), take(residuals.sums.z, axis=-1))
            dy = fill_where(clean.tainted, multiply(take(grads.y), 1 / divisor), 0.0)
            pass_back = partial(pass_back_in_turn, carry.dend)
            grad = group_grad(domain, clean.q, clean.keys, before, after, sums, dy, pass_back, underflowed, lost_chunks)
            dq, dkeys = write((dq, dkeys), to_tokens(multiply((grad.q, grad.keys), divisor)), i)
            for ends in grad.ends_after:
                all_sums = jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), all_sums, ends)
            return _GradCarry(grad.first, dq, dkeys, all_sums), None

        to_end = lambda m: domain.to_state(Summary(m, residuals.end.shifts))
        (dend,) = jax.vjp(to_end, residuals.end.sums)[1](multiply(grads.state, 1 / divisor))
        carry = _GradCarry(dend, *self._make_grad_buffers(q, keys, residuals.sums), residuals.before.sums)
        carry = vary_together(carry, (q, keys, residuals, grads))[0]
        xs = (
            jnp.arange(split.n_groups),
            residuals.before.shifts,
            residuals.after,
            residuals.tainted,
            residuals.underflowed,
            residuals.lost_chunks,
        )
        (dfirst, dq, dkeys, dafter), _ = lax.scan(step, carry, xs, reverse=True)
        dkeys = self.add_grad_of_after(keys, residuals, dkeys, dafter, divisor)
        to_sums = lambda state: domain.to_summary(replace_state(state, is_nonfinite_state(domain, state))).sums
        (dstate,) = jax.vjp(to_sums, state)[1](dfirst)
        return dq, dkeys, multiply(dstate, divisor)

    def add_grad_of_after(self, keys: Keys, residuals: Residuals, dkeys: Keys, dafter: Sums, divisor: Array) -> Keys:
        """Gradients of keys with what the sums after chunks make, from those of the sums as queries read them."""
        return dkeys

    def _make_buffers(self, m: Sums, save_residuals: bool) -> _Buffers:
        """Buffers for the groups to overwrite, filled differently: see the module's top."""
        n_tokens, (*batch, _, d_value) = self.split.n_tokens, m.s.shape
        make = lambda fill, *last: jnp.full((*batch, *last), fill, m.s.dtype)
        sums = Sums(make(1, n_tokens, d_value), make(1, n_tokens)) if save_residuals else None
        return _Buffers(make(0, n_tokens, d_value), sums)

    def _write(self, buffers: _Buffers, group: Group, i: Array) -> _Buffers:
        """The buffers with what the i-th group's queries read."""
        y, sums = write(buffers.y, to_tokens(group.y), i), buffers.sums
        if sums is not None:
            s, z = to_tokens(group.sums.s), to_tokens(group.sums.z, axis=-1)
            sums = Sums(write(sums.s, s, i), write(sums.z, z, i, axis=-1))
        return _Buffers(y, sums)

    def _make_grad_buffers(self, q: Array, keys: Keys, sums: Sums) -> tuple[Array, Keys]:
        """Buffers for the groups to overwrite, filled differently; for the gradient of the values that of S, or not."""
        dvalues = sums.s if self.domain.grad_overwrites_sums else jnp.full_like(keys.values, 2)
        like = lambda x, fill: None if x is None else jnp.full_like(x, fill)
        later = None if keys.later is None else Later(log_decay=like(keys.later.log_decay, 4))
        return jnp.full_like(q, 0), Keys(jnp.full_like(keys.k, 1), dvalues, None, like(keys.log_decay, 3), later)
