"""How the next token is drawn from its logits.

Axes: B sequences.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from heinsen.errors import InputError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options of `sample`, applied in this order: repetition penalty, temperature, top_k, top_p, min_p.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: keep the k likeliest tokens (0: all).
      top_p: of these keep the fewest whose probabilities sum to at least top_p (1: all).
      min_p: of these keep those with at least min_p times the probability of the likeliest (0: all).
      repetition_penalty: divides positive logits of tokens that are in the text already, multiplies negative ones.

    Raises ValueError for impossible values.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < float("inf")):
            raise InputError(f"temperature = {self.temperature}: it must be finite and not negative")
        if self.top_k < 0:
            raise InputError(f"top_k = {self.top_k}: it must not be negative (0 keeps every token)")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p = {self.top_p}: it must lie in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p = {self.min_p}: it must lie in [0, 1]")
        if not 0 < self.repetition_penalty < float("inf"):
            raise InputError(f"repetition_penalty = {self.repetition_penalty}: it must be finite and positive")


def sample(
    keys: Key[Array, " B"] | None,
    logits: Float[Array, "B padded_vocab"],
    sampling: Sampling,
    vocab_size: int,
    seen: Bool[Array, "B vocab"] | None = None,
) -> Int[Array, " B"]:
    """Draw a token id below vocab_size for each row.

    Args:
      keys: a random key for each row; temperature 0 needs none.
      seen: which tokens the text of each row has, for the repetition penalty.
    """
    logits = logits[:, :vocab_size]
    if seen is not None:
        factor = sampling.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Below 1e-30 the division could overflow; the largest logit stays 0 and is drawn alone long before.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / max(sampling.temperature, 1e-30)
    assert keys is not None
    order = None
    if 0 < sampling.top_k < vocab_size:
        # Drawn by rank, so that tokens of equal probability do not slip in beyond the limit.
        logits, order = jax.lax.top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = jnp.where(keep_likeliest(logits, sampling.top_p), logits, -jnp.inf)
    if sampling.min_p > 0:  # the likeliest has a logit of 0
        logits = jnp.where(logits >= np.log(sampling.min_p), logits, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, logits)
    return (drawn if order is None else jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0]).astype(jnp.int32)


def keep_likeliest(logits: Float[Array, "B V"], top_p: float) -> Bool[Array, "B V"]:
    """Return the fewest likeliest tokens with a total probability of at least top_p; of equal ones the first.

    The largest logit of each row is 0. A token is kept if the tokens before it, by logits and then by place, have less
    than top_p together, in sums of the logits' dtype: in float32 they are off by 1e-6.

    Nothing is sorted. Bisection finds the distance from the largest logit, by all bits, that the last kept tokens have.
    """
    p = jnp.exp(logits)
    limit = top_p * jnp.sum(p, axis=-1)
    # As integers, numbers that are not negative have the same order.
    n_bits = jnp.finfo(logits.dtype).bits
    distance = jax.lax.bitcast_convert_type(jnp.abs(logits), jnp.dtype(f"int{n_bits}"))
    farthest = jax.lax.bitcast_convert_type(jnp.full(limit.shape, jnp.inf, logits.dtype), distance.dtype)

    def sum_closer(than: Array) -> Array:
        return jnp.sum(jnp.where(distance < than[:, None], p, 0), axis=-1)

    def halve(_: Array, interval: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = interval
        middle = low + (high - low + 1) // 2
        fits = sum_closer(middle) < limit
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    last, _ = jax.lax.fori_loop(0, n_bits - 1, halve, (jnp.zeros_like(farthest), farthest))
    is_last = distance == last[:, None]

    def fit_equals() -> Array:
        before = sum_closer(last)[:, None] + (jnp.cumsum(is_last, axis=-1) - 1) * p
        return is_last & (before < limit[:, None])

    has_equals = jnp.any(jnp.sum(is_last, axis=-1) > 1)
    return (distance < last[:, None]) | jax.lax.cond(has_equals, fit_equals, lambda: is_last)
