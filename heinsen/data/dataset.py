"""Token datasets: what is on disk, and the reader.

    DIR/<split>/shard-00000.npy, shard-00001.npy, ...   1-D little-endian, `token_dtype`
    DIR/<split>/tokenizer.json                          of a tokenizer that is a file
    DIR/<split>/metadata.json                           written last: its presence means "complete"

The shards are one stream of tokens, cut at document boundaries. Every document is followed by one end-of-text token.
`metadata.json` holds a `Metadata`, and a digest of it (`heinsen.files.seal`).

The sources of a shard's documents (The Pile: `meta.pile_set_name`) are in `shard-00000.sources.npy`, 1-D little-endian
uint16: for each document the index of its source in the shard's `names`, where null means no source.
"""

import bisect
import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np
from jaxtyping import Int32, UInt

from heinsen.data.shards import (
    METADATA_FILE,
    SOURCE_DTYPE,
    DatasetError,
    ShardRecord,
    check_shard,
    check_sources,
    remedy_for,
    token_dtype,
)
from heinsen.data.tokenizer import TOKENIZERS, TokenizerFilesError, read_tokenizer_file
from heinsen.files import file_sha256, unseal

FORMAT_VERSION = 1


class Metadata(TypedDict):
    """The contents of metadata.json.

    Attributes:
      num_tokens: tokens in all shards, end-of-text tokens included.
      num_bytes: UTF-8 bytes of the documents' texts, without end-of-text tokens (for bits per byte).
      num_skipped_documents: bad documents that were left out.
      source: the inputs and the settings of the preparation.
    """

    format_version: int
    tokenizer: str
    vocab_size: int
    eot_id: int
    dtype: str
    num_tokens: int
    num_documents: int
    num_bytes: int
    num_skipped_documents: int
    shards: list[ShardRecord]
    source: dict[str, Any]


class Totals(NamedTuple):
    """Sums over shards."""

    n_tokens: int
    n_documents: int
    n_bytes: int


def sum_shards(shards: Sequence[ShardRecord]) -> Totals:
    """Return the totals that metadata.json holds."""
    return Totals(
        sum(shard["num_tokens"] for shard in shards),
        sum(shard["num_documents"] for shard in shards),
        sum(shard["num_bytes"] for shard in shards),
    )


def read_metadata(path: Path) -> Metadata:
    """Read a metadata.json whose contents agree with its digest and with each other.

    Raises ValueError, which says what is wrong, and OSError.
    """
    try:
        metadata = cast(Metadata, unseal(json.loads(path.read_bytes())))
        if (version := metadata["format_version"]) != FORMAT_VERSION:
            raise ValueError(f"format version {version!r}, this code reads {FORMAT_VERSION}")
        totals = Totals(metadata["num_tokens"], metadata["num_documents"], metadata["num_bytes"])
        if totals != (found := sum_shards(metadata["shards"])):
            raise ValueError(f"its totals are {totals}, those of its shards {found}")
        sizes = metadata["vocab_size"], metadata["eot_id"]
        if not 0 <= sizes[1] < sizes[0] <= np.iinfo(np.int32).max:
            raise ValueError(f"vocab_size is {sizes[0]} and eot_id {sizes[1]}")
        if metadata["dtype"] != (expected := token_dtype(sizes[0]).name):
            raise ValueError(f"dtype is {metadata['dtype']!r}, not {expected}")
        tokenizer = TOKENIZERS.get(metadata["tokenizer"])  # None: one that this version does not know
        if tokenizer is not None and sizes != (tokenizer.vocab_size, tokenizer.eot_id):
            raise ValueError(
                f"vocab_size is {sizes[0]} and eot_id {sizes[1]}, but those of tokenizer {tokenizer.name!r} are "
                f"{tokenizer.vocab_size} and {tokenizer.eot_id}"
            )
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(repr(error)) from error
    return metadata


