"""The token dataset on disk: names, records, and the error of a damaged one.

    DIR/<split>/shard-00000.npy, shard-00001.npy, ...   1-D little-endian uint16
    DIR/<split>/metadata.json                           written last: its presence means "complete"

The shards are one stream of tokens, cut at document boundaries. Every document is followed by one end-of-text token.
`metadata.json` holds a `Metadata`.

The sources of a shard's documents (The Pile: `meta.pile_set_name`) are in `shard-00000.sources.npy`, 1-D little-endian
uint16: for each document the index of its source in the shard's `names`, where null means no source.

The format version changes when readers of the previous version would misread what is written. Additions that they may
ignore, such as sources, keep it: every dataset of version 1 stays readable, with or without sources.

A split prepared by several machines keeps its shards in one folder per part, `part-00000-of-00008/shard-00000.npy`.
Each part is a dataset with its own metadata.json, and the split's metadata.json lists the shards of all parts.
"""

import re
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from heinsen.errors import HeinsenError

FORMAT_VERSION = 1
METADATA_FILE = "metadata.json"
PROGRESS_FILE = "progress.jsonl"  # of an unfinished preparation
TOKEN_DTYPE = np.dtype("<u2")


class DatasetError(HeinsenError, ValueError):
    """A token dataset that is missing, incomplete or damaged."""


class SourcesRecord(TypedDict):
    """The file of the sources of a shard's documents."""

    file: str
    names: list[str | None]
    sha256: str


class ShardRecord(TypedDict):
    """One shard. `sources` is absent where no document of the shard names its source."""

    file: str
    num_tokens: int
    num_documents: int
    num_bytes: int
    sha256: str
    sources: NotRequired[SourcesRecord]


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
    num_skipped_documents: NotRequired[int]
    shards: list[ShardRecord]
    source: dict[str, Any]


def shard_name(index: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{index:05d}.npy"


def sources_name(index: int) -> str:
    """Return the name of the file with the sources of a shard's documents."""
    return f"shard-{index:05d}.sources.npy"


def part_name(index: int, count: int) -> str:
    """Return the name of the folder of one of `count` parts."""
    return f"part-{index:05d}-of-{count:05d}"


_PART = re.compile(r"part-(\d{5,})-of-(\d{5,})")


def is_part(folder: Path) -> bool:
    """Return whether the folder is named like a part of a split."""
    return _PART.fullmatch(folder.name) is not None


def find_parts(path: Path) -> dict[Path, tuple[int, int]]:
    """Return the folders of parts in a split's folder, sorted, each with its (index, count)."""
    matches = [(folder, _PART.fullmatch(folder.name)) for folder in sorted(path.glob("part-*-of-*"))]
    return {folder: (int(match[1]), int(match[2])) for folder, match in matches if match and folder.is_dir()}
