"""Generation: tokens drawn one after the other, in one compiled loop.

Axes: B sequences, N tokens drawn.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from heinsen.decoding.prompts import Prefix, TokenIds, read, with_room
from heinsen.decoding.sampling import Sampling, sample
from heinsen.models import ModelConfig, Params, check_room, forward, unstack
from heinsen.models.state import from_running, join_caches, split_caches, to_running
from heinsen.promotion import usual_promotion


@usual_promotion
def step_params(config: ModelConfig, params: Params, donate: bool = False) -> Params:
    """Convert parameters to what `decode` reads fastest: one entry per layer, matrices in `config.dtype`.

    donate: delete the arrays of `params` on the way, as nothing else reads them: memory holds parameters only once.
    """

    def cast(path: tuple[Any, ...], x: Array) -> Array:
        if path[-1].key != "kernel" or x.dtype == config.dtype:
            return x
        converted = x.astype(config.dtype)
        if donate:
            jax.block_until_ready(converted)
            x.delete()
        return converted

    unstacked = unstack(config, jax.tree_util.tree_map_with_path(cast, params), donate)
    # Tokens are looked up in the embedding as it is; the product that makes logits reads it in config.dtype.
    embedding = unstacked["embedding"]
    return unstacked | {"head": embedding if embedding.dtype == config.dtype else embedding.astype(config.dtype)}


@usual_promotion
def decode(
    config: ModelConfig,
    params: Params,
    prefix: Prefix,
    keys: Key[Array, " B"],
    sampling: Sampling,
    n_tokens: int,
    n_drawn: int = 0,
    stop_id: int | None = None,
    seen: Bool[Array | np.ndarray, "B vocab"] | None = None,
    buffer: int | None = None,
) -> tuple[Int[np.ndarray, "B N"], Prefix, Bool[Array, "B vocab"] | None]:
    """Draw n_tokens tokens in one compiled loop: (the tokens, the prefix and `seen` with all that were drawn).

    Args:
      params: from `step_params`.
      prefix: what was read; its caches are donated.
      keys: one random key per row; token i of a text is drawn with fold_in(key, i).
      n_drawn: number of tokens of the text drawn before.
      stop_id: a row ends before this token; its tokens are -1 from there on.
      seen: which tokens are in the texts, for the repetition penalty (None: no penalty).
      buffer: compile for so many tokens, of which n_tokens are drawn (None: n_tokens).

    Raises ValueError where the text could go beyond the model's learned positions.
    """
    if config.max_positions is not None:
        check_room(config, int(np.max(prefix.state.n_tokens - prefix.state.document_start)) + n_tokens)
    buffer = n_tokens if buffer is None else buffer
    caches, rest = split_caches(config, with_room(config, prefix.state, n_tokens))
    prefix = prefix._replace(state=rest)
    arguments = (prefix, keys, n_tokens, n_drawn, stop_id, seen, buffer)
    tokens, after, after_seen, is_exact = _decode(config, sampling, params, caches, *arguments, exact=False)
    if not bool(is_exact):
        # An average underflowed: draw again without the fast form. What the caches hold of these tokens is overwritten.
        caches, _ = split_caches(config, after.state)
        tokens, after, after_seen, _ = _decode(config, sampling, params, caches, *arguments, exact=True)
    return np.asarray(tokens)[:, :n_tokens], after, after_seen


class _Drawing(NamedTuple):
    """Carry of the decode loop: the n tokens drawn so far, -1 beyond them, and the text with them."""

    n: Int[Array, ""]
    tokens: Int[Array, "B N"]
    prefix: Prefix
    seen: Bool[Array, "B vocab"] | None
    ended: Bool[Array, " B"]


@partial(jax.jit, static_argnames=("config", "sampling", "buffer", "exact"), donate_argnames="caches")
def _decode(
    config: ModelConfig,
    sampling: Sampling,
    params: Params,
    caches: tuple[Any, ...],
    prefix: Prefix,
    keys: Array,
    n_tokens: Array,
    n_drawn: Array,
    stop_id: Array | None,
    seen: Array | None,
    buffer: int,
    *,
    exact: bool,
) -> tuple[Array, Prefix, Array | None, Array]:
    """Draw tokens by steps in their fast form, or in the `exact` one: (tokens, prefix, seen, whether it was exact)."""
    state = join_caches(caches, prefix.state)
    if not exact:
        state = to_running(config, state)
    n_rows = prefix.logits.shape[0]

    def goes_on(drawing: _Drawing) -> Array:
        return (drawing.n < n_tokens) & ~jnp.all(drawing.ended)

    def draw(drawing: _Drawing) -> _Drawing:
        n, tokens, (logits, state), seen, ended = drawing
        token_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, n_drawn + n)
        token = sample(token_keys, logits, sampling, config.vocab_size, seen)
        if stop_id is not None:
            ended = ended | (token == stop_id)
        tokens = tokens.at[:, n].set(jnp.where(ended, -1, token))
        if seen is not None:
            seen = seen.at[jnp.arange(n_rows), token].set(True)
        logits, state = forward(config, params, token[:, None], state, last_only=True)
        return _Drawing(n + 1, tokens, Prefix(logits, state), seen, ended)

    tokens, ended = jnp.full((n_rows, buffer), -1, jnp.int32), jnp.zeros(n_rows, bool)
    start = _Drawing(jnp.zeros((), jnp.int32), tokens, Prefix(prefix.logits, state), seen, ended)
    _, tokens, (logits, state), seen, _ = jax.lax.while_loop(goes_on, draw, start)
    is_exact = jnp.ones((), bool)
    if not exact:
        state, is_exact = from_running(config, state)
    return tokens, Prefix(logits, state), seen, is_exact


# ---- texts ---------------------------------------------------------------------------------------


def fork(prefix: Prefix, n: int) -> Prefix:
    """Copy each row n times, next to each other, to continue it in n ways."""
    return jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), prefix)


def continue_texts(
    config: ModelConfig,
    params: Params,
    prefix: Prefix,
    sampling: Sampling,
    seed: int,
    max_tokens: int | None = None,
    stop_id: int | None = None,
    texts: Sequence[TokenIds] | None = None,
    tokens_per_call: int = 32,
    numbers: Sequence[int] | None = None,
) -> Iterator[tuple[Int[np.ndarray, "B N"], Prefix]]:
    """Continue what was read, some tokens at a time: (their ids, -1 where a row has ended; the prefix with them).

    Ends when all rows have ended, or after max_tokens (None: never). Row r draws with fold_in(key(seed), numbers[r]),
    whatever the other rows and the number of tokens per call.

    Args:
      params: from `step_params`.
      texts: the tokens of each row so far, for the repetition penalty.
      numbers: of the rows among all texts of this seed; rows of one number draw alike. None: 0, 1, ...
    """
    n_rows = prefix.logits.shape[0]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.key(seed), jnp.asarray(range(n_rows) if numbers is None else numbers)
    )
    seen: Array | np.ndarray | None = None
    if sampling.repetition_penalty != 1:
        seen = np.zeros((n_rows, config.vocab_size), bool)
        for row, text in enumerate(texts or ()):
            seen[row, np.asarray(text, np.int32)] = True
    prefix = jax.tree.map(jnp.copy, prefix) if config.has_cache else prefix  # `decode` donates caches
    n_drawn, ended = 0, np.zeros(n_rows, bool)
    while not ended.all() and (max_tokens is None or n_drawn < max_tokens):
        n = tokens_per_call if max_tokens is None else min(tokens_per_call, max_tokens - n_drawn)
        tokens, prefix, seen = decode(
            config, params, prefix, keys, sampling, n, n_drawn, stop_id, seen, buffer=tokens_per_call
        )
        tokens = np.where(ended[:, None], -1, tokens)
        ended |= (tokens < 0).any(axis=1)
        n_drawn += n
        yield tokens, prefix


def generate(
    config: ModelConfig,
    params: Params,
    prompt: TokenIds,
    sampling: Sampling,
    seed: int,
    max_tokens: int | None = None,
    stop_id: int | None = None,
) -> Iterator[int]:
    """Yield token ids that continue `prompt`, one at a time, until `stop_id`, `max_tokens`, or without end.

    Raises ValueError for an empty prompt or ids outside the vocabulary.
    """
    prefix = read(config, params, [prompt])
    decode_params = step_params(config, params)
    for tokens, _ in continue_texts(config, decode_params, prefix, sampling, seed, max_tokens, stop_id, [prompt]):
        yield from (int(token) for token in tokens[0] if token >= 0)
