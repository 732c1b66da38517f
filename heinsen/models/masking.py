"""Masked language modeling: which tokens a bidirectional model must predict, in training and in evaluation.

Training hides 15% of the tokens of each sequence, as BERT does: 80% of these become the mask token, 10% a random one,
and 10% stay. The choice is a function of (seed, step, row) alone: it is the same for any number of devices, processes
and accumulation passes, and after an interruption. Evaluation hides every token once, one in seven at a time.

The document_token, if there is one, is neither hidden nor substituted for another: it shows where documents begin.

Axes: B or R rows of a batch, T tokens, N = T + 1 tokens of a window.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from heinsen.models.config import ModelConfig
from heinsen.models.language_model import Params
from heinsen.models.losses import masked_losses, next_token_losses

FRACTION = 0.15  # share of the tokens that training hides
BECOME_MASK, BECOME_ANY = 0.8, 0.1  # shares of the hidden tokens; the rest stay
ROUNDS = 7  # rounds of an evaluation, with 1/7 of the tokens hidden in each: about as many as in training


def mask_tokens(
    model: ModelConfig, tokens: Int[np.ndarray, "R T"], seed: int, step: int, rows: Int[np.ndarray, " R"]
) -> dict[str, Int[np.ndarray, "R T"] | Float[np.ndarray, "R T"]]:
    """Return a batch for `masked_loss`: "tokens" with some hidden, "targets", and "weights", 1 for the hidden ones.

    rows: indices of these rows in the global batch of the step.
    """
    hidden, weights = tokens.copy(), np.zeros(tokens.shape, np.float32)
    n_hidden = max(1, round(FRACTION * tokens.shape[1]))
    for i, row in enumerate(rows.tolist()):
        rng = np.random.default_rng([seed, step, row])
        order = np.asarray(rng.random(tokens.shape[1]))
        order[tokens[i] == model.document_token] = 2.0  # after all others
        chosen = np.argsort(order)[:n_hidden]
        chosen = chosen[order[chosen] < 1.0]
        becomes = rng.random(len(chosen))
        anything = rng.integers(model.vocab_size, size=len(chosen))
        anything = np.where(anything == model.document_token, tokens[i, chosen], anything)
        kept = np.where(becomes < BECOME_MASK + BECOME_ANY, anything, tokens[i, chosen])
        hidden[i, chosen] = np.where(becomes < BECOME_MASK, model.mask_token, kept)
        weights[i, chosen] = 1.0
    return {"tokens": hidden, "targets": tokens, "weights": weights}


def window_losses(
    model: ModelConfig,
    params: Params,
    tokens: Int[Array | np.ndarray, "B N"],
    mesh: Mesh | None = None,
    lengths: Int[Array | np.ndarray, " B"] | None = None,
) -> Float[Array, "B N-1"]:
    """Return the loss of every token but each window's first, in nats: for a next-token model, `next_token_losses`.

    lengths: number of targets of each window, if windows are padded at their end, where losses mean nothing (None: T).

    A masked model reads the T tokens in seven rounds, which hide tokens 0, 7, 14, ..., then 1, 8, 15, ..., and so on:
    each token is predicted once, from the 6/7 of the window that are visible with it. The exponential of the mean is
    reported as pseudo-perplexity. (Hiding one token at a time, the other usual definition, takes T rounds and gives
    lower values.) It is no likelihood of the text and cannot be compared with the perplexity of a next-token model,
    which sees no later tokens. A document_token is always visible, and its loss is 0.
    """
    if model.causal:
        return next_token_losses(model, params, tokens, mesh)
    targets = jnp.asarray(tokens)[:, 1:]
    visible = jnp.zeros(targets.shape, bool) if model.document_token is None else targets == model.document_token
    turn = jnp.arange(targets.shape[1]) % ROUNDS

    def add_round(losses: Array, i: Array) -> tuple[Array, None]:
        hidden = (turn == i) & ~visible
        seen = jnp.where(hidden, model.mask_token, targets)
        return losses + jnp.where(hidden, masked_losses(model, params, seen, targets, mesh, lengths), 0), None

    return jax.lax.scan(add_round, jnp.zeros(targets.shape, model.accumulator_dtype), jnp.arange(ROUNDS))[0]
