"""The losses of a split document by document: how sure a loss is, what each source costs, what a long context brings.

Every token is predicted once, in one of two ways:

- in windows of the training length (`measure_windows`), as in training: what a window does not hold is not seen;
- streaming (`measure_streaming`): every document from its start, the model's state carried on to its end.

`Sums` adds up the losses by document and by position. Intervals are bootstrap percentiles: the documents are drawn
anew, as many as there are, with replacement, and the loss of the drawn ones is taken, `RESAMPLES` times. In a mixture
each dataset's documents are drawn for themselves.

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
from heinsen.models import ModelConfig, ModelState, Params, forget, next_token_losses
from heinsen.models.masking import window_losses
from heinsen.parallel import place_batch, replicated, split_batch

RESAMPLES = 1000
CONFIDENCE = 0.95

# Positions in ranges 1, 2, 3-4, 5-8, ..., 32769-65536, and all after that.
LAST_POSITIONS = 2 ** np.arange(17)
N_RANGES = len(LAST_POSITIONS) + 1

Interval = tuple[float, float]


class Sums:
    """Sums of losses over the tokens of a split, in float64.

    A token's position is the number of tokens of its document that come before it, the end of text that begins the
    document included: 1 for a document's first. Its context is what a window of `window` tokens shows of what comes
    before it. A model that `forgets` at a document's start sees no more than the document.

    Attributes:
      nats: [D, P] by document and range of positions.
      seen_nats, seen_tokens: [P] by range of the context.
      far_nats, far_tokens: [D] of the tokens farther than `window` from their document's start whose window shows at
        least half of its length before them: a long context, and yet not all.
    """

    def __init__(self, documents: Documents, window: int, forgets: bool):
        self.documents, self.window, self.forgets = documents, window, forgets
        self.nats = np.zeros((len(documents), N_RANGES))
        self.seen_nats, self.seen_tokens = np.zeros(N_RANGES), np.zeros(N_RANGES, np.int64)
        self.far_nats, self.far_tokens = np.zeros(len(documents)), np.zeros(len(documents), np.int64)

    def add(self, index: np.ndarray, losses: np.ndarray) -> None:
        """The losses of tokens `index` of the stream, int64 and float [n]."""
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
        """How many tokens of each document lie in each range of positions, int64 [D, P]."""
        until = np.minimum(self.documents.lengths[:, None], np.append(LAST_POSITIONS, np.iinfo(np.int64).max))
        return np.diff(until, axis=1, prepend=0)

    @property
    def loss(self) -> float:
        """Nats a token."""
        return float(self.nats.sum() / self.documents.lengths.sum())


def _range_of(position: np.ndarray) -> np.ndarray:
    return np.searchsorted(LAST_POSITIONS, position)


# ---- measuring -----------------------------------------------------------------------------------


def make_window_step(model: ModelConfig, mesh: Mesh) -> Callable[[Params, dict[str, jax.Array]], jax.Array]:
    """(params, {"tokens" [B, T + 1], ...}) -> the losses of all targets, [B, T]."""

    def step(params, batch):
        return window_losses(model, params, batch["tokens"], mesh)

    return jax.jit(step, in_shardings=(None, split_batch(mesh)), out_shardings=replicated(mesh))


def make_stream_step(model: ModelConfig, mesh: Mesh) -> Callable[[Params, dict[str, jax.Array], Any], tuple]:
    """(params, {"tokens" [B, W + 1], "begins" [B], ...}, state) -> (the losses of all targets [B, W], state).

    Rows that begin a document start without the state.
    """

    def step(params, batch, state):
        state = forget(model, state, batch["begins"])
        return next_token_losses(model, params, batch["tokens"], mesh, state, return_state=True)

    return jax.jit(step, in_shardings=(None, split_batch(mesh), None), out_shardings=(replicated(mesh), None))


def measure_windows(
    step: Callable[[Params, dict[str, jax.Array]], jax.Array],
    params: Params,
    batches: Iterable[Batch],
    mesh: Mesh,
    sums: Sums,
) -> None:
    """Adds the losses of all windows (heinsen.data.loader.evaluation_batches, all rows) to `sums`."""
    start = 0
    for batch in batches:
        # Fetching each batch's losses keeps simulated devices from deadlocking, and bounds the queue on real ones.
        losses, mask = np.asarray(step(params, place_batch(mesh, batch))), batch["mask"]
        sums.add(np.arange(start, start + mask.size)[mask.reshape(-1)], losses[mask])
        start += mask.size


def measure_streaming(
    step: Callable[[Params, dict[str, jax.Array], Any], tuple],
    params: Params,
    batches: Iterable[Batch],
    mesh: Mesh,
    sums: Sums,
    state: ModelState,
) -> None:
    """Adds the losses of all documents, each from its start (heinsen.data.documents.DocumentBatches), to `sums`.

    `state` is an empty one, with room for the longest document where it has caches.
    """
    for batch in batches:
        mask, first = batch["mask"], batch["first"]
        placed = place_batch(mesh, {name: batch[name] for name in ("tokens", "begins")})
        losses, state = step(params, placed, state)
        index = first[:, None] + np.arange(mask.shape[1])
        sums.add(index[mask], np.asarray(losses)[mask])


# ---- what it says --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Estimate:
    """loss: nats a token; bits_per_byte: of UTF-8 text, None where there is none. Intervals: None below 2 documents."""

    documents: int
    tokens: int
    loss: float
    loss_interval: Interval | None
    perplexity: float
    bits_per_byte: float | None
    bits_per_byte_interval: Interval | None


@dataclasses.dataclass(frozen=True)
class Range:
    """Losses, nats a token, of the tokens at positions `first` to `last` (None: to the end of every document).

    windows and streaming are of the same tokens. difference: streaming less windows.
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
    """Loss in windows, nats a token, of the tokens before which the window shows `first` to `last` tokens."""

    first: int
    last: int | None
    tokens: int
    loss: float


