"""The token dataset on disk, and its reader.

    DIR/<split>/shard-00000.npy, shard-00001.npy, ...   1-D little-endian uint16
    DIR/<split>/metadata.json                           written last: its presence means "complete"

The shards are one stream of tokens, cut at document boundaries; every document is followed by one
end-of-text token. `metadata.json` holds

    format_version, tokenizer, vocab_size, eot_id, dtype
    num_tokens      tokens in all shards, end-of-text tokens included
    num_documents
    num_bytes       UTF-8 bytes of the documents' texts, end-of-text tokens not counted (for bits per byte)
    shards          a list of {file, num_tokens, num_documents, num_bytes, sha256 (of the file)}; with
                    sources: {file, names, sha256} where a document of the shard names its source
    source          where the documents came from, and the settings that chose them

The sources of a shard's documents (The Pile: `meta.pile_set_name`) are in `shard-00000.sources.npy`, 1-D little-endian
uint16, one number a document: its place in the shard's `names`, where null stands for documents that name none.

The format version rises when readers of the version before would misread what is written. What they may ignore, as the
sources, is added without: every dataset of version 1 stays readable, with sources and without.

A split that several machines prepared keeps its shards in one folder a part, `part-00000-of-00008/shard-00000.npy`;
each part is a dataset with a metadata.json of its own, and the split's lists the shards of all.

Shards are read by position, not mapped: a file that is cut while it is mapped kills its readers by SIGBUS, one that is
read gives an error that says so. Nothing is held of a shard but its name and size.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import tokenize
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from heinsen.errors import HeinsenError

FORMAT_VERSION = 1
METADATA_FILE = "metadata.json"
PROGRESS_FILE = "progress.jsonl"  # of an unfinished preparation
TOKEN_DTYPE = np.dtype("<u2")


class DatasetError(HeinsenError, ValueError):
    """A token dataset that is missing, incomplete or damaged."""


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.npy"


def sources_name(index: int) -> str:
    """The file of the sources of a shard's documents."""
    return f"shard-{index:05d}.sources.npy"


def part_name(index: int, count: int) -> str:
    """The folder of one of `count` parts that were prepared apart."""
    return f"part-{index:05d}-of-{count:05d}"


_PART = re.compile(r"part-(\d{5,})-of-(\d{5,})")


