"""The common part of both kernels' forms: rows that lost terms are computed by the chunked form."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from heinsen.ops.chunk import Keys
from heinsen.ops.chunked import attend_in_order
from heinsen.ops.exact import Output, is_nonfinite_state
from heinsen.ops.schedule import InOrder
from heinsen.ops.values import StateT, Summary


@dataclasses.dataclass(frozen=True)
class Kernels(InOrder[StateT]):
    """`InOrder` by one kernel for each pass. All chunks are in one group."""

    interpret: Any = None  # parameters of JAX's interpret mode, or None: compiled

    def recompute(self, q: Array, keys: Keys, state: StateT) -> Output[StateT]:
        return attend_in_order(self.domain, q, keys, state)

    def lost_between(self, state: StateT, first: Summary, end: Summary) -> Array:
        """Rows [*batch] whose summaries of all tokens may have lost terms, or where something is not finite."""
        domain = self.domain
        is_exact = domain.is_exact(first.sums, first.shifts.b) & domain.is_exact(end.sums, end.shifts.b)
        # What is not finite in keys and values is so in the sums at the end, too: no factor makes it a number again.
        return is_nonfinite_state(domain, state) | ~is_exact | ~jnp.all(jnp.isfinite(end.sums.s), axis=(-2, -1))


def pad_axis(x: Array, size: int, axis: int = -1, with_: float = 0.0) -> Array:
    """x with `axis` filled up to `size`."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=with_)
