"""Causality for inputs that are not finite, where products of 0 and NaN would spread them to all tokens.

They are replaced by neutral ones, and every output that sees one is set to NaN afterwards: in the scan and reference
forms for each call (`isolate_non_finite`), in the chunked form where a group's sums are not finite (`leave_out`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import NEG_INF
from heinsen.ops.chunk import Keys
from heinsen.ops.documents import document_ranges
from heinsen.ops.exact import vary_together
from heinsen.ops.values import StateT, Values

X = TypeVar("X")

Attend = Callable[[Values[Any], Array, Array, Array, bool, Any, Array | None, Array | None], tuple[Array, Any]]


def isolate_non_finite(attend: Attend) -> Attend:
    """`attend` with outputs of NaN where a query is not finite, or sees a key, value or log decay that is not.

    Nowhere else. Outputs of NaN have gradients of 0. -inf counts as finite where it stands for zero: in queries
    and keys, and in logarithms of values.
    """

    def isolated(
        kind: Values[Any],
        q: Array,
        k: Array,
        values: Array,
        causal: bool,
        state: Any,
        starts: Array | None,
        log_decay: Array | None,
    ) -> tuple[Array, Any]:
        keys = Keys(k, values, None, None if log_decay is None else log_decay[..., None])
        bad_query, bad_key = _find_bad(kind, q, keys)
        q, (k, values, _, column) = _drop(kind, q, keys, bad_query, bad_key)
        y, end = attend(kind, q, k, values, causal, state, starts, None if column is None else column[..., 0])
        seen, seen_by_last = _sees(bad_key, causal, starts)
        return mark(bad_query | seen, y), mark(seen_by_last, end)

    return isolated


def _find_bad(kind: Values[Any], q: Array, keys: Keys) -> tuple[Array, Array]:
    """Which queries are not finite, and which tokens' key, value or log decay is not, [*batch, ...] each."""
    bad_key = ~(jnp.all(keys.k < jnp.inf, axis=-1) & jnp.all(kind.is_value(keys.values), axis=-1))
    if keys.log_decay is not None:
        bad_key |= ~jnp.isfinite(keys.log_decay[..., 0])
    return ~jnp.all(q < jnp.inf, axis=-1), bad_key


def _drop(kind: Values[Any], q: Array, keys: Keys, bad_query: Array, bad_key: Array) -> tuple[Array, Keys]:
    """Queries and keys with neutral ones in place of bad ones."""
    k, values, resets, log_decay = keys
    clean = mark(bad_key, k, NEG_INF), mark(bad_key, values, kind.zero), resets, mark(bad_key, log_decay, 0.0)
    return mark(bad_query, q, 0.0), Keys(*clean)


def _sees(bad: Array, causal: bool, starts: Array | None) -> tuple[Array, Array]:
    """Whether each query [*batch, T or 1] sees a bad key, and whether the last document has one [*batch]."""
    count = jnp.cumsum(bad, axis=-1)
    if starts is None:
        return (count if causal else count[..., -1:]) > 0, count[..., -1] > 0
    first, end = document_ranges(starts)
    at = lambda i: jnp.take_along_axis(count, i, axis=-1)
    before_document = jnp.where(first == 0, 0, at(jnp.maximum(first - 1, 0)))
    in_document = at(end - 1) > before_document
    return count > before_document if causal else in_document, in_document[..., -1]


# ---- in the chunked form --------------------------------------------------------------------------


class Clean(NamedTuple):
    """Tokens with neutral ones in place of those that are not finite."""

    q: Array
    keys: Keys
    seen: Array  # [*batch, ...]: whether a query is not finite, or sees a token that is not
    seen_by_last: Array  # [*batch]: whether the last token sees one


def leave_out(kind: Values[Any], q: Array, keys: Keys, seen: Array) -> Clean:
    """Tokens, T of them or N chunks of C, without what is not finite.

    `seen` [*batch] is whether something before them is not, which they see up to the next reset.
    """
    bad_query, bad_key = _find_bad(kind, q, keys)

    def step(seen: Array, token: tuple[Array, Array | None]) -> tuple[Array, Array]:
        bad_key, reset = token
        seen = (seen if reset is None else seen & ~reset) | bad_key
        return seen, seen

    tokens_first = lambda x: jnp.moveaxis(x.reshape(*seen.shape, -1), -1, 0)
    follow = lambda _, found: lax.scan(step, seen, jax.tree.map(tokens_first, (bad_key, keys.resets)))
    # Token by token, in a loop of one iteration where anything is bad, and of none otherwise.
    is_any = jnp.any(bad_key) | jnp.any(seen)
    none = vary_together(seen, tokens_first(bad_key), keys.resets)[:2]
    last, seen_by = lax.fori_loop(0, is_any.astype(jnp.int32), follow, none)
    seen_by = jnp.moveaxis(seen_by, 0, -1).reshape(bad_key.shape) | bad_query
    return Clean(*_drop(kind, q, keys, bad_query, bad_key), seen_by, last)


def is_bad_state(kind: Values[StateT], state: StateT) -> Array:
    """Which states [*batch] are not finite."""
    return ~(jnp.all(kind.is_value(state[0]), axis=(-2, -1)) & jnp.all(state.h_z.value() < jnp.inf, axis=-1))


def leave_out_state(state: StateT, bad: Array) -> StateT:
    """The empty state in place of bad ones."""
    return mark(bad, state, state.empty())


def mark(bad: Array, arrays: X, fill: Any = jnp.nan) -> X:
    """Arrays with `fill`, a number or as many arrays, where `bad`, of their leading axes, is true."""
    fills = jax.tree.map(lambda _: fill, arrays) if isinstance(fill, float) else fill
    expand = lambda x: bad.reshape(*bad.shape, *(1,) * (x.ndim - bad.ndim))
    return jax.tree.map(lambda x, fill: jnp.where(expand(x), fill, x), arrays, fills)
