"""Inputs of a preparation: the files and hub datasets that the settings name, and their documents in order."""

import collections
import dataclasses
import glob
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from heinsen.data.raw import RawDocument
from heinsen.data.readers import READERS
from heinsen.data.settings import PreparationError, Provenance, Settings
from heinsen.files import name_errors

STDLIB = "stdlib"
STDLIB_SPLITS = ("train", "validation")

_KINDS = {suffix: kind for kind, reader in READERS.items() for suffix in reader.suffixes}
_SUFFIXES = tuple(_KINDS)


class Position(NamedTuple):
    """Position after a document: `input` indexes the inputs, `number` counts lines or rows from 1."""

    input: int
    number: int


class Document(NamedTuple):
    """A raw document and the position after it."""

    position: Position
    raw: RawDocument


@dataclasses.dataclass(frozen=True)
class Input:
    """One file or hub dataset.

    Attributes:
      kind: a key of `READERS`.
      name: for messages and for the comparison of settings.
      location: path of the file, or name of the hub dataset.
      size: bytes of the file; None for a hub dataset.
    """

    kind: str
    name: str
    location: str
    size: int | None

    @property
    def is_file(self) -> bool:
        return self.size is not None

    def where(self, number: int) -> str:
        """Return the place of a document, for messages."""
        return self.name + READERS[self.kind].place.format(number)


def find_inputs(settings: Settings) -> list[Input]:
    """Return the inputs of a split in reading order. Raises PreparationError if there are none."""
    inputs = [found for source in settings.sources for found in _find_source(source, settings)]
    names = collections.Counter(i.name for i in inputs)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise PreparationError(f"given more than once by the sources: {', '.join(repeated[:5])}")
    return inputs


def check_disjoint(splits: Sequence[Settings]) -> None:
    """Raise PreparationError if an input would be in every one of several splits.

    Local files are the same for every split, and so is a hub dataset with `hub_split`.
    """
    if len(splits) < 2:
        return
    names = [{i.name for i in find_inputs(s) if i.is_file or s.hub_split} for s in splits]
    if shared := sorted(set.intersection(*names)):
        raise PreparationError(f"{shared[0]} would be in every split: give one --split per call")


def describe_inputs(inputs: Sequence[Input]) -> Provenance:
    """Return what identifies the inputs when settings are compared: number, size, and a hash of names and sizes."""
    listing = [(i.name, i.size or 0) for i in inputs]
    return {
        "files": len(listing),
        "bytes": sum(size for _, size in listing),
        "sha256": hashlib.sha256(json.dumps(listing).encode()).hexdigest(),
    }


def read_documents(inputs: Sequence[Input], settings: Settings, start: Position | None) -> Iterator[Document]:
    """Yield all documents after position `start` in order; None means from the beginning."""
    first_input, done = start or (0, 0)
    for index in range(first_input, len(inputs)):
        with name_errors(Path(inputs[index].location)):
            for number, raw in READERS[inputs[index].kind].read(inputs[index].location, settings):
                if index > first_input or number > done:
                    yield Document(Position(index, number), raw)


def _find_source(source: str, settings: Settings) -> list[Input]:
    if source == STDLIB:
        return _find_stdlib(settings.split)
    paths = _find_files(source)
    if paths is None:
        return [Input("hub", source, source, None)]
    if not paths:
        raise PreparationError(
            f"no file matches source {source!r} (of {', '.join(settings.sources)}); "
            f"known endings are {', '.join(_SUFFIXES)}"
        )
    return [Input(_kind(path), str(path), str(path), path.stat().st_size) for path in paths]


def _kind(path: Path) -> str:
    return next(kind for suffix, kind in _KINDS.items() if path.name.endswith(suffix))


def _find_files(source: str) -> list[Path] | None:
    """Return the files that `source` names, sorted; None if it can only be the name of a hub dataset."""
    path = Path(source)
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.name.endswith(_SUFFIXES) and p.is_file())
    if path.is_file():
        if not path.name.endswith(_SUFFIXES):
            raise PreparationError(f"source {source!r} has none of the known endings {', '.join(_SUFFIXES)}")
        return [path]
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source) and not source.endswith(_SUFFIXES):
        return None
    found = map(Path, glob.glob(source, recursive=True))
    return sorted(p for p in found if p.name.endswith(_SUFFIXES) and p.is_file())


def _find_stdlib(split: str) -> list[Input]:
    """Return the standard library's own sources: no packages, tests or editor. A path's hash decides its split."""
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
            inputs.append(Input("txt", f"{STDLIB}/{name}", str(path), path.stat().st_size))
    return sorted(inputs, key=lambda i: i.name)