@dataclasses.dataclass(frozen=True)
class Far:
    """Tokens beyond the window's length whose window shows at least half of its length before them: see `Sums`."""

    tokens: int
    windows: float
    streaming: float
    difference: float
    difference_interval: Interval | None

    @property
    def verdict(self) -> str:
        if self.difference_interval is None or self.difference_interval[0] <= 0 <= self.difference_interval[1]:
            return "makes no sure difference"
        return "helps" if self.difference < 0 else "hurts"


@dataclasses.dataclass(frozen=True)
class ByPosition:
    """far is None where no document goes on beyond the window's length."""

    window: int
    ranges: list[Range]
    contexts: list[Context]
    far: Far | None


Parts = Sequence[tuple[float, Sums]]  # each dataset's share, and its sums


class _Resamples:
    """Bootstrap over the documents of all datasets of a mixture, with the same draws each time."""

    def __init__(self, parts: Parts, seed: int = 0):
        self._sizes, self._seed = [len(sums.documents) for _, sums in parts], seed

    def __iter__(self) -> Iterator[np.ndarray]:
        """How many times each document is drawn, int64 [D] over all datasets, R times."""
        rng = np.random.default_rng(self._seed)
        for _ in range(RESAMPLES):
            yield np.concatenate([np.bincount(rng.integers(0, n, n), minlength=n) for n in self._sizes])


def _interval(values: np.ndarray) -> Interval:
    """Of resampled ratios; NaN where nothing was drawn of what the ratio is taken of."""
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.nanpercentile(values, [tail, 100 - tail])
    return float(low), float(high)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """NaN where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.full(np.shape(numerator), np.nan), where=denominator > 0)


def _weights(parts: Parts) -> list[float]:
    """How much a token of each dataset counts: all of its tokens as much as its share of all datasets' tokens."""
    n_tokens = [sums.documents.lengths.sum() for _, sums in parts]
    return [share * sum(n_tokens) / n for (share, _), n in zip(parts, n_tokens, strict=True)]


def _weighted(parts: Parts, of: Callable[[Sums], np.ndarray]) -> np.ndarray:
    """Sums of all documents, by the weight of their datasets."""
    return np.concatenate([weight * of(sums) for weight, (_, sums) in zip(_weights(parts), parts, strict=True)])


def estimate(parts: Parts) -> Estimate:
    """The loss over all documents of a mixture."""
    return _estimates(parts, np.zeros(sum(len(sums.documents) for _, sums in parts), np.int64), 1)[0]


def estimate_sources(parts: Parts) -> dict[str | None, Estimate] | None:
    """The loss over the documents of each source, those of most tokens first; None if no document names its source."""
    if not any(sums.documents.dataset.has_sources for _, sums in parts):
        return None
    places: dict[str | None, int] = {}

    def sources_of(sums):
        own = np.array([places.setdefault(name, len(places)) for name in sums.documents.names])
        sources = sums.documents.sources
        return own[np.zeros(len(sums.documents), int) if sources is None else sources]

    groups = np.concatenate([sources_of(sums) for _, sums in parts])
    estimates = _estimates(parts, groups, len(places))
    found = [(name, of) for name, of in zip(places, estimates, strict=True) if of.documents]
    return dict(sorted(found, key=lambda item: -item[1].tokens))


