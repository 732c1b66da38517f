"""The token dataset on disk, and its reader.

    DIR/<split>/shard-00000.npy, shard-00001.npy, ...   1-D little-endian uint16, memory-mapped
    DIR/<split>/metadata.json                           written last: its presence means "complete"

The shards are one stream of tokens, cut at document boundaries; every document is followed by one
end-of-text token. `metadata.json` holds

    format_version, tokenizer, vocab_size, eot_id, dtype
    num_tokens      tokens in all shards, end-of-text tokens included
    num_documents
    num_bytes       UTF-8 bytes of the documents' texts, end-of-text tokens not counted (for bits per byte)
    shards          a list of {file, num_tokens, num_documents, num_bytes, sha256 (of the file)}
    source          where the documents came from, and the settings that chose them
"""

import bisect
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

FORMAT_VERSION = 1
METADATA_FILE = "metadata.json"
PROGRESS_FILE = "progress.jsonl"  # of an unfinished preparation
TOKEN_DTYPE = np.dtype("<u2")


class DatasetError(ValueError):
    """A token dataset that is missing, incomplete or damaged."""


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.npy"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class TokenDataset:
    """One split of a token dataset, memory-mapped.

    Opening it checks every shard's header and size; `verify` reads every byte.

    Args:
      path: the folder of the split, `DIR/<split>`.

    Attributes:
      path, metadata (the contents of metadata.json), num_tokens, num_documents, num_bytes, vocab_size,
      eot_id, tokenizer_name.

    Raises:
      DatasetError: the folder is missing, incomplete, damaged, empty or of another format version.
    """

    def __init__(self, path: str | Path):
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
            self._shards = [map_shard(self.path / s["file"], s["num_tokens"]) for s in self.metadata["shards"]]
            self._sha256 = {s["file"]: s["sha256"] for s in self.metadata["shards"]}
        except (KeyError, TypeError) as error:
            raise _damaged_metadata(self.path / METADATA_FILE, error) from error
        # _offsets[i] is the position of shard i's first token in the stream; one more for its end.
        self._offsets = [0, *itertools.accumulate(len(shard) for shard in self._shards)]
        if self._offsets[-1] != self.num_tokens:
            raise DatasetError(
                f"{self.path}: the shards hold {self._offsets[-1]} tokens, {METADATA_FILE} says {self.num_tokens}"
            )
        if self.num_tokens == 0:
            raise DatasetError(f"{self.path} holds no tokens")

    def __len__(self) -> int:
        return self.num_tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` (excluded) of the stream, a new uint16 array `[stop - start]`.

        Raises IndexError outside `0 <= start <= stop <= num_tokens`.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of a split that holds {self.num_tokens}")
        tokens = np.empty(stop - start, np.uint16)
        index = bisect.bisect_right(self._offsets, start) - 1
        position = start
        while position < stop:
            offset, end = self._offsets[index], min(stop, self._offsets[index + 1])
            tokens[position - start : end - start] = self._shards[index][position - offset : end - offset]
            position, index = end, index + 1
        return tokens

    def verify(self) -> None:
        """Reads every shard whole and compares its SHA-256; raises DatasetError naming the damaged ones."""
        damaged = [name for name, sha256 in self._sha256.items() if file_sha256(self.path / name) != sha256]
        if damaged:
            raise DatasetError(
                f"{self.path}: SHA-256 differs from {METADATA_FILE} for {', '.join(damaged)}; "
                "delete the folder and prepare the split again"
            )


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
    return DatasetError(f"{path} is damaged ({error!r}); delete the folder and prepare the split again")


def map_shard(path: Path, num_tokens: int) -> np.ndarray:
    """Memory-maps one shard, uint16 `[num_tokens]`; the checks read no more than its header."""
    remedy = "the file is damaged: delete the folder and prepare the split again"
    try:
        shard = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is listed in {METADATA_FILE} but missing; {remedy}") from error
    except (ValueError, EOFError, OSError) as error:  # no .npy header, or fewer bytes than it promises
        raise DatasetError(f"{path} cannot be mapped: {error}; {remedy}") from error
    if shard.dtype != TOKEN_DTYPE:
        raise DatasetError(f"{path} has dtype {shard.dtype}, expected {TOKEN_DTYPE.name}; {remedy}")
    if shard.shape != (num_tokens,):
        raise DatasetError(f"{path} has shape {shard.shape}, {METADATA_FILE} says ({num_tokens},); {remedy}")
    expected_size = shard.offset + shard.nbytes
    if path.stat().st_size != expected_size:
        raise DatasetError(f"{path} has {path.stat().st_size} bytes instead of {expected_size}; {remedy}")
    return shard
