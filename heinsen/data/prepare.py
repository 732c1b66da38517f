"""Documents to token shards: one pass over the inputs, tokenised in several processes, resumable.

The parent reads the inputs in order and sends batches of raw documents to worker processes, which parse and
tokenise them; it takes the results in the same order, closes a shard at the first document boundary at or
after `shard_tokens` tokens, and notes each finished shard in `progress.jsonl` together with the position
in the inputs. The output is a function of inputs and settings alone, however often it was interrupted.

Several machines that share a file system may each prepare a part of a split: every N-th input, into a folder of its
own. Whoever finds all parts finished writes the metadata.json that joins them, and moves no shard.
"""

import collections
import concurrent.futures
import concurrent.futures.process
import contextlib
import dataclasses
import fcntl
import functools
import glob
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import tqdm

from heinsen.data.dataset import (
    FORMAT_VERSION,
    METADATA_FILE,
    PROGRESS_FILE,
    TOKEN_DTYPE,
    TokenDataset,
    check_shard,
    check_sources,
    find_parts,
    part_name,
    shard_name,
    sources_name,
)
from heinsen.data.tokenizer import Tokenizer, get_tokenizer
from heinsen.errors import HeinsenError

STDLIB = "stdlib"
STDLIB_SPLITS = ("train", "validation")

_BATCH_BYTES = 2 << 20  # of raw documents sent to a worker at a time
_READ_BYTES = 1 << 20
_PROGRESS_SECONDS = 10  # between progress lines where stderr is no terminal
_SUFFIXES = (".jsonl", ".jsonl.zst", ".txt", ".parquet")
_MAX_SOURCES = 1000  # different ones in a shard: a field with more does not name sources
_REMEDY = "Correct the input, or leave such documents out with --skip_bad_documents."


class PreparationError(HeinsenError, ValueError):
    """Inputs or settings from which no token dataset can be made; finished shards are kept."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that the content of a prepared split depends on, the inputs' content aside.

    Attributes:
      sources: local files, globs or folders (.jsonl, .jsonl.zst, .txt, .parquet), names of datasets on the
        Hugging Face hub, or "stdlib": the running interpreter's own library, a twentieth of whose files are
        the validation split.
      split: name of the split, and of its folder.
      tokenizer: what `get_tokenizer` takes.
      shard_tokens: a shard is closed at the first document boundary at or after so many tokens.
      text_field: the field (.jsonl, hub) or column (.parquet) that holds a document's text.
      source_field: the field or column, after dots one within it, that names the source a document is from, kept
        beside the shards; documents whose field is missing or holds no text name none. None: nobody's is kept.
      max_documents: stop after so many documents.
      max_tokens: stop after the document with which so many tokens are reached.
      hub_config: configuration of a hub dataset.
      hub_split: split of a hub dataset; None: the one called `split`.
    """

    sources: tuple[str, ...]
    split: str
    tokenizer: str
    shard_tokens: int = 100_000_000
    text_field: str = "text"
    source_field: str | None = "meta.pile_set_name"
    max_documents: int | None = None
    max_tokens: int | None = None
    hub_config: str | None = None
    hub_split: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.split):
            raise PreparationError(f"split {self.split!r} must consist of letters, digits, '_', '.' and '-'")
        if not self.sources:
            raise PreparationError("no source given")
        for name in ("shard_tokens", "max_documents", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise PreparationError(f"{name} must be at least 1, got {value}")


def prepare(
    settings: Settings, out: str | Path, *, workers: int | None = None, skip_bad_documents: bool = False
) -> TokenDataset:
    """Writes the split to `out/<split>`, or goes on with it, or finds it there; reports on stderr.

    Args:
      settings: what to prepare.
      out: folder of the dataset; the split's folder is made in it.
      workers: tokenising processes; 1 tokenises in this process. None: one a CPU, or 1 for small inputs.
      skip_bad_documents: count and leave out documents that cannot be read instead of stopping.

    Raises:
      PreparationError: no input, a bad document, an unsuitable tokenizer, a preparation with other settings
        in the folder, or one that is running. What was finished before stays, and the same call goes on
        from there.
    """
    tokenizer, inputs = _get_suitable_tokenizer(settings), find_inputs(settings)
    folder, source = Path(out) / settings.split, _source(settings, inputs)
    for part in find_parts(folder):
        if (before := _recorded_source(part)) is not None:
            _check_same(part, _STATE[before[0]], before[1], source)
    job = _Job(settings, inputs, tokenizer, source, folder, settings.split)
    return job.run(workers, skip_bad_documents)


def prepare_part(
    settings: Settings,
    out: str | Path,
    index: int,
    count: int,
    *,
    workers: int | None = None,
    skip_bad_documents: bool = False,
) -> TokenDataset:
    """Writes one of `count` parts of the split to `out/<split>/part-...`, or goes on with it, or finds it there.

    The part holds the inputs `index`, `index + count`, ...; it may be empty. Once all parts are finished, the one that
    finds them so writes `out/<split>/metadata.json`, which makes them one dataset.

    Args:
      settings: of the whole split; without limits, which would have to be counted over all parts.
      index: from 0.
      The others are those of `prepare`; workers may differ from part to part.

    Returns:
      The whole split if all parts are finished, else the part.

    Raises:
      PreparationError: as `prepare`; also where the folder holds parts made with other settings or of another number,
        or there are fewer inputs than parts.
    """
    if count < 1 or not 0 <= index < count:
        raise PreparationError(
            f"shard_index = {index}, shard_count = {count}: the index must be from 0 to the count - 1"
        )
    for name in ("max_documents", "max_tokens"):
        if (limit := getattr(settings, name)) is not None:
            raise PreparationError(
                f"{name} = {limit} and shard_count = {count}: no machine knows how much the others have; leave the "
                "limit out and give fewer inputs, or prepare the split on one machine"
            )
    tokenizer, inputs = _get_suitable_tokenizer(settings), find_inputs(settings)
    if len(inputs) < count:
        hub = " A hub dataset is one input: download its files and give those." if inputs[0].kind == "hub" else ""
        raise PreparationError(
            f"{len(inputs)} input{'s' * (len(inputs) > 1)} for shard_count = {count}: each machine takes whole files, "
            f"and needs one at least. Use --shard_count={len(inputs)} or less, or more and smaller files.{hub}"
        )
    folder, source = Path(out) / settings.split, _source(settings, inputs) | {"shard_count": count}
    for neighbour in (folder, *find_parts(folder)):
        if (before := _recorded_source(neighbour)) is not None:
            _check_same(neighbour, _STATE[before[0]], _of_the_whole(before[1]), source)
    name = part_name(index, count)
    part_source = source | {"shard_index": index}
    job = _Job(settings, inputs[index::count], tokenizer, part_source, folder / name, f"{settings.split}/{name}", True)
    part = job.run(workers, skip_bad_documents)
    return _join_parts(folder, source, count, tokenizer) or part


def _get_suitable_tokenizer(settings: Settings) -> Tokenizer:
    tokenizer = get_tokenizer(settings.tokenizer)
    if tokenizer.vocab_size > np.iinfo(TOKEN_DTYPE).max + 1:
        raise PreparationError(
            f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} tokens: too many for {TOKEN_DTYPE.name} shards"
        )
    return tokenizer