def find_parts(path: Path) -> dict[Path, tuple[int, int]]:
    """The folders of parts in a split's folder, sorted, each with its (index, count)."""
    matches = [(folder, _PART.fullmatch(folder.name)) for folder in sorted(path.glob("part-*-of-*"))]
    return {folder: (int(match[1]), int(match[2])) for folder, match in matches if match and folder.is_dir()}


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class TokenDataset:
    """One split of a token dataset.

    Opening it checks every shard's header and size; `verify` reads every byte. Pickling it pickles its path: it is
    opened, and checked, anew.

    Args:
      path: the folder of the split, `DIR/<split>`.
      may_be_empty: take a split without tokens, as a part of a split may be.

    Attributes:
      path, metadata (the contents of metadata.json), num_tokens, num_documents, num_bytes, vocab_size,
      eot_id, tokenizer_name, has_sources (whether any document names its source).

    Raises:
      DatasetError: the folder is missing, incomplete, damaged, empty or of another format version.
    """

    def __init__(self, path: str | Path, *, may_be_empty: bool = False):
        self.path = Path(path)
        self.metadata = _read_metadata(self.path)
        try:
            self.num_tokens: int = self.metadata["num_tokens"]
            self.num_documents: int = self.metadata["num_documents"]
            self.num_bytes: int = self.metadata["num_bytes"]
            self.vocab_size: int = self.metadata["vocab_size"]
            self.eot_id: int = self.metadata["eot_id"]
            self.tokenizer_name: str = self.metadata["tokenizer"]
            if self.metadata["dtype"] != TOKEN_DTYPE.name:
                raise DatasetError(
                    f"{self.path / METADATA_FILE}: dtype must be {TOKEN_DTYPE.name}, not {self.metadata['dtype']!r}"
                )
            shards = self.metadata["shards"]
            self._shards = [check_shard(self.path / s["file"], s["num_tokens"]) for s in shards]
            self._sources = [check_sources(self.path, s) for s in shards]
            self._sha256 = {file["file"]: file["sha256"] for s in shards for file in (s, s.get("sources")) if file}
            self.has_sources: bool = any("sources" in s for s in shards)
        except (KeyError, TypeError) as error:
            raise _damaged_metadata(self.path / METADATA_FILE, error) from error
        # _offsets[i] is the position of shard i's first token in the stream; one more for its end.
        self._offsets = [0, *itertools.accumulate(shard.num_tokens for shard in self._shards)]
        if self._offsets[-1] != self.num_tokens:
            raise DatasetError(
                f"{self.path}: the shards hold {self._offsets[-1]} tokens, {METADATA_FILE} says {self.num_tokens}"
            )
        if self.num_tokens == 0 and not may_be_empty:
            raise DatasetError(f"{self.path} holds no tokens")

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text for each token, end-of-text tokens included."""
        return self.num_bytes / self.num_tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` (excluded) of the stream, a new uint16 array `[stop - start]`.

        Raises IndexError outside `0 <= start <= stop <= num_tokens`, and DatasetError for a shard that can no longer
        be read whole.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of a split that holds {self.num_tokens}")
        tokens = np.empty(stop - start, TOKEN_DTYPE)
        index = bisect.bisect_right(self._offsets, start) - 1
        position = start
        while position < stop:
            offset, end = self._offsets[index], min(stop, self._offsets[index + 1])
            if end > position:
                self._shards[index].read_into(tokens[position - start : end - start], position - offset)
            position, index = end, index + 1
        return tokens.astype(np.uint16, copy=False)  # copies on a big-endian machine only

    def read_sources(self) -> tuple[list[str | None], np.ndarray]:
        """(names, the place in them of every document's source, int32 `[num_documents]`), in order of appearance.

        None is the name of documents that name no source. Raises DatasetError for a file that can no longer be read
        whole, or holds numbers without a name.
        """
        places: dict[str | None, int] = {}
        pieces = [np.empty(0, np.int32)]
        for record, sources in zip(self.metadata["shards"], self._sources, strict=True):
            shard, names = sources or (None, [None])
            indices = np.zeros(num_documents := record["num_documents"], TOKEN_DTYPE)
            if shard is not None:
                shard.read_into(indices, 0)
                if num_documents and indices.max() >= len(names):
                    raise DatasetError(
                        f"{shard.path} holds the number {indices.max()} of a source, and there are {len(names)} names; "
                        f"the file is damaged: {_remedy(shard.path)}"
                    )
            own = np.array([places.setdefault(name, len(places)) for name in names], np.int32)
            pieces.append(own[indices])
        return list(places), np.concatenate(pieces)

    def verify(self) -> None:
        """Reads every shard whole and compares its SHA-256; raises DatasetError naming the damaged ones."""
        damaged = [name for name, sha256 in self._sha256.items() if not _is_intact(self.path / name, sha256)]
        if damaged:
            remedies = dict.fromkeys(_remedy(self.path / name) for name in damaged)
            raise DatasetError(
                f"{self.path}: SHA-256 differs from {METADATA_FILE} for {', '.join(damaged)}; {'; '.join(remedies)}"
            )

    def __reduce__(self):
        return TokenDataset, (self.path,)


def unigram_entropy(dataset: TokenDataset) -> float:
    """Entropy of the split's token frequencies, in nats a token: the loss of the best context-free model."""
    counts = np.zeros(dataset.vocab_size, np.int64)
    block = 1 << 22  # bincount makes int64 of its input: eight bytes a token
    for start in range(0, dataset.num_tokens, block):
        tokens = dataset.read(start, min(start + block, dataset.num_tokens))
        counts += np.bincount(tokens, minlength=dataset.vocab_size)
    p = counts[counts > 0] / dataset.num_tokens
    return float(-np.sum(p * np.log(p)))


def _read_metadata(path: Path) -> dict[str, Any]:
    command = f"python scripts/prepare_data.py --source=SOURCE --out={path.parent} --split={path.name}"
    metadata_path = path / METADATA_FILE
    if not path.is_dir():
        raise DatasetError(f"no token dataset at {path}; make one with `{command} --tokenizer=TOKENIZER`")
    if not metadata_path.is_file():
        if parts := find_parts(path):
            finished = sum((part / METADATA_FILE).is_file() for part in parts)
            count = max(count for _, count in parts.values())
            raise DatasetError(
                f"{path} is not a complete token dataset: it has no {METADATA_FILE}, and {finished} of {count} parts "
                "are finished. Wait for the others, or give their commands again; the last one joins all. If all are "
                "finished, give that of any part again."
            )
        raise DatasetError(
            f"{path} is not a complete token dataset: it has no {METADATA_FILE}. If its preparation was "
            f"interrupted, give the same command again (`{command} ...`) and it goes on where it stopped; if "
            "it is still running, wait for it."
        )
    try:
        metadata = json.loads(metadata_path.read_text(encoding="utf-8"))
        version = metadata["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged_metadata(metadata_path, error) from error
    if version != FORMAT_VERSION:
        raise DatasetError(
            f"{metadata_path} has format version {version!r}, this code reads {FORMAT_VERSION}; prepare the split again"
        )
    return metadata


def _damaged_metadata(path: Path, error: Exception) -> DatasetError:
    joined = bool(find_parts(path.parent))
    remedy = "the file and prepare any part" if joined else "the folder and prepare the split"
    return DatasetError(f"{path} is damaged ({error!r}); delete {remedy} again")


def _remedy(shard: Path) -> str:
    """What to do about a damaged shard."""
    folder = shard.parent
    if not _PART.fullmatch(folder.name):
        return "delete the folder and prepare the split again"
    return f"delete {folder} and {folder.parent / METADATA_FILE} and prepare that part again"


def _is_intact(path: Path, sha256: str) -> bool:
    try:
        return file_sha256(path) == sha256
    except OSError:
        return False


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """One file of tokens, found whole by `check_shard`; its first token lies `offset` bytes into it."""

    path: Path
    num_tokens: int
    offset: int

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.offset + self.num_tokens * TOKEN_DTYPE.itemsize

    def read_into(self, tokens: np.ndarray, start: int) -> None:
        """Fills `tokens`, contiguous TOKEN_DTYPE `[n]`, with the shard's from `start` on. Raises DatasetError."""
        rest = memoryview(tokens).cast("B")
        position = self.offset + start * TOKEN_DTYPE.itemsize
        try:
            file = _open(self)  # held until the end: another thread may push it out of the cache
            while rest:
                count = os.preadv(file.number, [rest], position)
                if count == 0:
                    raise self._changed(f"it ends at byte {os.fstat(file.number).st_size}, not {self.size}")
                rest, position = rest[count:], position + count
        except OSError as error:
            raise self._changed(f"{error.strerror or error}") from error

    def _changed(self, what: str) -> DatasetError:
        return DatasetError(
            f"{self.path} was whole when the dataset was opened and cannot be read now: {what}. Restore the file, or "
            f"the access to it; if it is lost, {_remedy(self.path)}. Then give the same command again."
        )


class _Descriptor:
    """A file open for reading, until nobody refers to it; positioned reads may share it between threads and forks."""

    def __init__(self, path: Path):
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)


# One bound for all datasets of the process, as the limit on descriptors is the process's; a Shard is equal to none but
# itself, so that a file put in another's place is never read for it.
@functools.lru_cache(maxsize=256)
def _open(shard: Shard) -> _Descriptor:
    descriptor = _Descriptor(shard.path)
    if (size := os.fstat(descriptor.number).st_size) != shard.size:
        raise shard._changed(f"it has {size} bytes instead of {shard.size}")
    return descriptor


def check_sources(folder: Path, record: dict[str, Any]) -> tuple[Shard, list[str | None]] | None:
    """The sources of a shard's documents by its record in metadata.json, and their names; None if it has none."""
    if "sources" not in record:
        return None
    sources = record["sources"]
    return check_shard(folder / sources["file"], record["num_documents"]), list(sources["names"])


def check_shard(path: Path, num_tokens: int) -> Shard:
    """The shard of `num_tokens` tokens at `path`; the checks read no more than its header. Raises DatasetError."""
    try:
        with path.open("rb") as file:
            if (version := np.lib.format.read_magic(file)) != (1, 0):
                raise ValueError(f"format version {version} of .npy")
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            offset, size = file.tell(), os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is listed in {METADATA_FILE} but missing: {_remedy(path)}") from error
    except (ValueError, OSError, tokenize.TokenError) as error:  # no .npy header
        raise DatasetError(f"{path} cannot be read: {error}; the file is damaged: {_remedy(path)}") from error
    shard = Shard(path, num_tokens, offset)
    if dtype != TOKEN_DTYPE:
        problem = f"dtype {dtype}, expected {TOKEN_DTYPE.name}"
    elif shape != (num_tokens,):
        problem = f"shape {shape}, {METADATA_FILE} says ({num_tokens},)"
    elif size != shard.size:
        problem = f"{size} bytes instead of {shard.size}"
    else:
        return shard
    raise DatasetError(f"{path} has {problem}; the file is damaged: {_remedy(path)}")
