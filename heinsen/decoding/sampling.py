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
    draw = jax.vmap(jax.random.categorical)
    if 0 < sampling.top_k < vocab_size or sampling.top_p < 1:
        # Drawn by rank, so that tokens of equal probability do not slip in beyond the limit.
        descending, order = jax.lax.top_k(logits, min(sampling.top_k or vocab_size, vocab_size))
        if sampling.top_p < 1:
            p = jax.nn.softmax(descending, axis=-1)
            descending = jnp.where(jnp.cumsum(p, axis=-1) - p < sampling.top_p, descending, -jnp.inf)
        rank = draw(keys, _mask_below_min_p(descending, sampling.min_p))
        return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0].astype(jnp.int32)
    return draw(keys, _mask_below_min_p(logits, sampling.min_p)).astype(jnp.int32)


def _mask_below_min_p(logits: Array, min_p: float) -> Array:
    """Mask tokens less than min_p times as likely as the likeliest, whose logit is 0."""
    return logits if min_p == 0 else jnp.where(logits >= np.log(min_p), logits, -jnp.inf)
