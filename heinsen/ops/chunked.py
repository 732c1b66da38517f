"""The attention at matmul speed, exact at every dynamic range, in memory linear in T: the default form.

    y[t] = sum_s w[t, s] v[s] / Z[t],   Z[t] = sum_s w[t, s],   w[t, s] = sum_k exp(q[t, k] + k[s, k] + decay(s .. t))

Tokens are cut into chunks. Each chunk's keys are summed up relative to their largest (`summarize`), a scan merges these
sums along the sequence (`scan_chunks`, the log-sum-exp monoid), and each chunk's queries read what came before the
chunk and the chunk itself (`read_chunk`). A weight is a product of two factors <= 1, relative to the largest c[k] of
the keys that it is summed with and to the largest exponent r of its query:

    exp(q[t, k] + c[k] - r) exp(k[s, k] - c[k])

No product loses a term that matters, by construction. Where the keys of every chunk and its log values, with the
largest before, spread by at most 60 nats together, one product takes the whole chunk (`product_weights`). Else
a query takes all earlier blocks of its chunk at once, with c of exactly these keys, so that Z >= 1 relative to exp(r);
and in its own block of a few tokens each exponent is formed before its exponential (`block_weights`). That is exact at
any magnitude.

Derivatives are JAX's own: shifts are constants, and some rows at a time are computed again in the backward pass
(`jax.checkpoint`), so that memory is linear in T, and all modes and orders of derivatives are there.

Log values are summed as exp(log v - b), with b the largest in a column. Where all that a query sees of a column lies
more than 60 nats below b, its sum underflows. That shows, and the rows are computed in logarithms (`logarithms`).

Derivation, and what decays do: docs/attention.md. Axes: `*batch` any leading axes; T tokens; N chunks of C tokens, in J
blocks of M; K key and V value features.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from heinsen import backend
from heinsen.logspace import NEG_INF, centered_sum, finite, log_divide, logaddexp, two_sum
from heinsen.ops import logarithms
from heinsen.ops.arrays import (
    Precision,
    einsum,
    isolate_values,
    precision_of,
    safe_divide,
    safe_log,
    to_chunks,
    vary_together,
)
from heinsen.ops.decay import ChunkDecay, sums_until_end, with_starts
from heinsen.ops.states import SMALLEST_SUM, LogState, State, Summary, init_state, log_rescaling, lost_terms
from heinsen.promotion import usual_promotion


class Split(NamedTuple):
    """How the work is cut, so that it needs little memory and, on CPUs, stays in cache."""

    chunk: int  # tokens
    block: int  # tokens
    rows: int | None  # sequences and heads that are computed together, None: all
    chunks: int | None = None  # whose queries read together, None: all of these rows'; memory is mostly theirs


def choose_split(shape: tuple[Any, ...]) -> Split:
    """Split of keys [*batch, T, K] on the platform that is compiled for; the batch may be symbolic."""
    *batch, n_tokens, d_key = shape
    # Accelerators move fewer bytes with larger chunks and blocks.
    is_cpu = backend.current() == "cpu"
    most_numbers, largest_chunk, largest_block = (2**18, 32, 8) if is_cpu else (2**25, 64, 16)
    block = min(largest_block, n_tokens)
    chunk = min(largest_chunk, block * -(-n_tokens // block))
    if not all(isinstance(n, int) for n in batch):
        return Split(chunk, block, None)
    n_rows = math.prod(batch)
    n_chunks = -(-n_tokens // chunk)
    rows = _divide(n_rows, max(1, most_numbers // (n_chunks * chunk * d_key)))
    most_chunks = max(1, 2 * most_numbers // (chunk * d_key))  # only a long row has more
    chunks = _divide(n_chunks, most_chunks) if rows == 1 and n_chunks > most_chunks else None
    return Split(chunk, block, rows if is_cpu or rows < n_rows else None, chunks)


def _divide(n: int, most: int) -> int:
    """The size of equal parts of n, at most so many; a little larger than n / k where a divisor is far below."""
    even = next(size for size in range(min(n, most), 0, -1) if n % size == 0)
    return even if even > most // 4 else -(-n // -(-n // most))


# Nats up to which one product is exact: between the keys of a chunk and the largest before it, for each feature, and
# between its log values. A query sees its own token, so that its sums are at least exp(-60), and what underflows is
# below exp(-87). So they lose nothing by `SMALLEST_SUM`, and are not asked.
LARGEST_SPREAD = 60.0
assert math.exp(-LARGEST_SPREAD) > SMALLEST_SUM


# ---- one chunk ------------------------------------------------------------------------------------


def value_factors(values: Array, b: Array | None, dtype: DTypeLike) -> Array:
    """What weights multiply: v itself, or exp(log v - b) where there is a shift b [*batch, V]."""
    values = values.astype(dtype)
    return values if b is None else jnp.exp(values - finite(b)[..., None, :])


def summarize(k: Array, values: Array, until_end: Array, signed: bool) -> Summary:
    """Sums over keys [*batch, C, K], each with a log decay until_end [*batch, C]."""
    c = lax.stop_gradient(jnp.max(k + until_end[..., None], axis=-2))
    weights = jnp.exp((k - finite(c)[..., None, :]) + until_end[..., None])
    b = None if signed else lax.stop_gradient(jnp.max(values, axis=-2)).astype(k.dtype)
    s = einsum("...sk,...sv->...kv", weights, value_factors(values, b, k.dtype), precision=precision_of(values))
    return Summary(s, jnp.sum(weights, axis=-2), c, b)


class Spread(NamedTuple):
    """How far a chunk's keys and values spread, in nats."""

    largest: Array  # [*batch, K]
    smallest: Array  # [*batch, K]
    values: Array  # [*batch, V]: the smallest log value; 0 for real values; NaN where one is not finite

    @classmethod
    def of(cls, k: Array, values: Array, signed: bool) -> "Spread":
        """Of the tokens [*batch, C, ...] of a chunk."""
        of_values = jnp.sum(0.0 * values, axis=-2) if signed else jnp.min(values, axis=-2)
        return lax.stop_gradient(cls(jnp.max(k, axis=-2), jnp.min(k, axis=-2), of_values))

    def allows_one_product(self, c_before: Array, b: Array | None) -> Array:
        """Whether `product_weights` is exact in all chunks, with values relative to b [*batch, V].

        Relative to the largest of the keys and values, here or before, what a token adds to what it sees itself is at
        least exp(-LARGEST_SPREAD).
        """
        of_keys = jnp.max(jnp.maximum(c_before, self.largest) - self.smallest, axis=-1)
        of_values = jnp.max(self.values if b is None else b - self.values, axis=-1)
        return lax.stop_gradient(jnp.all(of_keys + of_values <= LARGEST_SPREAD))


