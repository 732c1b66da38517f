"""Readers: what a preparation reads, and how the documents of each kind of input become text.

Each kind of input has a `Reader`. In the parent process its `read` yields blocks of documents, and does little more
than read bytes. In a worker its `split` divides a block into documents, and its `parse` gives the text of one. A new
kind is an entry in `READERS`.
"""

import codecs
import dataclasses
import functools
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from heinsen.errors import HeinsenError

if TYPE_CHECKING:
    import pyarrow

READ_BYTES = 1 << 20
_ROWS = 64  # of a table, decoded at a time


class PreparationError(HeinsenError, ValueError):
    """Inputs or settings from which no token dataset can be made. Finished shards are kept."""


class BadDocumentError(Exception):
    """A document without usable text, or the rest of an input that cannot be read. The message says why."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that determines the content of a prepared split, apart from the content of its inputs.

    Attributes:
      sources: local files, globs or folders (.jsonl, .jsonl.zst, .jsonl.gz, .txt, .parquet), names of datasets on the
        Hugging Face hub, or "stdlib": the running interpreter's standard library, one file in twenty of which
        belongs to the validation split.
      split: name of the split and of its folder.
      tokenizer: a name that `get_tokenizer` accepts, or the path of a file of the `tokenizers` library, which ends in
        .json. It stands for the name of that tokenizer, which depends on the file's content alone.
      shard_tokens: a shard is closed at the first document boundary at or after this many tokens.
      text_field: the field (.jsonl, hub) or column (.parquet) that holds a document's text.
      source_field: the field or column that names a document's source; dots select nested fields. The names are
        stored beside the shards. A document whose field is missing or is not text has no source. None stores no
        sources.
      max_documents: stop after this many documents.
      max_tokens: stop after the document that reaches this many tokens.
      hub_config: configuration of a hub dataset.
      hub_split: split of a hub dataset. None means `split`.
      end_of_text: the special token of such a file that ends a document. None means the only one.
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
    end_of_text: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.split):
            raise PreparationError(f"split {self.split!r} must consist of letters, digits, '_', '.' and '-'")
        if not self.sources:
            raise PreparationError("no source given")
        for name in ("shard_tokens", "max_documents", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise PreparationError(f"{name} must be at least 1, got {value}")


class Row(NamedTuple):
    """A document of a table: what its text field and its source field hold."""

    text: object
    source: object


Content = bytes | Row | BadDocumentError  # of a document or of several lines; the error counts as one bad document
# Documents that follow each other, with the numbers of their lines or rows, which count from 1 and are positions in the
# input.
Block = tuple[range, Content]


def _keep(numbers: range, content: Content) -> list[tuple[int, Content]]:
    return [(numbers.start, content)]


@dataclasses.dataclass(frozen=True)
class Reader:
    """How to read one kind of input.

    Attributes:
      read: yields the blocks of the input at a location (a path, or the name of a hub dataset). It raises
        PreparationError where the settings do not fit the input, and yields a BadDocumentError for damaged data.
      parse: returns the text of a document, and the value of `settings.source_field`, None where there is none. Raises
        BadDocumentError.
      place: what to append to the input's name to point at document `{}` in messages.
      suffixes: endings of the files of this kind, in lower case.
      split: returns number and content of each document of a block.
    """

    read: Callable[[str, Settings], Iterator[Block]]
    parse: Callable[[Any, Settings], tuple[str, object]]
    place: str
    suffixes: tuple[str, ...] = ()
    split: Callable[[range, Content], list[tuple[int, Content]]] = _keep


def read_txt(location: str, settings: Settings) -> Iterator[Block]:
    """Yield the whole file as one document."""
    yield range(1, 2), Path(location).read_bytes().removeprefix(codecs.BOM_UTF8)


def read_jsonl(location: str, settings: Settings) -> Iterator[Block]:
    """Yield the lines of a file, compressed if it ends in .zst or .gz."""
    decompress = {".zst": _zstd_blocks, ".gz": _gzip_blocks}.get(Path(location).suffix.lower(), _plain_blocks)
    number = 1
    with Path(location).open("rb") as file:
        try:
            for lines in _whole_lines(decompress(file)):
                lines = lines.removeprefix(codecs.BOM_UTF8) if number == 1 else lines
                numbers = range(number, number + lines.count(b"\n") + 1)
                yield numbers, lines
                number = numbers.stop
        except BadDocumentError as error:
            yield range(number, number + 1), error


def _whole_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same bytes cut at ends of lines, which are left out there."""
    pieces: list[bytes] = []  # of the unfinished line: joined once, or a long line would take quadratic time
    for block in blocks:
        if (end := block.rfind(b"\n")) >= 0:
            yield b"".join([*pieces, block[:end]])
            pieces, block = [], block[end + 1 :]
        pieces.append(block)
    yield b"".join(pieces)


def split_lines(numbers: range, content: Content) -> list[tuple[int, Content]]:
    """Return number and content of each line that is not blank."""
    if not isinstance(content, bytes):
        return _keep(numbers, content)
    lines = zip(numbers, content.split(b"\n"), strict=True)
    return [(number, line) for number, line in lines if line and not line.isspace()]


def _plain_blocks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(functools.partial(file.read, READ_BYTES), b"")


def _check_not_empty(file: IO[bytes]) -> None:
    if os.fstat(file.fileno()).st_size == 0:
        raise BadDocumentError("the compressed file has 0 bytes, as after a failed download; fetch it again")