def _source(settings: Settings, inputs: Sequence["Input"]) -> dict[str, Any]:
    """What is recorded, and compared, of settings and inputs."""
    return dataclasses.asdict(settings) | {"sources": list(settings.sources), "inputs": _fingerprint(inputs)}


@dataclasses.dataclass(frozen=True)
class _Job:
    """One folder to prepare: a split, or a part of one. `label` names it in reports."""

    settings: Settings
    inputs: Sequence["Input"]
    tokenizer: Tokenizer
    source: dict[str, Any]
    folder: Path
    label: str
    may_be_empty: bool = False

    def run(self, workers: int | None, skip_bad_documents: bool) -> TokenDataset:
        """Writes the folder, or goes on with it, or finds it finished."""
        if workers is None:
            workers = 1 if _are_small(self.inputs) else _num_cpus()
        if workers < 1:
            raise PreparationError(f"workers must be at least 1, got {workers}")
        find_finished = lambda: _find_finished(self.folder, self.source, skip_bad_documents, self.may_be_empty)
        if (dataset := find_finished()) is not None:
            return dataset
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / PROGRESS_FILE).open("a+b") as progress_file:
            try:
                fcntl.flock(progress_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise PreparationError(f"another process is preparing {folder}; wait for it or stop it") from error
            if (dataset := find_finished()) is not None:  # until just now
                return dataset
            for leftover in folder.glob("*.tmp"):
                leftover.unlink()
            writer = _ShardWriter(folder, progress_file, self.source, skip_bad_documents)
            try:
                self._tokenize_inputs(writer, workers, skip_bad_documents)
            except BaseException:
                if not writer.shards:
                    (folder / PROGRESS_FILE).unlink()  # nothing to go on from
                raise
            metadata = _metadata(self.tokenizer, writer.shards, writer.num_skipped, self.source)
            with _atomic_writer(folder / METADATA_FILE) as file:
                file.write(metadata)
            (folder / PROGRESS_FILE).unlink()
        return TokenDataset(folder, may_be_empty=self.may_be_empty)

    def _tokenize_inputs(self, writer: "_ShardWriter", workers: int, skip_bad_documents: bool) -> None:
        """Tokenises the inputs from the writer's position to their end, or to a limit of the settings."""
        settings, inputs = self.settings, self.inputs

        def is_complete() -> bool:
            return (settings.max_documents is not None and writer.num_documents >= settings.max_documents) or (
                settings.max_tokens is not None and writer.num_tokens >= settings.max_tokens
            )

        documents = _read_documents(inputs, settings, start=writer.position)
        report = _Progress(self.label, len(inputs), writer)
        batches = _tokenize_all(_batched(documents), settings, workers)
        try:
            if not is_complete():
                for document, tokenized in itertools.chain.from_iterable(batches):
                    if isinstance(tokenized, str):
                        if not skip_bad_documents:
                            where = inputs[document.input].where(document.number)
                            raise PreparationError(f"{where}: {tokenized}. {_REMEDY}")
                        writer.skip()
                    else:
                        writer.add(*tokenized)
                    writer.position = (document.input, document.number)
                    if writer.pending_tokens >= settings.shard_tokens:
                        writer.close_shard()
                    report.update()
                    if is_complete():
                        break
            if writer.num_documents == 0 and not self.may_be_empty:
                raise _no_documents(settings.split, settings.sources, writer.num_skipped)
            writer.close_shard()
        finally:
            batches.close()
            report.close()
        report.summarize()


# Inputs: files and hub datasets, read as raw documents.


class Document(NamedTuple):
    """A document as it was read; workers turn it into text.

    `input` indexes the inputs, `number` counts lines or rows from 1: together, the position after it.
    `form` says what `content` is: bytes of a JSON object, bytes of UTF-8 text, a value that should be text,
    or the description of what made the rest of the input unreadable. `source` is what names the document's source,
    where the reader has it; within a JSON object it is found by the worker.
    """

    input: int
    number: int
    form: Literal["json", "utf8", "value", "unreadable"]
    content: Any
    source: Any = None


RawDocument = tuple[int, str, Any] | tuple[int, str, Any, Any]  # the fields of Document after the first


@dataclasses.dataclass(frozen=True)
class Input:
    """One file (`path`) or hub dataset (`name`); `size` in bytes, 0 where unknown."""

    kind: Literal["jsonl", "txt", "parquet", "hub"]
    name: str
    path: Path | None
    size: int

    def where(self, number: int) -> str:
        """The place of a document, for messages."""
        unit = {"jsonl": ", line {}", "txt": "", "parquet": ", row {}", "hub": ", row {}"}[self.kind]
        return self.name + unit.format(number)


def find_inputs(settings: Settings) -> list[Input]:
    """The inputs of a split in the order in which they are read; PreparationError if there are none."""
    inputs: list[Input] = []
    for source in settings.sources:
        if source == STDLIB:
            inputs += _stdlib_inputs(settings.split)
            continue
        paths = _local_paths(source)
        if paths is not None:
            if not paths:
                raise PreparationError(
                    f"no file matches source {source!r} (of {', '.join(settings.sources)}); "
                    f"known endings are {', '.join(_SUFFIXES)}"
                )
            inputs += [_file_input(path) for path in paths]
        else:
            inputs.append(Input("hub", source, None, 0))
    names = collections.Counter(i.name for i in inputs)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise PreparationError(f"given more than once by the sources: {', '.join(repeated[:5])}")
    return inputs


def _local_paths(source: str) -> list[Path] | None:
    """Files that `source` names, sorted; None if it can only be the name of a hub dataset."""
    path = Path(source)
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.name.endswith(_SUFFIXES) and p.is_file())
    if path.is_file():
        if not path.name.endswith(_SUFFIXES):
            raise PreparationError(f"source {source!r} has none of the known endings {', '.join(_SUFFIXES)}")
        return [path]
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source) and not source.endswith(_SUFFIXES):
        return None
    return sorted(p for p in map(Path, glob.glob(source, recursive=True)) if p.name.endswith(_SUFFIXES))


