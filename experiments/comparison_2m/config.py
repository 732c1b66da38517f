"""The config that all contestants share, 2M parameters, 8M bytes of text, windows of 1024, and where they differ.

Parameters are equal within 1%: rotary positions have none, and so leave some for the rest; an output's gate takes some.
"""

from ml_collections import ConfigDict

from experiments.forgetting import config as forgetting


def get_config() -> ConfigDict:
    config = forgetting.get_config()
    config.total_tokens = 8_000_000
    config.sequence_length = 1024
    config.model.update(n_layers=8, d_model=200, n_heads=6)
    config.update(log_every=50, validate_every=400, validation_tokens=200_000, checkpoint_every=400)
    return config


# What helped the gated model most in experiments/forgetting, and what helped softmax most.
PARTS = dict(gate="head", output_gate=True, convolution=4, position="none")
GPT2 = dict(attention="softmax", block="gpt2", position="rotary", n_layers=4)
CONTESTANTS = {
    "paper's": {},
    "gate": dict(gate="head"),
    "gate, parts": dict(**PARTS, d_model=180),
    "linear": dict(attention="linear"),
    "linear, gate": dict(attention="linear", gate="head"),
    "(gate, parts)*3, softmax": dict(**PARTS, attention="heinsen*3,softmax", d_model=180),
    "softmax": dict(attention="softmax", position="rotary", d_model=206),
    "softmax, GPT-2's block": dict(**GPT2, d_model=202),
    "softmax, GPT-2's block, parts": dict(**GPT2, output_gate=True, convolution=4, d_model=192),
}
CONTESTS = {
    "all": CONTESTANTS,
    "small": {name: CONTESTANTS[name] for name in ("paper's", "gate, parts", "softmax, GPT-2's block, parts")},
}
