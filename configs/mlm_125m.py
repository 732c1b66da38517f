"""The paper's model as a bidirectional one: masked language modeling on the data and recipe of pile_125m.py.

    python scripts/prepare_data.py --source=monology/pile-uncopyrighted --tokenizer=gpt2 --split=train --out=data/pile
    python train.py --config=configs/mlm_125m.py --workdir=runs/mlm_125m

Attention over all keys (eq. (3)), positions by a recurrence in each direction, 15% of the tokens masked.
"""

from ml_collections import ConfigDict

from configs import pile_125m


def get_config() -> ConfigDict:
    config = pile_125m.get_config()
    config.model.objective = "masked"
    return config
