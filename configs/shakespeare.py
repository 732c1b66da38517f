"""A byte-level model of Shakespeare's works: gated, the paper's, or softmax attention; minutes each on a laptop CPU.

make shakespeare

prepares the data and trains all three, as in train.py --config=configs/shakespeare.py:softmax. They have as many
parameters within 1%, read the same 2M bytes in the same order, and have the learning rates that were best for such
models with AdamW (docs/log).
"""

from ml_collections import ConfigDict

from configs import default

KINDS = {
    "gated": dict(forget_gate="head", output_gate=True, convolution=4, position="none", d_model=119),
    "paper": dict(),
    "softmax": dict(attention="softmax", block="gpt2", position="rotary", n_layers=2, d_model=134),
}
RATES = {"gated": 1.2e-2, "paper": 3e-3, "softmax": 3e-3}


def get_config(kind: str = "gated") -> ConfigDict:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: choose {', '.join(KINDS)}, as in --config=configs/shakespeare.py:paper")
    config = default.get_config()
    config.total_tokens = 2_000_000
    config.sequence_length = 256
    config.batch_size = 8
    config.data.path = "data/shakespeare"
    config.model.update(n_layers=4, d_model=128, n_heads=4, d_key=32, d_value=32)
    config.model.update(KINDS[kind])
    config.optimizer.update(learning_rate=RATES[kind], final_learning_rate=1e-4, warmup_steps=50)
    config.update(log_every=50, validate_every=200, validation_tokens=100_000, sample_tokens=200, checkpoint_every=500)
    return config
