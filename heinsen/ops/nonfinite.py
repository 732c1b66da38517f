"""Causality for inputs that are not finite, where products of 0 and NaN would spread them to all tokens.

They are replaced by neutral ones, and every output that sees one is set to NaN afterwards: here for each call, in the
chunked form for each group of chunks (`isolate_if_any`).
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import NEG_INF
from heinsen.ops.chunk import Keys
from heinsen.ops.documents import document_ranges
from heinsen.ops.exact import vary_together
from heinsen.ops.values import Domain, StateT

X = TypeVar("X")
Attend = Callable[[Domain[Any], Array, Array, Array, bool, Any, Array | None, Array | None], tuple[Array, Any]]


def isolate_non_finite(attend: Attend) -> Attend:
    """`attend` with outputs of NaN where a query is not finite, or sees a key, value or log decay that is not.

    Nowhere else. Outputs of NaN have gradients of 0. -inf counts as finite where it stands for zero: in queries
    and keys, and in logarithms of values.
    """

    def isolated(
        domain: Domain[Any],
        q: Array,
        k: Array,
        values: Array,
        causal: bool,
        state: Any,
        resets: Array | None,
        log_decay: Array | None,
    ) -> tuple[Array, Any]:
        keys = Keys(k, values, None, None if log_decay is None else log_decay[..., None])
        bad_query, bad_key = find_nonfinite(domain, q, keys)
        q, (k, values, _, column, _) = replace_nonfinite(domain, q, keys, bad_query, bad_key)
        y, end = attend(domain, q, k, values, causal, state, resets, None if column is None else column[..., 0])
        seen, seen_by_last = _sees(bad_key, causal, resets)
        return fill_where(bad_query | seen, y), fill_where(seen_by_last, end)

    return isolated


def _sees(bad: Array, causal: bool, resets: Array | None) -> tuple[Array, Array]:
    """Whether each query [*batch, T or 1] sees a bad key, and whether the last document has one [*batch]."""
    count = jnp.cumsum(bad, axis=-1)
    if resets is None:
        return (count if causal else count[..., -1:]) > 0, count[..., -1] > 0
    first, end = document_ranges(resets)
    at = lambda i: jnp.take_along_axis(count, i, axis=-1)
    before_document = jnp.where(first == 0, 0, at(jnp.maximum(first - 1, 0)))
    in_document = at(end - 1) > before_document
    return count > before_document if causal else in_document, in_document[..., -1]


# ---- for each group of chunks ----------------------------------------------------------------------


def find_nonfinite(domain: Domain[Any], q: Array, keys: Keys) -> tuple[Array, Array]:
    """Which queries are not finite, and which tokens' key, value or log decay is not, [*batch, ...] each."""
    bad_key = ~(jnp.all(keys.k < jnp.inf, axis=-1) & jnp.all(domain.is_value(keys.values), axis=-1))
    for log_decay in keys.log_decays():
        bad_key |= ~jnp.isfinite(log_decay[..., 0])
    return ~jnp.all(q < jnp.inf, axis=-1), bad_key


def replace_nonfinite(
    domain: Domain[Any], q: Array, keys: Keys, bad_query: Array, bad_key: Array
) -> tuple[Array, Keys]:
    """Queries and keys with neutral ones in place of bad ones."""
    k, values, resets, log_decay, after = keys
    if after is not None:
        after = after._replace(log_decay=fill_where(bad_key, after.log_decay, 0.0))
    clean = (
        fill_where(bad_key, k, NEG_INF),
        fill_where(bad_key, values, domain.zero),
        resets,
        fill_where(bad_key, log_decay, 0.0),
    )
    return fill_where(bad_query, q, 0.0), Keys(*clean, after)


class Clean(NamedTuple):
    """Tokens with neutral ones in place of those that are not finite."""

    q: Array
    keys: Keys
    seen: Array  # [*batch, ...]: whether a query is not finite, or sees a token that is not
    beyond: tuple[Array, ...]  # [*batch]: whether one is seen from behind the last token; and from before the first


def isolate(domain: Domain[Any], q: Array, keys: Keys, seen: tuple[Array, ...]) -> Clean:
    """Tokens, T of them or N chunks of C, without what is not finite.

    `seen` [*batch] is whether something before them is not, which they see up to the next reset; and, where queries see
    later tokens, whether something after them is not.
    """
    bad_query, bad_key = find_nonfinite(domain, q, keys)
    tokens_first = lambda x: jnp.moveaxis(x.reshape(*seen[0].shape, -1), -1, 0)

    def spread(seen: Array, resets: Array | None, starts: Array | None, reverse: bool) -> tuple[Array, Array]:
        def step(seen: Array, token: tuple[Array, Array | None, Array | None]) -> tuple[Array, Array]:
            bad_key, reset, start = token
            own = (seen if reset is None else seen & ~reset) | bad_key
            return own if start is None else own & ~start, seen if reverse else own

        seen, tokens = vary_together(seen, jax.tree.map(tokens_first, (bad_key, resets, starts)))
        last, seen_by = lax.scan(step, seen, tokens, reverse=reverse)
        return last, jnp.moveaxis(seen_by, 0, -1).reshape(bad_key.shape)

    found = [spread(seen[0], keys.resets, None, reverse=False)]
    if keys.after is not None:
        found.append(spread(seen[1], keys.after.resets, keys.after.starts, reverse=True))
    beyond, seen_by = zip(*found, strict=True)
    return Clean(
        *replace_nonfinite(domain, q, keys, bad_query, bad_key), reduce(jnp.logical_or, seen_by) | bad_query, beyond
    )


def isolate_if_any(domain: Domain[Any], q: Array, keys: Keys, seen: tuple[Array, ...]) -> Clean:
    """As `isolate`, in a loop of one iteration if there is anything, else of none, which takes no time."""
    # A sum over tokens is not finite if one of them is not. Over tokens first: XLA's CPU compiler vectorizes only that.
    q_sum, sums = jax.tree.map(lambda x: jnp.sum(x, axis=-2), (q, keys.numbers()))
    is_any = reduce(jnp.logical_or, map(jnp.any, seen)) | jnp.any(jnp.stack(find_nonfinite(domain, q_sum, sums)))
    tokens = vary_together(Clean(q, keys, jnp.zeros(q.shape[:-1], bool), seen))[0]
    return lax.fori_loop(0, is_any.astype(jnp.int32), lambda _, x: isolate(domain, x.q, x.keys, seen), tokens)


def is_nonfinite_state(domain: Domain[StateT], state: StateT) -> Array:
    """Which states [*batch] are not finite."""
    return ~(jnp.all(domain.is_value(state[0]), axis=(-2, -1)) & jnp.all(state.h_z.value() < jnp.inf, axis=-1))


def replace_state(state: StateT, bad: Array) -> StateT:
    """The empty state in place of bad ones."""
    return fill_where(bad, state, state.empty())


def fill_where(bad: Array, arrays: X, fill: Any = jnp.nan) -> X:
    """Arrays with `fill`, a number or as many arrays, where `bad`, of their leading axes, is true."""
    fills = jax.tree.map(lambda _: fill, arrays) if isinstance(fill, float) else fill
    expand = lambda x: bad.reshape(*bad.shape, *(1,) * (x.ndim - bad.ndim))
    return jax.tree.map(lambda x, fill: jnp.where(expand(x), fill, x), arrays, fills)
