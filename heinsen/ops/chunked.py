"""The attention at matmul speed, exact at every dynamic range, in memory linear in T: the default form.

Three things happen, each a form of `exact.run`: attention in the order of tokens (`schedule.InOrder`, the mathematics
of `chunk`), the state that keys leave behind (`Summarize`), and what queries read of one state (`Read`). Attention that
is not causal is a summary and a read; within packed documents, and with a forget gate for each direction, it takes the
tokens in order as well, and queries see those after them too.

Arguments are those of `heinsen.log_attention` and `heinsen.attention`, validated there. Axes as in `chunk`.
"""

import abc
import dataclasses
from typing import Any, Generic

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen import backend
from heinsen.logspace import centered_sum, finite
from heinsen.ops import chunk, exact, logarithms
from heinsen.ops.both_ways import BothWays
from heinsen.ops.chunk import Keys, Later
from heinsen.ops.decay import log_decay_until_end, take_resets
from heinsen.ops.exact import Output
from heinsen.ops.schedule import InOrder, choose_chunk_size, split_tokens
from heinsen.ops.values import Domain, Shifts, StateT, Summary


def attend(
    domain: Domain[Any],
    q: Array,
    keys: Keys,
    causal: bool,
    state: Any,
    *,
    fused: bool = False,
) -> tuple[Array, Any]:
    """(log y or y [*batch, T, V], the `LogState` or `MeanState` after all tokens).

    `fused`: causal attention by one kernel for each pass; other attention has none.
    """
    if state is None:
        first = _empty_state(domain, keys.k, keys.values)
    else:
        first = jax.tree.map(lambda part: part.astype(keys.k.dtype), state).normalize()
    if causal:
        y, end = attend_in_order(domain, q, keys, first, fused=fused)
    elif keys.resets is None:
        end = summarize(domain, keys, first)
        y = read(domain, q, end)
    else:
        y, end = attend_in_order(domain, q, keys._replace(later=Later(keys.resets)), first)
    return y, end.denormalize()


def attend_both_ways(
    domain: Domain[Any],
    q: Array,
    k: Array,
    values: Array,
    starts: Array | None,
    log_decay: Array,
    log_decay_after: Array,
) -> Array:
    """y or log y [*batch, T, V] of all tokens of a query's document.

    The weights of earlier tokens decay by log_decay, those of later tokens by log_decay_after, each [*batch, T].
    """
    resets, log_decay = take_resets(starts, log_decay)
    resets_after, log_decay_after = take_resets(None, log_decay_after)
    keys = Keys.of_tokens(k, values, resets, log_decay)
    keys = keys._replace(later=Later(*map(chunk.as_column, (starts, resets_after, log_decay_after))))
    return attend_in_order(domain, q, keys, _empty_state(domain, k, values)).y


def _empty_state(domain: Domain[StateT], k: Array, values: Array) -> StateT:
    # XLA would spend seconds folding what follows from so large a constant.
    return lax.optimization_barrier(domain.empty_state(k, values))


# ---- attention in the order of tokens -------------------------------------------------------------


def attend_in_order(
    domain: Domain[StateT], q: Array, keys: Keys, state: StateT, *, fused: bool = False
) -> Output[StateT]:
    """Each query reads the keys up to its own, and the state before the first one; any number of tokens.

    And the later ones, if `keys.later` is not None: then never by kernels.
    """
    n_tokens, form = q.shape[-2], _form(domain, keys, fused)
    if n_missing := form.split.n_tokens - n_tokens:
        q = jnp.pad(q, [(0, 0)] * (q.ndim - 2) + [(0, n_missing), (0, 0)])
        keys = chunk.pad_keys(domain, keys, n_missing)
    y, end = exact.run(form, q, keys, state)
    return Output(lax.slice_in_dim(y, 0, n_tokens, axis=-2), end)


def _form(domain: Domain[StateT], keys: Keys, fused: bool) -> InOrder[StateT]:
    if fused:
        from heinsen.contrib import kernels  # slow to import

        return kernels.causal_form(domain, keys)
    form: type[InOrder[StateT]] = InOrder if keys.later is None else BothWays
    return form(domain, split_tokens(keys.k.shape), backend.current())


# ---- summaries and what is read of them -----------------------------------------------------------


def summarize(domain: Domain[StateT], keys: Keys, state: StateT) -> StateT:
    """Normalized state after all keys, from that before them."""
    return exact.run(Summarize(domain, choose_chunk_size(keys.k.shape[-1]), backend.current()), keys, state)


def read(domain: Domain[StateT], q: Array, state: StateT) -> Array:
    """y or log y [*batch, T, V] of queries that all read one normalized state."""
    return exact.run(Read(domain, choose_chunk_size(q.shape[-1]), backend.current()), q, state)


@dataclasses.dataclass(frozen=True)
class _Differentiated(abc.ABC, Generic[StateT]):
    """A form of `exact.run` that JAX differentiates."""

    domain: Domain[StateT]
    chunk_size: int
    platform: str  # as in `InOrder`

    @abc.abstractmethod
    def fast(self, *args: Any) -> tuple[Any, Array | None]:
        """(the output, the rows that lost terms)."""

    @property
    def max_rows(self) -> int:
        return exact.rows_together(self.chunk_size**3)  # tokens of a chunk, with features of keys and values

    def forward(self, *args: Any, save_residuals: bool) -> tuple[Any, None, Array | None]:
        out, lost = self.fast(*args)
        return out, None, lost

    def backward(self, *args: Any, residuals: None, grads: Any, divisor: Array) -> tuple[Any, ...]:
        return exact.gradients(lambda *args: self.fast(*args)[0], args, grads, divisor)


class Summarize(_Differentiated[StateT]):
    """Sum over all tokens at once, each weighted by its decay until the end."""

    def recompute(self, keys: Keys, state: Any) -> Any:
        return logarithms.summarize(self.chunk_size, keys, state)

    def fast(self, keys: Keys, state: StateT) -> tuple[StateT, Array | None]:
        domain, before = self.domain, self.domain.to_summary(state)
        until_end, log_decay = log_decay_until_end(keys.resets, keys.log_decay, keys.k.dtype)
        c = lax.stop_gradient(jnp.max(keys.k + until_end, axis=-2))
        own, own_b = domain.sum_tokens((keys.k - finite(c)[..., None, :]) + until_end, keys.values)
        shifts, scale_older, scale_newer = chunk.merge(before.shifts, log_decay, Shifts(c, own_b))
        sums = chunk.add(chunk.scale(before.sums, scale_older), chunk.scale(own, scale_newer))
        lost = ~domain.is_exact(sums, shifts.b) if domain.can_lose_terms else None
        return domain.to_state(Summary(sums, shifts)), lost


class Read(_Differentiated[StateT]):
    """One product of all queries with the state."""

    def recompute(self, q: Array, state: Any) -> Array:
        return logarithms.read(self.chunk_size, q, state)

    def fast(self, q: Array, state: StateT) -> tuple[Array, Array | None]:
        m, shifts = self.domain.to_summary(state)
        exponents, _ = centered_sum(q, shifts.c[..., None, :])
        sums = chunk.read_sums(jnp.exp(exponents), m)
        lost = ~self.domain.is_exact(sums, shifts.b) if self.domain.can_lose_terms else None
        return self.domain.mean(sums, shifts.b), lost
