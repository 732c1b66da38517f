"""The runs of a sweep: what each one is, and what is known of it at a moment."""

import dataclasses
import math
from collections.abc import Sequence

from heinsen.sweep.space import Point, folder_name

# In the order in which a run goes through them. "refused": the config rejects a point that a search has proposed.
STATES = ("waiting", "queued", "running", "interrupted", "crashed", "refused", "pruned", "finished")
ENDED = ("finished", "pruned", "refused")  # for good; crashed and interrupted runs may be started again


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """One run: its point and its length. `refused` says why the config rejects the point, if it does."""

    point: Point
    total_steps: int
    tokens_per_step: int
    refused: str | None = None

    @property
    def name(self) -> str:
        return folder_name(self.point)


@dataclasses.dataclass(frozen=True)
class Progress:
    """The latest values in a run's log. Values that have not been logged yet are None."""

    step: int = 0
    tokens: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    bits_per_byte: float | None = None  # on the validation split
    tokens_per_second: float | None = None
    validations: tuple[tuple[int, float], ...] = ()  # (step, loss)


@dataclasses.dataclass(frozen=True)
class RunView(Progress):
    """A run, its state, and the latest values in its log."""

    run: SweepRun = dataclasses.field(kw_only=True)
    state: str = dataclasses.field(kw_only=True)
    seconds_left: float | None = None
    returncode: int | None = None
    seconds: float | None = None  # that the last job has taken so far

    @property
    def name(self) -> str:
        return self.run.name


def best_of(views: Sequence[RunView]) -> RunView | None:
    """Return the finished run with the lowest validation loss."""
    losses = [(view.validation_loss, i) for i, view in enumerate(views) if view.state == "finished"]
    finite = [(loss, i) for loss, i in losses if is_finite(loss)]
    return views[min(finite)[1]] if finite else None


def is_finite(x: float | None) -> bool:
    return x is not None and math.isfinite(x)
