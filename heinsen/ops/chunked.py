"""The attention at matmul speed, exact at every dynamic range, in memory linear in T: the default form.

Three things happen, each a form of `exact.run`: causal attention (`schedule.Causal`, the mathematics of `chunk`), the
state that keys leave behind (`Summarize`), and what queries read of one state (`Read`). Attention that is not causal is
a summary and a read; within packed documents, and with a forget gate for each direction, two causal attentions.

Arguments are those of `heinsen.log_attention` and `heinsen.attention`, validated there; `resets` [*batch, T] is true
where nothing is left of the tokens before, as where a packed document starts. Axes as in `chunk`.
"""

import abc
import dataclasses
from functools import partial
from typing import Any, Generic

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen import platform
from heinsen.logspace import NEG_INF, centered_sum, finite, log_shares
from heinsen.ops import chunk, exact, logarithms
from heinsen.ops.chunk import Keys
from heinsen.ops.decay import log_kept_until_end, take_resets
from heinsen.ops.documents import document_ends
from heinsen.ops.exact import Output
from heinsen.ops.schedule import Causal, chunk_size, split_tokens
from heinsen.ops.states import LogState
from heinsen.ops.values import LOG_VALUES, Shifts, StateT, Summary, Values


def attend(
    kind: Values[Any],
    q: Array,
    k: Array,
    values: Array,
    causal: bool,
    state: Any,
    resets: Array | None,
    log_decay: Array | None = None,
    *,
    fused: bool = False,
) -> tuple[Array, Any]:
    """(log y or y [*batch, T, V], the `LogState` or `MeanState` after all tokens). `fused`: by one kernel per pass."""
    keys = _keys(k, values, resets, log_decay)
    if state is None:
        first = _empty_state(kind, k, values)
    else:
        first = jax.tree.map(lambda part: part.astype(k.dtype), state).normalize()
    if causal:
        y, _, end = attend_causally(kind, q, keys, first, fused=fused)
    elif resets is None:
        end = summarize(kind, keys, first)
        y = read(kind, q, end)
    else:
        y, end = _attend_both_ways(kind, q, keys, resets, first, fused)
    return y, end.denormalize()


def state_after(
    k: Array, log_v: Array, state: LogState, resets: Array | None, log_decay: Array | None = None
) -> LogState:
    """The `LogState` after all tokens, without outputs."""
    return summarize(LOG_VALUES, _keys(k, log_v, resets, log_decay), state.normalize()).denormalize()


def attend_both_ways(
    kind: Values[Any], q: Array, k: Array, values: Array, starts: Array | None, log_decay: Array, log_decay_after: Array
) -> Array:
    """y or log y [*batch, T, V] of all tokens of a query's document.

    The weights of earlier tokens decay by log_decay, those of later tokens by log_decay_after, each [*batch, T].
    """
    starts = jnp.zeros(k.shape[:-1], bool) if starts is None else starts
    log_decay, resets = take_resets(log_decay, starts)
    keys = _keys(k, values, resets, log_decay)
    return _attend_both_ways(kind, q, keys, starts, _empty_state(kind, k, values), False, log_decay_after)[0]


def _empty_state(kind: Values[StateT], k: Array, values: Array) -> StateT:
    # XLA would spend seconds folding what follows from so large a constant.
    return lax.optimization_barrier(kind.empty_state(k, values))


def _keys(k: Array, values: Array, resets: Array | None, log_decay: Array | None) -> Keys:
    column = lambda x: None if x is None else x[..., None]
    return Keys(k, values, column(resets), column(log_decay))


def _attend_both_ways(
    kind: Values[StateT],
    q: Array,
    keys: Keys,
    document_starts: Array,
    state: StateT,
    fused: bool,
    log_decay_after: Array | None = None,
) -> tuple[Array, StateT]:
    """Every query sees its whole document: the keys up to its own and, in a run from the end, the later ones."""
    run = partial(attend_causally, kind, return_log_z=True, fused=fused)
    past = run(q, keys, state)
    # From the end, each token takes the key of the token after it. A document's last token has none: it keeps its own
    # key, in a document by itself, as a query without keys would count as lost terms. Its result is dropped below.
    ends = document_ends(document_starts)[..., None]
    later_k = jnp.where(ends, keys.k, _shift_earlier(keys.k))
    later_values = jnp.where(ends, keys.values, _shift_earlier(keys.values))
    resets, later_decay = (ends | _shift_earlier(ends))[..., 0], None
    if log_decay_after is not None:
        later_decay, resets = take_resets(_shift_earlier(log_decay_after[..., None])[..., 0], resets)
    later = _keys(later_k, later_values, resets, later_decay)
    flipped_q, flipped_keys = jax.tree.map(lambda x: jnp.flip(x, axis=-2), (q, later))
    future = run(flipped_q, flipped_keys, state.empty())

    assert past.log_z is not None and future.log_z is not None
    future_y = jnp.flip(future.y, axis=-2)
    future_log_z = jax.tree.map(lambda x: jnp.where(ends[..., 0], NEG_INF, jnp.flip(x, axis=-1)), future.log_z)
    past_share, future_share = (share[..., None] for share in log_shares(past.log_z, future_log_z))
    return kind.combine(past.y, past_share, future_y, future_share), past.state


