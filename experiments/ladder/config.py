"""The comparison's config, whose learning rates the ladder takes; run.py says which sizes and how many tokens.

python experiments/ladder/run.py --corpus=CORPUS --out=runs/ladder
"""

from ml_collections import ConfigDict

from experiments.attention_comparison import config as comparison


def get_config() -> ConfigDict:
    config = comparison.get_config()
    config.update(validate_every=1_000_000, validation_tokens=400_000)  # at the end alone
    return config
