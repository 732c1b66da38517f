"""Causality for inputs that are not finite, where products of 0 and NaN would spread them to all tokens.

They are replaced by neutral ones, and every output that sees one is set to NaN afterwards: here for each call, in the
chunked form for each group of chunks (`exact.isolate_if_any`).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from heinsen.ops.chunk import Keys
from heinsen.ops.documents import document_ranges
from heinsen.ops.exact import fill_where, find_nonfinite, replace_nonfinite
from heinsen.ops.values import Domain

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
