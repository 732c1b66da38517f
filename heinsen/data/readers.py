"""Readers: one for each kind of input, from its location to raw documents.

A new kind is a function and an entry in `READERS`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from heinsen.data.raw import JsonLine, RawDocument, Unreadable, Utf8Text, Value, get_field
from heinsen.data.settings import PreparationError, Settings

if TYPE_CHECKING:
    import pyarrow

READ_BYTES = 1 << 20

# (number, document): numbers count lines or rows from 1, increase, and serve as positions in the input.
Numbered = tuple[int, RawDocument]


@dataclasses.dataclass(frozen=True)
class Reader:
    """How to read one kind of input.

    Attributes:
      read: yields the documents of the input at a location (a path, or the name of a hub dataset). It may raise
        PreparationError where the settings do not fit the input; damaged data gives an `Unreadable`.
      place: what to append to the input's name to point at document `{}` in messages.
      suffixes: endings of the files of this kind.
    """

    read: Callable[[str, Settings], Iterator[Numbered]]
    place: str
    suffixes: tuple[str, ...] = ()


def read_txt(location: str, settings: Settings) -> Iterator[Numbered]:
    """Yield the whole file as one document."""
    yield 1, Utf8Text(Path(location).read_bytes())


def read_jsonl(location: str, settings: Settings) -> Iterator[Numbered]:
    """Yield each line of a file, compressed if it ends in .zst, as a document. Blank lines are skipped."""
    number, rest = 0, b""
    with Path(location).open("rb") as file:
        blocks = _zstd_blocks(file) if location.endswith(".zst") else _blocks(file)
        try:
            for block in blocks:
                *lines, rest = (rest + block).split(b"\n")
                for number, line in enumerate(lines, start=number + 1):  # noqa: B020 (continues counting)
                    if line and not line.isspace():
                        yield number, JsonLine(line)
        except _DamagedFileError as error:
            yield number + 1, Unreadable(str(error))
            return
    if rest and not rest.isspace():
        yield number + 1, JsonLine(rest)


class _DamagedFileError(Exception):
    """The rest of a file cannot be read."""


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(functools.partial(file.read, READ_BYTES), b"")


def _zstd_blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the decompressed content of zstd frames. (zstandard's own reader accepts a truncated frame as whole.)"""
    import zstandard

    # Frames made with --long need more than the 128 MiB window allowed by default.
    context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame, unused = None, b""
    while block := unused or file.read(READ_BYTES):
        frame = frame or context.decompressobj()
        try:
            content = frame.decompress(block)
        except zstandard.ZstdError as error:
            raise _DamagedFileError(f"damaged zstd data ({error}): the rest cannot be read") from error
        if content:
            yield content
        frame, unused = (None, frame.unused_data) if frame.eof else (frame, b"")
    if frame is not None:
        raise _DamagedFileError("the file ends within a zstd frame: it is truncated; fetch it again")


def read_parquet(location: str, settings: Settings) -> Iterator[Numbered]:
    """Yield each row as a document."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(location) as file:
            _check_text_column(location, file.schema_arrow, settings.text_field)
            source_field = settings.source_field or ""
            outer = source_field.split(".")[0]
            columns = [settings.text_field, *([source_field] if outer in file.schema_arrow.names else [])]
            for batch in file.iter_batches(columns=columns, batch_size=1024):
                has_sources = outer in batch.schema.names
                sources = batch.column(outer) if has_sources else itertools.repeat(None, len(batch))
                rows = zip(batch.column(settings.text_field), sources, strict=True)
                for number, (cell, source) in enumerate(rows, start=number + 1):  # noqa: B020
                    if cell.is_valid:  # Arrow does not check UTF-8
                        row = {outer: _to_python(source)}
                        yield number, Utf8Text(cell.as_buffer().to_pybytes(), get_field(row, settings.source_field))
                    else:
                        yield number, Value(None)
    except (pyarrow.ArrowException, OSError) as error:
        yield number + 1, Unreadable(f"damaged parquet data ({error}): the rest cannot be read")


def _check_text_column(location: str, schema: "pyarrow.Schema", name: str) -> None:
    import pyarrow

    if name not in schema.names:
        raise PreparationError(
            f"{location} has no column {name!r} but {', '.join(schema.names)}; name the text column by --text_field"
        )
    kind = schema.field(name).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise PreparationError(
            f"{location}: column {name!r} holds {kind}, not strings; name the text column by --text_field"
        )


def _to_python(cell: "pyarrow.Scalar | None") -> object:
    """Return the value of an Arrow cell; None where it, or text within it, is not UTF-8."""
    try:
        return None if cell is None else cell.as_py()
    except UnicodeDecodeError:
        return None


def read_hub(location: str, settings: Settings) -> Iterator[Numbered]:
    """Stream the rows of a dataset on the Hugging Face hub as documents."""
    import datasets

    split = settings.hub_split or settings.split
    number = 0
    try:
        rows = datasets.load_dataset(location, settings.hub_config, split=split, streaming=True)
        for number, row in enumerate(rows, start=1):
            if settings.text_field not in row:
                raise PreparationError(
                    f"{location}, row {number}: no field {settings.text_field!r} but {', '.join(row)}; "
                    "name the text field by --text_field"
                )
            yield number, Value(row[settings.text_field], get_field(row, settings.source_field))
    except PreparationError:
        raise
    except Exception as error:  # network, hub and the dataset's own loading code
        where = f"after row {number} of" if number else "opening"
        raise PreparationError(
            f"{location!r} is no local file or folder, and {where} the hub dataset of that name (split {split!r}) "
            f"failed: {type(error).__name__}: {error}. Finished shards are kept; rerun the same command to resume."
        ) from error


READERS = {
    "jsonl": Reader(read_jsonl, ", line {}", (".jsonl", ".jsonl.zst")),
    "txt": Reader(read_txt, "", (".txt",)),
    "parquet": Reader(read_parquet, ", row {}", (".parquet",)),
    "hub": Reader(read_hub, ", row {}"),
}
