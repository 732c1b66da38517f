"""Costs of one call of a compiled program on one device of a chip, and the lower bound of its time that follows."""

import dataclasses
from collections import Counter
from typing import Any

from heinsen.chips import Chip


@dataclasses.dataclass
class Operation:
    """Kernels of one name: how many run, the bytes they move, their FLOPs by kind, and their bound in seconds."""

    kernels: int = 0
    n_bytes: float = 0.0
    flops: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, other: "Operation", times: int = 1) -> None:
        self.kernels += times * other.kernels
        self.n_bytes += times * other.n_bytes
        self.seconds += times * other.seconds
        for kind, flops in other.flops.items():
            self.flops[kind] += times * flops

    def figures(self) -> dict[str, Any]:
        """Return the figures, ready for JSON."""
        return {"kernels": self.kernels, "bytes": self.n_bytes, "flops": dict(self.flops)}


@dataclasses.dataclass
class Costs:
    """Costs of one call of a program, per device.

    Attributes:
      operations: by name, the part of the model and the line of Python that made them.
      collectives: of each kind, how many run and the bytes that a device must send.
      loops_not_counted: names of loops whose length depends on data; they count as not run.
    """

    chip: Chip
    operations: dict[str, Operation] = dataclasses.field(default_factory=dict)
    collectives: dict[str, Operation] = dataclasses.field(default_factory=dict)
    loops_not_counted: set[str] = dataclasses.field(default_factory=set)

    def add(self, other: "Costs", times: int = 1) -> None:
        for name, operation in other.operations.items():
            self.operations.setdefault(name, Operation()).add(operation, times)
        for kind, operation in other.collectives.items():
            self.collectives.setdefault(kind, Operation()).add(operation, times)
        self.loops_not_counted |= other.loops_not_counted

    @property
    def total(self) -> Operation:
        """The sum of all operations."""
        total = Operation()
        for operation in self.operations.values():
            total.add(operation)
        return total

    @property
    def seconds_moving(self) -> float:
        """Time to move all bytes of kernels and copies by the memory's bandwidth."""
        return self.total.n_bytes / self.chip.bandwidth

    @property
    def seconds_collectives(self) -> float:
        """Time to send the bytes of all collectives by the interconnect's rate."""
        return sum(x.n_bytes for x in self.collectives.values()) / self.chip.interconnect

    @property
    def seconds(self) -> float:
        """Lower bound of the time of one call."""
        return max(self.total.seconds, self.seconds_moving, self.seconds_collectives)

    def costliest(self, n: int = 10) -> list[tuple[str, Operation]]:
        """The n operations with the largest bounds, the largest first."""
        return sorted(self.operations.items(), key=lambda item: -item[1].seconds)[:n]

    def figures(self) -> dict[str, Any]:
        """Return the figures, ready for JSON."""
        return self.total.figures() | {
            "collectives": {kind: {"count": x.kernels, "bytes": x.n_bytes} for kind, x in self.collectives.items()},
            "seconds_kernels": self.total.seconds,
            "seconds_moving": self.seconds_moving,
            "seconds_collectives": self.seconds_collectives,
            "loops_not_counted": len(self.loops_not_counted),
            "costliest": [{"name": name, "seconds": x.seconds} | x.figures() for name, x in self.costliest()],
        }
