"""The small model of demo.py filling in masked bytes of Python sources; trains in minutes on a laptop CPU.

python scripts/prepare_data.py --source=stdlib --tokenizer=bytes --split=train,validation --out=data/stdlib
python train.py --config=configs/mlm_demo.py --workdir=runs/mlm_demo
python eval.py --workdir=runs/mlm_demo
"""

from ml_collections import ConfigDict

from configs import demo


def get_config() -> ConfigDict:
    config = demo.get_config()
    config.model.objective = "masked"
    return config
