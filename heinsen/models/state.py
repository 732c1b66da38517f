"""The state of a model: what it remembers of the tokens so far, in all layers.

Each function applies the mixers' own to the states of their layers.

Axes: B batch, T tokens, D d_model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from heinsen.models.config import ModelConfig, check_causal
from heinsen.models.mixers import TokenContext
from heinsen.ops.arrays import fill_where

# Without caches a stream may go on for good: counts stay here, so that no sum of int32 overflows.
MOST_COUNTED = 2**30


class LayerState(NamedTuple):
    """The state of one layer, of which ModelState has all. None: nothing came before, or there is none."""

    attention: Any  # the mixer's
    convolution: Float[Array, "B H I F"] | None  # the last inputs


class ModelState(NamedTuple):
    """Everything the model remembers of the tokens seen. Without caches its size does not depend on their number."""

    position: Float[Array, "B D"]  # e of the position recurrence
    attention: tuple[Any, ...]  # each layer's state (`Mixer`), with leading axis B
    convolution: tuple[Array | None, ...]  # each layer's last inputs (`heinsen.models.convolution`), if it has one
    n_tokens: Int[Array, " B"]  # tokens seen since the state was empty, up to MOST_COUNTED: the next slot of the caches
    document_start: Int[Array, " B"]  # slot of the current document's first token


def init_model_state(config: ModelConfig, batch_size: int, capacity: int = 0) -> ModelState:
    """Return the state before any token: e = 0 in the position recurrence, empty states in the layers.

    Caches have room for `capacity` tokens (`resize_caches` adds more). Raises ValueError for masked models.
    """
    check_causal(config)
    attention = tuple(mixer.init_state(batch_size, capacity) for mixer in config.layer_mixers)
    state = state_without_layers(config, batch_size)._replace(attention=attention)
    if not config.convolution:
        return state
    shape = batch_size, config.n_heads, config.convolution - 1, 2 * config.d_key + config.d_value
    return state._replace(convolution=(jnp.zeros(shape, config.accumulator_dtype),) * config.n_layers)


def state_without_layers(config: ModelConfig, batch_size: int) -> ModelState:
    """Return the state before any token, with None for the state of every layer."""
    position = jnp.zeros((batch_size, config.d_model), config.accumulator_dtype)
    zeros = jnp.zeros(batch_size, jnp.int32)
    nothing = (None,) * config.n_layers
    return ModelState(position, nothing, nothing, zeros, zeros)


def state_size(config: ModelConfig, n_tokens: int) -> int:
    """Return how many numbers one sequence's state has after n_tokens; without caches that does not depend on them."""
    state = jax.eval_shape(lambda: init_model_state(config, 1, n_tokens))
    position = state.position.size if config.position == "recurrent" else 0
    return position + sum(leaf.size for leaf in jax.tree.leaves((state.attention, state.convolution)))