def _file_input(path: Path) -> Input:
    kind = "jsonl" if path.name.endswith((".jsonl", ".jsonl.zst")) else path.suffix[1:]
    return Input(kind, str(path), path, path.stat().st_size)


def _stdlib_inputs(split: str) -> list[Input]:
    """The standard library's own sources: no packages, tests or editor; a path's hash decides its split."""
    if split not in STDLIB_SPLITS:
        raise PreparationError(f"{STDLIB!r} has the splits {' and '.join(STDLIB_SPLITS)}, not {split!r}")
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    inputs = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        is_validation = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % 20 == 0
        if excluded.isdisjoint(name.split("/")) and is_validation == (split == "validation"):
            try:
                path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:  # a few test encodings
                continue
            inputs.append(Input("txt", f"{STDLIB}/{name}", path, path.stat().st_size))
    return sorted(inputs, key=lambda i: i.name)


def _fingerprint(inputs: Sequence[Input]) -> dict[str, Any]:
    """Stands for the inputs when settings are compared: their number, size, and a hash of names and sizes."""
    listing = json.dumps([(i.name, i.size) for i in inputs]).encode()
    return {
        "files": len(inputs),
        "bytes": sum(i.size for i in inputs),
        "sha256": hashlib.sha256(listing).hexdigest(),
    }


