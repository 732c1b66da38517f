"""Shards on disk: the writer, the record of its progress, metadata.json, and what a folder holds already.

`progress.jsonl` exists while a preparation is unfinished. Its first line is the provenance (settings and inputs); each
further line is a `_ProgressRecord`. All carry digests (`heinsen.files.seal`). A preparation that was killed resumes
from it.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypedDict

import numpy as np

from heinsen.data.dataset import TokenDataset, check_shard, check_sources
from heinsen.data.format import (
    FORMAT_VERSION,
    LOCK_FILE,
    METADATA_FILE,
    PROGRESS_FILE,
    TOKEN_DTYPE,
    Metadata,
    ShardRecord,
    check_record,
    find_parts,
    read_metadata,
    shard_name,
    sources_name,
    sum_shards,
)
from heinsen.data.inputs import Position
from heinsen.data.settings import PreparationError, Provenance, check_same_settings
from heinsen.data.tokenize import TokenizedDocument
from heinsen.data.tokenizer import Tokenizer
from heinsen.files import LockedError, atomic_writer, hold_lock, name_errors, seal, unseal

MAX_SOURCES = 1000  # per shard: a field with more distinct values does not name sources

# States of a folder, as verb phrases for messages.
UNFINISHED = "holds an unfinished preparation"
FINISHED = "was prepared"


def encode_metadata(
    tokenizer: Tokenizer, shards: Sequence[ShardRecord], num_skipped: int, provenance: Provenance
) -> bytes:
    """Return the contents of metadata.json."""
    totals = sum_shards(shards)
    metadata: Metadata = {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        "dtype": TOKEN_DTYPE.name,
        "num_tokens": totals.num_tokens,
        "num_documents": totals.num_documents,
        "num_bytes": totals.num_bytes,
        "num_skipped_documents": num_skipped,
        "shards": list(shards),
        "source": provenance,
    }
    return json.dumps(seal(metadata), indent=2).encode() + b"\n"


# Writing.


@contextlib.contextmanager
def open_progress(folder: Path) -> Iterator[IO[bytes]]:
    """Open the folder's progress file for this process alone. Raises PreparationError if another one holds it."""
    path = folder / PROGRESS_FILE
    try:
        with hold_lock(folder / LOCK_FILE, patience=0.0):
            file = path.open("a+b")
            try:
                yield file
            finally:
                with name_errors(path):  # a full disk fails again what it could not write before
                    file.close()
    except LockedError as error:
        raise PreparationError(f"another process is preparing {folder} ({error}); wait for it or stop it") from error


def remove_progress(folder: Path) -> None:
    """Remove the files of an unfinished preparation."""
    for name in (PROGRESS_FILE, LOCK_FILE):
        (folder / name).unlink(missing_ok=True)


class _ProgressRecord(TypedDict):
    """A finished shard, the position after it, and how many documents were skipped before."""

    shard: ShardRecord
    position: list[int]
    num_skipped_documents: int


class ShardWriter:
    """Collects documents into shards and records the finished ones, so that a later process can resume after them.

    Opening it reads `progress_file` and resumes from it. `close_shard` appends to it.

    Attributes:
      shards: records of the finished shards.
      position: position after the last document added or skipped; the caller sets it. None before the first.
      num_tokens, num_documents, num_bytes: totals, the unfinished shard included.
      num_skipped: bad documents left out.

    Raises:
      PreparationError: the progress file is damaged, or records other settings.
    """

    def __init__(self, folder: Path, progress_file: IO[bytes], provenance: Provenance, skip_bad_documents: bool):
        self._folder = folder
        self._progress_file = progress_file
        self._pending = _PendingShard()
        self.shards: list[ShardRecord] = []
        self.position: Position | None = None
        self.num_tokens = self.num_documents = self.num_bytes = self.num_skipped = 0

        progress_file.seek(0)
        # A kill may have cut the last line short. The work that it was to record is repeated.
        *lines, torn = progress_file.read().split(b"\n")
        if len(lines) > 1:
            progress_file.truncate(progress_file.tell() - len(torn))
            before = self._restore(lines)
            check_same_settings(folder, UNFINISHED, before, provenance, self.num_skipped, skip_bad_documents)
            print(
                f"{folder}: resuming after {len(self.shards)} finished shards "
                f"({self.num_documents:,} documents, {self.num_tokens:,} tokens)",
                file=sys.stderr,
            )
        else:
            progress_file.truncate(0)
            self._append(provenance)

    def _restore(self, lines: list[bytes]) -> Provenance:
        """Set the state that the lines of the progress file record, and return their provenance."""
        try:
            before, *records = (unseal(json.loads(line)) for line in lines)
            for record in records:
                check_record(record, _ProgressRecord, "a finished shard's record")
            self.shards = [record["shard"] for record in records]
            self.position = Position(*records[-1]["position"])
            self.num_skipped = records[-1]["num_skipped_documents"]
            self.num_tokens, self.num_documents, self.num_bytes = sum_shards(self.shards)
            for shard in self.shards:
                check_shard(self._folder / shard["file"], shard["num_tokens"])
                check_sources(self._folder, shard)
            return before
        except (ValueError, KeyError, TypeError) as error:
            raise PreparationError(
                f"{self._folder} holds an unfinished preparation that is damaged ({error}); "
                "delete the folder to prepare it again"
            ) from error

    def _append(self, line: Mapping[str, Any]) -> None:
        with name_errors(self._folder / PROGRESS_FILE):
            self._progress_file.write(json.dumps(seal(line)).encode() + b"\n")
            self._progress_file.flush()
            os.fsync(self._progress_file.fileno())

    @property
    def pending_tokens(self) -> int:
        """Tokens of the unfinished shard."""
        return self._pending.num_tokens

    def add(self, document: TokenizedDocument) -> None:
        self._pending.add(document)
        if len(self._pending.names) > MAX_SOURCES:
            raise PreparationError(
                f"more than {MAX_SOURCES} different sources in {self._folder / shard_name(len(self.shards))}, the last "
                f"{document.source!r}: a field with so many values does not name sources. Give another "
                "--source_field, or --source_field= to store no sources"
            )
        self.num_tokens += len(document.tokens)
        self.num_documents += 1
        self.num_bytes += document.num_bytes

    def skip(self) -> None:
        """Count a bad document that is left out."""
        self.num_skipped += 1

    def close_shard(self) -> None:
        """Write the documents added since the last shard as the next one, if there are any."""
        if not self._pending.tokens:
            return
        self.shards.append(self._pending.write(self._folder, len(self.shards)))
        self._append({"shard": self.shards[-1], "position": self.position, "num_skipped_documents": self.num_skipped})
        self._pending = _PendingShard()


