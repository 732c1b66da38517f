"""Documents to token shards: one pass over the inputs, tokenized in several processes, resumable.

The parent process reads the inputs in order (`sources`) and sends batches of raw documents to worker processes, which
parse and tokenize them (`tokenization`). It takes the results in the same order, closes a shard at the first document
boundary at or after `shard_tokens` tokens, and records each finished shard with its position in the inputs (`writer`).
The output is a function of inputs and settings alone, however often it was interrupted.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from heinsen.data.dataset import TokenDataset, read_metadata
from heinsen.data.readers import PreparationError, Settings
from heinsen.data.shards import METADATA_FILE, token_dtype
from heinsen.data.sources import (
    STDLIB,
    Input,
    describe_inputs,
    find_inputs,
    hash_contents,
    hash_times,
    read_blocks,
)
from heinsen.data.tokenization import TokenizedDocument, tokenize_blocks
from heinsen.data.tokenizer import (
    TOKENIZER_FILE,
    Tokenizer,
    get_tokenizer,
    open_tokenizer_file,
    write_tokenizer_file,
)
from heinsen.data.writer import (
    PROGRESS_FILE,
    Provenance,
    ShardWriter,
    open_progress,
    remove_progress,
    write_metadata,
)
from heinsen.files import unseal
from heinsen.quantities import count

__all__ = ["PreparationError", "Settings", "prepare"]

_SMALL_BYTES = 16 << 20  # tokenizing smaller inputs takes no longer than starting workers
_LOG_SECONDS = 10.0  # between lines of progress


def prepare(
    settings: Settings, out: str | Path, *, workers: int | None = None, skip_bad_documents: bool = False
) -> TokenDataset:
    """Prepare the split in `out/<split>`: write it, resume it, or find it finished. Reports on stderr.

    Args:
      settings: what to prepare.
      out: folder of the dataset; the split's folder is made in it.
      workers: tokenizing processes; 1 tokenizes in this process. None means one per CPU, or 1 for small inputs.
      skip_bad_documents: count and leave out documents that cannot be read instead of stopping.

    Raises:
      PreparationError: no input, a bad document, an unsuitable tokenizer, a preparation with other settings in the
        folder, or one that is still running. Finished shards stay, and the same call resumes after them.
    """
    folder = Path(out) / settings.split
    settings, tokenizer = _load_tokenizer(settings)
    inputs = find_inputs(settings)
    provenance = _describe(settings, inputs)
    return _Preparation(settings, inputs, tokenizer, provenance, folder, skip_bad_documents).run(workers)


def _load_tokenizer(settings: Settings) -> tuple[Settings, Tokenizer]:
    """Return the tokenizer, and the settings with its name in place of its file's path."""
    if settings.tokenizer.endswith(".json"):
        tokenizer: Tokenizer = open_tokenizer_file(Path(settings.tokenizer), settings.end_of_text)
        return dataclasses.replace(settings, tokenizer=tokenizer.name, end_of_text=None), tokenizer
    if settings.end_of_text is not None:
        raise PreparationError(
            f"end_of_text = {settings.end_of_text!r}: tokenizer {settings.tokenizer!r} has an end of text of its own; "
            "leave it out"
        )
    return settings, get_tokenizer(settings.tokenizer)


def _describe(settings: Settings, inputs: Sequence[Input]) -> Provenance:
    """Return the record of settings and inputs that preparations are compared by."""
    return dataclasses.asdict(settings) | {"sources": list(settings.sources), "inputs": describe_inputs(inputs)}


