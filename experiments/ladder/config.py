"""The config of the comparison, whose learning rates the ladder uses; run.py sets the sizes and numbers of tokens.

python experiments/ladder/run.py --corpus=CORPUS --out=runs/ladder
"""

from ml_collections import ConfigDict

from experiments.attention_comparison import config as comparison


def get_config() -> ConfigDict:
    config = comparison.get_config()
    config.update(validate_every=1_000_000, validation_tokens=400_000)  # only at the end
    return config
