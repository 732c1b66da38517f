"""Documents to token shards: one pass over the inputs, tokenized in several processes, resumable.

The parent process reads the inputs in order (`inputs`, `readers`) and sends batches of raw documents to worker
processes, which parse and tokenize them (`raw`, `tokenize`). It takes the results in the same order, closes a shard at
the first document boundary at or after `shard_tokens` tokens, and records each finished shard with its position in the
inputs (`shards`). The output is a function of inputs and settings alone, however often it was interrupted.

Several machines that share a file system may each prepare a part of a split: every N-th input, into a folder of its
own. The machine that finds all parts finished writes the metadata.json that joins them, and moves no shard (`join`).
"""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from heinsen.data.dataset import TokenDataset
from heinsen.data.format import METADATA_FILE, TOKEN_DTYPE, find_parts, part_name
from heinsen.data.inputs import Document, Input, describe_inputs, find_inputs, read_documents
from heinsen.data.join import check_recorded, join_parts
from heinsen.data.report import Report
from heinsen.data.settings import PreparationError, Provenance, Settings, no_text_error
from heinsen.data.shards import ShardWriter, encode_metadata, find_finished, open_progress, remove_progress
from heinsen.data.tokenize import TokenizedDocument, tokenize_documents
from heinsen.data.tokenizer import Tokenizer, get_tokenizer
from heinsen.files import atomic_writer

__all__ = ["PreparationError", "Settings", "prepare", "prepare_part"]

_SMALL_BYTES = 16 << 20  # tokenizing smaller inputs takes no longer than starting workers


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
    tokenizer, inputs = _load_tokenizer(settings.tokenizer), find_inputs(settings)
    folder, provenance = Path(out) / settings.split, _describe(settings, inputs)
    check_recorded(find_parts(folder), provenance)
    job = _Job(settings, inputs, tokenizer, provenance, folder, settings.split, False, workers, skip_bad_documents)
    return job.run()


def prepare_part(
    settings: Settings,
    out: str | Path,
    index: int,
    count: int,
    *,
    workers: int | None = None,
    skip_bad_documents: bool = False,
) -> TokenDataset:
    """Prepare one of `count` parts of the split in `out/<split>/part-...`: write it, resume it, or find it finished.

    The part holds the inputs `index`, `index + count`, ...; it may be empty. The call that finds all parts finished
    writes `out/<split>/metadata.json`, which joins them into one dataset.

    Args:
      settings: of the whole split, without limits, which would have to be counted over all parts.
      out: as for `prepare`.
      index: from 0.
      count: number of parts.
      workers: as for `prepare`; may differ from part to part.
      skip_bad_documents: as for `prepare`.

    Returns:
      The whole split if all parts are finished, else the part.

    Raises:
      PreparationError: as `prepare`; also if the folder holds parts made with other settings or of another number, or
        there are fewer inputs than parts.
    """
    _check_part(settings, index, count)
    tokenizer, inputs = _load_tokenizer(settings.tokenizer), find_inputs(settings)
    _check_enough_inputs(inputs, count)
    folder, provenance = Path(out) / settings.split, _describe(settings, inputs) | {"shard_count": count}
    check_recorded([folder, *find_parts(folder)], provenance)
    name = part_name(index, count)
    job = _Job(
        settings,
        inputs[index::count],
        tokenizer,
        provenance | {"shard_index": index},
        folder / name,
        f"{settings.split}/{name}",
        True,
        workers,
        skip_bad_documents,
    )
    part = job.run()
    return join_parts(folder, provenance, count, tokenizer) or part


def _check_part(settings: Settings, index: int, count: int) -> None:
    if count < 1 or not 0 <= index < count:
        raise PreparationError(
            f"shard_index = {index}, shard_count = {count}: the index must be from 0 to the count - 1"
        )
    for name in ("max_documents", "max_tokens"):
        if (limit := getattr(settings, name)) is not None:
            raise PreparationError(
                f"{name} = {limit} and shard_count = {count}: no machine knows how much the others have; remove the "
                "limit and give fewer inputs, or prepare the split on one machine"
            )


def _check_enough_inputs(inputs: Sequence[Input], count: int) -> None:
    if len(inputs) < count:
        hub = "" if inputs[0].is_file else " A hub dataset is one input: download its files and give those."
        raise PreparationError(
            f"{len(inputs)} input{'s' * (len(inputs) > 1)} for shard_count = {count}: each machine takes whole files "
            f"and needs at least one. Use --shard_count={len(inputs)} or less, or more and smaller files.{hub}"
        )


