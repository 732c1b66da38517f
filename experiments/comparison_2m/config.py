"""The config of all contestants: that of experiments/forgetting with 2M parameters, 8M bytes of text, windows of 1024.

python experiments/comparison_2m/run.py --corpus=corpus --out=runs/comparison_2m
"""

from ml_collections import ConfigDict

from experiments.forgetting import config as forgetting


def get_config() -> ConfigDict:
    config = forgetting.get_config()
    config.total_tokens = 8_000_000
    config.sequence_length = 1024
    config.model.update(n_layers=8, d_model=200, n_heads=6)
    config.update(log_every=50, validate_every=400, validation_tokens=200_000, checkpoint_every=400)
    return config