def _estimates(parts: Parts, groups: np.ndarray, n_groups: int) -> list[Estimate]:
    lengths = np.concatenate([sums.documents.lengths for _, sums in parts])
    nats, tokens, n_bytes = (
        _weighted(parts, of)
        for of in (lambda s: s.nats.sum(1), lambda s: s.documents.lengths, lambda s: s.documents.num_bytes)
    )
    count = lambda values: np.bincount(groups, values, n_groups)
    losses, bits = _ratio(count(nats), count(tokens)), _ratio(count(nats), count(n_bytes) * math.log(2))
    resampled = np.array([[count(times * x) for x in (nats, tokens, n_bytes)] for times in _Resamples(parts)])
    resampled_losses, resampled_bits = (
        _ratio(resampled[:, 0], resampled[:, 1]),
        _ratio(resampled[:, 0], resampled[:, 2] * math.log(2)),
    )
    estimates = []
    for group in range(n_groups):
        n_documents, own = int(np.sum(groups == group)), groups == group
        has_text, sure = bool(n_bytes[own].any()), n_documents > 1
        loss = float(losses[group])
        estimates.append(
            Estimate(
                n_documents,
                int(lengths[own].sum()),
                loss,
                _interval(resampled_losses[:, group]) if sure else None,
                math.exp(min(loss, 700.0)),
                float(bits[group]) if has_text else None,
                _interval(resampled_bits[:, group]) if sure and has_text else None,
            )
        )
    return estimates


def by_position(windows: Parts, streaming: Parts) -> ByPosition:
    """The loss in each range of positions that holds tokens, and what more than the window brings.

    Both measured on the same mixture, with windows of one length.
    """
    tokens_of = lambda sums: np.column_stack([sums.tokens, sums.far_tokens])
    nats_of = lambda sums: np.column_stack([sums.nats, sums.far_nats])
    columns = _weighted(windows, tokens_of), _weighted(windows, nats_of), _weighted(streaming, nats_of)  # [D, P + 1]
    totals = np.array([x.sum(0) for x in columns])  # [3, P + 1]
    drawn = np.array([[times @ x for x in columns] for times in _Resamples(windows)])  # [R, 3, P + 1]
    losses, drawn_losses = _ratio(totals[1:], totals[:1]), _ratio(drawn[:, 1:], np.repeat(drawn[:, :1], 2, axis=1))
    counts = np.concatenate([tokens_of(sums) for _, sums in windows])
    weighted = list(zip(_weights(windows), [sums for _, sums in windows], strict=True))
    seen_nats = sum(weight * sums.seen_nats for weight, sums in weighted)
    seen_tokens = sum(weight * sums.seen_tokens for weight, sums in weighted)

    def measured(column):
        """Tokens, windows, streaming, their intervals, difference, its interval."""
        sure = np.sum(counts[:, column] > 0) > 1
        of = lambda values: _interval(values) if sure else None
        one, other = drawn_losses[:, 0, column], drawn_losses[:, 1, column]
        return dict(
            tokens=int(counts[:, column].sum()),
            windows=float(losses[0, column]),
            streaming=float(losses[1, column]),
            difference=float(losses[1, column] - losses[0, column]),
            difference_interval=of(other - one),
        ), dict(windows_interval=of(one), streaming_interval=of(other))

    ranges, contexts, first = [], [], 1
    for column, last in enumerate([*LAST_POSITIONS.tolist(), None]):
        if counts[:, column].any():
            both, each = measured(column)
            ranges.append(Range(first, last, **both, **each))
        if n_seen := sum(int(sums.seen_tokens[column]) for _, sums in windows):
            contexts.append(Context(first, last, n_seen, float(seen_nats[column] / seen_tokens[column])))
        first = (last or 0) + 1
    far = Far(**measured(N_RANGES)[0]) if counts[:, N_RANGES].any() else None
    return ByPosition(windows[0][1].window, ranges, contexts, far)


def plot_by_position(result: ByPosition, title: str, path: Path) -> None:
    """Loss by position in the document, in windows and streaming, and by what a window shows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 7.5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    window, ranges = result.window, result.ranges
    middles = lambda chosen: [math.sqrt(r.first * (r.last or 2 * r.first)) for r in chosen]

    def draw(axes, name, label, color):
        axes.plot(middles(ranges), [getattr(r, name) for r in ranges], "o-", ms=4, lw=1.2, label=label, color=color)
        sure = [r for r in ranges if getattr(r, f"{name}_interval") is not None]
        bounds = [getattr(r, f"{name}_interval") for r in sure]
        if sure:
            axes.fill_between(middles(sure), *zip(*bounds, strict=True), alpha=0.2, color=color, lw=0)

    draw(above, "windows", f"windows of {window}, by position in the document", "C0")
    draw(above, "streaming", "streaming, by position in the document", "C1")
    label = f"windows of {window}, by tokens before it in the window"
    losses = [context.loss for context in result.contexts]
    above.plot(middles(result.contexts), losses, "s--", ms=3, lw=1, label=label, color="C2")
    above.set(title=title, ylabel="loss (nats a token)")
    above.legend(fontsize=8)
    draw(below, "difference", None, "C1")
    below.axhline(0, color="0.5", lw=0.8)
    below.set(xlabel="position (tokens before it)", ylabel="streaming less windows")
    below.set_xscale("log", base=2)
    for axes in (above, below):
        axes.axvline(window, color="0.5", lw=0.8, ls=":")
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