def _shift_earlier(x: Array) -> Array:
    """Each token's successor in its place, and the last one twice, of x [*batch, T, F]."""
    return jnp.concatenate([x[..., 1:, :], x[..., -1:, :]], axis=-2)


# ---- causal attention -----------------------------------------------------------------------------


def attend_causally(
    kind: Values[StateT], q: Array, keys: Keys, state: StateT, *, return_log_z: bool = False, fused: bool = False
) -> Output[StateT]:
    """Each query reads the keys up to its own, and the state before the first one; any number of tokens."""
    n_tokens, form = q.shape[-2], _causal_form(kind, keys, return_log_z, fused)
    if n_missing := form.split.n_tokens - n_tokens:
        q = jnp.pad(q, [(0, 0)] * (q.ndim - 2) + [(0, n_missing), (0, 0)])
        keys = chunk.pad_keys(kind, keys, n_missing)
    y, log_z, end = exact.run(form, q, keys, state)
    cut = lambda x, axis: lax.slice_in_dim(x, 0, n_tokens, axis=axis)
    return Output(cut(y, -2), jax.tree.map(lambda x: cut(x, -1), log_z), end)


def _causal_form(kind: Values[StateT], keys: Keys, return_log_z: bool, fused: bool) -> Causal[StateT]:
    if fused:
        from heinsen.contrib import kernels  # slow to import

        return kernels.causal_form(kind, keys, return_log_z)
    return Causal(kind, split_tokens(keys.k.shape), return_log_z, platform.target())


# ---- summaries and what is read of them -----------------------------------------------------------


def summarize(kind: Values[StateT], keys: Keys, state: StateT) -> StateT:
    """Normalized state after all keys, from that before them."""
    return exact.run(Summarize(kind, chunk_size(keys.k.shape[-1])), keys, state)


def read(kind: Values[StateT], q: Array, state: StateT) -> Array:
    """y or log y [*batch, T, V] of queries that all read one normalized state."""
    return exact.run(Read(kind, chunk_size(q.shape[-1])), q, state)


class _Differentiated(abc.ABC):
    """A form of `exact.run` that JAX differentiates."""

    @abc.abstractmethod
    def fast(self, *args: Any) -> tuple[Any, Array | None]:
        """(the output, the rows that lost terms)."""

    def forward(self, *args: Any, save_residuals: bool) -> tuple[Any, None, Array | None]:
        out, lost = self.fast(*args)
        return out, None, lost

    def backward(self, *args: Any, residuals: None, grads: Any, scale: Array) -> tuple[Any, ...]:
        return exact.gradients(lambda *args: self.fast(*args)[0], args, grads, scale)


@dataclasses.dataclass(frozen=True)
class Summarize(_Differentiated, Generic[StateT]):
    """Sum over all tokens at once, each weighted by what is left of it at the end."""

    kind: Values[StateT]
    chunk_size: int

    def exact(self, keys: Keys, state: Any) -> Any:
        return logarithms.summarize(self.chunk_size, keys, state)

    def fast(self, keys: Keys, state: StateT) -> tuple[StateT, Array | None]:
        kind, before = self.kind, self.kind.to_summary(state)
        until_end, log_kept = log_kept_until_end(keys.resets, keys.log_decay)
        c = lax.stop_gradient(jnp.max(keys.k + until_end, axis=-2))
        own, own_b = kind.sum_tokens((keys.k - finite(c)[..., None, :]) + until_end, keys.values)
        shifts, older, newer = chunk.merge(before.shifts, log_kept, Shifts(c, own_b))
        sums = chunk.add(chunk.scale(before.sums, older), chunk.scale(own, newer))
        return kind.to_state(Summary(sums, shifts)), ~kind.is_exact(sums, shifts.b) if kind.can_lose_terms else None


@dataclasses.dataclass(frozen=True)
class Read(_Differentiated, Generic[StateT]):
    """One product of all queries with the state."""

    kind: Values[StateT]
    chunk_size: int

    def exact(self, q: Array, state: Any) -> Array:
        return logarithms.read(self.chunk_size, q, state)

    def fast(self, q: Array, state: StateT) -> tuple[Array, Array | None]:
        m, shifts = self.kind.to_summary(state)
        exponents, _ = centered_sum(q, shifts.c[..., None, :])
        sums = chunk.read_sums(jnp.exp(exponents), m)
        lost = ~self.kind.is_exact(sums, shifts.b) if self.kind.can_lose_terms else None
        return self.kind.mean(sums, shifts.b), lost
