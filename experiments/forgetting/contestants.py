"""The contestants, and the fields of the model in which they differ. Parameters are equal within 1%."""

from pathlib import Path

from experiments.contest import Contest
from experiments.forgetting import config
from heinsen.sweep.space import Value
from heinsen.training.config import TrainConfig


def gated(**fields: Value) -> dict[str, Value]:
    return dict(gate="head") | fields


def gpt2(**fields: Value) -> dict[str, Value]:
    """Two layers of GPT-2's block have as many parameters as four of the paper's."""
    return dict(block="gpt2", n_layers=2) | fields


def convolved(**fields: Value) -> dict[str, Value]:
    """A gate, a gated output and a convolution, which leave the matrices fewer parameters."""
    return gated(**dict(output="gate", convolution=4, d_model=118, d_key=30, d_value=30) | fields)


def softmax(**fields: Value) -> dict[str, Value]:
    """The best softmax model of PARTS, with a gated output."""
    return gpt2(attention="softmax", position="rotary", output="gate", d_model=128) | fields


# Rotary positions have no parameters, and so leave some for the rest; an output's gate takes some.
PARTS: dict[str, dict[str, Value]] = {
    "paper's": {},
    "gate": gated(),
    "gate, convolution": gated(convolution=4, d_model=126),
    "gate, output norm": gated(output="norm"),
    "gate, output gate": gated(output="gate", d_model=116, d_key=31, d_value=31),
    "gate, signed features": gated(signed_features=True),
    "gate, qk norm": gated(qk_norm=True),
    "gate*3, window": gated(attention="heinsen*3,window", window=64),
    "gate, no positions": gated(position="none", d_model=136),
    "linear": dict(attention="linear"),
    "linear, gate": gated(attention="linear"),
    "softmax": dict(attention="softmax", position="rotary", d_model=136),
    "softmax, GPT-2's block": gpt2(attention="softmax", position="rotary", d_model=134),
}
# What helped most, together, in other blocks, and with other kinds of attention.
COMBINED: dict[str, dict[str, Value]] = {
    "gate, output gate, convolution": convolved(),
    "gate, output gate, no positions": gated(output="gate", position="none", d_model=120),
    "gate, output gate, convolution, no positions": convolved(position="none", d_model=124),
    "(gate, output gate, convolution)*3, window": convolved(attention="heinsen*3,window", window=64),
    "gate, output gate, convolution, GPT-2's block": convolved(**gpt2(d_model=122, d_key=32, d_value=32)),
    "linear, gate, output gate, convolution": convolved(attention="linear"),
    "softmax, GPT-2's block, output gate": softmax(),
    "softmax, GPT-2's block, output gate, convolution": softmax(convolution=4),
}
# Why is the paper's attention worse in GPT-2's block: the block, its depth, or the logarithms of values?
BLOCKS: dict[str, dict[str, Value]] = {
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
CONTESTS = {
    name: Contest(Path(config.__file__), config.get_config, contestants)
    for name, contestants in {"parts": PARTS, "combined": COMBINED, "blocks": BLOCKS}.items()
}

# {contest: those that are tested on long documents}
LONG = {
    "parts": ["paper's", "gate", "linear, gate", "softmax, GPT-2's block"],
    "combined": ["gate, output gate, convolution, no positions"],
}


def timed() -> dict[str, TrainConfig]:
    """Return the contestants whose speed is measured."""
    return {name: contest.train_config(name) for contest in CONTESTS.values() for name in contest.contestants}