class TokenDataset:
    """One split of a token dataset.

    Opening it checks every shard's header and size; `verify` reads every byte. Pickling it pickles its path, and
    unpickling opens and checks it again.

    Args:
      path: the folder of the split, `DIR/<split>`.

    Attributes:
      path: the folder.
      metadata: the contents of metadata.json.
      n_tokens, n_documents, n_bytes, vocab_size, eot_id, tokenizer_name: from the metadata.
      has_sources: whether any document names its source.
      n_lost_bytes: bytes of the text that the tokens do not stand for.

    Raises:
      DatasetError: the folder is missing, incomplete, damaged, empty or has another format version.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metadata = _read_metadata(self.path)
        try:
            read_tokenizer_file(self.metadata["tokenizer"], self.path)
        except TokenizerFilesError as error:
            raise DatasetError(str(error)) from error
        self.n_tokens = self.metadata["num_tokens"]
        self.n_documents = self.metadata["num_documents"]
        self.n_bytes = self.metadata["num_bytes"]
        self.vocab_size = self.metadata["vocab_size"]
        self.eot_id = self.metadata["eot_id"]
        self.tokenizer_name = self.metadata["tokenizer"]
        self._dtype = token_dtype(self.vocab_size)
        shards = self.metadata["shards"]
        # Of all shards' tokens, wherever the folder lies.
        self.digest = hashlib.sha256("".join(shard["sha256"] for shard in shards).encode()).hexdigest()[:16]
        self._shards = [check_shard(self.path / s["file"], s["num_tokens"], self._dtype) for s in shards]
        self._sources = [check_sources(self.path, s) for s in shards]
        self._sha256 = {s["file"]: s["sha256"] for s in shards}
        self._sha256 |= {s["sources"]["file"]: s["sources"]["sha256"] for s in shards if "sources" in s}
        self.has_sources = any("sources" in s for s in shards)
        self.n_lost_bytes = sum(s.get("num_lost_bytes", 0) for s in shards)
        # _offsets[i] is the position of shard i's first token in the stream; the last entry is the stream's end.
        self._offsets = [0, *itertools.accumulate(shard.n_tokens for shard in self._shards)]
        if self.n_bytes == 0:
            raise DatasetError(f"{self.path} holds no text in {self.n_documents:,} documents; prepare other sources")

    def __len__(self) -> int:
        return self.n_tokens

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token, end-of-text tokens included in the count of tokens."""
        return self.n_bytes / self.n_tokens

    def read(self, start: int, stop: int) -> UInt[np.ndarray, " tokens"]:
        """Return tokens `start` to `stop` (excluded) of the stream as a new array.

        Raises IndexError unless `0 <= start <= stop <= n_tokens`, and DatasetError if a shard can no longer be read
        whole, or holds a token id outside the vocabulary.
        """
        if not 0 <= start <= stop <= self.n_tokens:
            raise IndexError(f"cannot read tokens {start} to {stop} of a split with {self.n_tokens} tokens")
        tokens = np.empty(stop - start, self._dtype)
        index = bisect.bisect_right(self._offsets, start) - 1
        position = start
        while position < stop:
            offset, end = self._offsets[index], min(stop, self._offsets[index + 1])
            if end > position:
                self._shards[index].read_into(tokens[position - start : end - start], position - offset)
            position, index = end, index + 1
        self._check_ids(tokens, start)
        return tokens.astype(self._dtype.newbyteorder("="), copy=False)  # copies on a big-endian machine only

    def _check_ids(self, tokens: np.ndarray, start: int) -> None:
        """Raise DatasetError if one of the tokens, which are those from `start` on, is not in the vocabulary."""
        if not tokens.size or int(tokens.max()) < self.vocab_size:
            return
        first = int(np.argmax(tokens >= self.vocab_size))
        index = bisect.bisect_right(self._offsets, start + first) - 1
        shard, number = self._shards[index], start + first - self._offsets[index]
        raise DatasetError(
            f"{shard.path} is damaged: token {number} (byte {shard.offset + number * self._dtype.itemsize} of the "
            f"file) is {tokens[first]}, and the vocabulary has {self.vocab_size} ids. `python scripts/prepare_data.py "
            f"--verify --out={self.path.parent} --split={self.path.name}` lists all damaged files; then "
            f"{remedy_for(shard.path)}"
        )

    def read_sources(self) -> tuple[list[str | None], Int32[np.ndarray, " documents"]]:
        """Return the names of the sources by first appearance, and each document's index into them.

        The name None stands for documents without a source. Raises DatasetError if a file can no longer be read whole,
        or holds an index without a name.
        """
        indices_of: dict[str | None, int] = {}
        pieces = [np.empty(0, np.int32)]
        for record, sources in zip(self.metadata["shards"], self._sources, strict=True):
            indices = np.zeros(record["num_documents"], SOURCE_DTYPE)
            names: list[str | None] = [None]
            if sources is not None:
                shard, names = sources
                shard.read_into(indices, 0)
                if len(indices) and indices.max() >= len(names):
                    raise DatasetError(
                        f"{shard.path} holds index {indices.max()} of a source, but there are {len(names)} names; "
                        f"the file is damaged: {remedy_for(shard.path)}"
                    )
            own = np.array([indices_of.setdefault(name, len(indices_of)) for name in names], np.int32)
            pieces.append(own[indices])
        return list(indices_of), np.concatenate(pieces)

    def verify(self) -> None:
        """Read every file whole and compare its SHA-256. Raises DatasetError naming the damaged ones."""
        damaged = [name for name, sha256 in self._sha256.items() if not _is_intact(self.path / name, sha256)]
        if damaged:
            remedies = dict.fromkeys(remedy_for(self.path / name) for name in damaged)
            raise DatasetError(
                f"{self.path}: SHA-256 differs from {METADATA_FILE} for {', '.join(damaged)}; {'; '.join(remedies)}"
            )

    def __reduce__(self) -> tuple[type["TokenDataset"], tuple[Path]]:
        return TokenDataset, (self.path,)


def _read_metadata(path: Path) -> Metadata:
    command = f"python scripts/prepare_data.py --source=SOURCE --out={path.parent} --split={path.name}"
    metadata_path = path / METADATA_FILE
    if not path.is_dir():
        others = sorted(other.parent.name for other in path.parent.glob(f"*/{METADATA_FILE}"))
        there = f" ({path.parent} has {', '.join(others)})" if others else ""
        raise DatasetError(f"no token dataset at {path}{there}; make one with `{command} --tokenizer=TOKENIZER`")
    if not metadata_path.is_file():
        raise DatasetError(
            f"{path} is not a complete token dataset: it has no {METADATA_FILE}. If its preparation was interrupted, "
            f"rerun the same command to resume (`{command} ...`); if it is still running, wait for it."
        )
    try:
        return read_metadata(metadata_path)
    except ValueError as error:
        raise DatasetError(
            f"{metadata_path} is damaged ({error}); restore it, or delete the folder and prepare the split again"
        ) from error


def _is_intact(path: Path, sha256: str) -> bool:
    try:
        return file_sha256(path) == sha256
    except OSError:
        return False
