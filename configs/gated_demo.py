"""The small model of demo.py with a forget gate, and as many parameters.

python scripts/prepare_data.py --source=stdlib --tokenizer=bytes --split=train,validation --out=data/stdlib
python train.py --config=configs/gated_demo.py --workdir=runs/gated_demo

The attention's output is gated too, and queries, keys and values are convolved. The gate tells near from far, so that
positions need no parameters.
"""

from ml_collections import ConfigDict

from configs import demo


def get_config() -> ConfigDict:
    config = demo.get_config()
    config.model.update(forget_gate="head", output_gate=True, convolution=4, position="none", d_model=276)
    return config
