"""The config that all cells share, 4 layers, and the cells: kinds of attention by the size of their state."""

from typing import Any

from ml_collections import ConfigDict

from configs import recall

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
SEEDS = 0, 1, 2, 3  # the first one tunes
ADDITIONS = dict(output_gate=True, convolution=4, position="none")


def get_config() -> ConfigDict:
    config = recall.get_config()
    config.model.update(n_layers=4, **ADDITIONS)
    config.optimizer.update(name="muon", muon_multiple=8.0)
    return config


LATE = dict(forget_gate="head", forget_gate_shortest=512.0)  # heads forget slowly at first: docs/log/2026-11.md
KINDS: dict[str, dict[str, Any]] = {
    "exponential": LATE,
    "linear": dict(**LATE, attention="linear"),
    "delta rule": dict(**LATE, attention="delta"),
}
# Heads, key and value features of each, and the width with which a model has as many parameters, within 1%.
SHAPES = {
    "4 x 16 x 16": (4, 16, 16, 128),
    "1 x 16 x 16": (1, 16, 16, 204),
    "2 x 16 x 16": (2, 16, 16, 172),
    "8 x 16 x 16": (8, 16, 16, 80),
    "8 x 32 x 16": (8, 32, 16, 62),
}


def _shaped(fields: dict[str, Any], n_heads: int, d_key: int, d_value: int, d_model: int) -> dict[str, Any]:
    return fields | dict(n_heads=n_heads, d_key=d_key, d_value=d_value, d_model=d_model)


EQUAL = {
    "softmax, 4 x 16 x 16": _shaped(dict(attention="softmax", position="rotary"), 4, 16, 16, 128),
    **{f"{kind}, {shape}": _shaped(KINDS[kind], *SHAPES[shape]) for shape in SHAPES for kind in KINDS},
    "exponential, 1 x 64 x 16": _shaped(LATE, 1, 64, 16, 172),
}
# As large a state, and more of something else.
LINEAR_TUNED = "linear, Muon at 4 times Adam's rate"  # the lowest validation loss of its multiples and gates
MORE = {
    "exponential, width 256": _shaped(LATE, 4, 16, 16, 256),
    "exponential, 64 sequences": _shaped(LATE, 4, 16, 16, 128) | dict(batch_size=64),
    "exponential, width 256, 64 sequences": _shaped(LATE, 4, 16, 16, 256) | dict(batch_size=64),
    "exponential, default gate": dict(forget_gate="head"),
    "exponential, real values": _shaped(LATE, *SHAPES["4 x 16 x 16"]) | dict(value_domain="real"),
    "exponential, real values, 1 x 16 x 16": _shaped(LATE, *SHAPES["1 x 16 x 16"]) | dict(value_domain="real"),
    # The protocol was found with exponential features (docs/log/2026-11.md): what it costs the others.
    "linear, default gate": _shaped(dict(forget_gate="head", attention="linear"), *SHAPES["4 x 16 x 16"]),
    LINEAR_TUNED: EQUAL["linear, 4 x 16 x 16"] | dict(muon_multiple=4.0),
    "linear, Muon at 16 times Adam's rate": EQUAL["linear, 4 x 16 x 16"] | dict(muon_multiple=16.0),
    "delta rule, 8,000 steps": EQUAL["delta rule, 4 x 16 x 16"] | dict(n_steps=8000),
}
CELLS: dict[str, dict[str, Any]] = {
    **dict(list(EQUAL.items())[:4]),
    **dict(list(MORE.items())[:3]),
    **EQUAL,
    **MORE,
}
SMALL = ("softmax, 4 x 16 x 16",)  # compiles soonest
