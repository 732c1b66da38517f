"""Losses of a split document by document: their confidence intervals, the loss by source, the benefit of long context.

Every token is predicted once, in one of two ways:

- in windows of the training length (`measure_windows`), as in training: the model sees nothing outside the window;
- streaming (`measure_streaming`): every document from its start to its end, with the model's state carried along.

`Sums` adds up the losses by document and by position. Intervals are bootstrap percentiles over `RESAMPLES` resamples of
the documents, with replacement. In a mixture, each dataset's documents are resampled separately.

Axes: B rows, T or W tokens of a row, D documents, P ranges of positions, R resamples.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from heinsen.data.documents import Documents
from heinsen.data.loader import Batch
from heinsen.figures import place_legend, pyplot
from heinsen.files import write_figure
from heinsen.models import ModelConfig, ModelState, Params, forget, next_token_losses_with_state
from heinsen.models.masking import window_losses
from heinsen.parallel import place_batch, replicated, split_batch

RESAMPLES = 1000
CONFIDENCE = 0.95

# Positions in ranges 1, 2, 3-4, 5-8, ..., 32769-65536, and all after that.
LAST_POSITIONS: np.ndarray = 2 ** np.arange(17)
N_RANGES = len(LAST_POSITIONS) + 1

Interval = tuple[float, float]


class Sums:
    """Sums of losses over the tokens of a split, in float64.

    A token's position is the number of tokens of its document before it, including the end-of-text token that begins
    the document: 1 for a document's first. Its context is the number of tokens before it in its window of `window`
    tokens. A model that `forgets` at a document's start sees none from before the document.

    Attributes:
      nats: sums by document and range of positions, [D, P].
      seen_nats, seen_tokens: sums by range of the context, [P].
      far_nats, far_tokens: sums by document, [D], over the tokens more than `window` from their document's start with a
        context of at least half the window: a long context, but not all of the document.
    """

    def __init__(self, documents: Documents, window: int, forgets: bool) -> None:
        self.documents, self.window, self.forgets = documents, window, forgets
        self.nats = np.zeros((len(documents), N_RANGES))
        self.seen_nats, self.seen_tokens = np.zeros(N_RANGES), np.zeros(N_RANGES, np.int64)
        self.far_nats, self.far_tokens = np.zeros(len(documents)), np.zeros(len(documents), np.int64)

    def add(self, index: np.ndarray, losses: np.ndarray) -> None:
        """Add the losses of the tokens with these indices in the stream, float and int64 [n]."""
        losses = losses.astype(np.float64)
        document = np.searchsorted(self.documents.starts, index, side="right") - 1
        position = index - self.documents.starts[document] + 1
        context = index % self.window + 1
        if self.forgets:
            context = np.minimum(context, position)
        where, own = np.unique(document * N_RANGES + _range_of(position), return_inverse=True)
        self.nats.reshape(-1)[where] += np.bincount(own, losses)
        seen = _range_of(context)
        self.seen_nats += np.bincount(seen, losses, N_RANGES)
        self.seen_tokens += np.bincount(seen, minlength=N_RANGES)
        is_far = (position > self.window) & (2 * context >= self.window)
        where, own = np.unique(document[is_far], return_inverse=True)
        self.far_nats[where] += np.bincount(own, losses[is_far])
        self.far_tokens[where] += np.bincount(own)

    @property
    def tokens(self) -> np.ndarray:
        """Number of tokens of each document in each range of positions, int64 [D, P]."""
        until = np.minimum(self.documents.lengths[:, None], np.append(LAST_POSITIONS, np.iinfo(np.int64).max))
        return np.diff(until, axis=1, prepend=0)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return float(self.nats.sum() / self.documents.lengths.sum())


def _range_of(position: np.ndarray) -> np.ndarray:
    return np.searchsorted(LAST_POSITIONS, position)


# ---- measuring -----------------------------------------------------------------------------------


def make_window_step(model: ModelConfig, mesh: Mesh) -> Callable[[Params, dict[str, jax.Array]], jax.Array]:
    """Return a compiled step: (params, {"tokens" [B, T + 1], "mask" [B, T]}) -> losses of all targets, [B, T].

    The mask is 1 up to the end of each row's tokens, and what follows is padding.
    """

    def step(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        return window_losses(model, params, batch["tokens"], mesh, batch["mask"].sum(axis=-1))

    return jax.jit(step, in_shardings=(None, split_batch(mesh)), out_shardings=replicated(mesh))


StreamStep = Callable[[Params, dict[str, jax.Array], ModelState], tuple[jax.Array, ModelState]]


def make_stream_step(model: ModelConfig, mesh: Mesh) -> StreamStep:
    """Return a compiled step: (params, {"tokens" [B, W + 1], "begins" [B], ...}, state) -> (losses [B, W], state).

    Rows that begin a document forget the state.
    """

    def step(params: Params, batch: dict[str, jax.Array], state: ModelState) -> tuple[jax.Array, ModelState]:
        state = forget(model, state, batch["begins"])
        return next_token_losses_with_state(model, params, batch["tokens"], mesh, state)

    return jax.jit(step, in_shardings=(None, split_batch(mesh), None), out_shardings=(replicated(mesh), None))


def measure_windows(
    step: Callable[[Params, dict[str, jax.Array]], jax.Array],
    params: Params,
    batches: Iterable[Batch],
    mesh: Mesh,
    sums: Sums,
) -> None:
    """Add the losses of all windows (heinsen.data.loader.evaluation_batches, all rows) to `sums`."""
    start = 0
    for batch in batches:
        # Fetching each batch's losses keeps simulated devices from deadlocking, and bounds the queue on real ones.
        losses, mask = np.asarray(step(params, place_batch(mesh, batch))), batch["mask"]
        sums.add(np.arange(start, start + mask.size)[mask.reshape(-1)], losses[mask])
        start += mask.size


def measure_streaming(
    step: StreamStep,
    params: Params,
    batches: Iterable[Batch],
    mesh: Mesh,
    sums: Sums,
    state: ModelState,
) -> None:
    """Add the losses of all documents, each from its start (heinsen.data.documents.DocumentBatches), to `sums`.

    `state` is empty, and its caches have room for the longest document.
    """
    for batch in batches:
        mask, first = batch["mask"], batch["first"]
        placed = place_batch(mesh, {name: batch[name] for name in ("tokens", "begins")})
        losses, state = step(params, placed, state)
        index = first[:, None] + np.arange(mask.shape[1])
        sums.add(index[mask], np.asarray(losses)[mask])


# ---- results -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The loss over some documents, with intervals, which are None for fewer than 2 documents.

    Attributes:
      loss: nats per token.
      bits_per_byte: bits per byte of UTF-8 text; None where there is no text.
    """

    documents: int
    tokens: int
    loss: float
    loss_interval: Interval | None
    perplexity: float
    bits_per_byte: float | None
    bits_per_byte_interval: Interval | None


