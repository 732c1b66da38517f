"""Costs of a compiled program on a chip, counted in its optimized HLO. `heinsen.plan` looks `count_costs` up here."""

from heinsen.contrib.hlo_cost.costs import count_costs

__all__ = ["count_costs"]
