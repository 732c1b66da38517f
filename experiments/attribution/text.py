"""The text of the experiment in one file, so that a machine without the corpus can train: windows, and what repeats.

Axes: S seeds, W windows, N = T + 1 tokens of a window, D documents, G lengths of n-grams.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int

from heinsen.data.documents import find_documents
from heinsen.data.loader import EvaluationBatches, train_iterator
from heinsen.data.preparation import Settings, prepare
from heinsen.data.tokenizer import get_tokenizer
from heinsen.errors import InputError
from heinsen.files import atomic_writer
from scripts.corpus.duplicates import hash_n_grams

N_GRAMS = 4, 8, 16  # bytes, powers of two
RARE = 1  # at most as often in the training text of a run, on average
ROWS = 32  # windows of a batch of evaluation


def load(
    corpus: Path, out: Path, seeds: Sequence[int], length: int, batch_size: int, n_steps: int
) -> dict[str, np.ndarray]:
    """The arrays of OUT/text.npz, which is made if it is not there. Raises InputError if it is of other windows.

    It has train [S, n_steps, batch_size, N] in the order of each seed; validation and test [W, N] with their lengths
    [W], the targets of each window; and, of the test split, starts [D + 1], num_bytes [D], sources [D], names, and
    recalled [G, tokens]: whether a token ends an n-gram that its window has had before, and that training text hardly
    has.
    """
    file = out / "text.npz"
    if not file.exists():
        _prepare(file, corpus, out, seeds, length, batch_size, n_steps)
    with np.load(file) as loaded:
        arrays = {name: loaded[name] for name in loaded}
    wanted = len(seeds), n_steps, batch_size, length + 1
    if arrays["train"].shape != wanted:
        raise InputError(
            f"{file} has training windows {arrays['train'].shape} where this reads {wanted}: give another --out"
        )
    return arrays


def _prepare(
    file: Path, corpus: Path, out: Path, seeds: Sequence[int], length: int, batch_size: int, n_steps: int
) -> None:
    if not any(corpus.glob("train-*")):
        raise InputError(
            f"--corpus={corpus} has no train-*.jsonl.zst: build it with `python scripts/build_corpus.py --out=CORPUS`"
        )
    files = {"train": "train-*", "validation": "validation", "test": "test"}
    sources = {split: (str(corpus.absolute() / f"{name}.jsonl.zst"),) for split, name in files.items()}
    splits = {split: prepare(Settings(source, split, "bytes"), out / "data") for split, source in sources.items()}
    read = lambda seed: train_iterator(splits["train"], length, batch_size, seed)
    train = np.stack([[next(batches)["tokens"] for _ in range(n_steps)] for batches in map(read, seeds)])
    arrays = {"train": train.astype(np.uint16)}
    for split in ("validation", "test"):
        batches = list(EvaluationBatches(splits[split], length, ROWS))
        arrays[split] = np.concatenate([each["tokens"] for each in batches]).astype(np.uint16)
        arrays[f"{split}_lengths"] = np.concatenate([each["mask"].sum(1) for each in batches])
    documents = find_documents(splits["test"], get_tokenizer("bytes", out / "data" / "test"))
    arrays |= dict(starts=documents.starts, num_bytes=documents.n_bytes, sources=documents.sources)
    arrays |= dict(names=np.array([str(name) for name in documents.names]))
    most = RARE * len(seeds)
    recalled = [find_recalled(arrays["test"], arrays["test_lengths"], train, n, most) for n in N_GRAMS]
    with atomic_writer(file) as out_file:
        np.savez_compressed(out_file, **arrays, recalled=np.stack(recalled))


def training_batches(
    found: Mapping[str, np.ndarray], seeds: Sequence[int]
) -> Callable[[int], Int[np.ndarray, "L B N"]]:
    """The function of a step that returns its windows of each seed."""
    return lambda step: found["train"][list(seeds), step].astype(np.int32)


def sum_by_document(
    losses: Float[np.ndarray, "L tokens"], places: Int[np.ndarray, " tokens"], starts: Int[np.ndarray, " D+1"]
) -> Float[np.ndarray, "L D"]:
    """Sums over each document. places: of the tokens in the split."""
    document = np.searchsorted(starts, places, side="right") - 1
    return np.stack([np.bincount(document, each, len(starts) - 1) for each in losses.astype(np.float64)])


def find_recalled(
    windows: Int[np.ndarray, "W N"], lengths: Int[np.ndarray, " W"], train: np.ndarray, n: int, most: int
) -> Bool[np.ndarray, " tokens"]:
    """Whether each target ends an n-gram that its window has before, and that training has at most `most` times."""
    own = hash_n_grams(windows, n)  # [W, N - n + 1]
    repeats = np.zeros(windows.shape, bool)
    for row, hashes in zip(repeats, own, strict=True):
        _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
        row[n - 1 :] = first[which] < np.arange(len(hashes))
    known = np.unique(own)
    counts = np.zeros(len(known), np.int64)
    for rows in train.reshape(-1, *train.shape[-2:]):
        hashes = hash_n_grams(rows, n).reshape(-1)
        at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        np.add.at(counts, at[known[at] == hashes], 1)
    rare = np.zeros(windows.shape, bool)
    rare[:, n - 1 :] = counts[np.searchsorted(known, own)] <= most
    is_target = np.arange(windows.shape[1] - 1) < lengths[:, None]
    return (repeats & rare)[:, 1:][is_target]
