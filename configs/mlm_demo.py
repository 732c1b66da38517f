"""The small model of demo.py filling in masked bytes of Python sources; trains in minutes on a laptop CPU.

python scripts/prepare_data.py --source=stdlib --tokenizer=bytes --split=train,validation --out=data/stdlib
python train.py --config=configs/mlm_demo.py --workdir=runs/mlm_demo
python eval.py --workdir=runs/mlm_demo

Attention over all keys (eq. (3)), positions by a recurrence in each direction, 15% of the tokens masked. Any other
config becomes such a model by --config.model.objective=masked.
"""

from ml_collections import ConfigDict

from configs import demo


def get_config() -> ConfigDict:
    config = demo.get_config()
    config.model.objective = "masked"
    return config
