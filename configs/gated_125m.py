"""A model of the paper's size that can forget, on the data and with the recipe of pile_125m.py.

    python scripts/prepare_data.py --source=monology/pile-uncopyrighted --tokenizer=gpt2 \
        --split=train,validation --out=data/pile
    python train.py --config=configs/gated_125m.py --workdir=runs/gated_125m

A forget gate, a gated output, a short convolution and no positions (experiments/attribution); 21 layers instead of 24
make as many parameters as the paper's model has, within 1%.
"""

from ml_collections import ConfigDict

from configs import pile_125m


def get_config() -> ConfigDict:
    config = pile_125m.get_config()
    config.model.update(forget_gate="head", output_gate=True, convolution=4, position="none", n_layers=21)
    return config
