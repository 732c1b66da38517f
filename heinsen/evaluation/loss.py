"""Loss, perplexity and bits per byte over a whole split, every token predicted once."""

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from heinsen.models import ModelConfig, Params, activation_rms
from heinsen.models.masking import window_losses
from heinsen.parallel import place_batch, replicated, split_batch


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """loss: nats a token; perplexity: exp(loss); bits_per_byte: of the documents' UTF-8 text; tokens: predicted."""

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """From nats a token to bits a byte of text, by the data's bytes a token."""
    return loss / (math.log(2) * bytes_per_token)


def mean_of_mixture(parts: list[tuple[float, Evaluation]], bytes_per_token: float) -> Evaluation:
    """The loss over tokens drawn from several datasets by their shares, from each dataset's own.

    bytes_per_token: of the mixture (`heinsen.data.mixture.bytes_per_token`).
    """
    loss = sum(share * part.loss for share, part in parts)
    tokens = sum(part.tokens for _, part in parts)
    return Evaluation(loss, math.exp(min(loss, 700.0)), bits_per_byte(loss, bytes_per_token), tokens)


def make_eval_step(model: ModelConfig, mesh: Mesh) -> Callable[[Params, dict[str, jax.Array]], jax.Array]:
    """(params, {"tokens" [B, T + 1], "mask" [B, T]}) -> each sequence's sum of nats over masked targets, [B]."""

    def step(params, batch):
        return jnp.sum(window_losses(model, params, batch["tokens"], mesh) * batch["mask"], axis=-1)

    return jax.jit(step, in_shardings=(None, split_batch(mesh)), out_shardings=replicated(mesh))


def make_activation_step(model: ModelConfig, mesh: Mesh) -> Callable[[Params, jax.Array], dict[str, jax.Array]]:
    """(params, windows [B, T + 1]) -> `activation_rms` of the tokens that the model reads of them, none masked."""

    def step(params, tokens):
        return activation_rms(model, params, tokens[:, :-1] if model.causal else tokens[:, 1:], mesh)

    return jax.jit(step, in_shardings=(None, split_batch(mesh)), out_shardings=replicated(mesh))


def evaluate(
    eval_step: Callable[[Params, dict[str, jax.Array]], jax.Array],
    params: Params,
    batches: Iterable[dict[str, np.ndarray]],
    mesh: Mesh,
    bytes_per_token: float,
) -> Evaluation:
    """Average over all masked targets of `batches` (heinsen.data.evaluation_batches), summed in float64."""
    nats, tokens = 0.0, 0
    for batch in batches:
        placed = place_batch(mesh, batch)
        # Waiting for each batch keeps simulated devices from deadlocking, and bounds the queue on real ones.
        nats += float(np.asarray(eval_step(params, placed), np.float64).sum())
        tokens += int(jnp.sum(placed["mask"]))
    loss = nats / tokens
    return Evaluation(loss, math.exp(min(loss, 700.0)), bits_per_byte(loss, bytes_per_token), tokens)
