"""The layout "reference": the published PyTorch module's state_dict."""

from heinsen.export.state_dicts import ExportError, Tensor, parameter_names
from heinsen.models import ModelConfig

# Our parameters -> the published module's.
_NAMES = {
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
    """Return whether the model is that of the published module: its attention, and its parameters' names."""
    is_published = config.causal and all(mixer.is_published for mixer in config.mixers)
    return is_published and set(parameter_names(config)) == set(_NAMES)


def reference_tensors(config: ModelConfig) -> list[Tensor]:
    """Return the tensors of the published module. Raises ExportError for any other model."""
    if not is_reference_model(config):
        raise ExportError(f"the published module has no such model: {config}. Use save_folder, which writes any model")
    tensors = []
    for ours, name in _NAMES.items():
        layers = range(config.n_layers) if "{layer}" in name else [None]
        tensors += [Tensor(name.format(layer=layer), ours, layer) for layer in layers]
    return tensors
