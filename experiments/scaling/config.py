"""The config that all cells share, and the cells: kinds of attention with additions in one block and depth, by width.

Parameters are equal within 1% at each width.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from experiments.attribution import config as attribution

SIZE = "0.5M"  # of attribution: text, windows and layers
HEAD = 32  # key and value features of a head
KINDS = {kind: f"{kind}, additions, GPT-2's block" for kind in ("exponential", "linear", "gated softmax", "softmax")}
WIDTHS = 64, 96, 160
NEXT_WIDTH = 256  # whose loss is predicted
STEPS = 240, 490, 980  # multiples of lanes.CYCLES; rates are tuned on the last but one


class Cell(NamedTuple):
    """A kind of attention at a width."""

    kind: str
    width: int

    @property
    def attributed(self) -> attribution.Cell:
        """That of experiments/attribution with this width."""
        cell, heads = attribution.CELLS[KINDS[self.kind]], dict(n_heads=self.width // HEAD, d_key=HEAD, d_value=HEAD)
        return cell._replace(d_model=(self.width,) * 2, model=dict(cell.model, **heads))


CELLS = {f"{kind}, {width}": Cell(kind, width) for width in (*WIDTHS, NEXT_WIDTH) for kind in KINDS}
SMALL = tuple(CELLS)[:2]


def get_config() -> ConfigDict:
    return attribution.get_config(SIZE)