class QueryMeans(NamedTuple):
    """What queries read: y or log y [*batch, C, V], and their Z [*batch, C] relative to exp(r)."""

    y: Array
    z: Array
    r: Array


class QuerySums(NamedTuple):
    """Sums that queries read: S [*batch, C, V] relative to exp(r + b), and Z [*batch, C] relative to exp(r)."""

    s: Array
    z: Array
    r: Array
    b: Array | None  # [*batch, V]
    shift: Array  # [*batch, C]: 0, of the weights: `split_shift`

    def mean(self) -> QueryMeans:
        z, shift = self.z * jnp.exp(self.shift), self.shift[..., None]
        if self.b is None:
            return QueryMeans(safe_divide(self.s, self.z[..., None]), z, self.r)
        log_mean = (safe_log(self.s) - jnp.where(self.s == 0, shift, 0.0)) - safe_log(self.z)[..., None]
        log_y = jnp.where((self.z == 0)[..., None], NEG_INF, log_mean) + finite(self.b)[..., None, :]
        return QueryMeans(log_y, z, self.r)

    def lost_terms(self) -> Array:
        """Whether a sum may have lost terms, [*batch]."""
        return lost_terms(self.s, self.z, self.b)


def read_state(q: Array, state: Summary, precision: Precision) -> QueryMeans:
    """What queries [*batch, T, K] read of a state alone; it loses no term where the state has lost none."""
    c = lax.stop_gradient(state.c)[..., None, :]
    exponents, r = centered_sum(q, c)
    exponents, shift = split_shift(exponents, exponents)
    weights = jnp.exp(exponents)
    s = einsum("...tk,...kv->...tv", weights, state.s, precision=precision)
    return QuerySums(s, jnp.sum(weights * state.z[..., None, :], axis=-1), r, state.b, shift).mean()


