"""Attention in which queries see later tokens too (`Keys.later`): documents of masked models, a gate per direction.

A pass over the keys from the last group to the first makes the summary after each group beforehand. The gradient of
these summaries goes through a pass of its own, from the first group to the last.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.ops import chunk
from heinsen.ops.chunk import Keys, Later
from heinsen.ops.decay import decay_after_grad
from heinsen.ops.exact import Clean, isolate_if_any, multiply, vary_together
from heinsen.ops.schedule import (
    InOrder,
    Residuals,
    pass_back_in_turn,
    summaries_after,
    summarize_in_turn,
    take_group,
    to_tokens,
    write,
)
from heinsen.ops.values import Domain, StateT, Summary, Sums


class BothWays(InOrder[StateT]):
    """`InOrder` with summaries after each chunk as well."""

    @property
    def max_rows(self) -> int:
        return super().max_rows // 2  # as each has sums in both directions

    def summarize_after(self, keys: Keys, state: StateT) -> tuple[tuple[Summary, ...], tuple[Array, ...]]:
        domain, split = self.domain, self.split

        def step(carry: tuple[Summary, Array], i: Array) -> Any:
            clean = self._isolate_keys(keys, i, carry[1])
            decay = clean.keys.decays()[1]
            factors = chunk.key_factors(domain, clean.keys, decay)
            return (summarize_in_turn(factors, decay, carry[0])[1], clean.beyond[1]), carry

        first = domain.to_summary(state.empty()), jnp.zeros(keys.k.shape[:-2], bool)
        after, tainted = lax.scan(step, vary_together(first, keys)[0], jnp.arange(split.n_groups), reverse=True)[1]
        return (after,), (tainted,)

    def add_grad_of_after(self, keys: Keys, residuals: Residuals, dkeys: Keys, dafter: Sums, divisor: Array) -> Keys:
        domain, split = self.domain, self.split

        def step(carry: Any, xs: Any) -> Any:
            dfirst, dkeys = carry
            i, after, tainted, from_queries = xs
            clean = self._isolate_keys(keys, i, tainted)
            more, dlast = _summary_after_grad(domain, clean.keys, after, from_queries, dfirst)
            more = to_tokens(multiply(more, divisor))
            add = lambda x, more: x + more
            before = to_tokens(take_group(dkeys, i, split))
            return (dlast, write(dkeys, jax.tree.map(add, before, more), i)), None

        none = jax.tree.map(jnp.zeros_like, residuals.end.sums)
        carry = vary_together((none, dkeys._replace(log_decay=None)), dafter)[0]
        xs = jnp.arange(split.n_groups), residuals.after[0], residuals.tainted[1], dafter
        (_, with_after), _ = lax.scan(step, carry, xs)
        return with_after._replace(log_decay=dkeys.log_decay)

    def _isolate_keys(self, keys: Keys, i: Array, tainted_after: Array) -> Clean:
        """A group's keys, without what is not finite, as queries without features see it."""
        no_queries = keys.k[..., :0]
        return isolate_if_any(
            self.domain, *take_group((no_queries, keys), i, self.split), (jnp.zeros_like(tainted_after), tainted_after)
        )


def _summary_after_grad(
    domain: Domain[Any], keys: Keys, after: Summary, from_queries: Sums, dfirst: Sums
) -> tuple[Keys, Sums]:
    """The part of the gradients of a group's keys that the sums after chunks make, and of the sums after the group.

    Args:
      after: the summary after the group.
      from_queries: what the queries of each chunk add to the gradient of the sums after it.
      dfirst: gradient of the sums of the group and all after it.
    """
    assert keys.later is not None
    decay = keys.decays()[1]
    factors = chunk.key_factors(domain, keys, decay)
    (after,) = summaries_after(domain, keys, (after,))
    _, scale_older, scale_newer = chunk.merge(after.shifts, decay.before_at_end, factors.shifts)
    dends, dlast = pass_back_in_turn(dfirst, scale_older, from_queries, decay.backwards)
    more = chunk.summary_grad(factors, chunk.scale(dends, scale_newer))
    dlog_decay = None
    if keys.later.log_decay is not None:
        dk_total, total = chunk.sum_features(more.k), chunk.end_total(scale_older, after.sums, dends, more.k)
        dlog_decay = decay_after_grad(jnp.zeros_like(dk_total), dk_total, total[..., None])[..., None]
    return Keys(more.k, domain.factor_grad(factors.vf, more.values), None, None, Later(log_decay=dlog_decay)), dlast
