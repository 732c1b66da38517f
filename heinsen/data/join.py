"""Parts of one split, prepared by several machines, joined into one dataset without moving a shard."""

import json
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from heinsen.data.dataset import TokenDataset
from heinsen.data.format import METADATA_FILE, ShardRecord, part_name, read_metadata, sum_shards
from heinsen.data.settings import PreparationError, Provenance, check_same_settings, no_text_error
from heinsen.data.shards import FINISHED, encode_metadata, find_recorded
from heinsen.data.tokenizer import Tokenizer
from heinsen.files import atomic_writer, unseal


def check_recorded(folders: Iterable[Path], provenance: Provenance) -> None:
    """Raise PreparationError if one of the folders holds a preparation with other settings.

    The folders are a split's and its parts'; `provenance` is that of the split.
    """
    for folder in folders:
        if (found := find_recorded(folder)) is not None:
            check_same_settings(folder, found.state, _of_split(found.provenance), provenance)


def _of_split(provenance: Provenance) -> Provenance:
    """Return a part's provenance without its index, which differs from part to part."""
    return {key: value for key, value in provenance.items() if key != "shard_index"}


def join_parts(folder: Path, provenance: Provenance, count: int, tokenizer: Tokenizer) -> TokenDataset | None:
    """Return the split whose `count` parts are all finished; None if one is not.

    Writes the split's metadata.json if it is missing. Any machine may call this at any time.

    Raises:
      PreparationError: a part was made with other settings, no part holds a document, or metadata.json lists
        something else than the parts hold.
    """
    folders = [folder / part_name(index, count) for index in range(count)]
    num_finished = sum((part / METADATA_FILE).is_file() for part in folders)
    if num_finished < count:
        print(f"{folder}: {num_finished} of {count} parts are finished; the last one joins them", file=sys.stderr)
        return None
    parts = [TokenDataset(part, may_be_empty=True) for part in folders]
    for part in parts:  # machines that began at the same moment did not see each other's settings
        check_same_settings(part.path, FINISHED, _of_split(part.metadata["source"]), provenance)
    _write_joined(folder / METADATA_FILE, _encode_joined(parts, tokenizer))
    dataset = TokenDataset(folder)
    print(
        f"{folder}: all {count} parts are finished and joined: {dataset.num_documents:,} documents, "
        f"{dataset.num_tokens:,} tokens, {dataset.num_bytes:,} bytes in {len(dataset.metadata['shards'])} shards",
        file=sys.stderr,
    )
    return dataset


def _encode_joined(parts: Sequence[TokenDataset], tokenizer: Tokenizer) -> bytes:
    """Return the contents of the split's metadata.json."""
    provenance = _of_split(parts[0].metadata["source"])  # older versions recorded less than this one
    shards = [_seen_from_split(part.path.name, shard) for part in parts for shard in part.metadata["shards"]]
    num_skipped = sum(part.metadata.get("num_skipped_documents", 0) for part in parts)
    if not sum_shards(shards).num_bytes:
        raise no_text_error(provenance["split"], provenance["sources"], sum_shards(shards).num_documents, num_skipped)
    return encode_metadata(tokenizer, shards, num_skipped, provenance)


def _seen_from_split(part: str, shard: ShardRecord) -> ShardRecord:
    """Return a shard's record with paths relative to the split's folder."""
    moved = shard.copy()
    moved["file"] = f"{part}/{shard['file']}"
    if "sources" in shard:
        moved["sources"] = {**shard["sources"], "file": f"{part}/{shard['sources']['file']}"}
    return moved


def _write_joined(path: Path, metadata: bytes) -> None:
    """Write the split's metadata.json, or check the one that is there.

    Other machines may be writing the same content at the same moment, so the temporary file's name is this process's
    own.
    """
    if path.is_file():
        try:
            is_same = read_metadata(path) == unseal(json.loads(metadata))
        except ValueError:
            is_same = False
        if not is_same:
            raise PreparationError(f"{path} does not list what its parts hold; delete it and rerun the same command")
        return
    try:
        with atomic_writer(path, suffix=f".{socket.gethostname()}.{os.getpid()}.tmp") as file:
            file.write(metadata)
    except FileNotFoundError:
        if not path.is_file():  # else another machine finished first and removed this file as a leftover
            raise
    for leftover in path.parent.glob(f"{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)