@jax.custom_jvp
def split_shift(q: Array, exponents: Array) -> tuple[Array, Array]:
    """Queries [*batch, C, K] without the derivative of a shift of all features, and 0 [*batch, C] with that alone.

    A shift of a query leaves a mean of values as it is. Where weights and values hardly differ, the sum of the gradient
    over features, which is 0, is rounded to more than the gradient. Features share it as they weigh, by their largest
    exponents [*batch, C, K].
    """
    return q, jnp.zeros_like(q[..., 0])


@split_shift.defjvp
@usual_promotion
def _split_shift_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> Any:
    (q, exponents), (dq, _) = primals, tangents
    weights = jax.nn.softmax(lax.stop_gradient(jnp.maximum(exponents, jnp.finfo(q.dtype).min)), axis=-1)
    dshift = jnp.sum(weights * dq, axis=-1)
    return split_shift(q, exponents), (dq - dshift[..., None], dshift)


@jax.checkpoint
def _pair_weights(q: Array, error: Array, k: Array, log_decay: Array) -> Array:
    """Sums over k of exp(q[t, k] + k[s, k] + log_decay[t, s]), [*batch, M (t), M (s)], of the keys s <= t."""
    visible = jnp.tril(jnp.ones(log_decay.shape[-2:], bool))[..., None]
    exponents = ((q[..., :, None, :] + k[..., None, :, :]) + error[..., :, None, :]) + log_decay[..., None]
    return jnp.sum(jnp.exp(jnp.where(visible, exponents, NEG_INF)), axis=-1)


class Weights(NamedTuple):
    """Weights of what queries see, relative to exp(r)."""

    before: Array  # [*batch, C, K], of the sums before the chunk
    own: Array  # [*batch, C, C], of the chunk's keys; 0 where a query does not see one
    r: Array  # [*batch, C]
    shift: Array  # [*batch, C]: 0, by which all weights of a query are multiplied: `split_shift`


def product_weights(q: Array, k: Array, decay: ChunkDecay, c_before: Array, precision: Precision) -> Weights:
    """Weights by one product of factors <= 1, where the `Spread` allows it."""
    c = lax.stop_gradient(jnp.maximum(c_before, jnp.max(k, axis=-2)))
    exponents, r = centered_sum(q, c[..., None, :])
    exponents, shift = split_shift(exponents, exponents)
    qf, kf = jnp.exp(exponents), jnp.exp(k - c[..., None, :])
    before = qf * jnp.exp(log_rescaling(c_before, c))[..., None, :]
    before = before * jnp.exp(decay.before_at_queries)[..., None]
    own = einsum("...tk,...sk->...ts", qf, kf, precision=precision) * decay.key_factors
    return Weights(before, own, r, shift)


