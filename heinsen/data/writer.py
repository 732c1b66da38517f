"""Shards on disk: their writer, the record of its progress, and metadata.json.

`progress.jsonl` exists while a preparation is unfinished. Its first line is the provenance (settings and inputs); each
further line is a finished shard's record, the position of the last document then, and how many documents were skipped
before. All carry digests (`heinsen.files.seal`). A preparation that was killed resumes from it.
"""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from heinsen.data.dataset import FORMAT_VERSION, Metadata, sum_shards
from heinsen.data.readers import PreparationError
from heinsen.data.shards import METADATA_FILE, SOURCE_DTYPE, ShardRecord, check_shard, check_sources, token_dtype
from heinsen.data.sources import InputPosition
from heinsen.data.tokenization import TokenizedDocument
from heinsen.data.tokenizer import Tokenizer, write_tokenizer_file
from heinsen.files import LockedError, atomic_writer, hold_lock, name_errors, seal, unseal

PROGRESS_FILE, LOCK_FILE = "progress.jsonl", "prepare.lock"  # of an unfinished preparation
MAX_SOURCES = 1000  # per shard: a field with more distinct values does not name sources

Provenance = dict[str, Any]  # the JSON record of settings and inputs: `source` in metadata.json


def write_metadata(
    folder: Path, tokenizer: Tokenizer, shards: Sequence[ShardRecord], n_skipped: int, provenance: Provenance
) -> None:
    """Write the tokenizer's file, and metadata.json, which makes the dataset in the folder complete."""
    write_tokenizer_file(tokenizer.content, folder)
    totals = sum_shards(shards)
    metadata: Metadata = {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "num_tokens": totals.n_tokens,
        "num_documents": totals.n_documents,
        "num_bytes": totals.n_bytes,
        "num_skipped_documents": n_skipped,
        "shards": list(shards),
        "source": provenance,
    }
    with atomic_writer(folder / METADATA_FILE) as file:
        file.write(json.dumps(seal(metadata), indent=2).encode() + b"\n")


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


class ShardWriter:
    """Collects documents into shards and records the finished ones, so that a later process can resume after them.

    Opening it reads `progress_file` and resumes from it. `begin` and `close_shard` append to it.

    dtype: of the tokens.

    Attributes:
      provenance: that of the preparation to resume; None where there is none.
      shards: records of the finished shards.
      position: of the last document added or skipped; the caller sets it.
      n_tokens, n_documents, n_bytes: totals, the unfinished shard included.
      n_skipped: bad documents left out; the caller counts them.

    Raises:
      PreparationError: the progress file is damaged.
    """

    def __init__(self, folder: Path, progress_file: IO[bytes], dtype: np.dtype):
        self._folder = folder
        self._dtype = dtype
        self._progress_file = progress_file
        self.provenance: Provenance | None = None
        self.shards: list[ShardRecord] = []
        self.position = InputPosition(0, 0)
        self.n_tokens = self.n_documents = self.n_bytes = self.n_skipped = 0

        progress_file.seek(0)
        # A kill may have cut the last line short. The work that it was to record is repeated.
        *lines, torn = progress_file.read().split(b"\n")
        if len(lines) > 1:
            progress_file.truncate(progress_file.tell() - len(torn))
            self._restore(lines)
        else:
            progress_file.truncate(0)
        self._clear_pending()

    def _restore(self, lines: list[bytes]) -> None:
        """Set the state that the lines of the progress file record."""
        try:
            self.provenance, *records = (unseal(json.loads(line)) for line in lines)
            self.shards = [record["shard"] for record in records]
            self.position = InputPosition(*records[-1]["position"])
            self.n_skipped = records[-1]["num_skipped_documents"]
            self.n_tokens, self.n_documents, self.n_bytes = sum_shards(self.shards)
            for shard in self.shards:
                check_shard(self._folder / shard["file"], shard["num_tokens"], self._dtype)
                check_sources(self._folder, shard)
        except (ValueError, KeyError, TypeError) as error:
            raise PreparationError(
                f"{self._folder} holds an unfinished preparation that is damaged ({error}); "
                "delete the folder to prepare it again"
            ) from error

    def begin(self, provenance: Provenance) -> None:
        """Record the provenance of a new preparation."""
        self.provenance = provenance
        self._append(provenance)

    def _append(self, line: Mapping[str, Any]) -> None:
        with name_errors(self._folder / PROGRESS_FILE):
            self._progress_file.write(json.dumps(seal(line)).encode() + b"\n")
            self._progress_file.flush()
            os.fsync(self._progress_file.fileno())

    def _clear_pending(self) -> None:
        self._tokens: list[np.ndarray] = []  # of each document of the unfinished shard
        self._sources: list[int] = []
        self._names: dict[str | None, int] = {}  # indices of sources by first appearance
        self._n_lost = 0
        self._start = self.n_tokens, self.n_bytes

    @property
    def pending_tokens(self) -> int:
        """Tokens of the unfinished shard."""
        return self.n_tokens - self._start[0]

    def add(self, document: TokenizedDocument) -> None:
        """Add a document to the unfinished shard."""
        self._tokens.append(document.tokens)
        self._sources.append(self._names.setdefault(document.source, len(self._names)))
        if len(self._names) > MAX_SOURCES:
            raise PreparationError(
                f"more than {MAX_SOURCES} different sources in {self._folder / _shard_name(len(self.shards))}, the "
                f"last {document.source!r}: a field with so many values does not name sources. Give another "
                "--source_field, or --source_field= to store no sources"
            )
        self.n_tokens += len(document.tokens)
        self.n_documents += 1
        self.n_bytes += document.n_bytes
        self._n_lost += document.n_lost

    def close_shard(self) -> None:
        """Write the documents added since the last shard as the next one, if there are any."""
        if not self._tokens:
            return
        name = _shard_name(len(self.shards))
        shard: ShardRecord = {
            "file": name,
            "num_tokens": self.pending_tokens,
            "num_documents": len(self._tokens),
            "num_bytes": self.n_bytes - self._start[1],
            "sha256": _write_array(self._folder / name, self._tokens, self._dtype),
        }
        if self._n_lost:
            shard["num_lost_bytes"] = self._n_lost
        if self._names.keys() != {None}:
            name = name.replace(".npy", ".sources.npy")
            sha256 = _write_array(self._folder / name, [np.array(self._sources, SOURCE_DTYPE)], SOURCE_DTYPE)
            shard["sources"] = {"file": name, "names": list(self._names), "sha256": sha256}
        self.shards.append(shard)
        self._append({"shard": shard, "position": self.position, "num_skipped_documents": self.n_skipped})
        self._clear_pending()


def _shard_name(index: int) -> str:
    return f"shard-{index:05d}.npy"


def _write_array(path: Path, pieces: Sequence[np.ndarray], dtype: np.dtype) -> str:
    """Write the pieces, 1-D of `dtype`, as one .npy file and return its SHA-256."""
    header = io.BytesIO()
    shape = (sum(map(len, pieces)),)
    np.lib.format.write_array_header_1_0(header, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    sha256 = hashlib.sha256()
    with atomic_writer(path) as file:
        for data in (header.getbuffer(), *(np.ascontiguousarray(piece).data for piece in pieces)):
            file.write(data)
            sha256.update(data)
    return sha256.hexdigest()