def _gzip_blocks(file: IO[bytes]) -> Iterator[bytes]:
    _check_not_empty(file)
    try:
        with gzip.open(file) as content:
            yield from iter(functools.partial(content.read1, READ_BYTES), b"")
    except EOFError as error:
        raise BadDocumentError("the gzip data end too early: the file is truncated; fetch it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BadDocumentError(f"damaged gzip data ({error}): the rest cannot be read") from error


def _zstd_blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the decompressed content of zstd frames. (zstandard's own reader accepts a truncated frame as whole.)"""
    import zstandard

    _check_not_empty(file)
    # Frames made with --long need more than the 128 MiB window allowed by default.
    context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame, unused = None, b""
    while block := unused or file.read(READ_BYTES):
        frame = frame or context.decompressobj()
        try:
            content = frame.decompress(block)
        except zstandard.ZstdError as error:
            raise BadDocumentError(f"damaged zstd data ({error}): the rest cannot be read") from error
        if content:
            yield content
        frame, unused = (None, frame.unused_data) if frame.eof else (frame, b"")
    if frame is not None:
        raise BadDocumentError("the file ends within a zstd frame: it is truncated; fetch it again")


def read_parquet(location: str, settings: Settings) -> Iterator[Block]:
    """Yield each row of a file as a document."""
    import pyarrow.parquet

    number, source = 0, settings.source_field or ""
    wanted = settings.text_field, source, source.split(".")[0]
    try:
        with pyarrow.parquet.ParquetFile(location, buffer_size=READ_BYTES) as file:  # no whole group of rows in memory
            columns = [name for name in file.schema_arrow.names if name in wanted]
            for number, row in enumerate(_rows(file.iter_batches(_ROWS, columns=columns or None)), start=1):
                yield range(number, number + 1), _select_fields(row, location, number, settings)
    except PreparationError:
        raise
    except Exception as error:  # of pyarrow
        if isinstance(error, OSError) and error.errno is not None:  # of the system: the data may be right
            raise
        reason = str(error).split("\n")[0]
        bad = BadDocumentError(f"damaged Parquet data ({reason}): the rest cannot be read")
        yield range(number + 1, number + 2), bad


def _rows(batches: Iterator["pyarrow.RecordBatch"]) -> Iterator[dict[str, object]]:
    for batch in batches:
        names = batch.schema.names
        for values in zip(*map(batch.column, names), strict=True):
            yield {name: value.as_py() for name, value in zip(names, values, strict=True)}


def read_hub(location: str, settings: Settings) -> Iterator[Block]:
    """Stream the rows of a dataset on the Hugging Face hub as documents."""
    import datasets
    import huggingface_hub

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs as an error, it also raises
    split = settings.hub_split or settings.split
    number = 0
    try:
        # `datasets` would try again and again, with warnings, where there is no network or no such dataset.
        huggingface_hub.HfApi().dataset_info(location, timeout=10)
        rows = datasets.load_dataset(location, settings.hub_config, split=split, streaming=True)
        for number, row in enumerate(rows, start=1):
            yield range(number, number + 1), _select_fields(row, location, number, settings)
    except PreparationError:
        raise
    except Exception as error:  # network, hub and the dataset's own loading code
        where = f"after row {number} of" if number else "opening"
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise PreparationError(
            f"{location!r} is no local file or folder, and {where} the hub dataset of that name (split {split!r}) "
            f"failed: {reason}. Finished shards are kept; rerun the same command to resume."
        ) from error


def _select_fields(row: dict[str, object], location: str, number: int, settings: Settings) -> Row:
    if settings.text_field not in row:
        raise PreparationError(
            f"{location}, row {number}: no column {settings.text_field!r} but {', '.join(row)}; name the text column "
            "by --text_field"
        )
    return Row(row[settings.text_field], _get_field(row, settings.source_field))


# ---- parsing, in the workers ---------------------------------------------------------------------


def parse_json(content: bytes, settings: Settings) -> tuple[str, object]:
    """Parse a JSON object that holds the text and the source among its fields."""
    line = _decode(content)
    try:
        # No integer is read. Python refuses those of thousands of digits, which may stand in any field.
        record = json.loads(line, parse_int=lambda digits: 0)
    except (ValueError, RecursionError) as error:
        raise BadDocumentError(f"invalid JSON ({error})") from error
    if not isinstance(record, dict) or settings.text_field not in record:
        fields = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        raise BadDocumentError(
            f"no text field {settings.text_field!r} but {fields or 'an empty object'}; name the text field by "
            "--text_field"
        )
    return parse_row(Row(record[settings.text_field], _get_field(record, settings.source_field)), settings)


def parse_text(content: bytes, settings: Settings) -> tuple[str, object]:
    """Decode a text that names no source."""
    return _decode(content), None


def parse_row(content: Row, settings: Settings) -> tuple[str, object]:
    """Check that the text of a row is one."""
    if not isinstance(content.text, str):
        raise BadDocumentError(f"the text is not a string but {type(content.text).__name__}")
    return content.text, content.source


def _get_field(row: dict[str, object], field: str | None) -> object:
    """Return the value at `field`, such as "outer.inner", in nested mappings or JSON; None where there is none."""
    if field is None or field in row:
        return None if field is None else row[field]
    value: object = row
    for name in field.split("."):
        if isinstance(value, str) and value.startswith("{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return None
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocumentError(f"not UTF-8 (byte {error.start}: {error.reason})") from error


READERS = {
    "jsonl": Reader(read_jsonl, parse_json, ", line {}", (".jsonl", ".jsonl.zst", ".jsonl.gz"), split_lines),
    "txt": Reader(read_txt, parse_text, "", (".txt",)),
    "parquet": Reader(read_parquet, parse_row, ", row {}", (".parquet",)),
    "hub": Reader(read_hub, parse_row, ", row {}"),
}
