"""A small model for the recall probes: 2 layers, 64 key and value features in all; minutes on a laptop CPU.

python scripts/recall.py --config=configs/recall.py --task=associative --lengths=4,8,16,32 --steps=2000
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.update(batch_size=32, log_every=100)
    config.model.update(vocab_size=256, padded_vocab_size=256)
    config.model.update(n_layers=2, d_model=128, n_heads=4, d_key=16, d_value=16)
    config.optimizer.update(learning_rate=3e-3, final_learning_rate=1e-4, warmup_steps=100, weight_decay=0.0)
    return config