def block_weights(q: Array, k: Array, decay: ChunkDecay, c_before: Array, precision: Precision) -> Weights:
    """Weights block by block, exact at every dynamic range."""
    n_blocks, block = decay.since_start.shape[-2:]
    in_blocks = lambda x: x.reshape(*x.shape[:-2], n_blocks, block, x.shape[-1])
    in_chunk = lambda x: x.reshape(*x.shape[:-3], n_blocks * block, x.shape[-1])
    q, k = in_blocks(q), in_blocks(k)

    # The largest keys at the end of each block, with the sums before the chunk as the first; of them, the largest that
    # each block sees at its start; and the factors <= 1 between the two.
    c_block = lax.stop_gradient(jnp.max(k + decay.until_end[..., None], axis=-2))  # [*batch, J, K]
    c_ends = jnp.concatenate([c_before[..., None, :], c_block], axis=-2)[..., None, :, :]
    is_before = jnp.tril(jnp.ones((n_blocks, n_blocks + 1), bool))[..., None]
    left = decay.between[..., :-1, :, None]
    c = jnp.max(jnp.where(is_before, c_ends + left, NEG_INF), axis=-2)  # [*batch, J, K]
    to_start = jnp.exp(jnp.where(is_before, log_rescaling(c_ends, c[..., None, :], left), NEG_INF))

    # The largest exponent of each query, in its own block or before it. Later keys are masked before any maximum or
    # exponential, so that what is not finite stays out of earlier outputs.
    c, since_start = c[..., None, :], decay.since_start[..., None]
    visible, within = jnp.tril(jnp.ones((block, block), bool))[..., None], decay.within[..., None]
    largest = jnp.max(jnp.where(visible, k[..., None, :, :] + within, NEG_INF), axis=-2)  # of each key feature
    exponents = q + jnp.maximum(largest, c + since_start)
    r = lax.stop_gradient(jnp.max(exponents, axis=-1))
    q, shift = split_shift(q, exponents)
    q, error = two_sum(q, -finite(r)[..., None])  # q - r, as if it were not rounded
    error = lax.stop_gradient(error)

    # Weights of the sums before the chunk, of its keys in earlier blocks, and of those in a query's own block.
    qf = jnp.exp(((q + c) + error) + since_start)
    before_chunk = in_chunk(qf * to_start[..., 0, None, :])
    weights = _pair_weights(q, error, k, decay.within)
    if n_blocks > 1:
        kf = jnp.exp((k - finite(c_block)[..., None, :]) + decay.until_end[..., None])
        kf = kf[..., None, :-1, :, :] * to_start[..., 1:, 1:-1, None, :]  # [*batch, J-1 (queries), J-1 (keys), M, K]
        earlier = einsum("...jtk,...jisk->...jtis", qf[..., 1:, :, :], kf, precision=precision)
        earlier = jnp.pad(earlier, [(0, 0)] * (earlier.ndim - 4) + [(1, 0), (0, 0), (0, 1), (0, 0)])
        is_own = jnp.eye(n_blocks, dtype=bool)[:, None, :, None]
        weights = jnp.where(is_own, weights[..., :, :, None, :], earlier)
    weights = weights.reshape(*r.shape[:-2], n_blocks * block, n_blocks * block)
    weights = jnp.where(jnp.tril(jnp.ones(weights.shape[-2:], bool)), weights, 0.0)

    return Weights(before_chunk, weights, *(x.reshape(before_chunk.shape[:-1]) for x in (r, shift)))


def read_chunk(
    weigh: Callable[..., Weights], q: Array, k: Array, values: Array, decay: ChunkDecay, before: Summary
) -> QuerySums:
    """What the queries [*batch, C, K] of a chunk read of its keys, up to their own, and of the sums before it."""
    product = partial(einsum, precision=precision_of(values))
    of_before, weights, r, shift = weigh(q, k, decay, lax.stop_gradient(before.c), precision_of(values))
    b = shift_of_values(before, values)
    s = product("...tk,...kv->...tv", of_before, before.s)
    if before.b is not None and b is not None:
        s = s * jnp.exp(log_rescaling(before.b, b))[..., None, :]
    s = s + product("...ts,...sv->...tv", weights, value_factors(values, b, weights.dtype))
    z = jnp.sum(of_before * before.z[..., None, :], axis=-1) + jnp.sum(weights, axis=-1)
    return QuerySums(s, z, r, b, shift)


def shift_of_values(before: Summary, values: Array) -> Array | None:
    """The largest log value [*batch, V] of a chunk [*batch, C, V] and before it; None for real values."""
    return None if before.b is None else lax.stop_gradient(jnp.maximum(before.b, jnp.max(values, axis=-2)))


# ---- along the sequence ---------------------------------------------------------------------------


def attend(
    signed: bool, q: Array, k: Array, values: Array, log_decay: Array | None, causal: bool, state: State | None
) -> tuple[Array, State]:
    """(y or, of log values, log y [*batch, T, V]; the state after all tokens). Inputs are validated.

    log_decay is -inf where a document starts; if not `causal`, there is no other.
    """
    if log_decay is not None and not causal:
        return attend_both_ways(signed, q, k, values, log_decay, None, log_decay == NEG_INF, state)
    read, end = _attend(signed, causal, choose_split(k.shape), q, k, values, log_decay, state)
    return read.y, end