def _map_layers(function: Callable[..., Any], config: ModelConfig, *layers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply function(mixer, *states) to each layer."""
    return tuple(function(*layer) for layer in zip(config.layer_mixers, *layers, strict=True))


# ---- documents -----------------------------------------------------------------------------------


def forget(config: ModelConfig, state: ModelState, rows: Bool[Array, " B"]) -> ModelState:
    """Return the state with those rows as before any token."""
    check_causal(config)
    attention = _map_layers(lambda mixer, layer: mixer.reset_rows(layer, rows), config, state.attention)
    fresh = state_without_layers(config, rows.shape[0])._replace(attention=(), convolution=())
    selected = fill_where(rows, state._replace(attention=(), convolution=()), fresh)
    # The last inputs may stay: a convolution sees those of its own document alone.
    return selected._replace(attention=attention, convolution=state.convolution)


def forget_at_document_start(
    config: ModelConfig, state: ModelState, begins: Bool[Array, " B"], n_tokens: int
) -> ModelState:
    """Apply `forget` to the rows whose first of n_tokens begins a document."""
    if n_tokens > 1:
        return forget(config, state, begins)
    # In decoding, the state is most of what is read besides the parameters: leave it alone if nothing begins.
    return jax.lax.cond(jnp.any(begins), lambda state: forget(config, state, begins), lambda state: state, state)


def locate_tokens(
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    state: ModelState | None = None,
    lengths: Int[Array, " B"] | None = None,
    first_place: Int[Array, " B"] | None = None,
) -> tuple[ModelState, TokenContext]:
    """Return the state before the tokens, by `forget_at_document_start`, and where they stand after it.

    No token sees the padding after it if the model is causal; else padding is a document of its own.

    Args:
      state: what came before (None: nothing).
      lengths: number of tokens of each row, if rows are padded at their end, with any ids (None: T).
      first_place: place of each row's first token in its document (None: as `state` says).
    """
    n_batch, n_tokens = tokens.shape
    valid = None if lengths is None else jnp.arange(n_tokens) < lengths[:, None]
    begins = None if config.document_token is None else tokens == config.document_token
    if begins is not None and valid is not None:
        begins = begins & valid
    # Without a state the layers get None rather than empty states, which would exist for all layers at once.
    before = state_without_layers(config, n_batch) if state is None else state
    if begins is not None and state is not None:
        before = forget_at_document_start(config, before, begins[:, 0], n_tokens)
    if first_place is not None:
        before = before._replace(document_start=before.n_tokens - first_place)
    slot = before.n_tokens[:, None] + jnp.arange(n_tokens)
    document_start = jnp.broadcast_to(before.document_start[:, None], slot.shape)
    segment_ids = None
    if begins is not None:
        document_start = jax.lax.cummax(jnp.where(begins, slot, document_start), axis=1)
        segment_ids = jnp.cumsum(begins, axis=-1)[:, None]
    if valid is not None and not config.causal:
        segment_ids = jnp.where(valid[:, None], 0 if segment_ids is None else segment_ids, -1)
    return before, TokenContext(slot, document_start, valid, segment_ids, begins)


def state_after(
    before: ModelState,
    context: TokenContext,
    lengths: Int[Array, " B"] | None,
    position: Float[Array, "B D"],
    layers: tuple[LayerState, ...],
) -> ModelState:
    """Return the state after the tokens that follow `before`, with these states of positions and layers."""
    n_seen = before.n_tokens + (context.slot.shape[1] if lengths is None else lengths)
    last = jnp.maximum(n_seen - before.n_tokens - 1, 0)
    document_start = jnp.take_along_axis(context.document_start, last[:, None], axis=1)[:, 0]
    attention, convolution = zip(*layers, strict=True)
    excess = jnp.maximum(n_seen - MOST_COUNTED, 0)
    return ModelState(position, attention, convolution, n_seen - excess, jnp.maximum(document_start - excess, 0))


# ---- decoding ------------------------------------------------------------------------------------


def to_running(config: ModelConfig, state: ModelState) -> ModelState:
    """Convert to the form in which single steps are fastest and most exact."""
    return state._replace(attention=_map_layers(lambda mixer, layer: mixer.to_running(layer), config, state.attention))


def from_running(config: ModelConfig, state: ModelState) -> tuple[ModelState, Bool[Array, ""]]:
    """Convert back from `to_running`: (state, whether all steps since were exact)."""
    ended = _map_layers(lambda mixer, layer: mixer.from_running(layer), config, state.attention)
    is_exact = jnp.ones((), bool)
    for _, layer_is_exact in ended:
        is_exact &= jnp.all(layer_is_exact)
    return state._replace(attention=tuple(layer for layer, _ in ended)), is_exact


# ---- caches --------------------------------------------------------------------------------------


def capacity(config: ModelConfig, state: ModelState) -> int | None:
    """Number of tokens for which the caches have room; None without caches."""
    caches = jax.tree.leaves(split_caches(config, state)[0])
    return caches[0].shape[-2] if caches else None


def resize_caches(config: ModelConfig, state: ModelState, n_slots: int) -> ModelState:
    """Return the state with caches of n_slots slots: the first of those that there are, or more, which are free."""

    def resize(cache: Array) -> Array:
        free = max(n_slots - cache.shape[-2], 0)
        return jnp.pad(cache, [(0, 0)] * (cache.ndim - 2) + [(0, free), (0, 0)])[..., :n_slots, :]

    caches, rest = split_caches(config, state)
    return join_caches(jax.tree.map(resize, caches), rest)


def split_caches(config: ModelConfig, state: ModelState) -> tuple[tuple[Any, ...], ModelState]:
    """Split into (each layer's cache, the state without them), with None where there is nothing of the kind.

    Steps only write to free slots of the caches: they can be repeated on the caches that they have written to, and need
    the rest as it was. So the caches can be donated, and the rest must be kept until the steps are known to be exact.
    """
    layers = list(zip(config.layer_mixers, state.attention, strict=True))
    rest = tuple(None if mixer.has_cache else layer for mixer, layer in layers)
    return tuple(layer if mixer.has_cache else None for mixer, layer in layers), state._replace(attention=rest)


def join_caches(caches: tuple[Any, ...], state: ModelState) -> ModelState:
    """Invert `split_caches`."""
    layers = zip(caches, state.attention, strict=True)
    return state._replace(attention=tuple(rest if cache is None else cache for cache, rest in layers))
