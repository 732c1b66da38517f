"""Losses of language models, for training and evaluation, in nats.

Axes: B batch, T predicted tokens, N = T + 1 tokens of a window, D d_model.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from heinsen.models.config import ModelConfig, check_causal
from heinsen.models.cross_entropy import token_logits, token_losses, weighted_loss
from heinsen.models.language_model import LanguageModel, Params
from heinsen.models.state import ModelState
from heinsen.parallel import constrain
from heinsen.promotion import usual_promotion


@usual_promotion
def next_token_losses(
    config: ModelConfig, params: Params, tokens: Int[Array | np.ndarray, "B N"], mesh: Mesh | None = None
) -> Float[Array, "B N-1"]:
    """Return the negative log-likelihood of every token but the first, -log p(tokens[t + 1] | tokens[:t + 1]).

    The logits of all tokens are never in memory at once. Raises ValueError for masked models.
    """
    check_causal(config)
    x, embedding, _ = _apply_model(config, params, tokens[:, :-1], mesh)
    return token_losses(x, embedding, tokens[:, 1:], config.dtype, mesh)


@usual_promotion
def next_token_losses_with_state(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array | np.ndarray, "B N"],
    state: ModelState,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B N-1"], ModelState]:
    """Return `next_token_losses` after `state`, and the state after all tokens but the last."""
    check_causal(config)
    x, embedding, after = _apply_model(config, params, tokens[:, :-1], mesh, state)
    return token_losses(x, embedding, tokens[:, 1:], config.dtype, mesh), after


@usual_promotion
def mean_loss(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array | np.ndarray, "B N"],
    mesh: Mesh | None = None,
    first_place: Int[Array | np.ndarray, " B"] | None = None,
) -> Float[Array, ""]:
    """Return the mean of `next_token_losses`. Fast to differentiate.

    first_place: place of each row's first token in its document (None: 0).
    """
    check_causal(config)
    x, embedding, _ = _apply_model(config, params, tokens[:, :-1], mesh, first_place=first_place)
    return _plain_mean(config, x, embedding, tokens[:, 1:], mesh)


@usual_promotion
def mean_loss_at(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array | np.ndarray, "B T"],
    indices: Int[Array | np.ndarray, "B A"],
    targets: Int[Array | np.ndarray, "B A"],
    mesh: Mesh | None = None,
) -> Float[Array, ""]:
    """Return the mean of -log p(targets[b, a] | tokens[b, :indices[b, a] + 1]). Fast to differentiate.

    Only these tokens have logits: with few of them the embedding's share of the work is small. Raises ValueError for
    masked models.
    """
    check_causal(config)
    x, embedding, _ = _apply_model(config, params, tokens, mesh)
    x = jnp.take_along_axis(x, jnp.asarray(indices)[..., None], axis=1)
    return _plain_mean(config, x, embedding, targets, mesh)


def _plain_mean(
    config: ModelConfig,
    x: Float[Array, "B T D"],
    embedding: Array,
    targets: Int[Array | np.ndarray, "B T"],
    mesh: Mesh | None,
) -> Float[Array, ""]:
    weights = jnp.full(targets.shape, 1 / targets.size, x.dtype)
    return weighted_loss(x, embedding, targets, weights, config.dtype, mesh)


@usual_promotion
def masked_logits(
    config: ModelConfig, params: Params, tokens: Int[Array | np.ndarray, "B T"], mesh: Mesh | None = None
) -> Float[Array, "B T padded_vocab"]:
    """Return a masked model's logits for every token, in its own place; `config.mask_token` stands for unknown ones."""
    x, embedding, _ = _apply_model(config, params, tokens, mesh)
    return token_logits(x, embedding, config.dtype)


@usual_promotion
def masked_losses(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array | np.ndarray, "B T"],
    targets: Int[Array | np.ndarray, "B T"],
    mesh: Mesh | None = None,
    lengths: Int[Array | np.ndarray, " B"] | None = None,
) -> Float[Array, "B T"]:
    """Return a masked model's negative log-likelihood of each target, in the place of the token there.

    lengths: number of tokens of each row, if rows are padded at their end, where losses mean nothing (None: T).
    """
    x, embedding, _ = _apply_model(config, params, tokens, mesh, lengths=lengths)
    return token_losses(x, embedding, targets, config.dtype, mesh)


@usual_promotion
def masked_loss(
    config: ModelConfig, params: Params, batch: dict[str, Array | np.ndarray], mesh: Mesh | None = None
) -> Float[Array, ""]:
    """Return the sum of `masked_losses` of batch "tokens" and "targets" times "weights". Fast to differentiate."""
    x, embedding, _ = _apply_model(config, params, batch["tokens"], mesh)
    weights = batch["weights"].astype(x.dtype)
    return weighted_loss(x, embedding, batch["targets"], weights, config.dtype, mesh)


def _apply_model(
    config: ModelConfig,
    params: Params,
    tokens: Array | np.ndarray,
    mesh: Mesh | None,
    state: ModelState | None = None,
    lengths: Array | np.ndarray | None = None,
    first_place: Array | np.ndarray | None = None,
) -> tuple[Float[Array, "B T D"], Array, Any]:
    """Return the last hidden states, the embedding, gathered once for both of its uses, and the state after `state`.

    Without a state there is none after.
    """
    params = params | {"embedding": constrain(mesh, params["embedding"])}
    model = LanguageModel(config, mesh)
    lengths, first_place = (None if x is None else jnp.asarray(x) for x in (lengths, first_place))
    inputs = jnp.asarray(tokens), state, lengths, state is not None, first_place
    result: Any = model.apply({"params": params}, *inputs)
    x, after = result
    return x, params["embedding"], after
