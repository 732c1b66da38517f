"""Reading: prompts of any lengths in parallel, piece by piece, and the likelihood of texts.

Axes: B sequences, T tokens of a prompt.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from heinsen.errors import InputError
from heinsen.models import ModelConfig, ModelState, Params, check_room, forward, hidden_states, init_model_state
from heinsen.models.language_model import logits_of
from heinsen.models.state import capacity, resize_caches
from heinsen.promotion import usual_promotion

TokenIds = Sequence[int] | np.ndarray | Array  # of one text

PREFILL_PIECE = 512  # tokens of a prompt read at once: bounds the memory for a prompt of any length
_SHORTEST_PIECE = 32  # all short prompts share a compiled program, which a process then finds in its cache

_EMPTY = "the prompt has no tokens: give at least one (an end-of-text token begins a document)"


class Prefix(NamedTuple):
    """Text that has been read: the logits of its next token, and the model's state after it."""

    logits: Float[Array, "B padded_vocab"]
    state: ModelState


@usual_promotion
def prefill(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array | np.ndarray, "B T"],
    state: ModelState | None = None,
    lengths: Int[Array | np.ndarray, " B"] | None = None,
) -> Prefix:
    """Read prompts in parallel, piece by piece, after what `state` has read (None: nothing).

    Args:
      params: from `init_params`.
      lengths: number of tokens of each prompt, at least one, if they are padded at their end (None: T).

    Raises ValueError for an empty prompt, one beyond the model's learned positions, and masked models.
    """
    tokens = np.asarray(tokens, np.int32)
    n_rows, n_tokens = tokens.shape
    lengths = np.full(n_rows, n_tokens) if lengths is None else np.asarray(lengths)
    if n_tokens == 0 or lengths.min() < 1:
        raise InputError(_EMPTY)
    state = init_model_state(config, n_rows) if state is None else state
    state = _make_room(config, state, tokens, lengths)
    prefix = Prefix(jnp.zeros((n_rows, config.padded_vocab_size), state.position.dtype), state)
    for _, counts, piece in _pieces(tokens, lengths, _SHORTEST_PIECE):
        prefix = _prefill_piece(config, params, piece, prefix, None if counts.min() == piece.shape[1] else counts)
    return prefix


@partial(jax.jit, static_argnums=0)
def _prefill_piece(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    prefix: Prefix,
    lengths: Int[Array, " B"] | None,
) -> Prefix:
    logits, state = forward(config, params, tokens, prefix.state, lengths, last_only=True)
    if lengths is not None:
        logits = jnp.where((lengths > 0)[:, None], logits, prefix.logits)
    return Prefix(logits, state)


def _make_room(
    config: ModelConfig, state: ModelState, tokens: Int[np.ndarray, "B T"], lengths: Int[np.ndarray, " B"]
) -> ModelState:
    """Return the state with room for these tokens. Raises ValueError where they go beyond learned positions."""
    if config.max_positions is not None:  # else nobody need wait for the state
        check_room(config, longest_document(config, state, tokens, lengths))
    return with_room(config, state, lengths)


def longest_document(
    config: ModelConfig, state: ModelState, tokens: Int[np.ndarray, "B T"], lengths: Int[np.ndarray, " B"]
) -> int:
    """Return the length of the longest of the documents that the state is in or that begin among the tokens."""
    longest = 0
    begun = np.asarray(state.n_tokens) - np.asarray(state.document_start)
    for row, length, before in zip(tokens, lengths, begun, strict=True):
        begins = np.flatnonzero(row[:length] == config.document_token)  # none where document_token is None
        longest = max(longest, *np.diff([-before, *begins, length]).tolist())
    return longest


