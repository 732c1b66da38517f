"""Causality for inputs that are not finite, in forms whose products of 0 and NaN would spread them to all tokens.

They are replaced by neutral ones, and every output that sees one is set to NaN afterwards. The chunked form needs none
of this: it takes the tokens of such a chunk in turn (`exact`).
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
        values_finite = (values < jnp.inf) & ((values > -jnp.inf) | (kind.zero == NEG_INF))
        bad_query = ~jnp.all(q < jnp.inf, axis=-1)
        bad_key = ~(jnp.all(k < jnp.inf, axis=-1) & jnp.all(values_finite, axis=-1))
        if log_decay is not None:
            bad_decay = ~jnp.isfinite(log_decay)
            bad_key |= bad_decay
            log_decay = jnp.where(bad_decay, 0.0, log_decay)
        leave_out = lambda bad, fill, x: jnp.where(bad[..., None], fill, x)
        clean = leave_out(bad_query, 0.0, q), leave_out(bad_key, NEG_INF, k), leave_out(bad_key, kind.zero, values)
        y, end = attend(kind, *clean, causal, state, starts, log_decay)
        seen, seen_by_last = _sees(bad_key, causal, starts)
        at_end = lambda x: jnp.expand_dims(seen_by_last, range(bad_key.ndim - 1, x.ndim))
        end = jax.tree.map(lambda x: jnp.where(at_end(x), jnp.nan, x), end)
        return jnp.where((bad_query | seen)[..., None], jnp.nan, y), end

    return isolated


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
    bad_query = ~jnp.all(q < jnp.inf, axis=-1)
    bad_key = ~(jnp.all(keys.k < jnp.inf, axis=-1) & jnp.all(kind.is_value(keys.values), axis=-1))
    if keys.log_decay is not None:
        bad_key |= ~jnp.isfinite(keys.log_decay[..., 0])

    def step(seen: Array, token: tuple[Array, Array | None]) -> tuple[Array, Array]:
        bad_key, reset = token
        seen = (seen if reset is None else seen & ~reset) | bad_key
        return seen, seen

    tokens_first = lambda x: jnp.moveaxis(x.reshape(*seen.shape, -1), -1, 0)
    last, seen_by = lax.scan(step, seen, jax.tree.map(tokens_first, (bad_key, keys.resets)))
    seen_by = jnp.moveaxis(seen_by, 0, -1).reshape(bad_key.shape) | bad_query
    drop: Callable[..., Any] = lambda bad, fill, x: None if x is None else jnp.where(bad[..., None], fill, x)
    k, values, resets, log_decay = keys
    clean = Keys(drop(bad_key, NEG_INF, k), drop(bad_key, kind.zero, values), resets, drop(bad_key, 0.0, log_decay))
    return Clean(drop(bad_query, 0.0, q), clean, seen_by, last)


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
