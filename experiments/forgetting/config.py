"""The config of all contestants: that of experiments/attention_comparison, with fewer validations.

python experiments/forgetting/run.py --corpus=CORPUS --out=runs/forgetting
"""

from ml_collections import ConfigDict

from experiments.attention_comparison import config as comparison


def get_config() -> ConfigDict:
    config = comparison.get_config()
    config.validate_every = 200
    return config
