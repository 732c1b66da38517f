"""The config that all contestants share, 0.46M parameters, 2M bytes of text, windows of 512, and where they differ.

Parameters are equal within 1%.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.total_tokens = 2_000_000
    config.sequence_length = 512
    config.batch_size = 4
    config.model.update(vocab_size=257, padded_vocab_size=264)
    config.model.update(n_layers=4, d_model=128, n_heads=4, d_key=32, d_value=32)
    config.optimizer.update(final_learning_rate=1e-4, warmup_steps=50)
    config.update(log_every=20, validate_every=200, validation_tokens=100_000, checkpoint_every=500)
    config.keep_checkpoints = 1
    return config


def gated(**fields: Any) -> dict[str, Any]:
    return dict(gate="head") | fields


def gpt2(**fields: Any) -> dict[str, Any]:
    """Two layers of GPT-2's block have as many parameters as four of the paper's."""
    return dict(block="gpt2", n_layers=2) | fields


def convolved(**fields: Any) -> dict[str, Any]:
    """A gate, a gated output and a convolution, which leave the matrices fewer parameters."""
    return gated(**dict(output_gate=True, convolution=4, d_model=118, d_key=30, d_value=30) | fields)


def softmax(**fields: Any) -> dict[str, Any]:
    """The best softmax model of PARTS, with a gated output."""
    return gpt2(attention="softmax", position="rotary", output_gate=True, d_model=128) | fields


# Rotary positions have no parameters, and so leave some for the rest; an output's gate takes some.
PARTS = {
    "paper's": {},
    "gate": gated(),
    "gate, convolution": gated(convolution=4, d_model=126),
    "gate, output gate": gated(output_gate=True, d_model=116, d_key=31, d_value=31),
    "gate, no positions": gated(position="none", d_model=136),
    "linear": dict(attention="linear"),
    "linear, gate": gated(attention="linear"),
    "softmax": dict(attention="softmax", position="rotary", d_model=136),
    "softmax, GPT-2's block": gpt2(attention="softmax", position="rotary", d_model=134),
}
# What helped most, together, in other blocks, and with other kinds of attention.
COMBINED = {
    "gate, output gate, convolution": convolved(),
    "gate, output gate, no positions": gated(output_gate=True, position="none", d_model=120),
    "gate, output gate, convolution, no positions": convolved(position="none", d_model=124),
    "gate, output gate, convolution, GPT-2's block": convolved(**gpt2(d_model=122, d_key=32, d_value=32)),
    "linear, gate, output gate, convolution": convolved(attention="linear"),
    "softmax, GPT-2's block, output gate": softmax(),
    "softmax, GPT-2's block, output gate, convolution": softmax(convolution=4),
}
# Why is the paper's attention worse in GPT-2's block: the block, its depth, or the logarithms of values?
BLOCKS = {
    "paper's, real values": dict(value_domain="real"),
    "paper's, GPT-2's block": gpt2(),
    "paper's, GPT-2's block, real values": gpt2(value_domain="real"),
    "gate, real values": gated(value_domain="real"),
    "gate, GPT-2's block": gated(**gpt2()),
    "gate, GPT-2's block, real values": gated(**gpt2(value_domain="real")),
    "gate, GPT-2's block, real values, 4 layers": gated(
        block="gpt2", value_domain="real", n_layers=4, d_model=94, d_key=22, d_value=22
    ),
    "gate, 2 layers": gated(n_layers=2, d_model=174, d_key=42, d_value=42),
}
CONTESTS = {"parts": PARTS, "combined": COMBINED, "blocks": BLOCKS}
