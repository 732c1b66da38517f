"""Small models for tests: the model of configs/default.py with smaller sizes."""

from typing import Any

from configs import default
from heinsen.config import from_mapping
from heinsen.models import ModelConfig

SIZES = dict(vocab_size=257, padded_vocab_size=264, n_layers=2, d_model=32, n_heads=2, d_key=4, d_value=4)


def model_config(**changes: Any) -> ModelConfig:
    """Return a small model's config with `changes`. Raises ConfigError."""
    return from_mapping(ModelConfig, default.get_config().model.to_dict() | SIZES | changes, "model")
