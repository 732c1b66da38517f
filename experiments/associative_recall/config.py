"""The config of all contestants: two layers, a vocabulary of 8192, batches of 32 sequences; run.py sets the rest.

python experiments/associative_recall/run.py --out=runs/associative_recall
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.update(batch_size=32, log_every=200)
    config.model.update(vocab_size=8192, padded_vocab_size=8192, n_layers=2)
    config.optimizer.update(final_learning_rate=0.0, warmup_steps=100, b2=0.999)  # most ids are rare: slow averages
    return config
