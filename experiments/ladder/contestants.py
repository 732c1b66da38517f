"""The kinds of models, at any size: their parameters are equal within 1% to those of the paper's model."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from experiments.ladder import config
from experiments.tools import Contest
from heinsen.sweep.space import Value

HEAD = 32  # key and value features of a head

# The parts that helped the gated model most in experiments/forgetting; softmax attention as it is used most.
KINDS: dict[str, dict[str, Value]] = {
    "paper's": {},
    "gate, parts": dict(gate="head", output_gate=True, convolution=4, position="none"),
    "softmax": dict(attention="softmax", block="gpt2", position="rotary"),
}


class Size(NamedTuple):
    """Layers and width of the paper's model; the other kinds have as many parameters."""

    n_layers: int
    width: int

    def __str__(self) -> str:
        return f"{self.n_layers}x{self.width}"


@functools.cache
def contest_of(size: Size) -> Contest:
    """Return the contest of all kinds at a size."""
    return Contest(config, {kind: fields_of(kind, size) for kind in KINDS})


@functools.cache
def paper_params(size: Size) -> int:
    """Return the number of parameters of the paper's model."""
    return contest_of(size).parameters("paper's")


def fields_of(kind: str, size: Size) -> Mapping[str, Value]:
    """Return the fields of the model; two layers of the paper's block have as many parameters as one of GPT-2's."""
    heads: dict[str, Value] = dict(n_heads=size.width // HEAD, d_key=HEAD, d_value=HEAD)
    paper = heads | dict(n_layers=size.n_layers, d_model=size.width)
    if kind == "paper's":
        return paper
    n_layers = size.n_layers // 2 if KINDS[kind].get("block") == "gpt2" else size.n_layers
    fields = KINDS[kind] | heads | dict(n_layers=n_layers)
    return fields | dict(d_model=_width_for(_count(paper), fields, size.width))


def _width_for(n: int, fields: Mapping[str, Value], near: int) -> int:
    """Return the width with which a model has closest to `n` parameters, up to twice a width that is `near`."""
    tried = near // 2, near, 2 * near
    counts = [_count({**fields, "d_model": width}) for width in tried]
    widths = np.arange(1, 2 * near)
    count = np.polynomial.Polynomial.fit(tried, counts, deg=2)  # the models' matrices are at most width x width
    return int(widths[np.argmin(abs(count(widths) - n))])


def _count(fields: Mapping[str, Value]) -> int:
    return Contest(config, {"": fields}).parameters("")
