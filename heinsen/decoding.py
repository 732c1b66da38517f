"""Generation: a parallel prefill of the prompt, then steps whose cost and memory do not depend on what came before."""

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from heinsen.model import ModelConfig, ModelState, Params, forward, init_model_state

PREFILL_PIECE = 512  # tokens of a prompt read at once: bounds the memory of a prompt of any length


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 takes the likeliest; top_k 0 and top_p 1 keep every token."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not (0 <= self.temperature < float("inf")):
            raise ValueError(f"temperature = {self.temperature}: it must be finite and not negative")
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}: it must not be negative (0 keeps every token)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: it must lie in (0, 1]")


def prefill(
    config: ModelConfig, params: Params, tokens: Int[Array, "B T"], state: ModelState | None = None
) -> tuple[Float[Array, "B padded_vocab"], ModelState]:
    """Read a prompt in parallel, piece by piece: the next token's logits, and the state after the last token."""
    if tokens.shape[-1] == 0:
        raise ValueError("the prompt has no tokens: give at least one (an end-of-text token begins a document)")
    state = init_model_state(config, tokens.shape[0]) if state is None else state
    for start in range(0, tokens.shape[1], PREFILL_PIECE):
        logits, state = _prefill_piece(config, params, tokens[:, start : start + PREFILL_PIECE], state)
    return logits, state


@partial(jax.jit, static_argnums=0)
def _prefill_piece(config, params, tokens_BxT, state):
    logits, state = forward(config, params, tokens_BxT, state)
    return logits[:, -1], state


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def decode_step(
    config: ModelConfig, params: Params, tokens: Int[Array, " B"], state: ModelState
) -> tuple[Float[Array, "B padded_vocab"], ModelState]:
    """One more token per sequence: the next token's logits, and the new state (the one given is donated)."""
    logits, state = forward(config, params, tokens[:, None], state)
    return logits[:, -1], state


@partial(jax.jit, static_argnums=(2, 3))
def sample(key: Array, logits: Float[Array, "B padded_vocab"], sampling: Sampling, vocab_size: int) -> Int[Array, " B"]:
    """Draw a token id below vocab_size for each row: top_k, then top_p (the fewest tokens that reach it) of softmax."""
    logits = logits[:, :vocab_size]
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    # Below 1e-30 the division could overflow; the largest logit stays 0 and is drawn alone long before.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / max(sampling.temperature, 1e-30)
    if not (0 < sampling.top_k < vocab_size or sampling.top_p < 1):
        return jax.random.categorical(key, logits, axis=-1)
    # Drawn by rank, so that tokens of equal probability do not slip in beyond the limit.
    order = jnp.argsort(logits, axis=-1, descending=True)
    descending = jnp.take_along_axis(logits, order, axis=-1)
    if sampling.top_k > 0:
        descending = jnp.where(jnp.arange(vocab_size) < sampling.top_k, descending, -jnp.inf)
    if sampling.top_p < 1:
        p = jax.nn.softmax(descending, axis=-1)
        descending = jnp.where(jnp.cumsum(p, axis=-1) - p < sampling.top_p, descending, -jnp.inf)
    rank = jax.random.categorical(key, descending, axis=-1)
    return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0]


def generate(
    config: ModelConfig,
    params: Params,
    prompt: np.ndarray,
    sampling: Sampling,
    seed: int,
    max_tokens: int | None = None,
    stop_id: int | None = None,
) -> Iterator[int]:
    """Token ids that continue `prompt` (int [T]), one at a time, until `stop_id`, `max_tokens`, or without end.

    Raises ValueError for an empty prompt or ids outside the vocabulary.
    """
    prompt = np.asarray(prompt, np.int32)
    if prompt.size and not (0 <= prompt.min() and prompt.max() < config.vocab_size):
        raise ValueError(
            f"prompt ids reach from {prompt.min()} to {prompt.max()}: the vocabulary has {config.vocab_size}"
        )
    key = jax.random.key(seed)
    logits, state = prefill(config, params, jnp.asarray(prompt)[None])
    n_tokens = 0
    while max_tokens is None or n_tokens < max_tokens:
        token = sample(jax.random.fold_in(key, n_tokens), logits, sampling, config.vocab_size)
        if int(token[0]) == stop_id:
            return
        yield int(token[0])
        n_tokens += 1
        logits, state = decode_step(config, params, token, state)