@dataclasses.dataclass(frozen=True)
class Range:
    """Losses, in nats per token, of the tokens at positions `first` to `last` (None: to the end of every document).

    windows and streaming are losses of the same tokens; difference is streaming minus windows.
    """

    first: int
    last: int | None
    tokens: int
    windows: float
    streaming: float
    windows_interval: Interval | None
    streaming_interval: Interval | None
    difference: float
    difference_interval: Interval | None


@dataclasses.dataclass(frozen=True)
class Context:
    """Loss in windows, in nats per token, of the tokens with a context of `first` to `last` tokens."""

    first: int
    last: int | None
    tokens: int
    loss: float


@dataclasses.dataclass(frozen=True)
class Far:
    """Losses of tokens far from their document's start with a context of half the window or more: see `Sums`."""

    tokens: int
    windows: float
    streaming: float
    difference: float
    difference_interval: Interval | None

    @property
    def verdict(self) -> str:
        if self.difference_interval is None or self.difference_interval[0] <= 0 <= self.difference_interval[1]:
            return "makes no significant difference"
        return "helps" if self.difference < 0 else "hurts"


@dataclasses.dataclass(frozen=True)
class ByPosition:
    """Losses by position and by context; `far` is None where no document is longer than the window."""

    window: int
    ranges: list[Range]
    contexts: list[Context]
    far: Far | None


Parts = Sequence[tuple[float, Sums]]  # each dataset's share of a mixture, and its sums


