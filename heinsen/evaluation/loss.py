"""Loss and bits per byte over a split, or its first tokens, every token predicted once."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from heinsen.data.loader import EvaluationBatches
from heinsen.models import ModelConfig, Params
from heinsen.models.masking import window_losses
from heinsen.parallel import place_batch, replicated, split_batch


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Losses over the first tokens of a split.

    Attributes:
      loss: nats per token.
      bits_per_byte: bits per byte of the documents' UTF-8 text.
      tokens: number of predicted tokens.
      split_tokens: number of tokens of the split.
    """

    loss: float
    bits_per_byte: float
    tokens: int
    split_tokens: int

    @property
    def extent(self) -> str:
        """Which tokens were predicted, in words."""
        if self.tokens == self.split_tokens:
            return f"all {self.tokens:,} tokens"
        return f"the first {self.tokens:,} of {self.split_tokens:,} tokens"


def perplexity(loss: float) -> float:
    """Return exp(loss), or exp(700) where that is less: beyond 709 the result would overflow."""
    return math.exp(min(loss, 700.0))


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Convert nats per token to bits per byte of text, by the data's bytes per token."""
    return loss / (math.log(2) * bytes_per_token)


def mean_of_mixture(parts: list[tuple[Evaluation, float]], bytes_per_token: float) -> Evaluation:
    """Combine (evaluation, share) of each dataset into the evaluation of tokens drawn by these shares.

    bytes_per_token: that of the mixture (`heinsen.data.mixture.bytes_per_token`).
    """
    loss = sum(share * part.loss for part, share in parts)
    tokens, split_tokens = (sum(getattr(part, name) for part, _ in parts) for name in ("tokens", "split_tokens"))
    return Evaluation(loss, bits_per_byte(loss, bytes_per_token), tokens, split_tokens)


def make_eval_step(model: ModelConfig, mesh: Mesh) -> Callable[[Params, dict[str, jax.Array]], jax.Array]:
    """Return a compiled step: (params, {"tokens" [B, T + 1], "mask" [B, T]}) -> sums of nats where mask is 1, [B].

    The mask is 1 up to the end of each row's tokens, and what follows is padding.
    """

    def step(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        lengths = jnp.sum(batch["mask"], axis=-1)
        return jnp.sum(window_losses(model, params, batch["tokens"], mesh, lengths) * batch["mask"], axis=-1)

    return jax.jit(step, in_shardings=(None, split_batch(mesh)), out_shardings=replicated(mesh))


def evaluate(
    eval_step: Callable[[Params, dict[str, jax.Array]], jax.Array],
    params: Params,
    batches: EvaluationBatches,
    mesh: Mesh,
) -> Evaluation:
    """Average over the targets of the batches where their mask is 1, in float64. eval_step is of `make_eval_step`."""
    nats, tokens = 0.0, 0
    for batch in batches:
        placed = place_batch(mesh, batch)
        # Waiting for each batch keeps simulated devices from deadlocking, and bounds the queue on real ones.
        nats += float(np.asarray(eval_step(params, placed), np.float64).sum())
        tokens += int(jnp.sum(placed["mask"]))
    loss, dataset = nats / tokens, batches.dataset
    return Evaluation(loss, bits_per_byte(loss, dataset.bytes_per_token), tokens, dataset.n_tokens)
