"""Positions: how a model knows the order of its tokens.

    recurrent   e_t = logaddexp(e_{t-1} + log a_t, l_t), added to the embedding: the paper's
    learned     a row of a table for each place in a document, added to the embedding
    rotary      pairs of features of queries and keys, rotated by an angle that grows with the place
    none        nothing

Axes: B batch, H heads, T tokens, D d_model, K key features.
"""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from heinsen.logspace import NEG_INF, logaddexp
from heinsen.models.config import ModelConfig, check_room
from heinsen.models.dense import Dense, weight_init
from heinsen.models.mixers import TokenContext
from heinsen.ops import sharded


class Position(nn.Module):
    """No positions, and the interface of all others.

    `init_std` is that of the embedding (`heinsen.models.dense.weight_init`).
    """

    config: ModelConfig
    mesh: Mesh | None = None
    init_std: float | None = None

    def __call__(
        self, x: Float[Array, "B T D"], before: Float[Array, "B D"], context: TokenContext
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B D"]]:
        """Add positions to the embedding x, with e before the first token: (x, e after the last token)."""
        return x, before

    @staticmethod
    def rotate(
        q: Float[Array, "B H T K"], k: Float[Array, "B H T K"], context: TokenContext
    ) -> tuple[Float[Array, "B H T K"], Float[Array, "B H T K"]]:
        """Rotate queries and keys."""
        return q, k


class RecurrentPosition(Position):
    """x_t + e_t, e_t = logaddexp(e_{t-1} + log a_t, l_t), log a = log_sigmoid(c), with (c, l) a dense map of x.

    A bidirectional model adds the same from the last token to the first, with a (c, l) of its own.
    """

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], before: Float[Array, "B D"], context: TokenContext
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B D"]]:
        n_maps = 2 if self.config.causal else 4
        dense = Dense(n_maps * self.config.d_model, self.config.dtype, rounded=False, name="dense")
        maps = jnp.split(dense(x), n_maps, axis=-1)
        e = self._recurrence(maps[0], maps[1], before, context.begins, context.valid)
        if not self.config.causal:
            flip: Callable[[Array], Array] = lambda x: jnp.flip(x, axis=1)
            # From the end, a document begins with its last token.
            ends = None if context.begins is None else flip(jnp.pad(context.begins[:, 1:], [(0, 0), (0, 1)]))
            valid = None if context.valid is None else flip(context.valid)
            e = e + flip(self._recurrence(flip(maps[2]), flip(maps[3]), before, ends, valid))
        return x + e, e[:, -1]

    def _recurrence(
        self,
        c: Float[Array, "B T D"],
        log_b: Float[Array, "B T D"],
        before: Float[Array, "B D"],
        begins: Bool[Array, "B T"] | None,
        valid: Bool[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        log_a = nn.log_sigmoid(c)
        if begins is not None:  # e_{t-1} is 0 there, as before any token
            begins = begins[..., None]
            log_b = jnp.where(begins, logaddexp(log_a, log_b), log_b)
            log_a = jnp.where(begins, NEG_INF, log_a)
        if valid is not None:  # padding changes nothing
            log_a = jnp.where(valid[..., None], log_a, 0.0)
            log_b = jnp.where(valid[..., None], log_b, NEG_INF)
        if log_b.shape[1] == 1:
            return logaddexp(before[:, None] + log_a, log_b)
        return sharded.log_linear_recurrence(self.mesh, log_a, log_b, before)


class LearnedPosition(Position):
    """x_t + table[place of t in its document]; NaN beyond the table."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], before: Float[Array, "B D"], context: TokenContext
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B D"]]:
        c, places = self.config, context.place
        if context.begins is None and context.valid is None:
            check_room(c, x.shape[1])
        if context.valid is not None:  # padding may lie beyond the table
            places = jnp.where(context.valid, places, 0)
        table = self.param("embedding", weight_init(c.d_model, self.init_std), (c.n_positions, c.d_model))
        return x + jnp.take(table, places, axis=0, mode="fill", fill_value=jnp.nan), before


class RotaryPosition(Position):
    """Queries and keys rotated; the embedding stays as it is."""

    @staticmethod
    def rotate(
        q: Float[Array, "B H T K"], k: Float[Array, "B H T K"], context: TokenContext
    ) -> tuple[Float[Array, "B H T K"], Float[Array, "B H T K"]]:
        """Rotate features i and i + K/2 by the token's place in its document times 10000^(-2i/K)."""
        return _rotate_pairs(q, context.place), _rotate_pairs(k, context.place)


_BASE, _DIGITS = 4096, 3  # a place, up to 2^31, is written as three digits in base 4096


def _angles(places: Array, rates: Array) -> Array:
    """places * rates up to full turns, within 2e-3 at any place; the product itself is off by 2^-24 of it."""
    angles = jnp.zeros((), rates.dtype)
    for _ in range(_DIGITS):
        angles = places % _BASE * rates + angles
        places, rates = places // _BASE, _BASE * rates % (2 * jnp.pi)
    return angles


def _rotate_pairs(x: Float[Array, "B H T K"], places: Int[Array, "B T"]) -> Float[Array, "B H T K"]:
    half, dtype = x.shape[-1] // 2, jnp.promote_types(x.dtype, jnp.float32)
    angles = _angles(places[:, None, :, None], 10000.0 ** (-jnp.arange(half) / half))
    a, b = x[..., :half].astype(dtype), x[..., half:].astype(dtype)
    cos, sin = jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


# The names in heinsen.models.config.POSITIONS.
POSITION_CLASSES: dict[str, type[Position]] = {
    "recurrent": RecurrentPosition,
    "learned": LearnedPosition,
    "rotary": RotaryPosition,
    "none": Position,
}
