"""The documents of a token dataset: where each begins, its bytes and source, and batches that read each from its start.

A document is its tokens and the end-of-text token after them; tokens after the last end of text are one more. The token
before a document's first is an end of text, for the first document of a split too.

Axes: D documents, B lanes, W tokens of a window.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.loader import Batch
from heinsen.data.tokenizer import Tokenizer

_BLOCK = 1 << 22  # tokens read at a time
_SMALLEST_WINDOW = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """Document d is tokens `starts[d]` to `starts[d + 1]` of the dataset's stream.

    Attributes:
      starts: int64 [D + 1].
      num_bytes: float64 [D], UTF-8 bytes of each text.
      sources: int32 [D], each document's place in `names`; None where no document of the dataset names its source.
      names: of the sources; None of those documents that name none.
    """

    dataset: TokenDataset
    starts: np.ndarray
    num_bytes: np.ndarray
    sources: np.ndarray | None
    names: list[str | None]

    def __len__(self) -> int:
        return len(self.num_bytes)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each, the end of text included, int64 [D]."""
        return np.diff(self.starts)


def find_documents(dataset: TokenDataset, tokenizer: Tokenizer | None) -> Documents:
    """The documents of a split, by reading it once.

    Without a tokenizer, which tells the bytes of each token, a document has bytes in proportion to its tokens. Raises
    DatasetError where metadata.json says otherwise than the tokens.
    """
    sizes = None if tokenizer is None else tokenizer.sizes()
    ends, bytes_before, total = [], [], 0
    for start in range(0, dataset.num_tokens, _BLOCK):
        tokens = dataset.read(start, min(start + _BLOCK, dataset.num_tokens))
        found = np.flatnonzero(tokens == dataset.eot_id)
        ends.append(start + found + 1)
        if sizes is not None:
            in_all = total + np.cumsum(sizes[tokens])
            bytes_before.append(in_all[found])
            total = int(in_all[-1])
    ends = np.concatenate(ends)
    if unfinished := not len(ends) or ends[-1] < dataset.num_tokens:
        ends = np.append(ends, dataset.num_tokens)
    if sizes is None:
        num_bytes = np.diff(ends, prepend=0) * dataset.bytes_per_token
    else:
        if total != dataset.num_bytes:
            raise DatasetError(
                f"{dataset.path}: the tokens stand for {total} bytes, its metadata.json says {dataset.num_bytes}; "
                "delete the folder and prepare the split again"
            )
        bytes_before = np.concatenate([*bytes_before, *([[total]] if unfinished else [])])
        num_bytes = np.diff(bytes_before, prepend=0).astype(np.float64)
    names, sources = dataset.read_sources() if dataset.has_sources else ([None], None)
    if sources is not None and len(sources) != len(num_bytes):
        raise DatasetError(
            f"{dataset.path} has {len(num_bytes)} documents and the sources of {len(sources)}; delete the folder and "
            "prepare the split again"
        )
    return Documents(dataset, np.concatenate([[0], ends]), num_bytes, sources, names)


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentBatches:
    """Batches that predict every token of the documents once, each document from its start, whatever its length.

    Each lane (row) reads one document after the other, window by window. The longest come first, so that no lane is
    left alone with one at the end, and documents that fit into a window are beside others of nearly their length. A
    window has the least of `window_sizes` tokens that holds what is left of every lane's document, at most
    `max_window`.

    Iterating gives, as often as needed, for B = `lanes`,

        {"tokens": int32 [B, W + 1], "mask": bool [B, W], "begins": bool [B], "first": int64 [B]}

    `mask[i, t]`: the target `tokens[i, t + 1]` counts, and is token `first[i] + t` of the stream. `begins[i]`: the
    window is a document's first, else it goes on where the lane's last one ended. Lanes without a document mask all.
    """

    documents: Documents
    max_window: int
    lanes: int
    multiple: int = 1  # of the tokens of a window, as the mesh may want

    @property
    def num_tokens(self) -> int:
        return self.documents.dataset.num_tokens

    @property
    def window_sizes(self) -> list[int]:
        """Rising; each half of the next."""
        sizes = [self.max_window]
        while sizes[0] % (2 * self.multiple) == 0 and sizes[0] // 2 >= _SMALLEST_WINDOW:
            sizes.insert(0, sizes[0] // 2)
        return sizes

    def __iter__(self) -> Iterator[Batch]:
        dataset, starts, sizes = self.documents.dataset, self.documents.starts, self.window_sizes
        waiting = iter(np.argsort(-self.documents.lengths, kind="stable").tolist())
        position = np.zeros(self.lanes, np.int64)  # of the next token in the stream, and its document's end
        end = np.zeros(self.lanes, np.int64)
        while True:
            begins = np.zeros(self.lanes, bool)
            for lane in np.flatnonzero(position == end):
                if (document := next(waiting, None)) is not None:
                    position[lane], end[lane] = starts[document : document + 2]
                    begins[lane] = True
            left = end - position
            if not left.any():
                return
            size = next((size for size in sizes if size >= left.max()), sizes[-1])
            tokens = np.full((self.lanes, size + 1), dataset.eot_id, np.int32)
            count = np.minimum(left, size)
            for row, start, n, is_first in zip(tokens, position.tolist(), count.tolist(), begins, strict=True):
                if is_first:  # after an end of text, which the row is filled with
                    row[1 : 1 + n] = dataset.read(start, start + n)
                elif n:
                    row[: 1 + n] = dataset.read(start - 1, start + n)
            yield {
                "tokens": tokens,
                "mask": np.arange(size) < count[:, None],
                "begins": begins,
                "first": position.copy(),
            }
            position += count