def attend_both_ways(
    signed: bool,
    q: Array,
    k: Array,
    values: Array,
    log_decay: Array,
    log_decay_after: Array | None,
    starts: Array | None,
    state: State | None,
) -> tuple[Array, State]:
    """As `attend`, of all tokens of a query's document, where `starts` [*batch, T] is true at the first of each.

    The weights of later tokens decay by log_decay_after: key s counts exp(sum of it over t < r < s) at query t < s.

    Later tokens are those before a query in the flipped order. There each query is moved by one token, so that it sees
    what comes after it alone. Both directions are one call of `_attend`.
    """
    flip = lambda x, axis: jnp.flip(x, x.ndim + axis)
    is_start = jnp.zeros(k.shape[:-1], bool) if starts is None else starts
    is_last = flip(is_start.at[..., 0].set(True), -1)  # in its document, in the flipped order
    given = None if log_decay_after is None else flip(log_decay_after, -1)
    decay_after = with_starts(given, jnp.roll(is_last, 1, axis=-1), k)
    assert decay_after is not None
    q_after = jnp.where(is_last[..., None], NEG_INF, jnp.roll(flip(q, -2), -1, axis=-2))
    directions = (q, q_after), (k, flip(k, -2)), (values, flip(values, -2)), (log_decay, decay_after)
    both = [jnp.stack(each) for each in directions]
    empty = init_state(k.shape[:-2], k.shape[-1], values.shape[-1], signed=signed, dtype=k.dtype)
    states = jax.tree.map(lambda *x: jnp.stack(x), empty if state is None else state, empty)
    read, end = _attend(signed, True, choose_split(both[1].shape), *both, states)
    earlier, later = (QueryMeans(*(x[i] for x in read)) for i in range(2))
    later = QueryMeans(*(jnp.roll(flip(x, axis), -1, axis=axis) for x, axis in zip(later, (-2, -1, -1), strict=True)))
    return _merge_reads(signed, earlier, later), jax.tree.map(lambda x: x[0], end)


def _merge_reads(signed: bool, a: QueryMeans, b: QueryMeans) -> Array:
    """y or log y of queries that have read two sets of keys."""
    r = jnp.maximum(a.r, b.r)
    log_z = [jnp.where(x.z == 0, NEG_INF, safe_log(x.z) + (finite(x.r) - finite(r))) for x in (a, b)]
    shares = [log_divide(each, logaddexp(*log_z))[..., None] for each in log_z]
    if signed:
        return jnp.exp(shares[0]) * a.y + jnp.exp(shares[1]) * b.y
    return logaddexp(a.y + shares[0], b.y + shares[1])


@jax.custom_jvp
def _zero_sums(log_decay: Array) -> Array:
    """0 for each of log_decay [*batch, C], with the derivatives of its running sums.

    With a gate, y is that of keys k - G, where G are the running sums of log decays since any token before. So their
    gradients go through the keys, and the decays themselves are constants.
    """
    return jnp.zeros_like(log_decay)


@_zero_sums.defjvp
@usual_promotion
def _zero_sums_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _zero_sums(*primals), lax.cumsum(tangents[0], axis=tangents[0].ndim - 1)


# Jitted, so that a second call outside jit compiles nothing.
@partial(jax.jit, static_argnums=(0, 1, 2))
def _attend(
    signed: bool,
    causal: bool,
    split: Split,
    q: Array,
    k: Array,
    values: Array,
    log_decay: Array | None,
    state: State | None,
) -> tuple[QueryMeans, State]:
    """What queries read, and the state after all tokens."""
    if state is None:
        state = init_state(k.shape[:-2], k.shape[-1], values.shape[-1], signed=signed, dtype=k.dtype)
    state = jax.tree.map(lambda x: x.astype(k.dtype), state)
    q, k, values, log_decay, state = vary_together(q, k, values, log_decay, state)
    run = partial(_causal if causal else _all_keys, split)
    return by_rows(split.rows, k.ndim - 2, run, q, k, values, log_decay, state)


def summarize_tokens(k: Array, log_v: Array, log_decay: Array | None, state: LogState) -> LogState:
    """The state after all tokens of log values, from that before them; log_decay [*batch, T] as in `attend`."""
    args = vary_together(k[..., :1, :], k, log_v, log_decay, state)
    after: Any = _all_keys(choose_split(k.shape), *args)[1]
    return after


def _sum_all(k: Array, values: Array, log_decay: Array | None, first: Summary) -> Summary:
    none = jnp.zeros(1, k.dtype), jnp.zeros(k.shape[:-2], k.dtype)
    until_end, total = none if log_decay is None else sums_until_end(log_decay)
    return first.merge(total, summarize(k, values, until_end, first.b is None))


