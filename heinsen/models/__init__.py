"""Language models: configuration, mixers, positions, the model, its state and its losses, in Flax."""

from heinsen.models.config import ModelConfig, check_room
from heinsen.models.convolution import check_halo
from heinsen.models.language_model import (
    LanguageModel,
    Params,
    abstract_params,
    attention_distances,
    count_params,
    forward,
    hidden_states,
    init_params,
    layer_records,
    unstack,
)
from heinsen.models.losses import masked_loss, mean_loss, next_token_losses, next_token_losses_with_state
from heinsen.models.state import ModelState, forget, init_model_state, state_size

__all__ = [
    "LanguageModel",
    "ModelConfig",
    "ModelState",
    "Params",
    "abstract_params",
    "attention_distances",
    "check_halo",
    "check_room",
    "count_params",
    "forget",
    "forward",
    "hidden_states",
    "init_model_state",
    "init_params",
    "layer_records",
    "masked_loss",
    "mean_loss",
    "next_token_losses",
    "next_token_losses_with_state",
    "state_size",
    "unstack",
]
