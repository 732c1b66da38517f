r"""The paper's experiment: 125M parameters, 300e9 tokens of The Pile, reported loss 2.47.

    python scripts/prepare_data.py --source=monology/pile-uncopyrighted --tokenizer=gpt2 \
        --split=train,validation --out=data/pile
    python train.py --config=configs/pile_125m.py --workdir=runs/pile_125m

The model and recipe are those of default.py, number for number; this config names the vocabulary, so that no data are
needed to plan it, and adapts the rest to the machine.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.model.update(vocab_size=50257, padded_vocab_size=50304)
    config.model.dtype = "bfloat16"
    config.model.remat = "dots"  # the best bounds, but of gated and fused; "full" needs less memory: docs/planning.md
    return config
