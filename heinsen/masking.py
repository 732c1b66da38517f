"""Masked language modelling: which tokens a bidirectional model has to fill in, in training and in evaluation.

Training hides 15% of the tokens of each sequence, as BERT does: of those 80% become the mask token, 10% a random one,
and 10% stay. The choice is a function of (seed, step, row) alone: the same for any number of devices, processes and
accumulation passes, and after an interruption. Evaluation hides every token once, one in seven at a time.

With a document_token, that token is neither hidden nor put in another's place: it tells where documents begin.

Axes: R rows of a batch, T tokens.
"""

from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from heinsen.model import ModelConfig, Params, masked_losses
from heinsen.parallel import replicated, split_batch

FRACTION = 0.15  # of the tokens that training hides
BECOME_MASK, BECOME_ANY = 0.8, 0.1  # of those; the rest stay
ROUNDS = 7  # of an evaluation: 1/7 of the tokens in each, about as many as training hides


def mask_tokens(
    model: ModelConfig, tokens: Int[np.ndarray, "R T"], seed: int, step: int, rows: Int[np.ndarray, " R"]
) -> dict[str, Int[np.ndarray, "R T"] | Float[np.ndarray, "R T"]]:
    """What `masked_loss` takes: "tokens" with some hidden, "targets", and "weights", 1 for those to be predicted.

    rows: the places of these rows in the global batch of the step.
    """
    hidden, weights = tokens.copy(), np.zeros(tokens.shape, np.float32)
    n_hidden = max(1, round(FRACTION * tokens.shape[1]))
    for i, row in enumerate(rows.tolist()):
        rng = np.random.default_rng([seed, step, row])
        order = rng.random(tokens.shape[1])
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


def evaluation_rounds(model: ModelConfig, batches: Iterable[dict[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    """Every batch {"tokens" [R, T + 1], "mask" [R, T]} seven times, its mask split: round i has tokens i, i + 7, ..."""
    for batch in batches:
        place = np.arange(batch["mask"].shape[1]) % ROUNDS
        mask = batch["mask"] & (batch["tokens"][:, 1:] != model.document_token)
        for i in range(ROUNDS):
            yield {"tokens": batch["tokens"], "mask": mask & (place == i)}


def make_masked_eval_step(model: ModelConfig, mesh: Mesh) -> Callable[[Params, dict[str, jax.Array]], jax.Array]:
    """(params, a round of `evaluation_rounds`) -> each sequence's sum of nats over its hidden tokens, [R].

    For `heinsen.evaluation.evaluate`. All tokens of the mask are hidden at once, the sequence's others are seen.
    The mean over all rounds is the logarithm of the pseudo-perplexity: every token is predicted exactly once from the
    6/7 of its sequence that are seen with it. (Hiding one token at a time, the other usual definition, would cost T
    passes rather than 7, and gives lower values.) It is no likelihood of the text, and not to be compared with the
    perplexity of a next-token model, which sees nothing of what comes after.
    """

    def step(params, batch):
        targets_RxT = batch["tokens"][:, 1:]
        tokens_RxT = jnp.where(batch["mask"], model.mask_token, targets_RxT)
        return jnp.sum(masked_losses(model, params, tokens_RxT, targets_RxT, mesh) * batch["mask"], axis=-1)

    return jax.jit(step, in_shardings=(None, split_batch(mesh)), out_shardings=replicated(mesh))
