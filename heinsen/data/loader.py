"""Batches of fixed-length windows from token datasets.

With `T = sequence_length`, window `w` is the `T + 1` tokens from `w·T` on: inputs `[:-1]`, targets `[1:]`.
Neighboring windows share one token, so that each token is a target once.

Each process reads some of the rows of each global batch. The global batches, their order and the iterator's state do
not depend on which rows: a run resumes unchanged on another number of processes. Memory use does not grow with the
datasets.
"""

import math
import sys
from collections.abc import Iterator

import grain
import numpy as np

from heinsen.data.dataset import TokenDataset
from heinsen.data.mixture import Mixture, check_mixture, deal, whole_weights
from heinsen.data.shards import DatasetError

Batch = dict[str, np.ndarray]


def count_windows(dataset: TokenDataset, sequence_length: int) -> int:
    """Return the number of training windows per epoch; the last, incomplete window is dropped."""
    return (dataset.n_tokens - 1) // sequence_length


def train_iterator(
    data: TokenDataset | Mixture,
    sequence_length: int,
    batch_size: int,
    seed: int,
    rows: np.ndarray | None = None,
) -> grain.DatasetIterator[Batch]:
    """Return an iterator over endless shuffled training batches.

    Every epoch is a new permutation of all windows: the global batches contain each exactly once. Epochs follow each
    other without a gap: a batch may hold the last windows of one and the first of the next. In a mixture each dataset
    has its own epochs and supplies its share of any number of windows (see `heinsen.data.mixture`).

    Args:
      data: a dataset, or several as (dataset, weight) pairs.
      sequence_length: T, the number of tokens predicted per row.
      batch_size: rows of a global batch.
      seed: non-negative. It determines the order of windows, with the splits, weights and sequence length.
      rows: which rows of each global batch to read, sorted; None means all.

    Returns:
      A Grain iterator of `{"tokens": int32 [len(rows), T + 1]}`. `get_state()` after n batches and `set_state()` on an
      iterator with the same data, sequence length, seed and batch size, whatever its rows, continue with batch n + 1.

    Raises:
      DatasetError: a split has fewer windows than a batch takes from it, the datasets of a mixture have different
        tokenizers, or, on `next`, a shard can no longer be read.
      ValueError: an argument is out of range.
    """
    rows = _check_arguments(sequence_length, batch_size, rows)
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    mixture = [(data, 1.0)] if isinstance(data, TokenDataset) else list(data)
    check_mixture(mixture)
    datasets = [dataset for dataset, _ in mixture]
    weights = whole_weights([weight for _, weight in mixture])
    for dataset, weight in zip(datasets, weights, strict=True):
        _check_enough(dataset, sequence_length, batch_size, math.ceil(batch_size * weight / sum(weights)))
    # The first dataset has the same order as alone. Another of the same size must not share it.
    seeds = [seed, *np.random.SeedSequence(seed).generate_state(len(datasets) - 1).tolist()]
    orders = [
        _endless_order(count_windows(dataset, sequence_length), own_seed)
        for dataset, own_seed in zip(datasets, seeds, strict=True)
    ]

    def read_batch(step: int) -> Batch:
        tokens = np.empty((len(rows), sequence_length + 1), np.int32)
        for row, index in zip(tokens, (step * batch_size + rows).tolist(), strict=True):
            which, position = deal(index, weights)
            start = orders[which][position] * sequence_length
            row[:] = datasets[which].read(start, start + sequence_length + 1)
        return {"tokens": tokens}

    batches = grain.MapDataset.range(sys.maxsize // batch_size).map(read_batch)
    # No threads and no workers: reading windows is faster than handing them over.
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0)))


def _endless_order(windows: int, seed: int) -> grain.MapDataset[int]:
    """Return the windows in training order, indexable at random: each pass of `repeat` is a new permutation of all.

    One shuffle is not enough: Grain's has four rounds. They separate neighbors too well, and with some seeds leave half
    of a few hundred windows in place from one epoch to the next. Two shuffles with different seeds are statistically
    indistinguishable from a random permutation.
    """
    return grain.MapDataset.range(windows).seed(seed).shuffle().shuffle().repeat()


def _check_enough(dataset: TokenDataset, sequence_length: int, batch_size: int, share: int) -> None:
    windows = count_windows(dataset, sequence_length)
    if windows < share:
        needed = "the" if share == batch_size else f"its share of {share} of the"
        raise DatasetError(
            f"{dataset.path} has {dataset.n_tokens} tokens, which make {windows} windows of "
            f"{sequence_length} + 1 tokens: fewer than {needed} {batch_size} rows of a batch. "
            "Use a larger split, a smaller batch or shorter sequences."
        )


class EvaluationBatches:
    """Batches that predict every token of a split exactly once, in order.

    An end-of-text token is put before the split, so that its first token is predicted too. Rows and batches are padded
    with end-of-text tokens to static shapes, and the padding is masked. The number of batches does not depend on the
    rows.

    Iterating, as often as needed, yields `{"tokens": int32 [b, T + 1], "mask": bool [b, T]}` with `b = len(rows)`;
    where `mask[i, t]` is true, the target `tokens[i, t + 1]` counts.

    Args:
      dataset: the split.
      sequence_length: T.
      batch_size: rows of a global batch.
      rows: which rows of each global batch to read, sorted; None means all.
      max_tokens: predict only this many tokens from the start of the split; None means all.

    Attributes:
      n_tokens: the number of targets in all rows of the global batches.

    Raises:
      ValueError: an argument is out of range.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        sequence_length: int,
        batch_size: int,
        rows: np.ndarray | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        self.dataset, self.n_tokens = dataset, min(max_tokens or dataset.n_tokens, dataset.n_tokens)
        self._length, self._batch_size = sequence_length, batch_size
        self._rows = _check_arguments(sequence_length, batch_size, rows)

    def __len__(self) -> int:
        """Return the number of batches."""
        windows = -(-self.n_tokens // self._length)
        return -(-windows // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        length, rows = self._length, self._rows
        for index in range(len(self)):
            # Window w predicts tokens w·T to (w+1)·T and sees the one before them.
            starts = (index * self._batch_size + rows) * length
            tokens = np.full((len(rows), length + 1), self.dataset.eot_id, np.int32)
            for row, start in zip(tokens, starts.tolist(), strict=True):
                stop = min(start + length, self.n_tokens)
                if start == 0:  # the token before the split is the end of text that the row is filled with
                    row[1 : 1 + stop] = self.dataset.read(0, stop)
                elif start < stop:
                    row[: 1 + stop - start] = self.dataset.read(start - 1, stop)
            yield {"tokens": tokens, "mask": starts[:, None] + np.arange(length) < self.n_tokens}


def _check_arguments(sequence_length: int, batch_size: int, rows: np.ndarray | None) -> np.ndarray:
    """Return the rows to read. Raises ValueError."""
    if sequence_length < 1 or batch_size < 1:
        raise ValueError(f"{sequence_length=} and {batch_size=} must be at least 1")
    if rows is None:
        return np.arange(batch_size)
    rows = np.asarray(rows)
    if rows.ndim != 1 or not rows.size or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"rows must be a non-empty array of integers, got {rows.dtype} {list(rows.shape)}")
    rows = rows.astype(np.int64)  # also a copy: the caller may change its array
    if rows[0] < 0 or rows[-1] >= batch_size or (np.diff(rows) <= 0).any():
        raise ValueError(f"rows must be sorted, each once, in [0, {batch_size=}), got {rows.tolist()}")
    return rows
