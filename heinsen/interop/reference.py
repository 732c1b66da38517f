"""The layout "reference": the published PyTorch module's state_dict."""

from collections.abc import Mapping

import numpy as np

from heinsen.interop.arrays import InteropError, Pair, Shapes, from_state_dict, shapes_of, to_state_dict
from heinsen.models import ModelConfig, Params

# Our parameters -> the published module's.
_REFERENCE_NAMES = {
    "embedding": "embed.weight",  # tied with the head
    "position.dense.kernel": "embed_pos.dense.weight",
    "position.dense.bias": "embed_pos.dense.bias",
    "layers.norm.scale": "layers.{layer}.feedforward1.0.weight",
    "layers.norm.bias": "layers.{layer}.feedforward1.0.bias",
    "layers.w1.kernel": "layers.{layer}.feedforward1.1.weight",
    "layers.w1.bias": "layers.{layer}.feedforward1.1.bias",
    "layers.w2.kernel": "layers.{layer}.feedforward2.0.weight",
    "layers.w2.bias": "layers.{layer}.feedforward2.0.bias",
    "layers.w3.kernel": "layers.{layer}.feedforward2.2.weight",
    "norm.scale": "lnorm.weight",
    "norm.bias": "lnorm.bias",
}


def is_reference_model(config: ModelConfig) -> bool:
    """Return whether the model is that of the published module: its attention, and its parameters' names and shapes."""
    is_published = all(mixer.is_published for mixer in config.mixers)
    return is_published and shapes_of(config) == _reference_model_shapes(config)


def to_reference_state_dict(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Convert parameters to the published module's state_dict, in their dtypes; every array is contiguous.

    Raises InteropError for any other model, and for parameters that do not fit the config.
    """
    _require_reference(config)
    return to_state_dict(_pairs(config), _reference_model_shapes(config), params)


def from_reference_state_dict(config: ModelConfig, state_dict: Mapping[str, np.ndarray]) -> Params:
    """Convert the published module's state_dict to our parameters, in its dtypes.

    Raises InteropError for any other model; one error names all tensors that are missing, unknown or of a wrong shape.
    """
    _require_reference(config)
    return from_state_dict(_pairs(config), _reference_model_shapes(config), state_dict)


def _pairs(config: ModelConfig) -> list[Pair]:
    return [
        Pair(ours, layer, theirs.format(layer=layer))
        for ours, theirs in _REFERENCE_NAMES.items()
        for layer in (range(config.n_layers) if "{layer}" in theirs else (None,))
    ]


def _reference_model_shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of the paper's model under our names."""
    n_layers, d = config.n_layers, config.d_model
    wide, values = config.n_heads * (2 * config.d_key + config.d_value), config.n_heads * config.d_value
    return {
        "embedding": (config.padded_vocab_size, d),
        "position.dense.kernel": (d, 2 * d),
        "position.dense.bias": (2 * d,),
        "layers.norm.scale": (n_layers, d),
        "layers.norm.bias": (n_layers, d),
        "layers.w1.kernel": (n_layers, d, wide),
        "layers.w1.bias": (n_layers, wide),
        "layers.w2.kernel": (n_layers, values, 2 * d),
        "layers.w2.bias": (n_layers, 2 * d),
        "layers.w3.kernel": (n_layers, d, d),
        "norm.scale": (d,),
        "norm.bias": (d,),
    }


def _require_reference(config: ModelConfig) -> None:
    if not is_reference_model(config):
        raise InteropError(f"the published module has no such model: {config}. Use save_folder, which writes any model")
