"""The config that all cells share, in two sizes, and the cells of the table.

A cell is an attention in a block with additions. Parameters are equal within 2%: d_model is what is left for them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs import default

ADAMW_RATES = 1.5e-3, 3e-3, 6e-3, 1.2e-2


class Size(NamedTuple):
    """How large models are, and how much they read."""

    fields: Mapping[str, int]  # of the config
    model: Mapping[str, int]
    n_steps: int  # of batch_size windows; a multiple of 2 lanes.CYCLES
    n_validation: int  # windows
    rates: Mapping[str, tuple[float, ...]]  # by optimizer: where most cells have their best inside


SIZES = {
    "2M": Size(
        dict(total_tokens=8_000_000, sequence_length=1024),
        dict(n_layers=8, n_heads=6),
        1960,
        768,
        dict(muon=(1e-3, 2e-3, 4e-3, 8e-3), adamw=ADAMW_RATES),
    ),
    "0.5M": Size(
        dict(total_tokens=2_000_000, sequence_length=512),
        dict(n_layers=4, n_heads=4),
        980,
        192,
        dict(muon=(2e-3, 4e-3, 8e-3, 1.6e-2), adamw=ADAMW_RATES),
    ),
}


def get_config(size: str) -> ConfigDict:
    config = default.get_config()
    config.batch_size = 4
    config.update(SIZES[size].fields)
    config.model.update(vocab_size=257, padded_vocab_size=264, d_model=128, d_key=32, d_value=32)
    config.model.update(SIZES[size].model)
    config.optimizer.update(final_learning_rate=1e-4, warmup_steps=50)
    config.update(log_every=20, validate_every=200, validation_tokens=100_000, checkpoint_every=500)
    config.keep_checkpoints = 1
    return config


# What helped the attentions with a forget gate, and what helped softmax (docs/log).
ADDITIONS = dict(forget_gate="head", output_gate=True, convolution=4, position="none")
SOFTMAX = dict(attention="softmax", position="rotary")
SOFTMAX_ADDITIONS = dict(**SOFTMAX, output_gate=True, convolution=4)
GPT2 = dict(block="gpt2")


class Cell(NamedTuple):
    """A model in all sizes, and its optimizer."""

    optimizer: str
    d_model: tuple[int, int]  # of each size
    model: Mapping[str, Any]

    def fields(self, size: str) -> dict[str, Any]:
        """Of the model, at a size."""
        n_layers = SIZES[size].model["n_layers"]
        if self.model.get("block") == "gpt2":  # half as many have as many parameters
            n_layers //= 2
        return dict(self.model, n_layers=n_layers, d_model=dict(zip(SIZES, self.d_model, strict=True))[size])


def _cell(optimizer: str, d_model: tuple[int, int] = (200, 128), **model: Any) -> Cell:
    return Cell(optimizer, d_model, model)


LINEAR = dict(attention="linear")
DELTA = dict(attention="delta")
BEST_SOFTMAX = dict(**SOFTMAX_ADDITIONS, **GPT2)
WITH_ADDITIONS = 180, 118
GPT2_ADDITIONS = 192, 128
# The most important ones first.
CELLS: dict[str, Cell] = {
    "exponential, additions": _cell("muon", WITH_ADDITIONS, **ADDITIONS),
    "linear, additions": _cell("muon", WITH_ADDITIONS, **ADDITIONS, **LINEAR),
    "softmax, additions, GPT-2's block": _cell("muon", GPT2_ADDITIONS, **BEST_SOFTMAX),
    "delta rule, additions": _cell("muon", (178, 118), **ADDITIONS, **DELTA),
    "exponential": _cell("muon"),
    "softmax, additions": _cell("muon", WITH_ADDITIONS, **SOFTMAX_ADDITIONS),
    "linear": _cell("muon", **LINEAR),
    "softmax, GPT-2's block": _cell("muon", (202, 134), **SOFTMAX, **GPT2),
    "exponential, additions, real values": _cell("muon", WITH_ADDITIONS, **ADDITIONS, value_domain="real"),
    "exponential, additions, GPT-2's block": _cell("muon", GPT2_ADDITIONS, **ADDITIONS, **GPT2),
    "linear, additions, GPT-2's block": _cell("muon", GPT2_ADDITIONS, **ADDITIONS, **LINEAR, **GPT2),
    "delta rule, additions, GPT-2's block": _cell("muon", GPT2_ADDITIONS, **ADDITIONS, **DELTA, **GPT2),
    "exponential, additions, AdamW": _cell("adamw", WITH_ADDITIONS, **ADDITIONS),
    "softmax, additions, GPT-2's block, AdamW": _cell("adamw", GPT2_ADDITIONS, **BEST_SOFTMAX),
    "linear, additions, AdamW": _cell("adamw", WITH_ADDITIONS, **ADDITIONS, **LINEAR),
    "exponential, AdamW": _cell("adamw"),
    "exponential, gate": _cell("muon", forget_gate="head"),
    "linear, gate": _cell("muon", **LINEAR, forget_gate="head"),
    "softmax": _cell("muon", (208, 136), **SOFTMAX),
    "gated softmax, additions, GPT-2's block": _cell("muon", GPT2_ADDITIONS, **ADDITIONS, attention="softmax", **GPT2),
    "gated softmax, additions, rotary, GPT-2's block": _cell(
        "muon", GPT2_ADDITIONS, **BEST_SOFTMAX, forget_gate="head"
    ),
}
SMALL = ("exponential, additions", "softmax, additions, GPT-2's block, AdamW")
