"""The config that all contestants share, two layers and a vocabulary of 8192, and where they differ."""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.update(batch_size=32, log_every=200)
    config.model.update(vocab_size=8192, padded_vocab_size=8192, n_layers=2)
    config.optimizer.update(final_learning_rate=0.0, warmup_steps=100, b2=0.999)  # most ids are rare: slow averages
    return config


# With recurrent positions softmax learned the task in the fewest tokens, at the one learning rate that was tried
# (docs/log/2026-11.md).
CONTESTANTS = {
    "softmax": dict(attention="softmax", block="gpt2", position="recurrent"),
    "linear": dict(attention="linear", block="gpt2", position="recurrent"),
    "heinsen": dict(attention="heinsen", block="heinsen", position="recurrent"),
    "heinsen-gate": dict(attention="heinsen", block="heinsen", position="recurrent", gate="head"),
    "heinsen-convolution": dict(attention="heinsen", block="heinsen", position="none", convolution=4),
    "heinsen-gate-convolution": dict(attention="heinsen", block="heinsen", position="none", gate="head", convolution=4),
}
