"""Batches of fixed-length windows from a token dataset.

With `T = sequence_length`, window `w` is the `T + 1` tokens from `w·T` on: inputs `[:-1]`, targets `[1:]`.
Neighbouring windows share one token, so that each token is a target once.

With several processes, process `p` of `P` yields rows `[p·b, (p+1)·b)` of a global batch of `P·b` rows. The
global batches, their order and the iterator's state depend on `P·b` only: the same run continues unchanged
on another number of processes.
"""

import dataclasses
from collections.abc import Iterator

import grain
import numpy as np

from heinsen.data.dataset import DatasetError, TokenDataset

Batch = dict[str, np.ndarray]


def num_windows(dataset: TokenDataset, sequence_length: int) -> int:
    """How many training windows an epoch has; the last, incomplete one is left out."""
    return (dataset.num_tokens - 1) // sequence_length


def train_iterator(
    dataset: TokenDataset,
    sequence_length: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[Batch]:
    """Endless shuffled training batches.

    Every epoch is another permutation of all windows, each exactly once across the processes. Epochs follow
    each other without a seam: a batch may hold the last windows of one and the first of the next.

    Args:
      sequence_length: T, the tokens predicted a row.
      batch_size: rows a batch of this process.
      seed: non-negative; the order of windows is a function of it, the split and the sequence length.

    Returns:
      A Grain iterator of `{"tokens": int32 [batch_size, T + 1]}`. `get_state()` after n batches and
      `set_state()` on an iterator with the same split, sequence length, seed and global batch size continue
      with batch n + 1.

    Raises:
      DatasetError: the split has fewer windows than the global batch has rows.
      ValueError: an argument is out of range.
    """
    _check_arguments(sequence_length, batch_size, process_index, process_count)
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    windows = num_windows(dataset, sequence_length)
    global_batch_size = batch_size * process_count
    if windows < global_batch_size:
        raise DatasetError(
            f"{dataset.path} has {dataset.num_tokens} tokens, which make {windows} windows of "
            f"{sequence_length} + 1 tokens: fewer than the {global_batch_size} rows of a batch "
            f"({batch_size} a process, {process_count} processes). "
            "Use a larger split, a smaller batch or shorter sequences."
        )
    rows = slice(process_index * batch_size, (process_index + 1) * batch_size)

    def read_windows(global_windows: np.ndarray) -> Batch:
        tokens = np.empty((batch_size, sequence_length + 1), np.int32)
        for row, window in zip(tokens, global_windows[rows].tolist(), strict=True):
            start = window * sequence_length
            row[:] = dataset.read(start, start + sequence_length + 1)
        return {"tokens": tokens}

    # Each pass of `repeat` is another permutation. One shuffle is not enough: Grain's has four rounds, which
    # keep neighbours apart, and with some seeds leave half of a few hundred windows in place from one epoch
    # to the next; two with different seeds pass for a true permutation. Dividing among processes after
    # `batch`, not before `repeat`, keeps their epochs aligned where the windows do not divide evenly.
    order = grain.MapDataset.range(windows).seed(seed).shuffle().shuffle().repeat()
    batches = order.batch(global_batch_size, drop_remainder=True)
    # No threads and no workers: reading memory-mapped windows is faster than handing them over.
    return iter(batches.map(read_windows).to_iter_dataset(grain.ReadOptions(num_threads=0)))


def evaluation_batches(
    dataset: TokenDataset,
    sequence_length: int,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
    max_tokens: int | None = None,
) -> "EvaluationBatches":
    """Batches that predict every token of a split exactly once, in order.

    An end-of-text token is put before the split, so that its first token is predicted too. Rows and batches
    are padded with end-of-text tokens to static shapes, and the padding is masked; with several processes
    all yield the same number of batches.

    Args:
      sequence_length: T.
      batch_size: rows a batch of this process, `b`.
      max_tokens: predict only the first so many tokens.

    Returns:
      An iterable, as often as needed, with a length, of `{"tokens": int32 [b, T + 1], "mask": bool [b, T]}`;
      `mask[i, t]` says that the target `tokens[i, t + 1]` counts. The masks of all processes together sum to
      `EvaluationBatches.num_tokens`.

    Raises:
      ValueError: an argument is out of range.
    """
    _check_arguments(sequence_length, batch_size, process_index, process_count)
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    return EvaluationBatches(
        dataset=dataset,
        sequence_length=sequence_length,
        batch_size=batch_size,
        first_row=process_index * batch_size,
        global_batch_size=process_count * batch_size,
        num_tokens=dataset.num_tokens if max_tokens is None else min(max_tokens, dataset.num_tokens),
    )


@dataclasses.dataclass(frozen=True)
class EvaluationBatches:
    """What `evaluation_batches` returns. `num_tokens` is the number of targets over all processes."""

    dataset: TokenDataset
    sequence_length: int
    batch_size: int
    first_row: int
    global_batch_size: int
    num_tokens: int

    def __len__(self) -> int:
        """The number of batches, the same in every process."""
        windows = -(-self.num_tokens // self.sequence_length)
        return -(-windows // self.global_batch_size)

    def __iter__(self) -> Iterator[Batch]:
        length = self.sequence_length
        for index in range(len(self)):
            first_window = index * self.global_batch_size + self.first_row
            # Window w predicts tokens w·T to (w+1)·T and sees the one before them.
            starts = (first_window + np.arange(self.batch_size)) * length
            tokens = np.full((self.batch_size, length + 1), self.dataset.eot_id, np.int32)
            for row, start in zip(tokens, starts.tolist(), strict=True):
                stop = min(start + length, self.num_tokens)
                if start == 0:  # the token before the split is the eot that the row is filled with
                    row[1 : 1 + stop] = self.dataset.read(0, stop)
                elif start < stop:
                    row[: 1 + stop - start] = self.dataset.read(start - 1, stop)
            yield {"tokens": tokens, "mask": starts[:, None] + np.arange(length) < self.num_tokens}


def _check_arguments(sequence_length: int, batch_size: int, process_index: int, process_count: int) -> None:
    if sequence_length < 1 or batch_size < 1:
        raise ValueError(f"{sequence_length=} and {batch_size=} must be at least 1")
    if not 0 <= process_index < process_count:
        raise ValueError(f"{process_index=} must be in [0, {process_count=})")
