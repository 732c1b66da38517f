"""The files of a token dataset's shards: their records in metadata.json, and reading them by position.

Shards are read by position, not mapped: if a file is truncated while it is mapped, its readers die of SIGBUS; a
positioned read gives an error that says so. Only the name and size of a shard are held in memory.
"""

import dataclasses
import functools
import os
import tokenize
import weakref
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from heinsen.errors import HeinsenError, describe

METADATA_FILE = "metadata.json"
SOURCE_DTYPE = np.dtype("<u2")  # of the indices of sources


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype of a dataset's tokens on disk: uint16, or uint32 for more than 65,536 ids."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class DatasetError(HeinsenError, ValueError):
    """A token dataset that is missing, incomplete or damaged."""


class SourcesRecord(TypedDict):
    """The file of the sources of a shard's documents."""

    file: str
    names: list[str | None]
    sha256: str


class ShardRecord(TypedDict):
    """One shard. `sources` is absent where no document of the shard names its source.

    num_lost_bytes: bytes of the text that the tokens do not stand for; absent where there are none, and in datasets of
    earlier versions.
    """

    file: str
    num_tokens: int
    num_documents: int
    num_bytes: int
    num_lost_bytes: NotRequired[int]
    sha256: str
    sources: NotRequired[SourcesRecord]


def remedy_for(shard: Path) -> str:
    """Return how to replace a damaged shard, for messages."""
    return f"delete the folder {shard.parent} and rerun the command that prepared it"


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """One file of numbers, checked by `check_shard`. Its first number is `offset` bytes into it."""

    path: Path
    n_tokens: int
    dtype: np.dtype
    offset: int

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.offset + self.n_tokens * self.dtype.itemsize

    def read_into(self, tokens: np.ndarray, start: int) -> None:
        """Fill `tokens`, contiguous `[n]` of `dtype`, with those of the shard from `start` on. Raises DatasetError."""
        rest = tokens.data.cast("B")
        position = self.offset + start * self.dtype.itemsize
        try:
            file = _open(self)  # held until the end: another thread may evict it from the cache
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
            f"the access to it; if it is lost, {remedy_for(self.path)}. Then rerun the same command."
        )


class _Descriptor:
    """A file open for reading, closed with its last reference. Threads and forks may share it for positioned reads."""

    def __init__(self, path: Path):
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)


# One bound for all datasets, because the limit on descriptors is per process. A Shard equals only itself, so a file
# that replaces another is never read in its name.
@functools.lru_cache(maxsize=256)
def _open(shard: Shard) -> _Descriptor:
    descriptor = _Descriptor(shard.path)
    if (size := os.fstat(descriptor.number).st_size) != shard.size:
        raise shard._changed(f"it has {size} bytes instead of {shard.size}")
    return descriptor


def check_sources(folder: Path, record: ShardRecord) -> tuple[Shard, list[str | None]] | None:
    """Return the file with the sources of a shard's documents, and their names; None if there are no sources.

    Raises DatasetError if the file is not as the record says.
    """
    if "sources" not in record:
        return None
    sources = record["sources"]
    return check_shard(folder / sources["file"], record["num_documents"], SOURCE_DTYPE), list(sources["names"])


def check_shard(path: Path, n_tokens: int, expected: np.dtype) -> Shard:
    """Return the shard at `path`, whose header and size are checked. Raises DatasetError."""
    try:
        with path.open("rb") as file:
            if (version := np.lib.format.read_magic(file)) != (1, 0):
                raise ValueError(f"format version {version} of .npy")
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            offset, size = file.tell(), os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is listed in {METADATA_FILE} but missing: {remedy_for(path)}") from error
    except (ValueError, OSError, tokenize.TokenError) as error:  # no .npy header
        raise DatasetError(
            f"{path} cannot be read: {describe(error)}; the file is damaged: {remedy_for(path)}"
        ) from error
    shard = Shard(path, n_tokens, expected, offset)
    if dtype != expected:
        problem = f"dtype {dtype}, expected {expected.name}"
    elif shape != (n_tokens,):
        problem = f"shape {shape}, {METADATA_FILE} says ({n_tokens},)"
    elif size != shard.size:
        problem = f"{size} bytes instead of {shard.size}"
    else:
        return shard
    raise DatasetError(f"{path} has {problem}; the file is damaged: {remedy_for(path)}")
