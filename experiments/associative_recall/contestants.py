"""The contestants: the fields of the model in which they differ. A row is all that another one needs."""

from collections.abc import Mapping

from experiments.associative_recall import config
from heinsen.config import from_mapping
from heinsen.models import ModelConfig
from heinsen.sweep.space import Value

# With recurrent positions softmax learned the task in the fewest tokens, at the one learning rate tried (docs/LOG.md).
CONTESTANTS: dict[str, dict[str, Value]] = {
    "softmax": dict(attention="softmax", block="gpt2", position="recurrent"),
    "softmax-rotary": dict(attention="softmax", block="gpt2", position="rotary"),
    "softmax-learned": dict(attention="softmax", block="gpt2", position="learned", n_positions=1024),
    "linear": dict(attention="linear", block="gpt2", position="recurrent"),
    "heinsen": dict(attention="heinsen", block="heinsen", position="recurrent"),
    "heinsen-gpt2": dict(attention="heinsen", block="gpt2", position="recurrent"),
    "heinsen-gate": dict(attention="heinsen", block="heinsen", position="recurrent", gate="head"),
    "heinsen-convolution": dict(attention="heinsen", block="heinsen", position="none", convolution=4),
    "heinsen-gate-convolution": dict(attention="heinsen", block="heinsen", position="none", gate="head", convolution=4),
    "linear-gate": dict(attention="linear", block="gpt2", position="recurrent", gate="head"),
}


def model_fields(name: str, width: int, n_heads: int) -> Mapping[str, Value]:
    """Return the fields of a contestant's model. The heads share its width."""
    features = width // n_heads
    return dict(d_model=width, n_heads=n_heads, d_key=features, d_value=features) | CONTESTANTS[name]


def model_config(name: str, width: int, n_heads: int) -> ModelConfig:
    """Return the config of a contestant's model."""
    model = config.get_config().model
    model.update(model_fields(name, width, n_heads))
    return from_mapping(ModelConfig, model.to_dict(), "model")
