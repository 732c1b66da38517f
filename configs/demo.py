"""A small byte-level model of the Python standard library's sources; trains in minutes on a laptop CPU.

python scripts/prepare_data.py --source=stdlib --tokenizer=bytes --split=train,validation --out=data/stdlib
python train.py --config=configs/demo.py --workdir=runs/demo
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.total_tokens = 4_500_000
    config.sequence_length = 64
    config.batch_size = 16
    config.data.path = "data/stdlib"
    config.model.update(n_layers=2, d_model=256, n_heads=16, d_key=8, d_value=8)
    config.optimizer.update(learning_rate=5e-3, final_learning_rate=1e-4, warmup_steps=100)
    config.update(log_every=50, validate_every=1000, validation_tokens=100_000, checkpoint_every=1000)
    return config
