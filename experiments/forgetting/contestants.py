"""The contestants, and the fields of the model in which they differ. Parameters are equal within 1%."""

from pathlib import Path

from experiments.contest import Contest
from experiments.forgetting import config
from heinsen.sweep.space import Value


def gated(**fields: Value) -> dict[str, Value]:
    return dict(gate="head") | fields


def gpt2(**fields: Value) -> dict[str, Value]:
    """Two layers of GPT-2's block have as many parameters as four of the paper's."""
    return dict(block="gpt2", n_layers=2) | fields


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
    for name, contestants in {"parts": PARTS, "blocks": BLOCKS}.items()
}
