"""GPT-2 small, exactly: 124,439,808 parameters; compares with the paper's model on the same data, recipe and tokens.

    python scripts/prepare_data.py --source=monology/pile-uncopyrighted --tokenizer=gpt2 \
        --split=train,validation --out=data/pile
    python train.py --config=configs/gpt2_124m.py --workdir=runs/gpt2_124m

Only `model` differs from pile_125m.py. If a mesh's fsdp and tensor do not divide the 50257 rows of the embedding, set
--config.model.padded_vocab_size=50304.
"""

from ml_collections import ConfigDict

from configs import pile_125m


def get_config() -> ConfigDict:
    config = pile_125m.get_config()
    config.model.update(attention="softmax", block="gpt2", position="learned", n_positions=1024)
    config.model.update(padded_vocab_size=50257, n_layers=12, n_heads=12, d_key=64, d_value=64)
    return config
