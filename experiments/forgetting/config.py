"""The config of all contestants: 0.46M parameters, 2M bytes of text, windows of 512; minutes on one CPU core each.

python experiments/forgetting/run.py --corpus=corpus --out=runs/forgetting
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.total_tokens = 2_000_000
    config.sequence_length = 512
    config.batch_size = 4
    config.data.tokenizer = "bytes"
    config.model.update(vocab_size=257, padded_vocab_size=264)
    config.model.update(n_layers=4, d_model=128, n_heads=4, d_key=32, d_value=32)
    config.optimizer.update(final_learning_rate=1e-4, warmup_steps=50)
    config.update(log_every=20, validate_every=200, validation_tokens=100_000, checkpoint_every=500)
    config.keep_checkpoints = 1
    return config