def _load_tokenizer(name: str) -> Tokenizer:
    tokenizer = get_tokenizer(name)
    if tokenizer.vocab_size > np.iinfo(TOKEN_DTYPE).max + 1:
        raise PreparationError(
            f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} tokens: too many for {TOKEN_DTYPE.name} shards"
        )
    return tokenizer


def _describe(settings: Settings, inputs: Sequence[Input]) -> Provenance:
    """Return the record of settings and inputs that preparations are compared by."""
    return dataclasses.asdict(settings) | {"sources": list(settings.sources), "inputs": describe_inputs(inputs)}


@dataclasses.dataclass(frozen=True)
class _Job:
    """One folder to prepare: a split, or a part of one. `label` names it in reports."""

    settings: Settings
    inputs: Sequence[Input]
    tokenizer: Tokenizer
    provenance: Provenance
    folder: Path
    label: str
    may_be_empty: bool
    workers: int | None
    skip_bad_documents: bool

    def run(self) -> TokenDataset:
        """Return the folder's dataset, after writing what is missing of it."""
        workers = self._count_workers()
        if (dataset := self._find_finished()) is not None:
            return dataset
        self.folder.mkdir(parents=True, exist_ok=True)
        with open_progress(self.folder) as progress_file:
            if (dataset := self._find_finished()) is not None:  # another process finished it just now
                return dataset
            for leftover in self.folder.glob("*.tmp"):
                leftover.unlink()
            writer = ShardWriter(self.folder, progress_file, self.provenance, self.skip_bad_documents)
            try:
                self._write_shards(writer, workers)
            except BaseException:
                if not writer.shards:
                    remove_progress(self.folder)  # nothing to resume
                raise
            with atomic_writer(self.folder / METADATA_FILE) as file:
                file.write(encode_metadata(self.tokenizer, writer.shards, writer.num_skipped, self.provenance))
            remove_progress(self.folder)
        return TokenDataset(self.folder, may_be_empty=self.may_be_empty)

    def _count_workers(self) -> int:
        if self.workers is not None:
            if self.workers < 1:
                raise PreparationError(f"workers must be at least 1, got {self.workers}")
            return self.workers
        are_small = all(i.is_file for i in self.inputs) and sum(i.size or 0 for i in self.inputs) < _SMALL_BYTES
        return 1 if are_small else _count_cpus()

    def _find_finished(self) -> TokenDataset | None:
        return find_finished(self.folder, self.provenance, self.skip_bad_documents, self.may_be_empty)

    def _write_shards(self, writer: ShardWriter, workers: int) -> None:
        """Tokenize the inputs from the writer's position to their end or to a limit of the settings."""
        documents = read_documents(self.inputs, self.settings, start=writer.position)
        with (
            contextlib.closing(Report(self.label, len(self.inputs), writer)) as report,
            contextlib.closing(tokenize_documents(documents, self.settings, workers)) as tokenized,
        ):
            while not self._is_complete(writer) and (item := next(tokenized, None)) is not None:
                self._take(writer, *item)
                report.update()
            if writer.num_bytes == 0 and not self.may_be_empty:
                raise no_text_error(
                    self.settings.split, self.settings.sources, writer.num_documents, writer.num_skipped
                )
            writer.close_shard()
        report.summarize()

    def _is_complete(self, writer: ShardWriter) -> bool:
        """Return whether a limit of the settings is reached."""
        max_documents, max_tokens = self.settings.max_documents, self.settings.max_tokens
        return (max_documents is not None and writer.num_documents >= max_documents) or (
            max_tokens is not None and writer.num_tokens >= max_tokens
        )

    def _take(self, writer: ShardWriter, document: Document, tokenized: TokenizedDocument) -> None:
        """Add a document to the shards, or skip a bad one."""
        if tokenized.problem is None:
            writer.add(tokenized)
        elif self.skip_bad_documents:
            writer.skip()
        else:
            where = self.inputs[document.position.input].where(document.position.number)
            raise PreparationError(
                f"{where}: {tokenized.problem}. Correct the input, or skip such documents with --skip_bad_documents."
            )
        writer.position = document.position
        if writer.pending_tokens >= self.settings.shard_tokens:
            writer.close_shard()


def _count_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
