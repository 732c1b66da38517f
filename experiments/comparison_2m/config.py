"""The config of all contestants: 2M parameters, 8M bytes of text, windows of 1024; half an hour on one CPU core each.

python experiments/comparison_2m/run.py --corpus=corpus --out=runs/comparison_2m
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.total_tokens = 8_000_000
    config.sequence_length = 1024
    config.batch_size = 4
    config.data.tokenizer = "bytes"
    config.model.update(vocab_size=257, padded_vocab_size=264)
    config.model.update(n_layers=8, d_model=200, n_heads=6, d_key=32, d_value=32)
    config.optimizer.update(final_learning_rate=1e-4, warmup_steps=50)
    config.update(log_every=50, validate_every=400, validation_tokens=200_000, checkpoint_every=400)
    config.keep_checkpoints = 1
    return config
