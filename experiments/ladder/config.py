"""The config that all sizes and kinds share: that of experiments/forgetting, in windows of 512.

python experiments/ladder/run.py --corpus=corpus --out=runs/ladder
"""

from ml_collections import ConfigDict

from experiments.forgetting import config as forgetting


def get_config() -> ConfigDict:
    config = forgetting.get_config()
    config.update(validate_every=1_000_000, validation_tokens=400_000)  # only at the end
    return config
