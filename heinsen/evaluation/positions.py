"""The loss by position in the document, and the benefit of a context beyond the training length.

Axes: D documents of all datasets, P ranges of positions, R resamples.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from heinsen.evaluation.bootstrap import Interval, MixtureLosses, interval, ratio, resample, weigh
from heinsen.evaluation.document_losses import LAST_POSITIONS, N_RANGES
from heinsen.figures import make_figure, save_figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Losses of the same tokens in windows and streaming, in nats per token; difference is streaming minus windows.

    The intervals are None where the tokens are of a single document.
    """

    tokens: int
    windows: float
    streaming: float
    windows_interval: Interval | None
    streaming_interval: Interval | None
    difference: float
    difference_interval: Interval | None

    @property
    def verdict(self) -> str:
        if self.difference_interval is None or self.difference_interval[0] <= 0 <= self.difference_interval[1]:
            return "makes no significant difference"
        return "helps" if self.difference < 0 else "hurts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionRange(Comparison):
    """Losses of the tokens at positions `first` to `last` (None: to the end of every document)."""

    first: int
    last: int | None


@dataclasses.dataclass(frozen=True)
class Context:
    """Loss in windows, in nats per token, of the tokens with a context of `first` to `last` tokens."""

    first: int
    last: int | None
    tokens: int
    loss: float


@dataclasses.dataclass(frozen=True)
class PositionLosses:
    """Losses by position and by context.

    Attributes:
      far: over the tokens far from their document's start with a context of half the window or more
        (`DocumentLosses`); None where no document is longer than the window.
    """

    window: int
    ranges: list[PositionRange]
    contexts: list[Context]
    far: Comparison | None


def compare_positions(windows: MixtureLosses, streaming: MixtureLosses) -> PositionLosses:
    """Return the loss in each range of positions that has tokens, and the benefit of seeing more than the window.

    Both arguments are measured on the same mixture, with windows of one length.
    """
    # One column for each range of positions, and one for the tokens far from their document's start: [D, P + 1].
    nats_of = lambda losses: np.column_stack([losses.nats, losses.far_nats])
    tokens_of = lambda losses: np.column_stack([losses.tokens, losses.far_tokens])
    columns = weigh(windows, tokens_of), weigh(windows, nats_of), weigh(streaming, nats_of)
    sums = np.array([x.sum(axis=0) for x in columns])
    resampled = resample(windows, lambda counts: np.array([counts @ x for x in columns]))
    n_tokens = np.concatenate([tokens_of(losses) for losses, _ in windows])
    *by_range, far = [_compare(n_tokens[:, i], sums[:, i], resampled[:, :, i]) for i in range(N_RANGES + 1)]

    lasts = [*LAST_POSITIONS.tolist(), None]
    firsts = [1, *(last + 1 for last in LAST_POSITIONS.tolist())]
    ranges = [
        PositionRange(first=first, last=last, **vars(found))
        for first, last, found in zip(firsts, lasts, by_range, strict=True)
        if found is not None
    ]

    nats = weigh(windows, lambda losses: losses.context_nats[None]).sum(axis=0)
    tokens = weigh(windows, lambda losses: losses.context_tokens[None]).sum(axis=0)
    n_context = np.sum([losses.context_tokens for losses, _ in windows], axis=0)
    contexts = [
        Context(first, last, int(n), float(loss))
        for first, last, n, loss in zip(firsts, lasts, n_context, ratio(nats, tokens), strict=True)
        if n
    ]
    return PositionLosses(windows[0][0].window, ranges, contexts, far)


def _compare(
    n_tokens: Int[np.ndarray, " D"], sums: Float[np.ndarray, "3"], resampled: Float[np.ndarray, "R 3"]
) -> Comparison | None:
    """Compare the losses of some tokens, of which each document has `n_tokens`; None if there are none.

    The sums, also of each resample, are of tokens, nats in windows and nats streaming, all weighted.
    """
    if not n_tokens.any():
        return None
    windows, streaming = (float(nats / sums[0]) for nats in sums[1:])
    resampled_windows, resampled_streaming = (ratio(nats, resampled[:, 0]) for nats in resampled[:, 1:].T)
    has_interval = np.sum(n_tokens > 0) > 1
    return Comparison(
        tokens=int(n_tokens.sum()),
        windows=windows,
        streaming=streaming,
        windows_interval=interval(resampled_windows) if has_interval else None,
        streaming_interval=interval(resampled_streaming) if has_interval else None,
        difference=streaming - windows,
        difference_interval=interval(resampled_streaming - resampled_windows) if has_interval else None,
    )


# ---- the plot ------------------------------------------------------------------------------------


def plot_positions(result: PositionLosses, title: str, path: Path) -> None:
    """Plot the loss by position in the document, in windows and streaming, and by context in the window."""
    figure, (above, below) = make_figure(2, 1, figsize=(8, 7.5), sharex=True, height_ratios=(2, 1))
    window, ranges = result.window, result.ranges
    _draw(above, ranges, "windows", f"windows of {window}, by position in the document", "C0")
    _draw(above, ranges, "streaming", "streaming, by position in the document", "C1")
    label = f"windows of {window}, by tokens before it in the window"
    losses = [context.loss for context in result.contexts]
    above.plot([_middle(c) for c in result.contexts], losses, "s--", ms=3, lw=1, label=label, color="C2")
    above.set(title=title, ylabel="loss (nats per token)")
    _draw(below, ranges, "difference", None, "C1")
    below.axhline(0, color="0.5", lw=0.8)
    below.set(xlabel="position (tokens before it in the document)", ylabel="streaming minus windows")
    below.set_xscale("log", base=2)
    for axes in (above, below):
        axes.axvline(window, color="0.5", lw=0.8, ls=":")
        axes.grid(alpha=0.3)
    save_figure(path, figure)


def _draw(axes: Any, ranges: Sequence[PositionRange], name: str, label: str | None, color: str) -> None:
    """Draw a field of the ranges with its intervals."""
    middles, values = [_middle(r) for r in ranges], [getattr(r, name) for r in ranges]
    axes.plot(middles, values, "o-", ms=4, lw=1.2, label=label, color=color)
    bounds = [getattr(r, f"{name}_interval") or (math.nan, math.nan) for r in ranges]
    axes.fill_between(middles, *zip(*bounds, strict=True), alpha=0.2, color=color, lw=0)


def _middle(r: PositionRange | Context) -> float:
    return math.sqrt(r.first * (r.last or 2 * r.first))