@dataclasses.dataclass(frozen=True)
class _Preparation:
    """One split to prepare."""

    settings: Settings
    inputs: Sequence[Input]
    tokenizer: Tokenizer
    provenance: Provenance
    folder: Path
    skip_bad_documents: bool

    def run(self, workers: int | None) -> TokenDataset:
        """Return the folder's dataset, after writing what is missing of it."""
        workers = self._count_workers(workers)
        if not self._is_finished():
            self.folder.mkdir(parents=True, exist_ok=True)
            with open_progress(self.folder) as progress_file:
                if not self._is_finished():  # else another process has finished it just now
                    self._write(progress_file, workers)
                    remove_progress(self.folder)
                    return self._tell_losses(TokenDataset(self.folder))
        dataset = TokenDataset(self.folder)
        self._check_same("was prepared", dataset.metadata["source"], dataset.metadata["num_skipped_documents"])
        remove_progress(self.folder)
        print(
            f"{self.folder}: already prepared with these settings ({count(dataset.n_documents, 'document')}, "
            f"{count(dataset.n_tokens, 'token')}, {count(dataset.n_bytes, 'byte')})",
            file=sys.stderr,
        )
        return self._tell_losses(dataset)

    def _tell_losses(self, dataset: TokenDataset) -> TokenDataset:
        if n := dataset.n_lost_bytes:
            print(
                f"{self.folder}: the tokenizer cannot spell {count(n, 'byte')} of the text: they are lost, while bits "
                "per byte count them",
                file=sys.stderr,
            )
        return dataset

    def _count_workers(self, workers: int | None) -> int:
        if workers is not None:
            if workers < 1:
                raise PreparationError(f"workers must be at least 1, got {workers}")
            return workers
        are_small = all(i.is_file for i in self.inputs) and sum(i.size for i in self.inputs) < _SMALL_BYTES
        n_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return 1 if are_small else n_cpus

    def _is_finished(self) -> bool:
        return (self.folder / METADATA_FILE).is_file()

    def _check_same(self, state: str, before: Provenance, n_skipped: int) -> None:
        """Raise PreparationError if this preparation differs from the recorded one, whose state the message names."""
        now = self.provenance
        differences = [
            f"{key}: {before.get(key)!r} before, {now.get(key)!r} now"
            for key in sorted((before.keys() | now.keys()) - {"content"})
            if before.get(key) != now.get(key)
        ]
        times, files = (before.get("content", {}).get(name) for name in ("times", "files"))
        if not differences and times != hash_times(self.inputs) and files != hash_contents(self.inputs):
            differences.append("the content of the inputs, at equal sizes")
        # No setting of its own: it may be turned on after a bad document stopped a preparation.
        if n_skipped and not self.skip_bad_documents:
            differences.append(f"skip_bad_documents: {n_skipped} skipped before, off now")
        if differences:
            raise PreparationError(
                f"{self.folder} {state} with other settings: {'; '.join(differences)}. Use the same settings, choose "
                "another --out or --split, or delete the folder to prepare it again."
            )

    def _check_other_splits(self, digests: Sequence[str]) -> None:
        """Raise PreparationError if a file, or a split of a hub dataset, is also in another split of the dataset."""
        files = [i for i in self.inputs if i.is_file]
        own: dict[Any, Input] = {digest: i for digest, i in zip(digests, files, strict=True) if i.size}
        hub = [i for i in self.inputs if not i.is_file]
        own |= dict(zip(_hub_splits(self.provenance, [i.location for i in hub]), hub, strict=True))
        for folder in sorted(path for path in self.folder.parent.iterdir() if path.is_dir() and path != self.folder):
            before = _read_provenance(folder)
            if STDLIB in self.settings.sources and STDLIB in before.get("sources", ()):
                continue  # it has its own splits, and files that are copies of others
            theirs = {*before.get("content", {}).get("files", ()), *_hub_splits(before, before.get("sources", ()))}
            if shared := [i for key, i in own.items() if key in theirs]:
                remedy = "leave it out of one of the two" if shared[0].is_file else "give another --hub_split"
                raise PreparationError(
                    f"{shared[0].location} is in split {folder.name!r} of {folder.parent}, too: {remedy}, or give "
                    "another --out"
                )

    def _write(self, progress_file: IO[bytes], workers: int) -> None:
        """Write the shards that are missing, and metadata.json."""
        for leftover in self.folder.glob("*.tmp"):
            leftover.unlink()
        writer = ShardWriter(self.folder, progress_file, token_dtype(self.tokenizer.vocab_size))
        if writer.provenance is not None:
            self._check_same("holds an unfinished preparation", writer.provenance, writer.n_skipped)
            print(
                f"{self.folder}: resuming after {count(len(writer.shards), 'finished shard')} "
                f"({count(writer.n_documents, 'document')}, {count(writer.n_tokens, 'token')})",
                file=sys.stderr,
            )
        try:
            if writer.provenance is None:
                content = {"times": hash_times(self.inputs), "files": hash_contents(self.inputs)}
                self._check_other_splits(content["files"])
                writer.begin(self.provenance | {"content": content})
            self._write_shards(writer, workers)
        except BaseException:
            if not writer.shards:
                remove_progress(self.folder)  # nothing to resume
                (self.folder / TOKENIZER_FILE).unlink(missing_ok=True)
            raise
        assert writer.provenance is not None
        write_metadata(self.folder, self.tokenizer, writer.shards, writer.n_skipped, writer.provenance)

    def _write_shards(self, writer: ShardWriter, workers: int) -> None:
        """Tokenize the inputs from the writer's position to their end or to a limit of the settings."""
        blocks = read_blocks(self.inputs, self.settings, after=writer.position)
        start = last = time.monotonic()
        start_tokens = writer.n_tokens
        write_tokenizer_file(self.tokenizer.content, self.folder)  # for the workers
        with contextlib.closing(tokenize_blocks(blocks, self.settings, self.folder, workers)) as documents:
            while not self._is_complete(writer) and (document := next(documents, None)) is not None:
                if document.position <= writer.position:  # in a block with the next one
                    continue
                self._take(writer, document)
                if (now := time.monotonic()) - last >= _LOG_SECONDS:
                    last, rate = now, (writer.n_tokens - start_tokens) / (now - start)
                    print(
                        f"{self.folder}: {count(writer.n_tokens, 'token')}, "
                        f"{count(writer.n_documents, 'document')}, input {document.position.input + 1} of "
                        f"{len(self.inputs)}, {rate:,.0f} tokens/s",
                        file=sys.stderr,
                        flush=True,
                    )
        if writer.n_bytes == 0:
            n_documents, n_bad = writer.n_documents, writer.n_skipped
            found = f"no text in {count(n_documents, 'document')}" if n_documents else "no documents"
            bad = f" ({count(n_bad, 'bad one')} skipped)" if n_bad else ""
            sources = ", ".join(self.settings.sources)
            raise PreparationError(f"{found} for split {self.settings.split!r} in {sources}{bad}: give other sources")
        writer.close_shard()
        seconds = time.monotonic() - start
        skipped = f", {count(writer.n_skipped, 'bad document')} skipped" if writer.n_skipped else ""
        print(
            f"{self.folder}: {count(writer.n_documents, 'document')}, {count(writer.n_tokens, 'token')}, "
            f"{count(writer.n_bytes, 'byte')} in {count(len(writer.shards), 'shard')}{skipped}; {seconds:.1f} s, "
            f"{(writer.n_tokens - start_tokens) / max(seconds, 1e-9):,.0f} tokens/s",
            file=sys.stderr,
        )

    def _is_complete(self, writer: ShardWriter) -> bool:
        """Return whether a limit of the settings is reached."""
        max_documents, max_tokens = self.settings.max_documents, self.settings.max_tokens
        return (max_documents is not None and writer.n_documents >= max_documents) or (
            max_tokens is not None and writer.n_tokens >= max_tokens
        )

    def _take(self, writer: ShardWriter, document: TokenizedDocument) -> None:
        """Add a document to the shards, or skip a bad one."""
        if document.problem is None:
            writer.add(document)
        elif self.skip_bad_documents:
            writer.n_skipped += 1
        else:
            where = self.inputs[document.position.input].where(document.position.number)
            raise PreparationError(
                f"{where}: {document.problem}. Correct the input, or skip such documents with --skip_bad_documents."
            )
        writer.position = document.position
        if writer.pending_tokens >= self.settings.shard_tokens:
            writer.close_shard()


def _hub_splits(provenance: Provenance, sources: Iterable[str]) -> list[tuple[str | None, ...]]:
    """Return (dataset, configuration, split) of each source."""
    read = provenance.get("hub_config"), provenance.get("hub_split") or provenance.get("split")
    return [(source, *read) for source in sources]


def _read_provenance(folder: Path) -> Provenance:
    """Return what a split was made of; nothing if it has no record of that, or a damaged one."""
    for name in (METADATA_FILE, PROGRESS_FILE, METADATA_FILE):  # another process may finish between two looks
        with contextlib.suppress(OSError, ValueError):
            if name == METADATA_FILE:
                return read_metadata(folder / name)["source"]
            return unseal(json.loads((folder / name).read_bytes().partition(b"\n")[0]))
    return {}
