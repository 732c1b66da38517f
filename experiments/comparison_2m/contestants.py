"""The contestants, and the fields of the model in which they differ. Parameters are equal within 1%."""

from pathlib import Path

from experiments.comparison_2m import config
from experiments.contest import Contest
from heinsen.sweep.space import Value
from heinsen.training.config import TrainConfig

# What helped the gated model most in experiments/forgetting, and what helped softmax most.
PARTS = dict(gate="head", output="gate", convolution=4, position="none")
GPT2 = dict(attention="softmax", block="gpt2", position="rotary", n_layers=4)

# Rotary positions have no parameters, and so leave some for the rest; an output's gate takes some.
CONTESTANTS: dict[str, dict[str, Value]] = {
    "paper's": {},
    "gate": dict(gate="head"),
    "gate, parts": dict(**PARTS, d_model=180),
    "linear": dict(attention="linear"),
    "linear, gate": dict(attention="linear", gate="head"),
    "(gate, parts)*3, softmax": dict(**PARTS, attention="heinsen*3,softmax", d_model=180),
    "softmax": dict(attention="softmax", position="rotary", d_model=206),
    "softmax, GPT-2's block": dict(**GPT2, d_model=202),
    "softmax, GPT-2's block, parts": dict(**GPT2, output="gate", convolution=4, d_model=192),
}
CONTEST = Contest(Path(config.__file__), config.get_config, CONTESTANTS)


def timed() -> dict[str, TrainConfig]:
    """Return the contestants whose speed is measured."""
    return {name: CONTEST.train_config(name) for name in CONTESTANTS}
