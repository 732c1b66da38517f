"""What a forget gate and the starts of documents leave of earlier tokens' weights, in logarithms.

A token's log decay g <= 0 multiplies the weights of all tokens before it by exp(g); -inf, where a document starts,
erases them. So key s keeps exp(g[s+1] + ... + g[t]) at query t >= s. All sums here are of neighboring tokens, block by
block. None is a difference of two running sums, so that nothing is rounded to their size, and -inf needs no care.

Axes: `*batch` is any leading axes; T tokens; C tokens of a chunk, in J blocks of M.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import NEG_INF
from heinsen.ops.arrays import einsum

_ERASED = -1e30  # far below any sum of log decays


def with_starts(log_decay: Array | None, starts: Array | None, like: Array) -> Array | None:
    """Log decays [*batch, T] with -inf where a document starts; None where neither is given.

    The gradient of -inf is 0. `like` [*batch, T, K] has the shape and the dtype of the keys.
    """
    if log_decay is None and starts is None:
        return None
    given = jnp.zeros(like.shape[:-1], like.dtype) if log_decay is None else log_decay.astype(like.dtype)
    erases = given == NEG_INF if starts is None else (given == NEG_INF) | starts
    return jnp.where(erases, NEG_INF, given)


def sums_between(x: Array) -> Array:
    """Sums x[s+1] + ... + x[t] of x [*batch, n], as [*batch, n (t), n (s)]; -inf where s > t. No entry is NaN."""
    r, t, s = (lax.broadcasted_iota(jnp.int32, (x.shape[-1],) * 3, axis) for axis in range(3))
    # A product, for which -inf is a large number: sums that XLA fuses into others are several times as slow on CPUs.
    is_between = ((s < r) & (r <= t)).astype(x.dtype)
    sums = einsum("...r,rts->...ts", jnp.maximum(x, _ERASED), is_between)
    return jnp.where((sums > _ERASED / 2) & (s[0] <= t[0]), sums, NEG_INF)


def sums_until_end(x: Array) -> tuple[Array, Array]:
    """(the sum [*batch, T] of all entries after each one of x [*batch, T], the sum [*batch] of all)."""
    later = lax.cumsum(x, axis=x.ndim - 1, reverse=True)
    return jnp.concatenate([later[..., 1:], jnp.zeros_like(later[..., :1])], axis=-1), later[..., 0]


class ChunkDecay(NamedTuple):
    """Log decays in a chunk of J blocks of M tokens. Without a gate or documents there is no `*batch`."""

    within: Array  # [*batch, J, M (t), M (s)]: of each key at each query of its block; -inf where s > t
    since_start: Array  # [*batch, J, M]: at each token of a block, of what came before the block
    until_end: Array  # [*batch, J, M]: of each key at the end of its block
    # [*batch, J+1, J+1], entry [j, i]: at the start of block j (J: at the end of the chunk), of what came before the
    # chunk (i = 0), or of block i - 1 from its end on; -inf where i > j
    between: Array

    @classmethod
    def of(cls, log_decay: Array, block: int) -> "ChunkDecay":
        """Decays of a chunk with log_decay [*batch, C]."""
        g = log_decay.reshape(*log_decay.shape[:-1], -1, block)
        within = sums_between(g)
        since_start = within[..., 0] + g[..., :1]
        before_first = jnp.zeros_like(since_start[..., :1, 0])
        totals = jnp.concatenate([before_first, since_start[..., -1]], axis=-1)
        return cls(within, since_start, within[..., -1, :], sums_between(totals))

    @property
    def keys_at_end(self) -> Array:
        """Of each key at the end of the chunk, [*batch, C]."""
        return _merge_last(self.until_end + self.between[..., -1, 1:, None])

    @property
    def before_at_queries(self) -> Array:
        """At each query, of what came before the chunk, [*batch, C]."""
        return _merge_last(self.since_start + self.between[..., :-1, 0, None])

    @property
    def before_at_end(self) -> Array:
        """At the end of the chunk, of what came before it, [*batch]."""
        return self.between[..., -1, 0]

    @property
    def key_factors(self) -> Array:
        """exp of the log decay of each key at each query, [*batch, C (t), C (s)]; 0 where s > t."""
        n_blocks, size = self.since_start.shape[-2:]
        apart = jnp.exp(self.since_start)[..., None, None] * jnp.exp(self.between)[..., :-1, None, 1:, None]
        apart = apart * jnp.exp(self.until_end)[..., None, None, :, :]
        own = jnp.eye(n_blocks, dtype=bool)[:, None, :, None]
        pairs = jnp.where(own, jnp.exp(self.within)[..., :, :, None, :], apart)
        return pairs.reshape(*pairs.shape[:-4], n_blocks * size, n_blocks * size)

    @property
    def keys_at_queries(self) -> Array:
        """Of each key at each query, [*batch, C (t), C (s)]; -inf where s > t."""
        n_blocks, size = self.since_start.shape[-2:]
        apart = self.since_start[..., None, None] + self.between[..., :-1, None, 1:, None]
        apart = apart + self.until_end[..., None, None, :, :]
        own = jnp.eye(n_blocks, dtype=bool)[:, None, :, None]
        pairs = jnp.where(own, self.within[..., :, :, None, :], apart)
        return pairs.reshape(*pairs.shape[:-4], n_blocks * size, n_blocks * size)


def _merge_last(x: Array) -> Array:
    return x.reshape(*x.shape[:-2], -1)
