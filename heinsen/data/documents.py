"""The documents of a token dataset: their positions, bytes and sources, and batches that read each from its start.

A document is its tokens and the end-of-text token after them. Tokens after the last end of text form one more document.
Every document is preceded by an end of text; the first document of a split is treated as if it were.

Axes: D documents, B lanes, W tokens of a window.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float64, Int32, Int64

from heinsen.data.dataset import TokenDataset
from heinsen.data.loader import Batch
from heinsen.data.shards import DatasetError
from heinsen.data.tokenizer import Tokenizer

_BLOCK = 1 << 22  # tokens read at a time
_SMALLEST_WINDOW = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """Document d is tokens `starts[d]` to `starts[d + 1]` of the dataset's stream.

    Attributes:
      starts: positions in the stream; the last one is the end of the stream.
      n_bytes: UTF-8 bytes of each text.
      sources: index into `names` for each document; None if no document of the dataset names its source.
      names: names of the sources; the name None stands for documents without a source.
    """

    dataset: TokenDataset
    starts: Int64[np.ndarray, " D_plus_1"]
    n_bytes: Float64[np.ndarray, " D"]
    sources: Int32[np.ndarray, " D"] | None
    names: list[str | None]

    def __len__(self) -> int:
        return len(self.n_bytes)

    @property
    def lengths(self) -> Int64[np.ndarray, " D"]:
        """Tokens of each document, the end of text included."""
        return np.diff(self.starts)


def find_documents(dataset: TokenDataset, tokenizer: Tokenizer | None) -> Documents:
    """Find the documents of a split by reading it once.

    The tokenizer gives the bytes of each token. Without it, the bytes of a document are in proportion to its tokens. If
    it loses characters, the bytes of all documents are scaled to the dataset's.

    Raises:
      DatasetError: metadata.json and the tokens disagree.
    """
    ends, bytes_before = _scan(dataset, None if tokenizer is None else tokenizer.sizes())
    if tokenizer is not None and tokenizer.is_lossless and bytes_before is not None:
        if bytes_before[-1] != dataset.n_bytes:
            raise DatasetError(
                f"{dataset.path}: the tokens stand for {bytes_before[-1]} bytes, but metadata.json says "
                f"{dataset.n_bytes}; delete the folder and prepare the split again"
            )
    if bytes_before is None or not bytes_before[-1]:
        n_bytes = np.diff(ends, prepend=0) * dataset.bytes_per_token
    else:
        n_bytes = np.diff(bytes_before, prepend=0) * (dataset.n_bytes / bytes_before[-1])
    names: list[str | None] = [None]
    sources = None
    if dataset.has_sources:
        names, sources = dataset.read_sources()
        if len(sources) != len(n_bytes):
            raise DatasetError(
                f"{dataset.path} has {len(n_bytes)} documents but the sources of {len(sources)}; delete the folder "
                "and prepare the split again"
            )
    return Documents(dataset, np.concatenate([[0], ends]), n_bytes, sources, names)


def _scan(dataset: TokenDataset, sizes: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return where each document ends, and the bytes of text up to there if the bytes of each token are given."""
    ends, bytes_before, total = [], [], 0
    for start in range(0, dataset.n_tokens, _BLOCK):
        tokens = dataset.read(start, min(start + _BLOCK, dataset.n_tokens))
        eots = np.flatnonzero(tokens == dataset.eot_id)
        ends.append(start + eots + 1)
        if sizes is not None:
            up_to = total + np.cumsum(sizes[tokens])
            bytes_before.append(up_to[eots])
            total = int(up_to[-1])
    if not len(ends[-1]) or ends[-1][-1] < dataset.n_tokens:  # tokens after the last end of text
        ends.append(np.array([dataset.n_tokens]))
        bytes_before.append(np.array([total]))
    return np.concatenate(ends), None if sizes is None else np.concatenate(bytes_before)


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentBatches:
    """Batches that predict every token of the documents once, each document from its start, whatever its length.

    Each lane (row) reads one document after another, window by window. The longest documents come first, so that no
    lane is left alone with a long one at the end, and documents that fit into one window are beside others of nearly
    their length. A window has the smallest of `window_sizes` that holds the rest of every lane's document, at most
    `max_window`.

    Iterating, as often as needed, yields for B = `lanes`

        {"tokens": int32 [B, W + 1], "mask": bool [B, W], "begins": bool [B], "first": int64 [B]}

    `mask[i, t]`: the target `tokens[i, t + 1]` counts, and is token `first[i] + t` of the stream. `begins[i]`: the
    window is the first of a document; otherwise it continues the lane's previous window. A lane without a document is
    masked entirely.
    """

    documents: Documents
    max_window: int
    lanes: int
    multiple: int = 1  # of the tokens of a window, as a mesh may require

    @property
    def n_tokens(self) -> int:
        return self.documents.dataset.n_tokens

    @property
    def window_sizes(self) -> list[int]:
        """Sizes in increasing order, each half of the next."""
        sizes = [self.max_window]
        while sizes[0] % (2 * self.multiple) == 0 and sizes[0] // 2 >= _SMALLEST_WINDOW:
            sizes.insert(0, sizes[0] // 2)
        return sizes

    def __iter__(self) -> Iterator[Batch]:
        dataset, starts, sizes = self.documents.dataset, self.documents.starts, self.window_sizes
        waiting = iter(np.argsort(-self.documents.lengths, kind="stable").tolist())
        position = np.zeros(self.lanes, np.int64)  # of each lane's next token in the stream
        end = np.zeros(self.lanes, np.int64)  # of each lane's document
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
                if is_first:  # preceded by an end of text, which the row is filled with
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