def _all_keys(
    split: Split, q: Array, k: Array, values: Array, log_decay: Array | None, state: State
) -> tuple[QueryMeans, State]:
    end = _sum_all(k, values, log_decay, Summary.of(state))
    read = lambda *args: (read_state(q, end, precision_of(values)), end.to_state())
    if end.b is None:
        return read()
    return _in_logarithms_if(end.lost_terms(), read, split, False, q, k, values, log_decay, state)


def _in_logarithms_if(
    lost: Array, read: Callable[..., tuple[QueryMeans, State]], split: Split, causal: bool, *args: Any
) -> tuple[QueryMeans, State]:
    """What `read` returns, computed from all arguments in logarithms where terms of any sum are lost."""

    def exactly(
        q: Array, k: Array, values: Array, log_decay: Array | None, state: LogState
    ) -> tuple[QueryMeans, State]:
        if not causal or log_decay is None:
            *read, after = logarithms.attend(split.chunk, split.block, causal, q, k, values, log_decay, state)
            return QueryMeans(*read), after
        zeros, log_decay = _zero_sums(log_decay), lax.stop_gradient(log_decay)
        k = k - zeros[..., None]
        y, z, r, after = logarithms.attend(split.chunk, split.block, causal, q, k, values, log_decay, state)
        return QueryMeans(y, z * jnp.exp(zeros), r), after.decay(zeros[..., -1])

    result: tuple[QueryMeans, State] = lax.cond(jnp.any(lost), jax.checkpoint(exactly), read, *args)
    return result


class _Chunks(NamedTuple):
    """How arrays [*batch, T, ...] are cut into chunks.

    The chunks of the last batch axis are one axis with it, [*chunks], as CPUs compute the first axis in parallel.
    """

    batch: tuple[Any, ...]
    n_tokens: int
    size: int  # tokens of a chunk

    def cut(self, x: Array, axis: int, **fill: Any) -> Array:
        """[*chunks, C, ...] of [*batch, T, ...]."""
        x = to_chunks(x, self.size, axis, **fill)
        return x.reshape(*self.batch[:-1], -1, *x.shape[len(self.batch) + 1 :])

    def by_row(self, x: Array) -> Array:
        """[*batch, N, ...] of [*chunks, ...]."""
        return x.reshape(*self.batch, -1, *x.shape[max(1, len(self.batch)) :])

    def to_tokens(self, x: Array) -> Array:
        """[*batch, T, ...] of [*chunks, C, ...]."""
        x = x.reshape(*self.batch, -1, *x.shape[max(1, len(self.batch)) + 1 :])
        return lax.slice_in_dim(x, 0, self.n_tokens, axis=len(self.batch))