def _are_small(inputs: Sequence[Input]) -> bool:
    """Whether tokenising the inputs takes no longer than starting workers."""
    return all(i.path is not None for i in inputs) and sum(i.size for i in inputs) < 16 << 20


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_documents(inputs: Sequence[Input], settings: Settings, start: tuple[int, int] | None) -> Iterator[Document]:
    """All documents after position `start` (input, number), in order; None: from the beginning."""
    first_input, done = start or (0, 0)
    for index in range(first_input, len(inputs)):
        for raw in _READERS[inputs[index].kind](inputs[index], settings):
            if index > first_input or raw[0] > done:
                yield Document(index, *raw)


def _read_txt(source: Input, settings: Settings) -> Iterator[RawDocument]:
    yield 1, "utf8", source.path.read_bytes()


def _read_jsonl(source: Input, settings: Settings) -> Iterator[RawDocument]:
    """One document a line; blank lines are none."""
    number, rest = 0, b""
    with source.path.open("rb") as file:
        blocks = _zstd_blocks(file) if source.name.endswith(".zst") else _blocks(file)
        try:
            for block in blocks:
                *lines, rest = (rest + block).split(b"\n")
                for number, line in enumerate(lines, start=number + 1):  # noqa: B020 (goes on counting)
                    if line and not line.isspace():
                        yield number, "json", line
        except _UnreadableError as error:
            yield number + 1, "unreadable", str(error)
            return
    if rest and not rest.isspace():
        yield number + 1, "json", rest


class _UnreadableError(Exception):
    """The rest of an input cannot be read."""


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(functools.partial(file.read, _READ_BYTES), b"")


