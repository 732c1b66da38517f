"""What a sweep shows in a terminal: a table of its runs, redrawn in place."""

import io
import shutil
import statistics
import sys
from collections.abc import Sequence
from typing import TextIO

from tqdm import tqdm

from heinsen.sweep.runs import ENDED, STATES, RunView, best_of

# In a terminal that is too low for all runs, the first ones of this list are shown.
_MOST_URGENT = ("running", "crashed", "interrupted", "queued", "waiting", "refused", "pruned", "finished")


def align(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return the rows as lines of equally wide columns; `sides` has < (left) or > (right) for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{x:{side}{width}}" for x, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def table(views: Sequence[RunView], height: int | None = None) -> list[str]:
    """Return the lines of `--status`, at most `height` of them if it is given."""
    shown = list(views)
    if height is not None and len(views) + 2 > height:
        shown = _most_urgent(views, max(height - 3, 1))
    rows = [("run", "state", "step", "loss", "validation", "tokens/s", "ETA"), *map(_row, shown)]
    more = [f"... and {len(views) - len(shown)} more"] if len(shown) < len(views) else []
    return [*align(rows, "<<>>>>>"), *more, summary(views)]


def _most_urgent(views: Sequence[RunView], count: int) -> list[RunView]:
    """Return the `count` most urgent runs, in their own order."""
    urgent = sorted(range(len(views)), key=lambda i: _MOST_URGENT.index(views[i].state))[:count]
    return [views[i] for i in sorted(urgent)]


def _row(view: RunView) -> tuple[str, ...]:
    eta = "" if view.seconds_left is None else tqdm.format_interval(view.seconds_left)
    rate = "" if view.tokens_per_second is None else f"{view.tokens_per_second:,.0f}"
    steps = f"{view.step:,}/{view.run.total_steps:,}"
    loss, validation_loss = ("" if x is None else f"{x:.4f}" for x in (view.loss, view.validation_loss))
    return view.name, view.state, steps, loss, validation_loss, rate, eta


def summary(views: Sequence[RunView], at_a_time: int | None = None) -> str:
    """Return one line: the number of runs in each state, the best finished run, and the time until all have ended.

    at_a_time: how many run at a time; default: as many as do now.
    """
    counts = {state: sum(view.state == state for view in views) for state in STATES}
    text = f"{len(views)} runs: " + ", ".join(f"{n} {state}" for state, n in counts.items() if n)
    if best := best_of(views):
        so_far = "" if all(view.state in (*ENDED, "crashed") for view in views) else " so far"
        text += f"; best{so_far} {best.validation_loss:.4f} ({best.name})"
    seconds = _seconds_left(views, sum(view.state == "running" for view in views) if at_a_time is None else at_a_time)
    return text if seconds is None else f"{text}; ETA {tqdm.format_interval(seconds)}"


def _seconds_left(views: Sequence[RunView], at_a_time: int) -> float | None:
    """Return the seconds until all runs have ended, if they take as long per token as others have so far."""
    going = [view for view in views if view.state not in (*ENDED, "crashed")]
    rates = [rate for view in views if (rate := _rate(view))]
    if not going or not rates or not at_a_time:
        return None
    tokens = sum((view.run.total_steps - view.step) * view.run.tokens_per_step for view in going)
    return tokens / statistics.harmonic_mean(rates) / min(at_a_time, len(going))


def _rate(view: RunView) -> float | None:
    """Return the tokens/s of a run, if known; those of a finished one include its start, validation and saving."""
    if view.state != "finished" or not view.seconds or not view.tokens_per_second:
        return view.tokens_per_second
    return min(view.tokens / view.seconds, view.tokens_per_second)  # the seconds are those of its last job


class Screen:
    """Lines that are redrawn in place in a terminal; `say` prints above them. A log file receives only what is said."""

    def __init__(self, stream: TextIO | io.TextIOBase = sys.stderr):
        self._stream, self._n_lines = stream, 0
        self.live = stream.isatty()

    def draw(self, lines: Sequence[str]) -> None:
        """Replace the lines drawn before."""
        if self.live:
            width = shutil.get_terminal_size().columns
            self._clear()
            self._stream.write("".join(line[: width - 1] + "\n" for line in lines))
            self._stream.flush()
            self._n_lines = len(lines)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def height(self) -> int:
        return shutil.get_terminal_size().lines - 1

    def _clear(self) -> None:
        if self.live and self._n_lines:
            self._stream.write(f"\x1b[{self._n_lines}F\x1b[J")
            self._n_lines = 0