class _Resamples:
    """Bootstrap over the documents of all datasets of a mixture, with the same draws each time."""

    def __init__(self, parts: Parts, seed: int = 0) -> None:
        self._sizes, self._seed = [len(sums.documents) for _, sums in parts], seed

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield R times how often each document of all datasets is drawn, int64 [D]."""
        rng = np.random.default_rng(self._seed)
        for _ in range(RESAMPLES):
            yield np.concatenate([np.bincount(rng.integers(0, n, n), minlength=n) for n in self._sizes])


def _interval(values: np.ndarray) -> Interval:
    """Return the interval of resampled ratios, without those that are NaN."""
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.nanpercentile(values, [tail, 100 - tail])
    return float(low), float(high)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Divide; NaN where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.full(np.shape(numerator), np.nan), where=denominator > 0)


def _weights(parts: Parts) -> list[float]:
    """Return the weight of a token of each dataset, by which the dataset has its share of all datasets' tokens."""
    n_tokens = [sums.documents.lengths.sum() for _, sums in parts]
    return [share * sum(n_tokens) / n for (share, _), n in zip(parts, n_tokens, strict=True)]


def _weighted(parts: Parts, of: Callable[[Sums], np.ndarray]) -> np.ndarray:
    """Return sums by document, of all datasets, weighted by `_weights`."""
    return np.concatenate([weight * of(sums) for weight, (_, sums) in zip(_weights(parts), parts, strict=True)])


def estimate(parts: Parts) -> Estimate:
    """Return the loss over all documents of a mixture."""
    return _estimates(parts, np.zeros(sum(len(sums.documents) for _, sums in parts), np.int64), 1)[0]


def estimate_sources(parts: Parts) -> dict[str | None, Estimate] | None:
    """Return the loss over the documents of each source, largest first; None if no document names its source."""
    if not any(sums.documents.dataset.has_sources for _, sums in parts):
        return None
    places: dict[str | None, int] = {}

    def sources_of(sums: Sums) -> np.ndarray:
        own = np.array([places.setdefault(name, len(places)) for name in sums.documents.names])
        sources = sums.documents.sources
        return own[np.zeros(len(sums.documents), int) if sources is None else sources]

    groups = np.concatenate([sources_of(sums) for _, sums in parts])
    estimates = _estimates(parts, groups, len(places))
    found = [(name, of) for name, of in zip(places, estimates, strict=True) if of.documents]
    return dict(sorted(found, key=lambda item: -item[1].tokens))


def _estimates(parts: Parts, groups: np.ndarray, n_groups: int) -> list[Estimate]:
    """Return the loss over each group of documents; `groups` has the group of each, int64 [D]."""
    lengths = np.concatenate([sums.documents.lengths for _, sums in parts])
    nats, tokens, n_bytes = (
        _weighted(parts, of)
        for of in (lambda s: s.nats.sum(1), lambda s: s.documents.lengths, lambda s: s.documents.num_bytes)
    )

    def count(values: np.ndarray) -> np.ndarray:
        return np.bincount(groups, values, n_groups)

    losses, bits = _ratio(count(nats), count(tokens)), _ratio(count(nats), count(n_bytes) * math.log(2))
    resampled = np.array([[count(times * x) for x in (nats, tokens, n_bytes)] for times in _Resamples(parts)])
    resampled_losses, resampled_bits = (
        _ratio(resampled[:, 0], resampled[:, 1]),
        _ratio(resampled[:, 0], resampled[:, 2] * math.log(2)),
    )
    estimates = []
    for group in range(n_groups):
        n_documents, own = int(np.sum(groups == group)), groups == group
        has_text, has_interval = bool(n_bytes[own].any()), n_documents > 1
        loss = float(losses[group])
        estimates.append(
            Estimate(
                n_documents,
                int(lengths[own].sum()),
                loss,
                _interval(resampled_losses[:, group]) if has_interval else None,
                math.exp(min(loss, 700.0)),
                float(bits[group]) if has_text else None,
                _interval(resampled_bits[:, group]) if has_interval and has_text else None,
            )
        )
    return estimates