def _causal(
    split: Split, q: Array, k: Array, values: Array, log_decay: Array | None, state: State
) -> tuple[QueryMeans, State]:
    first, tokens = Summary.of(state), (q, k, values, log_decay, state)
    signed, batch, n_tokens = first.b is None, k.shape[:-2], k.shape[-2]
    chunks = _Chunks(batch, n_tokens, split.chunk)

    # Tokens that fill up the last chunk are copies of the last one, which the sums leave out.
    q, k, values = (chunks.cut(x, -2, mode="edge") for x in (q, k, values))
    decays = None if log_decay is None else chunks.cut(lax.stop_gradient(log_decay), -1)
    zeros = jnp.zeros((), k.dtype) if log_decay is None else _zero_sums(chunks.cut(log_decay, -1))
    k = k - zeros[..., None]

    def decay_of(decays: Array | None) -> ChunkDecay:
        return ChunkDecay.of(jnp.zeros(split.chunk, k.dtype) if decays is None else decays, split.block)

    def summarize_all(k: Array, values: Array, decays: Array | None) -> tuple[Summary, Spread]:
        until_end = decay_of(decays).keys_at_end
        if n_tokens % split.chunk:
            is_filler = chunks.cut(jnp.zeros((*batch, n_tokens), bool), -1, constant_values=True)
            until_end = jnp.where(is_filler, NEG_INF, until_end)
        return summarize(k, values, until_end, signed), Spread.of(k, values, signed)

    # All rows at once are computed again part by part, as the sums before chunks are worth keeping.
    again = jax.checkpoint if split.rows is None else lambda function: function
    own, spread = again(summarize_all)(k, values, decays)
    total = jnp.zeros(k.shape[:-2], k.dtype) if decays is None else jnp.sum(decays, axis=-1)
    gain = None if log_decay is None else jnp.exp(zeros[..., -1])
    before, end = scan_chunks(first, *jax.tree.map(chunks.by_row, (total, own, gain)))
    before = jax.tree.map(lambda x: x.reshape(*k.shape[:-2], *x.shape[len(batch) + 1 :]), before)
    lost_before = jnp.any(before.lost_terms()) | jnp.any(end.lost_terms())

    def read_chunks(weigh: Callable[..., Weights], *args: Any) -> tuple[QueryMeans, Array]:
        def read_some(
            q: Array, k: Array, values: Array, decays: Array | None, before: Summary
        ) -> tuple[QueryMeans, Array]:
            sums = read_chunk(weigh, q, k, values, decay_of(decays), before)
            return sums.mean(), sums.lost_terms()

        in_parts = partial(by_rows, split.chunks, max(1, len(batch)), read_some)
        read, lost = again(read_some)(*args) if split.chunks is None else in_parts(*args)
        return jax.tree.map(chunks.to_tokens, read._replace(z=read.z * jnp.exp(zeros))), jnp.any(lost)

    def by_product(*args: Any) -> tuple[QueryMeans, State]:
        return read_chunks(product_weights, *args)[0], end.to_state()

    def by_blocks(q: Array, k: Array, values: Array, decays: Array | None, before: Summary) -> tuple[QueryMeans, State]:
        values, taint = isolate_values(values, signed)
        if decays is not None:
            taint = jnp.where(jnp.isnan(decays), jnp.nan, taint)
            decays = jnp.where(jnp.isnan(decays), 0.0, decays)
        found, lost = read_chunks(block_weights, q, k + taint[..., None], values, decays, before)
        exact = lambda *_: (found, end.to_state())
        if signed:
            return exact()
        return _in_logarithms_if(lost | lost_before, exact, split, True, *tokens)

    b = None if before.b is None or own.b is None else jnp.maximum(before.b, own.b)
    is_exact = spread.allows_one_product(before.c, b) & ~lost_before & ~jnp.any(jnp.isnan(total))
    result: tuple[QueryMeans, State] = lax.cond(is_exact, by_product, by_blocks, q, k, values, decays, before)
    return result


def scan_chunks(first: Summary, log_decay: Array, own: Summary, gain: Array | None = None) -> tuple[Summary, Summary]:
    """(the sums before each chunk, those after all), from the chunks' own [*batch, N, ...] and decays [*batch, N].

    gain: what the sums after each chunk are multiplied by, [*batch, N].
    """
    axis = log_decay.ndim - 1

    def step(before: Summary, chunk: tuple[Array, Summary, Array | None]) -> tuple[Summary, Summary]:
        log_decay, own, gain = chunk
        after = before.merge(log_decay, own)
        if gain is not None:
            after = after._replace(s=after.s * gain[..., None, None], z=after.z * gain[..., None])
        return after, before

    in_front = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), (log_decay, own, gain))
    unroll = 8 if backend.current() == "gpu" else 1  # each step launches kernels of its own there
    end, before = lax.scan(step, first, in_front, unroll=unroll)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), before), end


def by_rows(rows: int | None, n_axes: int, function: Callable[..., Any], *arrays: Any) -> Any:
    """function(*arrays) of trees of arrays [*batch, ...] with n_axes batch axes, as its results have them.

    In turn for so many rows of the batch, and computed again in the backward pass. None: for all, and not again.
    """
    if rows is None:
        return function(*arrays)
    batch = jax.tree.leaves(arrays)[0].shape[:n_axes]
    size, missing = math.prod(batch), -math.prod(batch) % rows
    merged = jax.tree.map(lambda x: x.reshape(size, *x.shape[n_axes:]), arrays)
    if rows >= size:
        found = jax.checkpoint(function)(*merged)
    else:
        # Without an axis of a single row, for which XLA would copy all arrays into another layout.
        inner = () if rows == 1 else (rows,)
        pad = lambda x: jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)]) if missing else x
        turns = jax.tree.map(lambda x: pad(x).reshape(-1, *inner, *x.shape[1:]), merged)
        found = lax.map(jax.checkpoint(lambda some: function(*some), prevent_cse=False), turns)
        found = jax.tree.map(lambda x: x.reshape(-1, *x.shape[1 + len(inner) :])[:size], found)
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), found)
