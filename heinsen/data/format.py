"""The token dataset on disk: names, records, and the error of a damaged one.

    DIR/<split>/shard-00000.npy, shard-00001.npy, ...   1-D little-endian uint16
    DIR/<split>/metadata.json                           written last: its presence means "complete"

The shards are one stream of tokens, cut at document boundaries. Every document is followed by one end-of-text token.
`metadata.json` holds a `Metadata`, and a digest of it (`heinsen.files.seal`); earlier versions wrote no digest.

The sources of a shard's documents (The Pile: `meta.pile_set_name`) are in `shard-00000.sources.npy`, 1-D little-endian
uint16: for each document the index of its source in the shard's `names`, where null means no source.

The format version changes when readers of the previous version would misread what is written. Additions that they may
ignore, such as sources, keep it: every dataset of version 1 stays readable, with or without sources.

A split prepared by several machines keeps its shards in one folder per part, `part-00000-of-00008/shard-00000.npy`.
Each part is a dataset with its own metadata.json, and the split's metadata.json lists the shards of all parts.
"""

import json
import re
import reprlib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

import numpy as np

from heinsen.data.tokenizer import TOKENIZERS
from heinsen.errors import HeinsenError
from heinsen.files import unseal

FORMAT_VERSION = 1
METADATA_FILE = "metadata.json"
PROGRESS_FILE, LOCK_FILE = "progress.jsonl", "prepare.lock"  # of an unfinished preparation
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


class Totals(NamedTuple):
    """Sums over shards."""

    num_tokens: int
    num_documents: int
    num_bytes: int


def sum_shards(shards: Sequence[ShardRecord]) -> Totals:
    """Return the totals that metadata.json holds."""
    return Totals(
        sum(shard["num_tokens"] for shard in shards),
        sum(shard["num_documents"] for shard in shards),
        sum(shard["num_bytes"] for shard in shards),
    )


def read_metadata(path: Path) -> Metadata:
    """Read a metadata.json, with all its records well-formed, in agreement with each other and with its digest.

    Metadata of another format version are returned as they are. Raises ValueError, which says what is wrong, and
    OSError.
    """
    try:
        metadata = unseal(json.loads(path.read_bytes()))
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if "format_version" not in metadata or metadata["format_version"] == FORMAT_VERSION:
        check_record(metadata, Metadata, "")
        _check_consistency(cast(Metadata, metadata))
    return cast(Metadata, metadata)


def check_record(value: Any, wanted: Any, where: str) -> None:
    """Raise ValueError unless a JSON value is of the type that a TypedDict declares, and no number in it is negative.

    Args:
      where: the name of the value in messages.
    """
    if typing.is_typeddict(wanted):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {reprlib.repr(value)}, not an object")
        for name, hint in typing.get_type_hints(wanted).items():
            if name in value:
                check_record(value[name], hint, f"{where}.{name}".removeprefix("."))
            elif name in wanted.__required_keys__:
                raise ValueError(f"{where or 'it'} lacks {name}")
        return
    options = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    if type(value) not in [typing.get_origin(option) or option for option in options]:
        names = " or ".join(getattr(option, "__name__", str(option)) for option in options)
        raise ValueError(f"{where} is {reprlib.repr(value)}, not {names}")
    if type(value) is int and value < 0:
        raise ValueError(f"{where} is {value}: it must not be negative")
    if isinstance(value, list):
        (of_items,) = typing.get_args(wanted)
        for index, item in enumerate(value):
            check_record(item, of_items, f"{where}[{index}]")


def _check_consistency(metadata: Metadata) -> None:
    """Raise ValueError if the fields of well-formed metadata contradict each other."""
    totals = Totals(metadata["num_tokens"], metadata["num_documents"], metadata["num_bytes"])
    for name, total, of_shards in zip(Totals._fields, totals, sum_shards(metadata["shards"]), strict=True):
        if total != of_shards:
            raise ValueError(f"{name} is {total}, the shards' sum is {of_shards}")
    if metadata["dtype"] != TOKEN_DTYPE.name:
        raise ValueError(f"dtype is {metadata['dtype']!r}, not {TOKEN_DTYPE.name}")
    vocab_size, eot_id = metadata["vocab_size"], metadata["eot_id"]
    if not eot_id < vocab_size <= np.iinfo(TOKEN_DTYPE).max + 1:
        raise ValueError(f"vocab_size is {vocab_size} and eot_id {eot_id}")
    tokenizer = TOKENIZERS.get(metadata["tokenizer"])  # None: one that this version does not know
    if tokenizer is not None and (vocab_size, eot_id) != (tokenizer.vocab_size, tokenizer.eot_id):
        raise ValueError(
            f"vocab_size is {vocab_size} and eot_id {eot_id}, but those of tokenizer {tokenizer.name!r} are "
            f"{tokenizer.vocab_size} and {tokenizer.eot_id}"
        )


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
