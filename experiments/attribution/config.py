"""The config that all cells share, 2M parameters, 8M bytes of text, windows of 1024, and the cells of the table.

A cell is an attention in a block with parts. Parameters are equal within 1%: d_model is what is left for them.
"""

from typing import Any

from ml_collections import ConfigDict

from experiments.forgetting import config as forgetting

RATES = {"muon": (2e-3, 4e-3, 8e-3, 1.6e-2), "adamw": (1.5e-3, 3e-3, 6e-3, 1.2e-2)}


def get_config() -> ConfigDict:
    config = forgetting.get_config()
    config.total_tokens = 8_000_000
    config.sequence_length = 1024
    config.model.update(n_layers=8, d_model=200, n_heads=6)
    return config


# What helped the attentions with a forget gate, and what helped softmax (experiments/forgetting).
PARTS = dict(gate="head", output_gate=True, convolution=4, position="none")
SOFTMAX = dict(attention="softmax", position="rotary")
SOFTMAX_PARTS = dict(**SOFTMAX, output_gate=True, convolution=4)
GPT2 = dict(block="gpt2", n_layers=4)


def _cell(optimizer: str, **model: Any) -> dict[str, Any]:
    return dict(optimizer=optimizer, model=model)


EXPONENTIAL = dict(**PARTS, d_model=180)
LINEAR = dict(attention="linear")
DELTA = dict(attention="delta")
BEST_SOFTMAX = dict(**SOFTMAX_PARTS, **GPT2, d_model=192)
# The most important ones first.
CELLS: dict[str, dict[str, Any]] = {
    "exponential, parts": _cell("muon", **EXPONENTIAL),
    "linear, parts": _cell("muon", **EXPONENTIAL, **LINEAR),
    "softmax, parts, GPT-2's block": _cell("muon", **BEST_SOFTMAX),
    "delta rule, parts": _cell("muon", **PARTS, **DELTA, d_model=178),
    "exponential": _cell("muon"),
    "softmax, parts": _cell("muon", **SOFTMAX_PARTS, d_model=180),
    "linear": _cell("muon", **LINEAR),
    "softmax, GPT-2's block": _cell("muon", **SOFTMAX, **GPT2, d_model=202),
    "exponential, parts, real values": _cell("muon", **EXPONENTIAL, value_domain="real"),
    "exponential, parts, GPT-2's block": _cell("muon", **PARTS, **GPT2, d_model=192),
    "linear, parts, GPT-2's block": _cell("muon", **PARTS, **LINEAR, **GPT2, d_model=192),
    "delta rule, parts, GPT-2's block": _cell("muon", **PARTS, **DELTA, **GPT2, d_model=192),
    "exponential, parts, AdamW": _cell("adamw", **EXPONENTIAL),
    "softmax, parts, GPT-2's block, AdamW": _cell("adamw", **BEST_SOFTMAX),
    "linear, parts, AdamW": _cell("adamw", **EXPONENTIAL, **LINEAR),
    "exponential, AdamW": _cell("adamw"),
    "exponential, gate": _cell("muon", gate="head"),
    "linear, gate": _cell("muon", **LINEAR, gate="head"),
    "softmax": _cell("muon", **SOFTMAX, d_model=208),
}
SMALL = ("exponential, parts", "softmax, parts, GPT-2's block, AdamW")
