"""Raw documents: what readers yield in the parent process and workers parse into text.

Each kind is one class whose `parse` gives the text. Parsing happens in the workers, so that the parent does nothing
but read bytes.
"""

import abc
import dataclasses
import json

from heinsen.data.settings import Settings


class BadDocumentError(Exception):
    """A document without usable text. The message says what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class RawDocument(abc.ABC):
    """A document as it was read, before its text is known."""

    content: object

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        return len(self.content) if isinstance(self.content, bytes | str) else 1

    @abc.abstractmethod
    def parse(self, settings: Settings) -> tuple[str, object]:
        """Return the text and the value of `settings.source_field`, None where there is none.

        Raises BadDocumentError.
        """


@dataclasses.dataclass(frozen=True)
class JsonLine(RawDocument):
    """A JSON object in UTF-8 that holds the text and the source among its fields."""

    content: bytes

    def parse(self, settings: Settings) -> tuple[str, object]:
        try:
            record = json.loads(_decode(self.content))
        except (ValueError, RecursionError) as error:
            raise BadDocumentError(f"invalid JSON ({error})") from error
        if not isinstance(record, dict) or settings.text_field not in record:
            fields = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
            raise BadDocumentError(
                f"no text field {settings.text_field!r} but {fields or 'an empty object'}; name the text field by "
                "--text_field"
            )
        return _check_text(record[settings.text_field]), get_field(record, settings.source_field)


@dataclasses.dataclass(frozen=True)
class Utf8Text(RawDocument):
    """A text as UTF-8 bytes, not checked yet."""

    content: bytes
    source: object = None

    def parse(self, settings: Settings) -> tuple[str, object]:
        return _decode(self.content), self.source


@dataclasses.dataclass(frozen=True)
class Value(RawDocument):
    """A Python value that should be a string."""

    source: object = None

    def parse(self, settings: Settings) -> tuple[str, object]:
        return _check_text(self.content), self.source


@dataclasses.dataclass(frozen=True)
class Unreadable(RawDocument):
    """The rest of an input, which cannot be read for the reason `content`. It counts as one bad document."""

    content: str

    def parse(self, settings: Settings) -> tuple[str, object]:
        raise BadDocumentError(self.content)


def get_field(row: object, field: str | None) -> object:
    """Return the value at `field`, such as "outer.inner", in nested mappings; None where there is none."""
    if field is None:
        return None
    for name in field.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return row


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocumentError(f"not UTF-8 (byte {error.start}: {error.reason})") from error


def _check_text(value: object) -> str:
    if not isinstance(value, str):
        raise BadDocumentError(f"the text is not a string but {type(value).__name__}")
    return value