def _zstd_blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Decompressed content of zstd frames. (zstandard's own reader takes a truncated one for whole.)"""
    import zstandard

    # Frames made with --long need more than the 128 MiB window allowed by default.
    context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame, unused = None, b""
    while block := unused or file.read(_READ_BYTES):
        frame = frame or context.decompressobj()
        try:
            content = frame.decompress(block)
        except zstandard.ZstdError as error:
            raise _UnreadableError(f"damaged zstd data ({error}): the rest cannot be read") from error
        if content:
            yield content
        frame, unused = (None, frame.unused_data) if frame.eof else (frame, b"")
    if frame is not None:
        raise _UnreadableError("the file ends within a zstd frame: it is truncated; fetch it again")


def _read_parquet(source: Input, settings: Settings) -> Iterator[RawDocument]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            schema, name = file.schema_arrow, settings.text_field
            if name not in schema.names:
                raise PreparationError(
                    f"{source.name} has no column {name!r} but {', '.join(schema.names)}; "
                    "name the one with the text by --text_field"
                )
            kind = schema.field(name).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise PreparationError(
                    f"{source.name}: column {name!r} holds {kind}, not strings; "
                    "name the one with the text by --text_field"
                )
            outer = (settings.source_field or "").split(".")[0]
            named = [settings.source_field] if outer in schema.names else []
            for batch in file.iter_batches(columns=[name, *named], batch_size=1024):
                sources = batch.column(outer) if outer in batch.schema.names else itertools.repeat(None, len(batch))
                rows = zip(batch.column(name), sources, strict=True)
                for number, (cell, source) in enumerate(rows, start=number + 1):  # noqa: B020
                    if cell.is_valid:  # Arrow does not check UTF-8
                        row = {outer: _as_python(source)}
                        yield number, "utf8", cell.as_buffer().to_pybytes(), _get_field(row, settings.source_field)
                    else:
                        yield number, "value", None
    except (pyarrow.ArrowException, OSError) as error:
        yield number + 1, "unreadable", f"damaged parquet data ({error}): the rest cannot be read"


def _as_python(cell: Any) -> Any:
    """What a cell of Arrow's holds; None where it, or text within it, is no UTF-8."""
    try:
        return None if cell is None else cell.as_py()
    except UnicodeDecodeError:
        return None


def _read_hub(source: Input, settings: Settings) -> Iterator[RawDocument]:
    import datasets

    split = settings.hub_split or settings.split
    number = 0
    try:
        rows = datasets.load_dataset(source.name, settings.hub_config, split=split, streaming=True)
        for number, row in enumerate(rows, start=1):
            if settings.text_field not in row:
                raise PreparationError(
                    f"{source.name}, row {number}: no field {settings.text_field!r} but {', '.join(row)}; "
                    "name the one with the text by --text_field"
                )
            yield number, "value", row[settings.text_field], _get_field(row, settings.source_field)
    except PreparationError:
        raise
    except Exception as error:  # network, hub and the dataset's own loading code
        where = f"after row {number} of" if number else "opening"
        raise PreparationError(
            f"{source.name!r} is no local file or folder, and {where} the hub dataset of that name (split "
            f"{split!r}) failed: {type(error).__name__}: {error}. Finished shards are kept; the same command "
            "goes on from there."
        ) from error


_READERS: dict[str, Callable[[Input, Settings], Iterator[RawDocument]]] = {
    "jsonl": _read_jsonl,
    "txt": _read_txt,
    "parquet": _read_parquet,
    "hub": _read_hub,
}


def _batched(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.content) if isinstance(document.content, bytes | str) else 1
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# Tokenising.

# Tokens (uint16, eot included), number of UTF-8 bytes and source of a document, or what is wrong with it.
Tokenized = tuple[np.ndarray, int, str | None] | str


def _tokenize_all(
    batches: Iterator[list[Document]], settings: Settings, workers: int
) -> Iterator[Iterator[tuple[Document, Tokenized]]]:
    """Each batch's documents with their tokens, in order, tokenised ahead by `workers` processes."""
    work = functools.partial(_tokenize, settings.tokenizer, settings.text_field, settings.source_field)
    if workers == 1:
        for batch in batches:
            yield zip(batch, _split(work(_contents(batch))), strict=True)
        return
    # Spawned, not forked: the caller may have threads. Workers import no more than this module.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, initializer=_start_worker)
    queue: collections.deque[tuple[list[Document], concurrent.futures.Future]] = collections.deque()
    try:
        for batch in batches:
            queue.append((batch, pool.submit(work, _contents(batch))))
            if len(queue) > 2 * workers:  # bounds memory, and keeps workers busy while results are written
                batch, future = queue.popleft()
                yield zip(batch, _split(future.result()), strict=True)
        while queue:
            batch, future = queue.popleft()
            yield zip(batch, _split(future.result()), strict=True)
    except concurrent.futures.process.BrokenProcessPool as error:
        raise PreparationError(
            "a worker process died, perhaps killed for want of memory; finished shards are kept: give the "
            "same command again, with fewer --workers if it was memory"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _contents(batch: list[Document]) -> list[tuple[str, Any, Any]]:
    return [(document.form, document.content, document.source) for document in batch]


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends us

    def follow_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    # A killed parent cannot end its workers, which would wait for the next batch for ever.
    threading.Thread(target=follow_parent, daemon=True).start()


_get_tokenizer_once = functools.cache(get_tokenizer)


# Tokens of all documents joined; of each, the number of tokens (or what is wrong), of bytes, and the source.
_Batch = tuple[np.ndarray, list[int | str], list[int], list[str | None]]


def _tokenize(
    tokenizer_name: str, text_field: str, source_field: str | None, contents: list[tuple[str, Any, Any]]
) -> _Batch:
    tokenizer = _get_tokenizer_once(tokenizer_name)
    pieces, lengths, sizes, sources = [], [], [], []
    for form, content, source in contents:
        sources.append(None)
        try:
            text, source = _get_text(form, content, text_field, source_field, source)
            sizes.append(len(text.encode("utf-8")))
        except UnicodeEncodeError as error:
            character = error.object[error.start]
            lengths.append(f"the text holds the lone surrogate {character!r}, which has no UTF-8 form")
            sizes.append(0)
        except _BadDocumentError as error:
            lengths.append(str(error))
            sizes.append(0)
        else:
            ids = tokenizer.encode(text)
            pieces.append(np.append(ids, tokenizer.eot_id).astype(TOKEN_DTYPE))
            lengths.append(len(ids) + 1)
            sources[-1] = _source_name(source)
    return np.concatenate(pieces) if pieces else np.empty(0, TOKEN_DTYPE), lengths, sizes, sources


def _split(result: _Batch) -> Iterator[Tokenized]:
    tokens, lengths, sizes, sources = result
    start = 0
    for length, size, source in zip(lengths, sizes, sources, strict=True):
        if isinstance(length, str):
            yield length
        else:
            yield tokens[start : start + length], size, source
            start += length


def _get_field(row: Any, field: str | None) -> Any:
    """What nested mappings hold at `field`, "outer.inner"; None if they hold nothing there."""
    for name in field.split(".") if field is not None else ():
        row = row.get(name) if isinstance(row, dict) else None
    return row if field is not None else None


def _source_name(source: Any) -> str | None:
    """A document's source as one line of text that has a UTF-8 form; None for what is no text, or blank."""
    if not isinstance(source, str):
        return None
    return sys.intern(" ".join(source.encode("utf-8", "replace").decode().split())) or None


class _BadDocumentError(Exception):
    """What is wrong with a document."""


def _get_text(form: str, content: Any, text_field: str, source_field: str | None, source: Any) -> tuple[str, Any]:
    """A document's text, and what names its source."""
    if form == "unreadable":
        raise _BadDocumentError(content)
    if form == "value":
        text = content
    else:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _BadDocumentError(f"not UTF-8 (byte {error.start}: {error.reason})") from error
        if form == "json":
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise _BadDocumentError(f"invalid JSON ({error})") from error
            if not isinstance(record, dict) or text_field not in record:
                fields = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
                raise _BadDocumentError(f"no text field {text_field!r} but {fields or 'an empty object'}")
            text, source = record[text_field], _get_field(record, source_field)
    if not isinstance(text, str):
        raise _BadDocumentError(f"the text is not a string but {type(text).__name__}")
    return text, source


# Output.


class _ShardWriter:
    """Collects documents into shards and records finished ones, so that another run can go on after them.

    `progress.jsonl` holds the settings, then for each finished shard its metadata and the state after it. It
    is read when the writer is made and appended to by `close_shard`.
    """

    def __init__(self, folder: Path, progress_file: IO[bytes], source: dict[str, Any], skip_bad_documents: bool):
        self._folder = folder
        self._progress_file = progress_file
        self.shards: list[dict[str, Any]] = []
        self.position: tuple[int, int] | None = None
        self.num_tokens = self.num_documents = self.num_bytes = self.num_skipped = 0
        self._clear_pending()

        progress_file.seek(0)
        # A kill may have cut the last line short; what it was to record is done again.
        *lines, torn = progress_file.read().split(b"\n")
        if len(lines) > 1:
            progress_file.truncate(progress_file.tell() - len(torn))
            self._restore(lines, source, skip_bad_documents)
        else:
            progress_file.truncate(0)
            self._append(source)

    def _restore(self, lines: list[bytes], source: dict[str, Any], skip_bad_documents: bool) -> None:
        try:
            before, *records = map(json.loads, lines)
            self.shards = [record["shard"] for record in records]
            self.position = tuple(records[-1]["position"])
            self.num_skipped = records[-1]["num_skipped_documents"]
            self.num_tokens, self.num_documents, self.num_bytes = _totals(self.shards)
            for shard in self.shards:
                check_shard(self._folder / shard["file"], shard["num_tokens"])
                check_sources(self._folder, shard)
        except (ValueError, KeyError, TypeError) as error:
            raise PreparationError(
                f"{self._folder} holds an unfinished preparation, but a damaged one ({error}); "
                "delete the folder to prepare it anew"
            ) from error
        _check_same(self._folder, _UNFINISHED, before, source, self.num_skipped, skip_bad_documents)
        print(
            f"{self._folder}: going on after {len(self.shards)} finished shards "
            f"({self.num_documents:,} documents, {self.num_tokens:,} tokens)",
            file=sys.stderr,
        )

    def _append(self, line: dict[str, Any]) -> None:
        self._progress_file.write(json.dumps(line).encode() + b"\n")
        self._progress_file.flush()
        os.fsync(self._progress_file.fileno())

    def _clear_pending(self) -> None:
        self._pending: list[np.ndarray] = []
        self.pending_tokens = self._pending_bytes = 0
        self._names: dict[str | None, int] = {}  # of sources, by first appearance in the shard
        self._pending_sources: list[int] = []

    def add(self, tokens: np.ndarray, num_bytes: int, source: str | None) -> None:
        self._pending.append(tokens)
        self._pending_sources.append(self._names.setdefault(source, len(self._names)))
        if len(self._names) > _MAX_SOURCES:
            raise PreparationError(
                f"more than {_MAX_SOURCES} different sources in {self._folder / shard_name(len(self.shards))}, "
                f"the last {source!r}: a field with so many does not tell where documents come from. Give another "
                "--source_field, or --source_field= to keep none"
            )
        self.pending_tokens += len(tokens)
        self._pending_bytes += num_bytes
        self.num_tokens += len(tokens)
        self.num_documents += 1
        self.num_bytes += num_bytes

    def skip(self) -> None:
        self.num_skipped += 1

    def close_shard(self) -> None:
        """Writes the documents added since the last shard as the next one."""
        if not self._pending:
            return
        name = shard_name(len(self.shards))
        shard = {
            "file": name,
            "num_tokens": self.pending_tokens,
            "num_documents": len(self._pending),
            "num_bytes": self._pending_bytes,
            "sha256": _write_array(self._folder / name, self._pending),
        }
        if self._names.keys() != {None}:
            name = sources_name(len(self.shards))
            sha256 = _write_array(self._folder / name, [np.array(self._pending_sources, TOKEN_DTYPE)])
            shard["sources"] = {"file": name, "names": list(self._names), "sha256": sha256}
        self.shards.append(shard)
        self._append({"shard": self.shards[-1], "position": self.position, "num_skipped_documents": self.num_skipped})
        self._clear_pending()


def _write_array(path: Path, pieces: Sequence[np.ndarray]) -> str:
    """Writes the pieces, 1-D of TOKEN_DTYPE, as one .npy file and returns its SHA-256."""
    sha256 = hashlib.sha256()
    with _atomic_writer(path) as file:
        header = {"descr": TOKEN_DTYPE.str, "fortran_order": False, "shape": (sum(map(len, pieces)),)}
        np.lib.format.write_array_header_1_0(file, header)
        file.seek(0)
        sha256.update(file.read())
        for piece in pieces:
            data = np.ascontiguousarray(piece).data
            file.write(data)
            sha256.update(data)
    return sha256.hexdigest()


@contextlib.contextmanager
def _atomic_writer(path: Path, suffix: str = ".tmp") -> Iterator[IO[bytes]]:
    """A file that appears under its name only when it is whole and on the disk; until then its name has the suffix."""
    temporary = path.with_name(path.name + suffix)
    with temporary.open("w+b") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _totals(shards: Sequence[dict[str, Any]]) -> tuple[int, int, int]:
    return tuple(sum(shard[key] for shard in shards) for key in ("num_tokens", "num_documents", "num_bytes"))


def _metadata(
    tokenizer: Tokenizer, shards: Sequence[dict[str, Any]], num_skipped: int, source: dict[str, Any]
) -> bytes:
    """The contents of metadata.json."""
    num_tokens, num_documents, num_bytes = _totals(shards)
    metadata = {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        "dtype": TOKEN_DTYPE.name,
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "num_bytes": num_bytes,
        "num_skipped_documents": num_skipped,
        "shards": shards,
        "source": source,
    }
    return json.dumps(metadata, indent=2).encode() + b"\n"


def _join_parts(folder: Path, source: dict[str, Any], count: int, tokenizer: Tokenizer) -> TokenDataset | None:
    """The split whose parts are all finished, its metadata.json written if need be; None if a part is not."""
    folders = [folder / part_name(index, count) for index in range(count)]
    finished = sum((part / METADATA_FILE).is_file() for part in folders)
    if finished < count:
        print(f"{folder}: {finished} of {count} parts are finished; the last one joins them", file=sys.stderr)
        return None
    parts = [TokenDataset(part, may_be_empty=True) for part in folders]
    for part in parts:
        _check_same(part.path, _FINISHED, _of_the_whole(part.metadata["source"]), source)
    source = _of_the_whole(parts[0].metadata["source"])  # older versions recorded less
    shards = [_in_folder(part.path.name, shard) for part in parts for shard in part.metadata["shards"]]
    num_skipped = sum(part.metadata["num_skipped_documents"] for part in parts)
    if not shards:
        raise _no_documents(source["split"], source["sources"], num_skipped)
    metadata, path = _metadata(tokenizer, shards, num_skipped, source), folder / METADATA_FILE
    if not path.is_file():
        _write_with_others(path, metadata)
    elif path.read_bytes() != metadata:
        raise PreparationError(f"{path} does not list what its parts hold; delete it and give the same command again")
    dataset = TokenDataset(folder)
    print(
        f"{folder}: all {count} parts are finished and joined: {dataset.num_documents:,} documents, "
        f"{dataset.num_tokens:,} tokens, {dataset.num_bytes:,} bytes in {len(shards)} shards",
        file=sys.stderr,
    )
    return dataset


def _in_folder(folder: str, record: dict[str, Any]) -> dict[str, Any]:
    """A shard's record as seen from outside its folder."""
    moved = record | {"file": f"{folder}/{record['file']}"}
    return moved | {"sources": _in_folder(folder, record["sources"])} if "sources" in record else moved


def _write_with_others(path: Path, content: bytes) -> None:
    """Writes a file that others, on any machine, may be writing at the same moment with the same content."""
    try:
        with _atomic_writer(path, suffix=f".{socket.gethostname()}.{os.getpid()}.tmp") as file:
            file.write(content)
    except FileNotFoundError:
        if not path.is_file():  # else another was first, and took this one's for a leftover
            raise
    for leftover in path.parent.glob(f"{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)


def _no_documents(split: str, sources: Sequence[str], num_skipped: int) -> PreparationError:
    skipped = f" ({num_skipped} bad ones skipped)" if num_skipped else ""
    return PreparationError(f"no documents for split {split!r} in {', '.join(sources)}{skipped}")


_FINISHED, _UNFINISHED = "was prepared", "holds an unfinished preparation"
_STATE = {METADATA_FILE: _FINISHED, PROGRESS_FILE: _UNFINISHED}


def _recorded_source(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """The file in `folder` that records with what inputs and settings it is being or was prepared, and that record."""
    for name in (METADATA_FILE, PROGRESS_FILE, METADATA_FILE):  # it may be finished between two looks
        try:
            content = (folder / name).read_bytes()
            if name == METADATA_FILE:
                return name, dict(json.loads(content)["source"])
            if b"\n" in content:
                return name, dict(json.loads(content[: content.index(b"\n")]))
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError) as error:
            what = "file" if find_parts(folder) else "folder"  # the parts are whole even so
            raise PreparationError(
                f"{folder / name} is damaged ({error!r}); delete the {what} and give the same command again"
            ) from error
    return None


def _of_the_whole(source: dict[str, Any]) -> dict[str, Any]:
    """A part's source without what sets it apart from the other parts."""
    return {key: value for key, value in source.items() if key != "shard_index"}


def _find_finished(
    folder: Path, source: dict[str, Any], skip_bad_documents: bool, may_be_empty: bool
) -> TokenDataset | None:
    """The finished dataset in `folder`, if there is one; an error if it was made with other settings."""
    if not (folder / METADATA_FILE).is_file():
        return None
    dataset = TokenDataset(folder, may_be_empty=may_be_empty)
    metadata = dataset.metadata
    skipped = metadata.get("num_skipped_documents", 0)
    _check_same(folder, _FINISHED, metadata.get("source", {}), source, skipped, skip_bad_documents)
    (folder / PROGRESS_FILE).unlink(missing_ok=True)
    print(
        f"{folder}: already prepared with these settings ({dataset.num_documents:,} documents, "
        f"{dataset.num_tokens:,} tokens, {dataset.num_bytes:,} bytes)"
        + ("" if "source_field" in metadata.get("source", {}) else ", by a version that kept no sources of documents"),
        file=sys.stderr,
    )
    return dataset


def _check_same(
    folder: Path,
    what: str,
    before: dict[str, Any],
    now: dict[str, Any],
    num_skipped: int = 0,
    skip_bad_documents: bool = False,
) -> None:
    # Versions that kept no sources of documents recorded no field of theirs: what they prepared stays good.
    before = {key: value for key, value in now.items() if key == "source_field"} | before
    differences = [
        f"{key}: {before.get(key)!r} before, {now.get(key)!r} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    # Not one of the settings: it may be turned on when a preparation has stopped at a bad document.
    if num_skipped and not skip_bad_documents:
        differences.append(f"skip_bad_documents: {num_skipped} skipped before, not asked for now")
    if differences:
        raise PreparationError(
            f"{folder} {what} with other settings: {'; '.join(differences)}. Use the same ones, another "
            "--out or --split, or delete the folder to prepare it anew."
        )


class _Progress:
    """Reports on stderr: a bar on a terminal, else a line now and then; `summarize` prints the totals."""

    def __init__(self, split: str, num_inputs: int, writer: _ShardWriter):
        self._split, self._num_inputs, self._writer = split, num_inputs, writer
        self._start_tokens = writer.num_tokens
        self._start = self._last = time.monotonic()
        self._bar = tqdm.tqdm(desc=split, unit=" tokens", unit_scale=True) if sys.stderr.isatty() else None

    def update(self) -> None:
        now = time.monotonic()
        if now - self._last < (0.2 if self._bar is not None else _PROGRESS_SECONDS):
            return
        self._last = now
        writer = self._writer
        state = f"{writer.num_documents:,} documents, input {writer.position[0] + 1} of {self._num_inputs}"
        if self._bar is not None:
            self._bar.set_postfix_str(state, refresh=False)
            self._bar.update(writer.num_tokens - self._start_tokens - self._bar.n)
        else:
            print(
                f"{self._split}: {writer.num_tokens:,} tokens, {state}, {self._rate():,.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )

    def _rate(self) -> float:
        return (self._writer.num_tokens - self._start_tokens) / max(time.monotonic() - self._start, 1e-9)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def summarize(self) -> None:
        writer = self._writer
        skipped = f", {writer.num_skipped:,} bad documents skipped" if writer.num_skipped else ""
        print(
            f"{self._split}: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens, "
            f"{writer.num_bytes:,} bytes in {len(writer.shards)} shards{skipped}; "
            f"{time.monotonic() - self._start:.1f} s, {self._rate():,.0f} tokens/s",
            file=sys.stderr,
        )