class _PendingShard:
    """The documents of a shard that is not written yet. `names` maps sources to indices by first appearance."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.names: dict[str | None, int] = {}
        self._sources: list[int] = []
        self.num_tokens = self._num_bytes = 0

    def add(self, document: TokenizedDocument) -> None:
        self.tokens.append(document.tokens)
        self._sources.append(self.names.setdefault(document.source, len(self.names)))
        self.num_tokens += len(document.tokens)
        self._num_bytes += document.num_bytes

    def write(self, folder: Path, index: int) -> ShardRecord:
        name = shard_name(index)
        record: ShardRecord = {
            "file": name,
            "num_tokens": self.num_tokens,
            "num_documents": len(self.tokens),
            "num_bytes": self._num_bytes,
            "sha256": _write_array(folder / name, self.tokens),
        }
        if self.names.keys() != {None}:
            name = sources_name(index)
            sha256 = _write_array(folder / name, [np.array(self._sources, TOKEN_DTYPE)])
            record["sources"] = {"file": name, "names": list(self.names), "sha256": sha256}
        return record


def _write_array(path: Path, pieces: Sequence[np.ndarray]) -> str:
    """Write the pieces, 1-D of TOKEN_DTYPE, as one .npy file and return its SHA-256."""
    header = io.BytesIO()
    shape = (sum(map(len, pieces)),)
    np.lib.format.write_array_header_1_0(header, {"descr": TOKEN_DTYPE.str, "fortran_order": False, "shape": shape})
    sha256 = hashlib.sha256()
    with atomic_writer(path) as file:
        for data in (header.getbuffer(), *(np.ascontiguousarray(piece).data for piece in pieces)):
            file.write(data)
            sha256.update(data)
    return sha256.hexdigest()


# What a folder holds already.


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A preparation found in a folder. `state` is UNFINISHED or FINISHED."""

    state: str
    provenance: Provenance


def find_recorded(folder: Path) -> Recorded | None:
    """Return the finished or unfinished preparation in a folder, without checking its shards; None if there is none.

    Raises PreparationError if its record is damaged.
    """
    for name in (METADATA_FILE, PROGRESS_FILE, METADATA_FILE):  # another process may finish it between two looks
        try:
            if name == METADATA_FILE:
                return Recorded(FINISHED, dict(read_metadata(folder / name)["source"]))
            content = (folder / name).read_bytes()
            if b"\n" in content:
                return Recorded(UNFINISHED, unseal(json.loads(content[: content.index(b"\n")])))
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError) as error:
            damaged = "file" if find_parts(folder) else "folder"  # damaged metadata of a joined split costs no part
            raise PreparationError(
                f"{folder / name} is damaged ({error}); delete the {damaged} and rerun the same command"
            ) from error
    return None


def find_finished(
    folder: Path, provenance: Provenance, skip_bad_documents: bool, may_be_empty: bool
) -> TokenDataset | None:
    """Return the finished dataset in a folder, if there is one.

    Raises PreparationError if it was made with other settings.
    """
    if not (folder / METADATA_FILE).is_file():
        return None
    dataset = TokenDataset(folder, may_be_empty=may_be_empty)
    before = dataset.metadata.get("source", {})
    num_skipped = dataset.metadata.get("num_skipped_documents", 0)
    check_same_settings(folder, FINISHED, before, provenance, num_skipped, skip_bad_documents)
    remove_progress(folder)
    without_sources = "" if "source_field" in before else ", by a version that stored no sources of documents"
    print(
        f"{folder}: already prepared with these settings ({dataset.num_documents:,} documents, "
        f"{dataset.num_tokens:,} tokens, {dataset.num_bytes:,} bytes){without_sources}",
        file=sys.stderr,
    )
    return dataset