@usual_promotion
def score(
    config: ModelConfig,
    params: Params,
    prefix: Prefix,
    tokens: Int[Array | np.ndarray, "B T"],
    lengths: Int[Array | np.ndarray, " B"] | None = None,
) -> tuple[Float[np.ndarray, "B T"], Bool[np.ndarray, "B T"], Prefix]:
    """Score texts that continue a prefix, read piece by piece as by `prefill`.

    Returns each token's log-likelihood in nats, whether it was the likeliest, and the prefix with the texts.

    Args:
      params: from `init_params`.
      lengths: number of tokens of each row, if rows are padded at their end, where both results are 0 (None: T).

    Raises ValueError for a text beyond the model's learned positions.
    """
    tokens = np.asarray(tokens, np.int32)
    lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else np.asarray(lengths)
    log_p, likeliest = np.zeros(tokens.shape), np.zeros(tokens.shape, bool)
    prefix = prefix._replace(state=_make_room(config, prefix.state, tokens, lengths))
    for start, counts, piece in _pieces(tokens, lengths):
        piece_log_p, piece_likeliest, prefix = _score_piece(config, params, piece, prefix, counts)
        width = min(piece.shape[1], tokens.shape[1] - start)
        log_p[:, start : start + width] = np.asarray(piece_log_p)[:, :width]
        likeliest[:, start : start + width] = np.asarray(piece_likeliest)[:, :width]
    return log_p, likeliest, prefix


@partial(jax.jit, static_argnums=0)
def _score_piece(
    config: ModelConfig, params: Params, tokens: Int[Array, "B T"], prefix: Prefix, lengths: Int[Array, " B"]
) -> tuple[Array, Array, Prefix]:
    x, state = hidden_states(config, params, tokens, prefix.state, lengths)

    def next_token(logits: Array, token: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        x, target = token
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=1)[:, 0]
        likeliest = jnp.argmax(logits[:, : config.vocab_size], axis=-1)
        return logits_of(config, params, x), (log_p, likeliest == target)

    steps = x.swapaxes(0, 1), tokens.T
    _, (log_p, likeliest) = jax.lax.scan(next_token, prefix.logits, steps)
    within = jnp.arange(tokens.shape[1]) < lengths[:, None]
    last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = jnp.where((lengths > 0)[:, None], logits_of(config, params, last), prefix.logits)
    return jnp.where(within, log_p.T, 0.0), within & likeliest.T, Prefix(logits, state)


def _pieces(tokens: np.ndarray, lengths: np.ndarray, shortest: int = 1) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(first column, each row's number of tokens, the tokens), padded to a power of two: few compiled programs."""
    for start in range(0, int(lengths.max()), PREFILL_PIECE):
        counts = np.clip(lengths - start, 0, PREFILL_PIECE)
        padded = min(PREFILL_PIECE, max(shortest, 1 << int(counts.max() - 1).bit_length()))
        yield start, counts, np.pad(tokens[:, start : start + counts.max()], [(0, 0), (0, padded - counts.max())])


@usual_promotion
def with_room(config: ModelConfig, state: ModelState, n_more: Int[np.ndarray, " B"] | int) -> ModelState:
    """Return the state with room for so many more tokens; caches grow by doubling: few compiled programs."""
    room = capacity(config, state)
    if room is None:
        return state
    n_tokens = int(np.max(state.n_tokens + n_more))
    return state if room >= n_tokens else resize_caches(config, state, max(128, 1 << (n_tokens - 1).bit_length()))


# ---- texts ---------------------------------------------------------------------------------------


def check_prompt(config: ModelConfig, prompt: TokenIds) -> Int[np.ndarray, " T"]:
    """Return the prompt as int32. Raises ValueError for an empty one, and for ids outside the vocabulary."""
    prompt = np.asarray(prompt, np.int32)
    if prompt.size == 0:
        raise InputError(_EMPTY)
    if not (0 <= prompt.min() and prompt.max() < config.vocab_size):
        raise InputError(
            f"prompt ids reach from {prompt.min()} to {prompt.max()}: the vocabulary has {config.vocab_size}"
        )
    return prompt


def read(
    config: ModelConfig,
    params: Params,
    prompts: Sequence[TokenIds],
    state: ModelState | None = None,
) -> Prefix:
    """Read prompts of any lengths together, after what `state` has read, one row per prompt.

    Raises ValueError as `prefill` and `check_prompt`.
    """
    prompts = [check_prompt(config, prompt) for prompt in prompts]
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.stack([np.pad(prompt, (0, lengths.max() - len(prompt))) for prompt in prompts])
    return prefill(config, params, tokens, state, lengths)