def by_position(windows: Parts, streaming: Parts) -> ByPosition:
    """Return the loss in each range of positions that has tokens, and the benefit of seeing more than the window.

    Both arguments are measured on the same mixture, with windows of one length.
    """

    def tokens_of(sums: Sums) -> np.ndarray:
        return np.column_stack([sums.tokens, sums.far_tokens])

    def nats_of(sums: Sums) -> np.ndarray:
        return np.column_stack([sums.nats, sums.far_nats])

    columns = _weighted(windows, tokens_of), _weighted(windows, nats_of), _weighted(streaming, nats_of)  # [D, P + 1]
    totals = np.array([x.sum(0) for x in columns])  # [3, P + 1]
    drawn = np.array([[times @ x for x in columns] for times in _Resamples(windows)])  # [R, 3, P + 1]
    losses, drawn_losses = _ratio(totals[1:], totals[:1]), _ratio(drawn[:, 1:], np.repeat(drawn[:, :1], 2, axis=1))
    counts = np.concatenate([tokens_of(sums) for _, sums in windows])
    weighted = list(zip(_weights(windows), [sums for _, sums in windows], strict=True))
    seen_nats = np.sum([weight * sums.seen_nats for weight, sums in weighted], axis=0)
    seen_tokens = np.sum([weight * sums.seen_tokens for weight, sums in weighted], axis=0)

    def compare(column: int) -> tuple[Far, Interval | None, Interval | None]:
        """Return the losses in a column, and the intervals of windows and streaming."""
        has_interval = np.sum(counts[:, column] > 0) > 1
        interval: Callable[[np.ndarray], Interval | None] = lambda values: _interval(values) if has_interval else None
        in_windows, in_streaming = drawn_losses[:, 0, column], drawn_losses[:, 1, column]
        both = Far(
            tokens=int(counts[:, column].sum()),
            windows=float(losses[0, column]),
            streaming=float(losses[1, column]),
            difference=float(losses[1, column] - losses[0, column]),
            difference_interval=interval(in_streaming - in_windows),
        )
        return both, interval(in_windows), interval(in_streaming)

    ranges: list[Range] = []
    contexts: list[Context] = []
    first = 1
    for column, last in enumerate([*LAST_POSITIONS.tolist(), None]):
        if counts[:, column].any():
            both, windows_interval, streaming_interval = compare(column)
            ranges.append(
                Range(
                    first,
                    last,
                    both.tokens,
                    both.windows,
                    both.streaming,
                    windows_interval,
                    streaming_interval,
                    both.difference,
                    both.difference_interval,
                )
            )
        if n_seen := sum(int(sums.seen_tokens[column]) for _, sums in windows):
            contexts.append(Context(first, last, n_seen, float(seen_nats[column] / seen_tokens[column])))
        first = (last or 0) + 1
    far = compare(N_RANGES)[0] if counts[:, N_RANGES].any() else None
    return ByPosition(windows[0][1].window, ranges, contexts, far)


def plot_by_position(result: ByPosition, title: str, path: Path) -> None:
    """Plot the loss by position in the document, in windows and streaming, and by context in the window."""
    plt = pyplot()
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 7.5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    window, ranges = result.window, result.ranges

    def middles(chosen: Sequence[Range | Context]) -> list[float]:
        return [math.sqrt(r.first * (r.last or 2 * r.first)) for r in chosen]

    def draw(axes: Any, name: str, label: str | None, color: str) -> None:
        axes.plot(middles(ranges), [getattr(r, name) for r in ranges], "o-", ms=4, lw=1.2, label=label, color=color)
        with_interval = [r for r in ranges if getattr(r, f"{name}_interval") is not None]
        bounds = [getattr(r, f"{name}_interval") for r in with_interval]
        if with_interval:
            axes.fill_between(middles(with_interval), *zip(*bounds, strict=True), alpha=0.2, color=color, lw=0)

    draw(above, "windows", f"windows of {window}, by position in the document", "C0")
    draw(above, "streaming", "streaming, by position in the document", "C1")
    label = f"windows of {window}, by tokens before it in the window"
    losses = [context.loss for context in result.contexts]
    above.plot(middles(result.contexts), losses, "s--", ms=3, lw=1, label=label, color="C2")
    above.set(title=title, ylabel="loss (nats per token)")
    draw(below, "difference", None, "C1")
    below.axhline(0, color="0.5", lw=0.8)
    explained = "in windows, the first tokens of a document follow the end of another one, which helps"
    below.set(xlabel=f"position (tokens before it; {explained})", ylabel="streaming minus windows")
    below.xaxis.label.set_size("small")
    below.set_xscale("log", base=2)
    for axes in (above, below):
        axes.axvline(window, color="0.5", lw=0.8, ls=":")
        axes.grid(alpha=0.3)
    place_legend(figure)
    write_figure(path, figure, dpi=120)
    plt.close(figure)
