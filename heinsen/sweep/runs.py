"""The runs of a sweep: what each one is, what is known of it at a moment, and the table of all."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from tqdm import tqdm

from heinsen.quantities import count
from heinsen.sweep.space import Point, folder_name

# In the order in which a run goes through them. "refused": the config rejects a point that a search has proposed.
STATES = ("waiting", "queued", "running", "interrupted", "crashed", "refused", "pruned", "finished")
ENDED = ("finished", "pruned", "refused")  # for good; crashed and interrupted runs may be started again
SETTLED = (*ENDED, "crashed")  # a sweep does nothing more with them by itself


@dataclass(frozen=True)
class SweepRun:
    """One run: its point and its length. `refused` says why the config rejects the point, if it does."""

    point: Point
    total_steps: int
    tokens_per_step: int
    refused: str | None = None

    @property
    def name(self) -> str:
        return folder_name(self.point)


@dataclass(frozen=True)
class RunView:
    """A run, its state, and the latest values in its log. Values that have not been logged yet are None."""

    run: SweepRun
    state: str
    returncode: int | None = None
    seconds: float | None = None  # that the last job has taken so far
    step: int = 0
    tokens: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    bits_per_byte: float | None = None  # on the validation split
    tokens_per_second: float | None = None
    validations: tuple[tuple[int, float], ...] = ()  # (step, loss)

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def result(self) -> float | None:
        """The validation loss of a finished run; None for the others, and where it is not finite."""
        return self.validation_loss if self.state == "finished" and is_finite(self.validation_loss) else None

    @property
    def tokens_left(self) -> int:
        return (self.run.total_steps - self.step) * self.run.tokens_per_step


def best_of(views: Sequence[RunView]) -> RunView | None:
    """Return the run with the lowest result, the first of several; None if there is no result."""
    return min((view for view in views if view.result is not None), key=attrgetter("result"), default=None)


def is_finite(x: float | None) -> bool:
    return x is not None and math.isfinite(x)


def format_number(x: float | None, form: str = ".4f") -> str:
    """Return the text of a number in a table, "" for None."""
    return "" if x is None else format(x, form)


def align(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return the rows as lines of equally wide columns; `sides` has < (left) or > (right) for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{x:{side}{width}}" for x, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def table(views: Sequence[RunView]) -> list[str]:
    """Return the lines of `--status`."""
    rows = [("run", "state", "step", "loss", "validation", "tokens/s", "ETA")]
    for view in views:
        rate = view.tokens_per_second
        eta = tqdm.format_interval(view.tokens_left / rate) if view.state == "running" and rate else ""
        steps = f"{view.step:,}/{view.run.total_steps:,}"
        losses = format_number(view.loss), format_number(view.validation_loss)
        rows.append((view.name, view.state, steps, *losses, format_number(rate, ",.0f"), eta))
    return [*align(rows, "<<>>>>>"), summary(views)]


def count_states(views: Sequence[RunView]) -> str:
    """Return the number of runs, and of those in each state."""
    counts = {state: sum(view.state == state for view in views) for state in STATES}
    return f"{count(len(views), 'run')}: " + ", ".join(f"{n} {state}" for state, n in counts.items() if n)


def summary(views: Sequence[RunView], at_a_time: int | None = None) -> str:
    """Return one line: the number of runs in each state, the best finished run, and the time until all have ended.

    at_a_time: how many run at a time; default: as many as do now.
    """
    text = count_states(views)
    if best := best_of(views):
        so_far = "" if all(view.state in SETTLED for view in views) else " so far"
        text += f"; best{so_far} {best.validation_loss:.4f} ({best.name})"
    n_running = sum(view.state == "running" for view in views)
    seconds = _seconds_left(views, n_running if at_a_time is None else at_a_time)
    return text if seconds is None else f"{text}; ETA {tqdm.format_interval(seconds)}"


def _seconds_left(views: Sequence[RunView], at_a_time: int) -> float | None:
    """Return the seconds until all runs have ended, if they take as long per token as others have so far."""
    going = [view for view in views if view.state not in SETTLED]
    rates = [rate for view in views if (rate := _rate(view))]
    if not going or not rates or not at_a_time:
        return None
    tokens = sum(view.tokens_left for view in going)
    return tokens / statistics.harmonic_mean(rates) / min(at_a_time, len(going))


def _rate(view: RunView) -> float | None:
    """Return the tokens/s of a run, if known; those of a finished one include its start, validation and saving."""
    if view.state != "finished" or not view.seconds or not view.tokens_per_second:
        return view.tokens_per_second
    return min(view.tokens / view.seconds, view.tokens_per_second)  # the seconds are those of its last job
